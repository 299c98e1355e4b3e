"""Defines the flags of `bigfleet shard` and `bigfleet shard backup`, checks them, and converts them to settings.

docs/spec/shard.md §1. Exit 2 for a wrong call, 1 if the process cannot start or fails while it runs, 0 after a clean
stop. `bigfleet.cli.shard.process` builds and runs the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bigfleet.cli.flags.switches import SwitchCommand, SwitchGroup
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
    check_dialable,
    check_different_files,
    check_log_level,
    parse_address,
    parse_duration_or_never_seconds,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
    parse_share,
    parse_size_bytes,
)
from bigfleet.cli.runtime.failures import RunFault, UsageFault, choice_of
from bigfleet.cli.runtime.terminal import echo
from bigfleet.model.ids import ShardId, identifier_fault
from bigfleet.model.ownership import Base

if TYPE_CHECKING:
    from bigfleet.cli.shard.process_settings import ShardProcessSettings
    from bigfleet.exchange.values import ExchangeMode
    from bigfleet.shard.cluster_policy import PolicyFile
    from bigfleet.shard.ports import ShardSettings

#: What a new state file owns before a coordinator has spoken.
OWNERSHIP = {"all": Base.ALL, "assigned": Base.DOMAINS}
#: How long threads may take to end when the shard has stopped.
THREADS_SECONDS_MAX = 0.5
#: The kit looks through them on the shard's own loop, a second for these; more want a provider of their own.
FAKE_SLOTS_MAX = 10_000

_ProviderAddr = Annotated[str, typer.Option(metavar="HOST:PORT", help="Capacity provider; or use --fake-provider.")]
_FakeProvider = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=FAKE_SLOTS_MAX,
        help="For development: run with N fake machines in this process instead of a provider. They "
        "are discarded at exit. Not with --coordinator-addr.",
    ),
]
_Id = Annotated[str, typer.Option("--id", metavar="ID", help="Id of this shard.")]
_Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Listen address of the gRPC services; :PORT is loopback without TLS.",
    ),
]
_MetricsAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Listen address of /metrics, /healthz and /readyz, or off.")
]
_DataDir = Annotated[Path, typer.Option(metavar="DIR", help="Directory of the state file shard.db.")]
_CycleInterval = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="Time between timer cycles; at most 60s, else BigFleetShardCycleStalled may fire."
    ),
]
_WakeMinGap = Annotated[
    str, typer.Option(metavar="DURATION", help="Minimum time between cycles that a change starts; off disables them.")
]
_Concurrency = Annotated[
    int, typer.Option(min=1, help="Maximum number of actions that run at the same time; the queue holds twice as many.")
]
_WaitingMax = Annotated[int, typer.Option(min=0, help="Maximum number of actions that wait for an operator.")]
_ExecuteTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one provider call.")]
_BootstrapTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one bootstrap request.")]
_ListTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one List call.")]
_MaxActions = Annotated[int, typer.Option(min=0, help="Maximum number of actions per cycle; 0 is unlimited.")]
_VerifyEvery = Annotated[
    int,
    typer.Option(metavar="CYCLES", min=0, help="Check every N-th decision against a full computation; 0 is off."),
]
_Incremental = Annotated[
    bool, typer.Option("--incremental-reconcile", help="List only changed machines, not the whole inventory.")
]
_FullListEvery = Annotated[
    int, typer.Option(min=1, help="Cycles between full Lists; three times as many if the provider reports removals.")
]
_CapFraction = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Maximum share of a cluster's machines that is reclaimed per period, from 0 to 1; 0 is no limit.",
    ),
]
_ReclaimAfter = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="Time that a machine must stay excess before it is reclaimed; 0 reclaims at once.",
    ),
]
_PlanWorkers = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        metavar="N",
        help="Processes that compute target compositions; 0 computes them in the cycle.",
    ),
]
_PlanWait = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="Maximum time that new machines for changed demand wait for the target composition.",
    ),
]
_Exchange = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Exchanges of machines for cheaper ones: off, propose to show them, or on to carry them out.",
    ),
]
_Guard = Annotated[
    bool,
    typer.Option(
        "--empty-rollup-guard/--no-empty-rollup-guard", help="Quarantine roll-ups that lose most of a cluster's demand."
    ),
]
_Brake = Annotated[
    bool, typer.Option("--removal-brake/--no-removal-brake", help="Hold back a sudden removal of many machines.")
]
_Paused = Annotated[bool, typer.Option("--actuation-paused", help="Decide and report, but execute no action.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Like --actuation-paused, and log each action.")]
_Outbox = Annotated[int, typer.Option(min=16, help="Maximum number of frames queued for one operator.")]
_History = Annotated[int, typer.Option(min=1, help="Number of actions that bigfleet get actions lists.")]
_AuditLog = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one JSON line per action to this file; off by default.")
]
_Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Record the input of each cycle to this file, for bigfleet replay.")
]
_RecordMax = Annotated[
    str, typer.Option(metavar="SIZE", help="Size at which the recording is rotated; 4 old files are retained.")
]
_AuditLogMax = Annotated[
    str, typer.Option(metavar="SIZE", help="Size at which the audit log is rotated; 4 old files are retained.")
]
_StuckCreating = Annotated[
    str, typer.Option(metavar="DURATION", help="Time in Creating after which the call is repeated.")
]
_StuckConfiguring = Annotated[
    str, typer.Option(metavar="DURATION", help="Time in Configuring after which the call is repeated.")
]
_StuckDeleting = Annotated[
    str, typer.Option(metavar="DURATION", help="Time in Deleting after which the call is repeated.")
]
_StuckDraining = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="Time in Draining, after the grace period, after which the call is repeated."
    ),
]
_JoinGate = Annotated[
    str,
    typer.Option(metavar="MODE", help="Reaction to a node that does not become Ready: off, observe or enforce."),
]
_JoinDeadline = Annotated[
    str, typer.Option(metavar="DURATION", help="Time in which a Configured machine's node must become Ready.")
]
_SilenceAlert = Annotated[
    str, typer.Option(metavar="DURATION", help="Time without a session after which a cluster is reported as silent.")
]
_ReclaimWithoutSession = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="Time without a session after which a cluster's excess machines are reclaimed, or never.",
    ),
]
_HintInterval = Annotated[
    str, typer.Option(metavar="DURATION", help="Minimum time between two capacity hints for one need.")
]
_CoordinatorAddr = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT,...", help="Replicas of the coordinator. Without it the shard runs alone."),
]
_Ownership = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Machines that a new shard owns: all, or assigned (only what the coordinator assigns).",
    ),
]
_Inherits = Annotated[
    str | None,
    typer.Option(metavar="ID,...", help="Removed shards whose bound machines this shard adopts."),
]
_ReportInterval = Annotated[str, typer.Option(metavar="DURATION", help="Time between reports to the coordinator.")]
_Advertise = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Address under which others reach this shard; by default the host (or loopback) and port.",
    ),
]
_ClusterPolicy = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of settings per cluster; reloaded on SIGHUP.")
]
_HelloMax = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a session's first frame; at most 64KiB.")]
_FrameMax = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of an operator's frame; at most 32MiB.")]
_LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="Minimum log level: debug, info, warning or error.")]


def _lowered(text: str, flag: str, bytes_max: int) -> int:
    """Return a size that may only be lowered. Raises UsageFault naming the flag."""
    size_bytes = parse_size_bytes(text, flag)
    if size_bytes > bytes_max:
        raise UsageFault(f"{flag}: {text!r} is above the limit of {bytes_max} bytes; use that or less")
    return size_bytes


class ShardCommand(SwitchGroup):
    """The command, with its options under headings; without a subcommand it runs a shard."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "Shard": (
                "--id",
                "--listen",
                "--metrics-addr",
                "--advertise-addr",
                "--data-dir",
                "--cluster-policy",
                "--log-level",
            ),
            "Provider": (
                "--provider-addr",
                "--fake-provider",
                "--list-timeout",
                "--incremental-reconcile",
                "--full-list-every",
            ),
            "Coordinator": ("--coordinator-addr", "--report-interval", "--ownership", "--inherits"),
            "Cycle": (
                "--cycle-interval",
                "--wake-min-gap",
                "--plan-workers",
                "--plan-wait",
                "--exchange",
                "--reclaim-after",
                "--engine-verify-every",
            ),
            "Actions": (
                "--execute-concurrency",
                "--execute-waiting-max",
                "--execute-timeout",
                "--bootstrap-timeout",
                "--stuck-creating",
                "--stuck-configuring",
                "--stuck-deleting",
                "--stuck-draining-margin",
                "--action-history",
            ),
            "Safety limits": (
                "--actuation-paused",
                "--dry-run",
                "--max-actions-per-cycle",
                "--reclaim-cap-fraction",
                "--empty-rollup-guard",
                "--removal-brake",
            ),
            "Operators": (
                "--join-gate",
                "--join-deadline",
                "--cluster-silence-alert",
                "--reclaim-without-session",
                "--available-capacity-interval",
                "--outbox-frames",
                "--hello-max-bytes",
                "--frame-max-bytes",
            ),
            "Audit log and recording": ("--audit-log", "--audit-log-max-bytes", "--record", "--record-max-bytes"),
            TLS_SECTION: SERVER_TLS_OPTIONS,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFlags:
    """The flags of a shard as given on the command line, not yet checked."""

    provider_addr: _ProviderAddr = ""
    fake_provider: _FakeProvider = None
    id: _Id = "shard-0"
    listen: _Listen = ":7780"
    metrics_addr: _MetricsAddr = ":8780"
    data_dir: _DataDir = Path("data")
    advertise_addr: _Advertise = ""
    coordinator_addr: _CoordinatorAddr = None
    ownership: _Ownership = "all"
    inherits: _Inherits = None
    report_interval: _ReportInterval = "30s"
    cycle_interval: _CycleInterval = "10s"
    wake_min_gap: _WakeMinGap = "500ms"
    execute_concurrency: _Concurrency = 64
    execute_waiting_max: _WaitingMax = 1024
    execute_timeout: _ExecuteTimeout = "30s"
    bootstrap_timeout: _BootstrapTimeout = "30s"
    list_timeout: _ListTimeout = "120s"
    max_actions_per_cycle: _MaxActions = 0
    engine_verify_every: _VerifyEvery = 100
    incremental_reconcile: _Incremental = False
    full_list_every: _FullListEvery = 30
    reclaim_cap_fraction: _CapFraction = "0.05"
    reclaim_after: _ReclaimAfter = "10m"
    plan_workers: _PlanWorkers = 1
    plan_wait: _PlanWait = "10s"
    exchange: _Exchange = "propose"
    empty_rollup_guard: _Guard = True
    removal_brake: _Brake = True
    actuation_paused: _Paused = False
    dry_run: _DryRun = False
    outbox_frames: _Outbox = 1024
    action_history: _History = 10_000
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    insecure: Insecure = False
    audit_log: _AuditLog = None
    audit_log_max_bytes: _AuditLogMax = "256MiB"
    record: _Record = None
    record_max_bytes: _RecordMax = "256MiB"
    stuck_creating: _StuckCreating = "20m"
    stuck_configuring: _StuckConfiguring = "15m"
    stuck_deleting: _StuckDeleting = "20m"
    stuck_draining_margin: _StuckDraining = "10m"
    join_gate: _JoinGate = "observe"
    join_deadline: _JoinDeadline = "15m"
    cluster_silence_alert: _SilenceAlert = "10m"
    reclaim_without_session: _ReclaimWithoutSession = "1h"
    available_capacity_interval: _HintInterval = "5s"
    cluster_policy: _ClusterPolicy = None
    hello_max_bytes: _HelloMax = "64KiB"
    frame_max_bytes: _FrameMax = "32MiB"
    log_level: _LogLevel = "info"

    def check(self) -> None:
        """Check the values that Typer does not check. Raises UsageFault naming the flag."""
        self._check_provider()
        fault = identifier_fault(self.id)
        if fault:
            raise UsageFault(f"--id {fault}")
        if self.ownership not in OWNERSHIP:
            raise UsageFault(f"--ownership: {self.ownership!r} is unknown; choose one of {', '.join(OWNERSHIP)}")
        if OWNERSHIP[self.ownership] is Base.DOMAINS and self.coordinator_addr is None:
            raise UsageFault(
                f"--ownership {self.ownership} needs --coordinator-addr: only a coordinator assigns machines"
            )
        self._check_files()
        check_log_level(self.log_level)

    def _check_files(self) -> None:
        """Raise UsageFault where a file would be written over."""
        from bigfleet.shard.ownership.state_file import FILE_NAME

        check_different_files(
            {"--audit-log": self.audit_log, "--record": self.record, "--data-dir": self.data_dir / FILE_NAME},
            {
                "--cluster-policy": self.cluster_policy,
                "--tls-cert": self.tls_cert,
                "--tls-key": self.tls_key,
                "--tls-ca": self.tls_ca,
            },
        )

    def _check_provider(self) -> None:
        if self.fake_provider is None:
            if not self.provider_addr:
                raise UsageFault(
                    "--provider-addr is missing: name the HOST:PORT of the capacity provider, or try without one with "
                    "--fake-provider N"
                )
            return
        if self.provider_addr:
            raise UsageFault("--provider-addr and --fake-provider contradict each other: a shard has one provider")
        if self.coordinator_addr is not None:
            # It would send real clusters here, and no machine here can be given to another shard.
            raise UsageFault(
                "--coordinator-addr and --fake-provider contradict each other: a coordinator gets no fake "
                "machines; run `bigfleet provider simulated` and name it with --provider-addr"
            )

    def settings(self) -> "ShardSettings":
        """Return what the flags set. Raises UsageFault naming the flag."""
        from bigfleet.shard.ports import JoinGate, ShardSettings

        gates = [gate.value for gate in JoinGate]
        if self.join_gate not in gates:
            raise UsageFault(f"--join-gate: {self.join_gate!r} is unknown; choose one of {', '.join(gates)}")
        is_woken = self.wake_min_gap != "off"
        wake_gap_seconds = parse_duration_seconds(self.wake_min_gap, "--wake-min-gap") if is_woken else None
        return ShardSettings(
            cycle_interval_seconds=parse_positive_duration_seconds(self.cycle_interval, "--cycle-interval"),
            wake_gap_seconds=wake_gap_seconds,
            execute_concurrency_max=self.execute_concurrency,
            execute_waiting_max=self.execute_waiting_max,
            execute_timeout_seconds=parse_positive_duration_seconds(self.execute_timeout, "--execute-timeout"),
            bootstrap_timeout_seconds=parse_positive_duration_seconds(self.bootstrap_timeout, "--bootstrap-timeout"),
            list_timeout_seconds=parse_positive_duration_seconds(self.list_timeout, "--list-timeout"),
            actions_per_cycle_max=self.max_actions_per_cycle,
            engine_verify_every_cycles=self.engine_verify_every,
            incremental_reconcile=self.incremental_reconcile,
            full_list_every_cycles=self.full_list_every,
            reclaim_cap_fraction=parse_share(self.reclaim_cap_fraction, "--reclaim-cap-fraction"),
            reclaim_after_seconds=parse_duration_seconds(self.reclaim_after, "--reclaim-after"),
            plan_wait_seconds=parse_duration_seconds(self.plan_wait, "--plan-wait"),
            empty_rollup_guard=self.empty_rollup_guard,
            removal_brake=self.removal_brake,
            actuation_paused=self.actuation_paused,
            dry_run=self.dry_run,
            outbox_frames_max=self.outbox_frames,
            join_gate=JoinGate(self.join_gate),
            join_deadline_seconds=parse_positive_duration_seconds(self.join_deadline, "--join-deadline"),
            cluster_silence_seconds=parse_positive_duration_seconds(
                self.cluster_silence_alert, "--cluster-silence-alert"
            ),
            reclaim_without_session_seconds=parse_duration_or_never_seconds(
                self.reclaim_without_session, "--reclaim-without-session"
            ),
            available_capacity_interval_seconds=parse_duration_seconds(
                self.available_capacity_interval, "--available-capacity-interval"
            ),
            action_history_max=self.action_history,
            stuck_creating_seconds=parse_positive_duration_seconds(self.stuck_creating, "--stuck-creating"),
            stuck_configuring_seconds=parse_positive_duration_seconds(self.stuck_configuring, "--stuck-configuring"),
            stuck_deleting_seconds=parse_positive_duration_seconds(self.stuck_deleting, "--stuck-deleting"),
            stuck_draining_margin_seconds=parse_duration_seconds(self.stuck_draining_margin, "--stuck-draining-margin"),
            inherits=self._inherited(),
            report_interval_seconds=parse_positive_duration_seconds(self.report_interval, "--report-interval"),
        )

    def _inherited(self) -> frozenset[ShardId]:
        names = [] if self.inherits is None else self.inherits.split(",")
        for name in names:
            fault = identifier_fault(name)
            if fault:
                raise UsageFault(f"--inherits: {name!r} {fault}; write the ids of shards, with commas between them")
        return frozenset(map(ShardId, names))

    def _coordinators(self) -> tuple[str, ...]:
        names = [] if self.coordinator_addr is None else self.coordinator_addr.split(",")
        return tuple(dict.fromkeys(check_dialable(name, "--coordinator-addr") for name in names))

    def process(self) -> "ShardProcessSettings":
        """Return the identity, directory and addresses of the shard. Raises UsageFault naming the flag."""
        from bigfleet.cli.shard.process_settings import ShardProcessSettings
        from bigfleet.rpc.security.identity import PeerIdentity, PeerRole
        from bigfleet.rpc.servers.session import FRAME_BYTES_MAX, HELLO_BYTES_MAX

        tls = read_tls(self.tls_cert, self.tls_key, self.tls_ca, bearer=PeerIdentity(PeerRole.SHARD, self.id))
        return ShardProcessSettings(
            shard_id=ShardId(self.id),
            coordinators=self._coordinators(),
            advertised_address=self.advertise_addr and check_dialable(self.advertise_addr, "--advertise-addr"),
            new_file_owns=OWNERSHIP[self.ownership],
            data_dir=self.data_dir,
            plan_workers=self.plan_workers,
            exchange=self._exchange_mode(),
            provider_address=parse_address(self.provider_addr, "--provider-addr") if self.provider_addr else None,
            fake_slots=self.fake_provider,
            listen_address=parse_listen_address(self.listen, "--listen", tls, is_insecure=self.insecure),
            metrics_address=parse_optional_address(self.metrics_addr, "--metrics-addr"),
            tls=tls,
            audit_log=self.audit_log,
            audit_log_bytes_max=parse_size_bytes(self.audit_log_max_bytes, "--audit-log-max-bytes"),
            record=self.record,
            record_bytes_max=parse_size_bytes(self.record_max_bytes, "--record-max-bytes"),
            cluster_policy=self._policies(),
            hello_bytes_max=_lowered(self.hello_max_bytes, "--hello-max-bytes", HELLO_BYTES_MAX),
            frame_bytes_max=_lowered(self.frame_max_bytes, "--frame-max-bytes", FRAME_BYTES_MAX),
        )

    def _exchange_mode(self) -> "ExchangeMode":
        from bigfleet.exchange.values import ExchangeMode

        return choice_of(ExchangeMode, "--exchange", self.exchange)

    def _policies(self) -> "PolicyFile | None":
        from bigfleet.shard.cluster_policy import PolicyFault, PolicyFile

        if self.cluster_policy is None:
            return None
        try:
            return PolicyFile(self.cluster_policy)
        except PolicyFault as fault:
            raise UsageFault(f"--cluster-policy {fault}") from fault


