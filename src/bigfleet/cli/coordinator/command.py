"""Defines the flags of `bigfleet coordinator`, checks them, and converts them to the settings of the process.

docs/spec/coordinator.md §1. Exit 2 for a wrong call, 1 if the process cannot start or fails while it runs, 0 after a
clean stop. `bigfleet.cli.coordinator.process` builds and runs the process.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.tls import (
    SERVER_TLS_OPTIONS,
    TLS_SECTION,
    Insecure,
    TlsCa,
    TlsCert,
    TlsKey,
    parse_listen_address,
    read_tls,
)
from bigfleet.cli.flags.values import (
    address_text,
    check_dialable,
    check_log_level,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.model.ids import identifier_fault

if TYPE_CHECKING:
    from bigfleet.cli.coordinator.process import CoordinatorProcessSettings
    from bigfleet.coordinator.leader_term import CoordinatorSettings
    from bigfleet.coordinator.replica import Export
    from bigfleet.coordinator.transfers import Knobs

_Id = Annotated[str, typer.Option("--id", metavar="ID", help="Id of this replica; the host's name by default.")]
_Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Listen address of the gRPC service; :PORT is loopback without TLS.",
    ),
]
_MetricsAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Listen address of /metrics, /healthz and /readyz, or off.")
]
_Advertise = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="Address under which others reach this replica; by default the host's name and port."
    ),
]
_Store = Annotated[
    str, typer.Option(metavar="URL", help="etcd://HOST:PORT,HOST:PORT/PREFIX or sqlite:///PATH. Required.")
]
_StoreCert = Annotated[Path | None, typer.Option(metavar="FILE", help="Client certificate for etcd (PEM).")]
_StoreKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Private key for etcd (PEM).")]
_StoreCa = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate authority of etcd (PEM).")]
_Lease = Annotated[
    str, typer.Option(metavar="DURATION", help="Time after which a silent leader is replaced; whole seconds.")
]
_ReportInterval = Annotated[str, typer.Option(metavar="DURATION", help="The shards' --report-interval.")]
_RebalanceInterval = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Time between rebalancing passes; by default 5 report intervals, 0 is off."),
]
_DryRun = Annotated[
    bool, typer.Option("--rebalance-dry-run", help="Plan and list transfers, but send no instructions.")
]
_Age = Annotated[
    int, typer.Option(min=0, metavar="CYCLES", help="Minimum age of a shortfall before machines are moved for it.")
]
_PreemptAge = Annotated[
    int,
    typer.Option(
        min=0, metavar="CYCLES", help="Minimum age of a shortfall before another shard drains machines for it."
    ),
]
_Cooldown = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Pause after a transfer between two shards; by default 8 report intervals."),
]
_MarginMin = Annotated[
    int, typer.Option(min=0, metavar="N", help="Minimum number of machines of a kind that a donor keeps.")
]
_MarginFraction = Annotated[
    str, typer.Option(metavar="SHARE", help="Minimum share of its machines of a kind that a donor keeps.")
]
_Benefit = Annotated[
    str, typer.Option(metavar="SHARE", help="Minimum share of a shortfall that a transfer must cover.")
]
_MaxMachines = Annotated[
    int, typer.Option(min=1, max=100, metavar="N", help="Maximum number of machines per instruction.")
]
_MaxDrains = Annotated[
    int, typer.Option(min=0, metavar="N", help="Maximum number of machines that are drained per pass.")
]
_ExportDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory to which the leader exports snapshots; off by default.")
]
_ExportInterval = Annotated[
    str, typer.Option(metavar="DURATION", help="Time between snapshots, if the tables changed.")
]
_ExportKeep = Annotated[int, typer.Option(min=1, metavar="N", help="Number of snapshots to retain.")]
_LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="Minimum log level: debug, info, warning or error.")]


class CoordinatorCommand(SwitchCommand):
    """The command, with its options under headings."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "Replica": ("--id", "--listen", "--metrics-addr", "--advertise-addr", "--report-interval", "--log-level"),
            "Store": ("--store", "--store-tls-cert", "--store-tls-key", "--store-tls-ca", "--lease-ttl"),
            "Rebalancing": (
                "--rebalance-interval",
                "--rebalance-dry-run",
                "--rebalance-age",
                "--rebalance-preempt-age",
                "--rebalance-cooldown",
                "--rebalance-margin-min",
                "--rebalance-margin-fraction",
                "--rebalance-min-benefit",
                "--rebalance-max-machines",
                "--rebalance-max-drains",
            ),
            "Snapshots": ("--snapshot-export-dir", "--snapshot-export-interval", "--snapshot-export-keep"),
            TLS_SECTION: SERVER_TLS_OPTIONS,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFlags:
    """The flags of a replica as given on the command line, not yet checked."""

    id: _Id = ""
    listen: _Listen = ":7790"
    metrics_addr: _MetricsAddr = ":8790"
    advertise_addr: _Advertise = ""
    store: _Store = ""
    store_tls_cert: _StoreCert = None
    store_tls_key: _StoreKey = None
    store_tls_ca: _StoreCa = None
    lease_ttl: _Lease = "10s"
    report_interval: _ReportInterval = "30s"
    rebalance_interval: _RebalanceInterval = None
    rebalance_dry_run: _DryRun = False
    rebalance_age: _Age = 5
    rebalance_preempt_age: _PreemptAge = 12
    rebalance_cooldown: _Cooldown = None
    rebalance_margin_min: _MarginMin = 1
    rebalance_margin_fraction: _MarginFraction = "0.1"
    rebalance_min_benefit: _Benefit = "0.25"
    rebalance_max_machines: _MaxMachines = 100
    rebalance_max_drains: _MaxDrains = 10
    snapshot_export_dir: _ExportDir = None
    snapshot_export_interval: _ExportInterval = "5m"
    snapshot_export_keep: _ExportKeep = 48
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    insecure: Insecure = False
    log_level: _LogLevel = "info"

    def check(self) -> None:
        """Check the values that Typer does not check. Raises UsageFault naming the flag."""
        fault = identifier_fault(self._name)
        if fault:
            raise UsageFault(f"--id {fault}")
        check_log_level(self.log_level)

    @property
    def _name(self) -> str:
        return self.id or socket.gethostname()

    def settings(self) -> "CoordinatorSettings":
        """Return how it works. Raises UsageFault naming the flag."""
        from bigfleet.coordinator.leader_term import CoordinatorSettings

        cycle_seconds = parse_positive_duration_seconds(self.report_interval, "--report-interval")
        interval, cooldown = self.rebalance_interval, self.rebalance_cooldown
        return CoordinatorSettings(
            report_interval_seconds=cycle_seconds,
            rebalance_interval_seconds=5 * cycle_seconds
            if interval is None
            else parse_duration_seconds(interval, "--rebalance-interval"),
            cooldown_seconds=8 * cycle_seconds
            if cooldown is None
            else parse_duration_seconds(cooldown, "--rebalance-cooldown"),
            is_dry_run=self.rebalance_dry_run,
            knobs=self._knobs(),
        )

    def _knobs(self) -> "Knobs":
        from bigfleet.coordinator.transfers import Knobs

        return Knobs(
            age_cycles=self.rebalance_age,
            preempt_age_cycles=self.rebalance_preempt_age,
            margin_min=self.rebalance_margin_min,
            margin_fraction=_share(self.rebalance_margin_fraction, "--rebalance-margin-fraction"),
            benefit_min=_share(self.rebalance_min_benefit, "--rebalance-min-benefit"),
            machines_max=self.rebalance_max_machines,
            drains_max=self.rebalance_max_drains,
        )

    def process(self) -> "CoordinatorProcessSettings":
        """Return the settings of the replica. Raises UsageFault naming the flag."""
        from bigfleet.cli.coordinator.process import CoordinatorProcessSettings
        from bigfleet.cli.coordinator.store_url import EtcdUrl, parse_store, read_store_tls
        from bigfleet.coordinator.stores.protocol import LeaderInfo
        from bigfleet.rpc.security.identity import PeerIdentity, PeerRole
        from bigfleet.rpc.security.tls import is_loopback

        tls = read_tls(self.tls_cert, self.tls_key, self.tls_ca, bearer=PeerIdentity(PeerRole.ADMIN))
        listen = parse_listen_address(self.listen, "--listen", tls, is_insecure=self.insecure)
        address = address_text(listen[0] if is_loopback(listen[0]) else socket.gethostname(), listen[1])
        if self.advertise_addr:
            address = check_dialable(self.advertise_addr, "--advertise-addr")
        lease_seconds = parse_positive_duration_seconds(self.lease_ttl, "--lease-ttl")
        if lease_seconds < 1 or not lease_seconds.is_integer():
            raise UsageFault(f"--lease-ttl: {self.lease_ttl!r} must be whole seconds, one at least")
        store = parse_store(self.store)
        store_tls = read_store_tls(self.store_tls_cert, self.store_tls_key, self.store_tls_ca)
        if store_tls is not None and not isinstance(store, EtcdUrl):
            raise UsageFault("--store-tls-cert, --store-tls-key and --store-tls-ca are for etcd; --store names a file")
        return CoordinatorProcessSettings(
            me=LeaderInfo(self._name, address),
            store=store,
            store_tls=store_tls,
            lease_ttl_seconds=int(lease_seconds),
            listen_address=listen,
            metrics_address=parse_optional_address(self.metrics_addr, "--metrics-addr"),
            tls=tls,
            export=self._export(),
        )

    def _export(self) -> "Export | None":
        from bigfleet.coordinator.replica import Export

        interval_seconds = parse_positive_duration_seconds(self.snapshot_export_interval, "--snapshot-export-interval")
        if self.snapshot_export_dir is None:
            return None
        return Export(
            directory=self.snapshot_export_dir, interval_seconds=interval_seconds, keep=self.snapshot_export_keep
        )


def _share(text: str, flag: str) -> Fraction:
    """Return a share from 0 to 1, exactly as it is written."""
    try:
        # Fraction writes out what an exponent stands for, however many digits that has.
        share = Fraction("" if "e" in text.lower() else text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageFault(f"{flag}: {text!r} is not a number; use a number such as 0.1") from error
    if not 0 <= share <= 1:
        raise UsageFault(f"{flag}: {text!r} must be from 0 to 1")
    return share


# As for `bigfleet shard`: typer reads the flags off the class, name and help stay the function's.
@wraps(CoordinatorFlags, assigned=(), updated=())
def coordinator(**given: Any) -> None:
    """Run one replica of the coordinator."""
    from bigfleet.cli.coordinator.process import serve_coordinator
    from bigfleet.cli.runtime.system import configure_logging, run_loop

    flags = CoordinatorFlags(**given)
    flags.check()
    settings, process = flags.settings(), flags.process()
    configure_logging("coordinator", flags.log_level)
    raise typer.Exit(run_loop(lambda: serve_coordinator(process, settings)))
