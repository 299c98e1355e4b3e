"""Which records say nothing new: those that equal the last one applied, while our view has not moved away from it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_STAMP, HostRef, Machine, PreemptedFor, invariant_fault
from bigfleet.model.states import CapacityType, MachineState, is_legal_transition
from bigfleet.shard.inventory import packed_records
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ListedMachine
from bigfleet.shard.sessions.registry import Sessions
from tests.engine.proof import in_proportion
from tests.shard.world import World, machine

pytestmark = pytest.mark.virtual_time

S = MachineState
KNOWN_STATES = [state for state in S if state is not S.UNSPECIFIED]


class StillClock:
    """Time does not pass."""

    def monotonic_seconds(self) -> float:
        """Return 5."""
        return 5.0

    def unix_nanos(self) -> int:
        """Return 7."""
        return 7

    async def sleep(self, seconds: float) -> None:
        """Return at once."""


@st.composite
def shown(draw: st.DrawFn) -> Machine:
    """Draw what a provider may say of one machine, sound or not."""
    state = draw(st.sampled_from(KNOWN_STATES))
    facts: dict[str, Any] = {
        "cluster": ClusterId(draw(st.sampled_from(["", "c1", "c2"]))),
        "price_usd_per_hour": draw(st.sampled_from([1.0, 2.0])),
        "labels": draw(st.sampled_from([{}, {"a": "b"}])),
        "last_error": draw(st.sampled_from(["", "broken"])),
        "node_name": draw(st.sampled_from(["", "n1"])),
    }
    return machine("m", state, **facts)


steps = st.one_of(
    st.tuples(st.just("observe"), shown()),
    st.tuples(st.just("drive"), st.sampled_from(KNOWN_STATES)),
    st.tuples(st.just("fail"), st.just("ours")),
    st.tuples(st.just("remove"), st.none()),
)


@pytest.mark.rule("shard 5.3/3", "shard 9.1/2")
@given(st.lists(steps, max_size=12), shown(), st.sampled_from([0, 4096]))
@settings(max_examples=in_proportion(400), deadline=None)
def test_a_record_is_unchanged_when_it_equals_the_last_applied_one(
    story: list[tuple[str, Any]], asked: Machine, unpacked_max: int
) -> None:
    """Whatever was observed, driven, failed and removed before; and the state of that record stays known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_records, "UNPACKED_MAX", unpacked_max)
        check_story(story, asked)


def check_story(story: list[tuple[str, Any]], asked: Machine) -> None:
    """Carry out a story, and compare after each step what is unchanged with what was applied."""
    inventory = Inventory()
    ingest = Ingest(
        inventory=inventory,
        sessions=Sessions(epoch=1, outbox_frames_max=16),
        metrics=ShardMetrics(CollectorRegistry(), inventory),
        clock=StillClock(),
    )
    applied: Machine | None = None
    #: Whether the newest record of a known machine was rejected: then the next one is read, also an equal one.
    is_rejected = False
    for kind, shown in story:
        known = inventory.get("m")
        if kind == "observe":
            is_taken = ingest.observe(ListedMachine(shown, {}))
            is_rejected = known is not None and not is_taken
            if is_taken:
                applied = shown
        elif known is None:
            continue
        elif kind == "drive":
            moved = replace(known, state=shown, cluster=ClusterId(known.cluster or "c1"))
            if is_legal_transition(known.state, shown) and invariant_fault(moved) is None:
                ingest.drive(moved)
        elif kind == "fail":
            ingest.fail(known, shown)
        else:
            ingest.remove(MachineId("m"))
            applied, is_rejected = None, False

        known = inventory.get("m")
        assert ingest.applied_state(MachineId("m")) == (applied.state if applied is not None else None)
        seen = [] if known is None else [replace(known, **NO_STAMP._asdict())]
        for record in (asked, *seen, *([applied] if applied is not None else [])):
            expected = (
                known is not None
                and not is_rejected
                and applied == record
                and (known.state, known.cluster) == (record.state, record.cluster)
            )
            assert ingest.is_unchanged(ListedMachine(record, {})) == expected
            assert ingest.changed([ListedMachine(record, {})]) == (set() if expected else {MachineId("m")})


