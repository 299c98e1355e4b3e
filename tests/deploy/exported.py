"""What each program exports, by name with the labels: from their registries."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from bigfleet.cli.pod_controller.process import PodControllerMetrics
from bigfleet.cli.runtime.state_watch import StateWatch
from bigfleet.cli.runtime.system import process_registry
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.engine.shortfalls import PRIORITY_CLASSES
from bigfleet.model.compute import compute_inline
from bigfleet.operator.metrics import OperatorMetrics
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.recording.file import RecordingFile
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import RecordingHead
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import TlsFiles, monitor_files
from bigfleet.shard.metrics import UNMET_REASONS
from bigfleet.shard.outcomes import ActionOutcome
from tests.shard.world import World

#: Labels that Prometheus puts on every series of a target.
OF_TARGETS = frozenset({"job", "instance"})
#: What Prometheus itself says of every target.
OF_PROMETHEUS: Mapping[str, frozenset[str]] = {"up": OF_TARGETS}


def registries() -> Mapping[str, CollectorRegistry]:
    """Return what each program can export, by the prefix of its series, as its process registers it."""
    world = World()
    shard = world.registry
    coordinator, provider, operator, pods = (process_registry() for _ in range(4))
    for outcome in ActionOutcome:
        world.shard.metrics.outcomes.labels("Bootstrap", outcome.value)
    for reason, priority in product(UNMET_REASONS, PRIORITY_CLASSES):
        world.shard.metrics.shortfall_rows.labels(reason.label, priority)
    CoordinatorMetrics(coordinator)
    ProviderMetrics(provider)
    OperatorMetrics(operator)
    PodControllerMetrics(pods)
    Recorder(cast(RecordingFile, None), head=cast(RecordingHead, None), registry=shard, compute=compute_inline)
    now = datetime.now(UTC)
    pair = SimpleNamespace(issued=now, expires=now)
    certificate = cast(TlsFiles, SimpleNamespace(current=lambda: pair, warn_of_loose_key=lambda: None))
    for registry, prefix in (
        (shard, "bigfleet_shard"),
        (coordinator, "bigfleet_coordinator"),
        (provider, "bigfleet_provider"),
    ):
        Gate(registry, prefix)
        StateWatch(lambda: "", registry, prefix)
        monitor_files(certificate, registry, prefix)
    monitor_files(certificate, operator, "bigfleet_operator")
    monitor_files(certificate, coordinator, "bigfleet_coordinator_store")
    return {
        "bigfleet_shard": shard,
        "bigfleet_coordinator": coordinator,
        "bigfleet_provider": provider,
        "bigfleet_operator": operator,
        "bigfleet_unschedulable_pod_controller": pods,
    }


def exported() -> Mapping[str, frozenset[str]]:
    """Return the labels of every series that a program can export, by the series' name."""
    found = dict(OF_PROMETHEUS)
    for registry in registries().values():
        found.update(_series(registry))
    return found


def _series(registry: Any) -> Iterator[tuple[str, frozenset[str]]]:
    for name, collector in registry._names_to_collectors.items():
        # A series without a sample yet is exported all the same once there is something to say.
        if (declared := getattr(collector, "_labelnames", None)) is not None:
            yield name, OF_TARGETS | set(declared) | ({"le"} if name.endswith("_bucket") else set())
    for family in registry.collect():
        for sample in family.samples:
            yield sample.name, OF_TARGETS | set(sample.labels)
