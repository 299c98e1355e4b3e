"""Defines the flags of `bigfleet operator`, checks them, and converts them to the settings of the process.

docs/spec/operator.md §1. Exit 2 for a wrong call, 1 if the process cannot start or fails while it runs, 0 after a clean
stop. `bigfleet.cli.operator.process` builds and runs the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bigfleet.cli.flags.kubernetes import Burst, Kubeconfig, LeaseName, LeaseNamespace, Qps, check_kubernetes_flags
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.tls import TLS_OPTIONS, TLS_SECTION, TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.flags.values import (
    check_dialable,
    check_log_level,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.cli.operator.token_mode import TokenMode
from bigfleet.cli.runtime.failures import UsageFault, choice_of
from bigfleet.model.ids import ClusterId, identifier_fault

if TYPE_CHECKING:
    from bigfleet.cli.operator.process_settings import OperatorProcessSettings


_ClusterId = Annotated[str, typer.Option(metavar="ID", help="Id of this cluster, for the cluster's life.")]
_ShardAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address of this cluster's shard; never a service over several shards.")
]
_MetricsAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Listen address of /metrics, /healthz and /readyz, or off.")
]
_RollUpInterval = Annotated[str, typer.Option(metavar="DURATION", help="Time between reports of demand.")]
_StatusWorkers = Annotated[int, typer.Option(min=1, max=256, help="Parallel writes of CapacityRequest status.")]
_HandlerWorkers = Annotated[
    int, typer.Option(min=1, max=256, help="Parallel writes of UpcomingNodes and AvailableCapacities.")
]
_Template = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Jinja2 template of the data that boots a machine; or use --bootstrap-stub."),
]
_Stub = Annotated[
    bool, typer.Option("--bootstrap-stub", help="Answer bootstrap requests with a fixed comment; for tests.")
]
_Ttl = Annotated[str, typer.Option(metavar="DURATION", help="Lifetime of a join token, or of data without a token.")]
_Token = Annotated[str, typer.Option(metavar="MODE", help="Join token: none, secret or tokenrequest.")]
_ServiceAccount = Annotated[
    str, typer.Option(metavar="NAMESPACE/NAME", help="Service account of tokens in the mode tokenrequest.")
]
_DrainForce = Annotated[
    bool, typer.Option("--drain-force", help="Delete the pods that are left when a drain's grace period ends.")
]
_LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="Minimum log level: debug, info, warning or error.")]


class OperatorCommand(SwitchCommand):
    """The command, with its options under headings."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "Cluster": ("--cluster-id", "--shard-addr", "--rollup-interval"),
            "Kubernetes": (
                "--kubeconfig",
                "--namespace",
                "--lease-name",
                "--qps",
                "--burst",
                "--status-workers",
                "--handler-workers",
            ),
            "Bootstrap": (
                "--bootstrap-template",
                "--bootstrap-token",
                "--bootstrap-service-account",
                "--bootstrap-ttl",
                "--bootstrap-stub",
            ),
            "Drains": ("--drain-force",),
            "Process": ("--metrics-addr", "--log-level"),
            TLS_SECTION: TLS_OPTIONS,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlags:
    """The flags of an operator as given on the command line, not yet checked."""

    cluster_id: _ClusterId = ""
    shard_addr: _ShardAddr = ""
    kubeconfig: Kubeconfig = None
    namespace: LeaseNamespace = ""
    lease_name: LeaseName = "bigfleet-operator"
    metrics_addr: _MetricsAddr = ":8770"
    qps: Qps = 50.0
    burst: Burst = 100
    rollup_interval: _RollUpInterval = "10s"
    status_workers: _StatusWorkers = 16
    handler_workers: _HandlerWorkers = 32
    bootstrap_template: _Template = None
    bootstrap_stub: _Stub = False
    bootstrap_ttl: _Ttl = "1h"
    bootstrap_token: _Token = TokenMode.NONE.value
    bootstrap_service_account: _ServiceAccount = ""
    drain_force: _DrainForce = False
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    log_level: _LogLevel = "info"

    def check(self) -> None:
        """Check the values that Typer does not check. Raises UsageFault naming the flag."""
        if not self.cluster_id:
            raise UsageFault("--cluster-id is missing: name this cluster, as the fleet knows it")
        fault = identifier_fault(self.cluster_id)
        if fault:
            raise UsageFault(f"--cluster-id {fault}")
        if not self.shard_addr:
            raise UsageFault("--shard-addr is missing: name the HOST:PORT of the shard that serves this cluster")
        check_log_level(self.log_level)
        check_kubernetes_flags(self.qps, self.namespace, self.lease_name)
        self._check_bootstrap()

    def _check_bootstrap(self) -> None:
        mode = self._token_mode()
        if self.bootstrap_stub and self.bootstrap_template is not None:
            raise UsageFault("--bootstrap-stub and --bootstrap-template contradict each other: leave one out")
        if not self.bootstrap_stub and self.bootstrap_template is None:
            raise UsageFault(
                "--bootstrap-template is missing: name the template of the data that boots a machine; "
                "deploy/bootstrap/ has examples"
            )
        if self.bootstrap_stub and mode is not TokenMode.NONE:
            raise UsageFault(
                "--bootstrap-token and --bootstrap-stub contradict each other: leave one out, a stub has no token"
            )
        wants_account = mode is TokenMode.SERVICE_ACCOUNT
        if wants_account and not self.bootstrap_service_account:
            raise UsageFault("--bootstrap-service-account is missing: --bootstrap-token tokenrequest needs one")
        if not wants_account and self.bootstrap_service_account:
            raise UsageFault("--bootstrap-service-account applies to --bootstrap-token tokenrequest only; leave it out")

    def _token_mode(self) -> TokenMode:
        return choice_of(TokenMode, "--bootstrap-token", self.bootstrap_token)

    def process(self) -> "OperatorProcessSettings":
        """Return the settings of the operator. Raises UsageFault naming the flag."""
        from bigfleet.cli.operator.process_settings import OperatorProcessSettings
        from bigfleet.rpc.security.identity import PeerIdentity, PeerRole

        ttl_seconds = parse_duration_seconds(self.bootstrap_ttl, "--bootstrap-ttl")
        mode = self._token_mode()
        if ttl_seconds <= 0 and mode is not TokenMode.NONE:
            raise UsageFault(f"--bootstrap-ttl: {self.bootstrap_ttl!r} is not a lifetime; write one such as 1h")
        return OperatorProcessSettings(
            cluster=ClusterId(self.cluster_id),
            shard_address=check_dialable(self.shard_addr, "--shard-addr"),
            kubeconfig=self.kubeconfig,
            namespace=self.namespace,
            lease_name=self.lease_name,
            metrics_address=parse_optional_address(self.metrics_addr, "--metrics-addr"),
            qps=self.qps,
            burst=self.burst,
            rollup_interval_seconds=parse_positive_duration_seconds(self.rollup_interval, "--rollup-interval"),
            status_workers=self.status_workers,
            handler_workers=self.handler_workers,
            bootstrap_template=self.bootstrap_template,
            bootstrap_ttl_seconds=int(ttl_seconds),
            token_mode=mode,
            service_account=self._service_account(),
            drain_force=self.drain_force,
            tls=read_tls(
                self.tls_cert, self.tls_key, self.tls_ca, bearer=PeerIdentity(PeerRole.CLUSTER, self.cluster_id)
            ),
        )

    def _service_account(self) -> tuple[str, str] | None:
        if not self.bootstrap_service_account:
            return None
        namespace, slash, name = self.bootstrap_service_account.partition("/")
        if not (slash and namespace and name) or "/" in name:
            raise UsageFault(
                f"--bootstrap-service-account: {self.bootstrap_service_account!r} is not NAMESPACE/NAME; "
                "write one such as bigfleet-system/node-joiner"
            )
        return namespace, name


# As in `bigfleet.cli.shard.command`: Typer reads the flags off the class; name and help stay the function's.
@wraps(OperatorFlags, assigned=(), updated=())
def operator(**given: Any) -> None:
    """Connect this Kubernetes cluster to its shard."""
    from bigfleet.cli.operator.process import serve_operator
    from bigfleet.cli.runtime.system import configure_logging, run_loop

    flags = OperatorFlags(**given)
    flags.check()
    process = flags.process()
    configure_logging("operator", flags.log_level)
    raise typer.Exit(run_loop(lambda: serve_operator(process)))
