"""Every metric of docs/spec/coordinator.md §11 is there from the start, with its closed label sets at 0."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bigfleet.cli.runtime.state_watch import StateWatch
from bigfleet.coordinator.delivery import State
from bigfleet.coordinator.metrics import KINDS, CoordinatorMetrics
from bigfleet.coordinator.transfers import Skip, Tier
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.servers import coordinator as coordinator_server

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "coordinator.md"


def named_in_the_spec() -> set[str]:
    section = SPEC.read_text(encoding="utf-8").split("## 11. Metrics")[1].split("\n---")[0]
    names: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| name"):
            names |= {name.strip(" *") for name in line.split("|")[1].split(",")}
    return names


@pytest.mark.rule("coordinator 11/1")
def test_every_name_of_the_spec_is_exported_and_no_other() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    Gate(registry, "bigfleet_coordinator", services=(coordinator_server.SERVICE_NAME,))
    StateWatch(lambda: "", registry, "bigfleet_coordinator")
    text = generate_latest(registry).decode()
    kept = {name for name in re.findall(r"# TYPE bigfleet_coordinator_(\S+)", text) if not name.endswith("_created")}

    assert len(named_in_the_spec()) > 20
    assert kept == named_in_the_spec()


@pytest.mark.rule("coordinator 11/1")
def test_closed_label_sets_are_there_from_the_start() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"bigfleet_coordinator_{name}", labels)

    assert {value("apply_total", outcome=outcome) for outcome in ("success", "error", "fsm_error")} == {0.0}
    assert {value("rebalance_skipped_total", reason=reason.label) for reason in Skip} == {0.0}
    assert {value("rebalance_moves_total", tier=tier.value) for tier in Tier} == {0.0}
    assert {value("instructions_surfaced", kind=kind) for kind in KINDS} == {0.0}
    final = [state.value for state in State if state.is_final]
    assert {value("instructions_total", kind=kind, state=state) for kind in KINDS for state in final} == {0.0}
