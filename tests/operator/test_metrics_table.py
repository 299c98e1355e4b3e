"""docs/spec/operator.md §13: the table of metrics is what an operator exports, name by name."""

import re
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from bigfleet.operator.metrics import PREFIX, AgentFigures, OperatorMetrics

PAGE = Path(__file__).parent.parent.parent / "docs" / "spec" / "operator.md"
NOTHING = AgentFigures(
    requests=0,
    acknowledged=0,
    invalid=0,
    is_connected=False,
    frames_dropped_total=0,
    bootstraps_dropped_total=0,
    rollups_replaced_total=0,
    recount_mismatches_total=0,
    template_reload_errors_total=0,
    upcoming_phases={},
    available_capacities=0,
    drains_running=0,
    dispatch_inflight=0,
    nodes_unmatched=0,
)


class Metric(NamedTuple):
    """One metric: its type, the values of each label, and the bounds of its buckets."""

    type: str
    labels: dict[str, frozenset[str]]
    buckets: tuple[float, ...] = ()


BUCKETS = {
    "": (),
    "D": tuple(0.001 * 2**power for power in range(16)),
    "B": tuple(0.01 * 2**power for power in range(16)),
}


def documented() -> dict[str, Metric]:
    """Return the metrics of the page's table by name."""
    section = PAGE.read_text(encoding="utf-8").split("## 13. Metrics")[1].split("Pod controller:")[0]
    rows = re.findall(r"^\| (\w+) \| (\w+)(?: (\w))? \|(.*?)\|", section, re.MULTILINE)
    return {
        name: Metric(kind, dict(_labels(labels.strip())), BUCKETS[buckets])
        for name, kind, buckets, labels in rows
        if name != "name"
    }


def _labels(text: str) -> list[tuple[str, frozenset[str]]]:
    given = [each.split(": ") for each in text.split("; ") if each]
    return [(label, frozenset(values.split(", "))) for label, values in given]


def exported() -> dict[str, Metric]:
    """Return what an operator that has seen nothing yet exports, by name."""
    registry = CollectorRegistry()
    OperatorMetrics(registry).sample(NOTHING)
    found = {}
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        labels: dict[str, set[str]] = {}
        for sample in samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        bounds = tuple(sorted(float(bound) for bound in labels.pop("le", set()) if bound != "+Inf"))
        values = {label: frozenset(each) for label, each in labels.items()}
        found[name.removeprefix(f"{PREFIX}_")] = Metric(family.type, values, bounds)
    return found


def test_the_table_names_the_metrics_that_are_exported_and_no_others() -> None:
    assert documented().keys() == exported().keys()


def test_types_labels_values_and_buckets_are_those_of_the_table() -> None:
    assert documented() == exported()
