"""Adds the series of the partitioned provider (docs/spec/provider.md §18, §22). No label may carry a machine."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bigfleet.provider.backends.partitioned.backend import PartitionedBackend
from bigfleet.provider.metrics import PREFIX


class PartitionSeries(Collector):
    """Reads the backend when it is asked."""

    def __init__(self, backend: PartitionedBackend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """Yield slots on offer, allocations lost so far, and free disk."""
        counted: Counter[tuple[str, str]] = Counter()
        for line, count in self._backend.slots_by_line():
            counted[line.group, line.interval] += count
        slots = GaugeMetricFamily(f"{PREFIX}_partition_slots", "Slots on offer.", labels=("group", "interval"))
        for key, count in counted.items():
            slots.add_metric(key, count)
        yield slots
        lost = CounterMetricFamily(
            f"{PREFIX}_partition_lost_allocations", "Allocations that placements lost.", labels=("group", "interval")
        )
        for key, count in self._backend.lost_allocations.items():
            lost.add_metric(key, count)
        yield lost
        free = GaugeMetricFamily(
            f"{PREFIX}_partition_free_disk_mebibytes", "Free disk of hosts that take instances.", labels=("group",)
        )
        for group, free_mib in self._backend.free_disk_mib().items():
            free.add_metric((group,), free_mib)
        yield free


def export(backend: PartitionedBackend, registry: CollectorRegistry) -> None:
    """Add the series to a registry."""
    registry.register(PartitionSeries(backend))
