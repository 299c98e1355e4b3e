"""What a shard and a provider export, by name with the labels: read from the registries that the processes fill."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector

from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import TlsFiles, export_expiry
from tests.shard.world import World

#: Labels that Prometheus puts on every series of a target.
OF_TARGETS = frozenset({"job", "instance"})
#: What Prometheus itself says of every target.
OF_PROMETHEUS: Mapping[str, frozenset[str]] = {"up": OF_TARGETS}


def exported() -> Mapping[str, frozenset[str]]:
    """Return the labels of every series that a shard or a provider can export, by the series' name."""
    shard, provider = World().registry, CollectorRegistry()
    ProviderMetrics(provider)
    certificate = cast(TlsFiles, SimpleNamespace(current=lambda: SimpleNamespace(expires=datetime.now(UTC))))
    for registry, prefix in ((shard, "bigfleet_shard"), (provider, "bigfleet_provider")):
        # As the processes do (bigfleet.cli.shard.process, bigfleet.cli.provider.process).
        ProcessCollector(registry=registry)
        Gate(registry, prefix)
        export_expiry(certificate, registry, prefix)
    return {**OF_PROMETHEUS, **dict(_series(shard)), **dict(_series(provider))}


def _series(registry: Any) -> Iterator[tuple[str, frozenset[str]]]:
    for name, collector in registry._names_to_collectors.items():
        # A series without a sample yet is exported all the same once there is something to say.
        if (declared := getattr(collector, "_labelnames", None)) is not None:
            yield name, OF_TARGETS | set(declared) | ({"le"} if name.endswith("_bucket") else set())
    for family in registry.collect():
        for sample in family.samples:
            yield sample.name, OF_TARGETS | set(sample.labels)