async def test_a_machine_that_nobody_holds_is_kept_without_a_binding() -> None:
    """Whatever stamps its record carries."""
    world = World()
    free = machine("m1", S.IDLE)
    world.shard.ingest.observe(ListedMachine(free, {}))
    stale = machine("m2", S.IDLE, cluster="c1", assigned_priority=7)
    world.shard.ingest.observe(ListedMachine(stale, {}))

    assert world.machine("m1") == free
    assert world.machine("m2") == machine("m2", S.IDLE)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": HostRef("other", "host-m")},
        {"instance_type": "t8"},
        {"zone": "zb"},
        {"capacity_type": CapacityType.RESERVED},
        {"resources": {"cpu": "8"}},
        {"allocatable": {"cpu": "8"}},
        {"labels": {"a": "b"}},
        {"price_usd_per_hour": 2.0},
        {"interruption_probability": 0.5},
        {"node_name": "n1"},
        {"last_error": "broken"},
        {"cluster": ClusterId("c1")},
        {"state": S.DELETING},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("unpacked_max", [0, 4096])
async def test_of_many_records_those_that_say_anything_new_are_found(
    changes: dict[str, Any], unpacked_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal ones are none of them, whether or not their parts are the same objects, packed or not."""
    monkeypatch.setattr(packed_records, "UNPACKED_MAX", unpacked_max)
    world = World()
    for name in ("l", "m", "n"):
        world.shard.ingest.observe(ListedMachine(machine(name, S.IDLE, labels={"rack": "r1"}), {}))
    shown = [machine(name, S.IDLE, labels={"rack": "r1"}) for name in ("l", "m", "n")]
    records = [
        ListedMachine(each, {}) for each in (shown[0], replace(shown[1], **changes), shown[2], machine("o", S.IDLE))
    ]

    assert world.shard.ingest.changed(records) == {MachineId("m"), MachineId("o")}


async def test_a_record_like_our_view_is_new_when_the_last_one_said_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A free machine that its provider showed with a cluster is shown without one."""
    monkeypatch.setattr(packed_records, "UNPACKED_MAX", 0)
    world = World()
    world.shard.ingest.observe(ListedMachine(machine("m", S.IDLE, cluster=ClusterId("c1")), {}))

    assert world.machine("m") == machine("m", S.IDLE)
    assert world.shard.ingest.changed([ListedMachine(machine("m", S.IDLE), {})]) == {MachineId("m")}


@pytest.mark.parametrize("state", [S.CONFIGURED, S.DRAINING, S.FAILED])
async def test_new_facts_of_a_bound_machine_take_over_every_stamp_of_ours(state: MachineState) -> None:
    """And what is derived from them; a preemption only stays with a machine that drains."""
    world = World()
    stamps: dict[str, Any] = {
        "assigned_priority": 7,
        "assigned_interruption_penalty_dollars": 1.0,
        "assigned_reclamation_penalty_dollars": 2.0,
        "assigned_need_fingerprint": "f",
        "assigned_group": "g",
        "intended_cluster": ClusterId("c1"),
        "preempted_for": PreemptedFor("c2", "f2", "g2"),
    }
    ours = machine("m", S.DRAINING, cluster=ClusterId("c1"), **stamps)
    world.shard.inventory.insert(ours, now_seconds=0.0)
    shown = machine("m", state, cluster=ClusterId("c1"), allocatable={"cpu": "8"}, last_error="broken")

    world.shard.ingest.observe(ListedMachine(shown, {}))

    known = world.shard.inventory.get("m")
    assert known is not None
    if state is not S.DRAINING:
        stamps["preempted_for"] = None
    assert known == replace(shown, **stamps)
    assert known.supply == {"cpu": 8000}


async def test_whoever_hears_of_a_change_sees_the_stamps_of_our_view() -> None:
    """A record tells none, and the time from a need to its machine hangs on them."""
    world = World()
    stamped = machine("m", S.CONFIGURING, cluster=ClusterId("c1"), assigned_need_fingerprint="f")
    world.shard.inventory.insert(stamped, now_seconds=0.0)
    heard: list[tuple[Machine | None, Machine]] = []
    world.shard.ingest._on_change = lambda before, after: heard.append((before, after))

    world.shard.ingest.observe(ListedMachine(machine("m", S.CONFIGURED, cluster=ClusterId("c1")), {}))
    world.shard.ingest.observe(ListedMachine(machine("m", S.CONFIGURED, cluster=ClusterId("c1")), {}))

    assert heard == [(stamped, replace(stamped, state=S.CONFIGURED))]


async def test_whoever_hears_of_a_removal_is_told_the_cluster() -> None:
    """The machine itself is gone by then."""
    world = World()
    world.shard.inventory.insert(machine("m", S.CONFIGURED, cluster=ClusterId("c1")), now_seconds=0.0)
    heard: list[tuple[str, str]] = []
    world.shard.ingest._on_remove = lambda machine_id, cluster: heard.append((machine_id, cluster))

    world.shard.ingest.remove(MachineId("m"))

    assert heard == [("m", "c1")]
    assert "m" not in world.shard.inventory
