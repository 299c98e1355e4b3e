"""Defines the flags of `bigfleet pod-controller`, checks them, and converts them to the settings of the process.

docs/spec/operator.md §11. Exit 2 for a wrong call or file, 1 if the process cannot start or fails while it runs, 0
after a clean stop. `bigfleet.cli.pod_controller.process` builds and runs the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bigfleet.cli.flags.kubernetes import Burst, Kubeconfig, LeaseName, LeaseNamespace, Qps, check_kubernetes_flags
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.values import (
    check_log_level,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from bigfleet.cli.pod_controller.process import PodControllerProcessSettings
    from bigfleet.operator.pods.defaults import PenaltyDefaults

_CacheSync = Annotated[
    str, typer.Option(metavar="DURATION", help="Maximum time in which all objects must have been read at start.")
]
_Defaults = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Penalties by PriorityClass, for pods without annotations (YAML)."),
]
_AnnotatedPenaltyMax = Annotated[
    str | None, typer.Option(metavar="DOLLARS", help="Maximum penalty that an annotation of a pod can set.")
]
_UnmanagedAfter = Annotated[
    str, typer.Option(metavar="DURATION", help="Age after which a Node that is not tied to a machine is unmanaged.")
]
_Workers = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Number of pods processed in parallel.")]
_MetricsAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Listen address of /metrics, /healthz and /readyz, or off.")
]
_LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="Minimum log level: debug, info, warning or error.")]


class PodControllerCommand(SwitchCommand):
    """The command, with its options under headings."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "API server": ("--kubeconfig", "--qps", "--burst", "--cache-sync-timeout"),
            "Requests": ("--priority-class-defaults", "--annotated-penalty-max", "--unmanaged-after", "--workers"),
            "Process": ("--namespace", "--lease-name", "--metrics-addr", "--log-level"),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodControllerFlags:
    """The flags of a pod controller as given on the command line, not yet checked."""

    kubeconfig: Kubeconfig = None
    qps: Qps = 200.0
    burst: Burst = 400
    cache_sync_timeout: _CacheSync = "10m"
    priority_class_defaults: _Defaults = None
    annotated_penalty_max: _AnnotatedPenaltyMax = None
    unmanaged_after: _UnmanagedAfter = "10m"
    workers: _Workers = 16
    namespace: LeaseNamespace = ""
    lease_name: LeaseName = "bigfleet-pod-controller"
    metrics_addr: _MetricsAddr = ":8080"
    log_level: _LogLevel = "info"

    def process(self) -> "PodControllerProcessSettings":
        """Return the settings of the process. Raises UsageFault naming the flag or the file."""
        from bigfleet.cli.pod_controller.process import PodControllerProcessSettings
        from bigfleet.cli.runtime.kubernetes import find_endpoint
        from bigfleet.cli.runtime.system import SystemClock

        check_log_level(self.log_level)
        check_kubernetes_flags(self.qps, self.namespace, self.lease_name)
        # Files are read last: a wrong flag is found without them.
        metrics_address = parse_optional_address(self.metrics_addr, "--metrics-addr")
        cache_sync_seconds = parse_positive_duration_seconds(self.cache_sync_timeout, "--cache-sync-timeout")
        unmanaged_after_seconds = parse_duration_seconds(self.unmanaged_after, "--unmanaged-after")
        defaults, endpoint = self._defaults(), find_endpoint(self.kubeconfig, SystemClock())
        return PodControllerProcessSettings(
            endpoint=endpoint,
            defaults=defaults,
            qps=self.qps,
            burst=self.burst,
            workers=self.workers,
            cache_sync_seconds=cache_sync_seconds,
            unmanaged_after_seconds=unmanaged_after_seconds,
            metrics_address=metrics_address,
            namespace=self.namespace or endpoint.namespace,
            lease_name=self.lease_name,
        )

    def _defaults(self) -> "PenaltyDefaults":
        from bigfleet.model.quantity import QuantityError
        from bigfleet.operator.pods.defaults import (
            PenaltyDefaults,
            PenaltyDefaultsFault,
            penalty_text,
            read_penalty_defaults,
        )

        try:
            bound = None if self.annotated_penalty_max is None else penalty_text(self.annotated_penalty_max)
        except QuantityError as fault:
            raise UsageFault(f"--annotated-penalty-max: {fault}") from fault
        if self.priority_class_defaults is None:
            return PenaltyDefaults(annotated_max=bound)
        try:
            return replace(read_penalty_defaults(self.priority_class_defaults), annotated_max=bound)
        except PenaltyDefaultsFault as fault:
            raise UsageFault(f"--priority-class-defaults: {fault}") from fault


# As for `bigfleet coordinator`: typer reads the flags off the class, name and help stay the function's.
@wraps(PodControllerFlags, assigned=(), updated=())
def pod_controller(**given: Any) -> None:
    """Create a CapacityRequest for each pod of a Kubernetes cluster."""
    from bigfleet.cli.pod_controller.process import serve_pod_controller
    from bigfleet.cli.runtime.system import configure_logging, run_loop

    flags = PodControllerFlags(**given)
    process = flags.process()
    configure_logging("pod-controller", flags.log_level)
    raise typer.Exit(run_loop(lambda: serve_pod_controller(process)))