app = typer.Typer()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardCall(ShardFlags):
    """The flags of one call, and how it was made."""

    context: typer.Context


# Typer reads the flags off a signature; one of fifty parameters would fit no screen, and a class can take them apart.
# Nothing but the signature is taken from the class: name and help stay the function's.
@app.callback(cls=ShardCommand, invoke_without_command=True)
@wraps(_ShardCall, assigned=(), updated=())
def shard(**given: Any) -> None:
    """Run one shard, or back up its state."""
    from bigfleet.cli.runtime.system import configure_logging, run_loop
    from bigfleet.cli.shard.process import serve_shard

    flags = _ShardCall(**given)
    if flags.context.invoked_subcommand is not None:
        flags.context.obj = flags.data_dir
        return
    flags.check()
    settings, process = flags.settings(), flags.process()
    configure_logging("shard", flags.log_level)
    # All files are closed by then. A thread that still runs loads kernels or computes a decision that is discarded.
    raise typer.Exit(run_loop(lambda: serve_shard(process, settings), threads_seconds_max=THREADS_SECONDS_MAX))


@app.command(cls=SwitchCommand)
def backup(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create; must not exist.")],
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the state file shard.db; data by default.")
    ] = None,
) -> None:
    """Copy shard.db to a new file, also while the shard runs."""
    from bigfleet.files.backup import BackupFault
    from bigfleet.shard.ownership.state_file import back_up_state

    try:
        size_bytes = back_up_state(context.obj if data_dir is None else data_dir, file)
    except BackupFault as fault:
        raise RunFault(str(fault)) from fault
    echo(f"{file}: {size_bytes:,} bytes")
