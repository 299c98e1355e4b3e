"""The series of a shard are those of its page: names, kinds, buckets, zeros from the start (docs/spec/shard.md §14)."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
SPEC = Path(__file__).parents[2] / "docs" / "spec" / "shard.md"
PREFIX = "bigfleet_shard_"
#: Series of the process around a shard; tests/rpc/security/test_identity.py, tests/e2e/test_tls.py and
#: tests/e2e/disks/test_lost_state_files.py see them.
OF_THE_PROCESS = {
    "identity_rejected_total",
    "certificate_expires_timestamp_seconds",
    "certificate_issued_timestamp_seconds",
    "state_file_lost",
}
#: Buckets by letter: the first in seconds, and how often it is doubled.
BUCKETS = {"A": (0.001, 13), "B": (0.01, 15), "C": (0.01, 19), "D": (0.002, 12), "E": (0.01, 14)}


def specified() -> dict[str, str]:
    """Return name → kind (counter, gauge, or hist and its letter) as the table of §14 lists them."""
    table = SPEC.read_text(encoding="utf-8").partition("## 14. Metrics")[2].partition("## 15. ")[0]
    found = {}
    for names, kind in re.findall(r"^\| ([a-z_, *]+?) \| ([^|]*?) \|", table, re.MULTILINE):
        for name in re.findall(r"[a-z_]+", names):
            if name != "name":
                letter = re.search(r"hist ([A-E])", kind)
                found[name] = f"hist {letter[1]}" if letter else "counter" if name.endswith("_total") else "gauge"
    return found


def exported(registry: CollectorRegistry) -> dict[str, Metric]:
    """Return the families of a shard by the names that the page gives them."""
    return {
        (family.name + ("_total" if family.type == "counter" else "")).removeprefix(PREFIX): family
        for family in registry.collect()
        if family.name.startswith(PREFIX)
    }


@pytest.mark.rule("shard 14/1")
async def test_names_and_kinds_are_those_of_the_page() -> None:
    """All that is built and nothing beside."""
    families = exported(World().registry)
    wanted = {name: kind for name, kind in specified().items() if name not in OF_THE_PROCESS}

    assert set(families) == set(wanted)
    kinds = {name: kind.replace("hist", "histogram").split()[0] for name, kind in wanted.items()}
    assert {name: family.type for name, family in families.items()} == kinds


@pytest.mark.rule("shard 14/1")
async def test_histograms_have_the_buckets_of_their_letter() -> None:
    """Doubling from 1 ms or 10 ms."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    world.shard.metrics.provider_rpc.labels("List", "OK").observe(1)
    families = exported(world.registry)
    for name, kind in specified().items():
        if kind.startswith("hist"):
            first, doublings = BUCKETS[kind[-1]]
            edges = {float(sample.labels["le"]) for sample in families[name].samples if "le" in sample.labels}
            assert edges == {*(first * 2**n for n in range(doublings + 1)), float("inf")}, name


#: Series whose label values are a bounded set, and what they may say.
BOUNDED: dict[str, dict[str, set[str]]] = {
    "cycle_phase_duration_seconds": {
        "phase": {"reconcile", "snapread", "phase1", "phase2", "phase3", "emit", "execute"}
    },
    "reconcile_total": {"mode": {"full", "delta"}, "outcome": {"ok", "error", "braked"}},
    "machines_rejected_total": {"reason": {"price", "interruption_probability", "structural", "limits"}},
    "shortfalls_aged": {"bucket": {"1-9", "10-59", "60-299", "300+"}},
    "rollups_total": {"result": {"accepted", "unchanged", "held", "rejected", "misrouted", "retired", "superseded"}},
    "session_lifecycle_total": {"event": {"installed", "removed", "replaced", "overflowed", "unresponsive"}},
    "session_frames_dropped_total": {"kind": {"unknown", "drain_result", "node_status"}},
    "execute_waiting": {"for": {"blob", "drain"}},
    "actions_total": {"kind": {"Bootstrap", "Provision", "Reclaim", "Preempt", "Delete"}},
    "machines_stuck": {"state": {"Creating", "Configuring", "Draining", "Deleting"}},
}


@pytest.mark.rule("shard 14/2")
@pytest.mark.parametrize("name", BOUNDED)
async def test_every_value_of_a_bounded_label_is_there_from_the_start(name: str) -> None:
    """At 0, so that a rate can be asked for before the first time."""
    family = exported(World().registry)[name]
    for label, values in BOUNDED[name].items():
        assert {sample.labels[label] for sample in family.samples if label in sample.labels} == values
    assert not any(sample.value for sample in family.samples if not sample.name.endswith("_created"))


@pytest.mark.rule("shard 14/2")
async def test_what_alerts_compare_with_is_there_from_the_start() -> None:
    """Successes of each kind, re-drives included, and failed instructions of each kind."""
    families = exported(World().registry)
    outcomes = [
        (s.labels["kind"], s.labels["outcome"], s.value)
        for s in families["action_execute_outcomes_total"].samples
        if s.name.endswith("_total")
    ]
    kinds = (*BOUNDED["actions_total"]["kind"], "Redrive")
    instructions = [s for s in families["instructions_total"].samples if s.name.endswith("_total")]

    assert sorted(outcomes) == sorted((kind, "success", 0) for kind in kinds)
    assert {(s.labels["outcome"], s.value) for s in instructions} == {("failed", 0)}
    assert len(instructions) == 6


@pytest.mark.rule("shard 14/3")
async def test_no_series_carries_a_machines_id() -> None:
    """However much happens, the number of series is bounded by kinds, states and clusters."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"machine-{number}", S.IDLE) for number in range(20)))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "40"))
    await world.settle()
    operator.report()
    await world.settle()

    values = {value for family in world.registry.collect() for s in family.samples for value in s.labels.values()}
    assert not any(value.startswith("machine-") for value in values)
    assert MachineId("machine-0") in world.shard.inventory


@pytest.mark.rule("shard 14/5")
async def test_there_is_one_sample_per_cycle() -> None:
    """Woken ones included, and one per phase."""
    world = World()
    for is_timer in (True, False, False):
        await world.cycle(is_timer=is_timer)

    assert world.metric("cycle_duration_seconds_count") == 3
    for phase in BOUNDED["cycle_phase_duration_seconds"]["phase"]:
        assert world.metric("cycle_phase_duration_seconds_count", phase=phase) == 3
