"""A leader that is lost between a drain and its transfer wastes one drain at most (docs/spec/coordinator.md §9.5, §12).

The leader dies at every moment of the course of one drain for another shard; the next one knows nothing of it but what
shards report. No machine is left without an owner, kept for ever, or drained a third time.
"""

import pytest

from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.states import MachineState
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.coordinator.fleet_world import CLOCK, Fleet, Want, machines_of, steady
from tests.engine.proof import RecordProperty

URGENT, CHEAP = ShardId("a"), ShardId("b")
NEEDED = 2
LEASE_SECONDS = 10.0
ENOUGH_SECONDS = 3_600.0


def starving(drain_seconds: float) -> Fleet:
    """One shard lacks two machines; another runs cheap work on all of its own, a third keeps one idle."""
    fleet = Fleet(CoordinatorSettings(), drain_seconds=drain_seconds)
    fleet.add(URGENT, [], Want(ClusterId("urgent"), ("m6i",), steady(NEEDED), priority=1_000, bucket=13))
    fleet.add(
        CHEAP, machines_of(CHEAP, "m6i", 8), Want(ClusterId("cheap"), ("m6i",), steady(8), priority=100, bucket=3)
    )
    fleet.add("c", machines_of("c", "m6i", 1))
    return fleet


def lived(drain_seconds: float, *, dies_at: float | None = None) -> Fleet:
    """Return the fleet after its course; the leader dies at a moment, and another stands when its lease is over."""
    fleet = starving(drain_seconds)

    async def course() -> None:
        async with fleet.running():
            if dies_at is not None:
                await CLOCK.sleep(dies_at)
                fleet.crash()
                await CLOCK.sleep(LEASE_SECONDS)
                fleet.lead()
            await CLOCK.sleep(ENOUGH_SECONDS)

    run_virtual(course)
    return fleet


def drains(fleet: Fleet) -> int:
    """Return how many machines were drained for another shard."""
    return sum(event.what == "drained" for event in fleet.events)


def check_nothing_is_orphaned(fleet: Fleet) -> None:
    for machine_id, record in fleet.records.items():
        (owner,) = fleet.owners(machine_id)
        shard = fleet.shards[owner]
        assert machine_id in shard.machines, f"{owner} owns {machine_id} and does not know it"
        assert record.state in (MachineState.IDLE, MachineState.CONFIGURED), f"{machine_id} is {record.state.label}"
    for shard in fleet.shards.values():
        assert not shard.file.reservations
    assert URGENT not in {shard.name for shard in fleet.shards.values() if shard.lacks}, "who lacked something has it"


def check_every_moment(drain_seconds: float, step_seconds: int) -> tuple[int, int]:
    """Lose the leader at moments that far apart; return how many there were, and in how many a drain was wasted."""
    undisturbed = lived(drain_seconds)
    check_nothing_is_orphaned(undisturbed)
    assert drains(undisturbed) == NEEDED
    first = next(event.at for event in undisturbed.events if event.what == "drained")
    last = max(event.at for event in undisturbed.events if event.what == "taken")

    moments = range(int(first) - 40, int(last) + 40, step_seconds)
    wasted = 0
    for moment in moments:
        fleet = lived(drain_seconds, dies_at=moment)
        check_nothing_is_orphaned(fleet)
        assert drains(fleet) <= 2 * NEEDED, f"the leader died at {moment} s"
        wasted += drains(fleet) > NEEDED
    return len(moments), wasted


@pytest.mark.rule("coordinator 9.5/2", "coordinator 12/2")
def test_a_leader_lost_in_a_drain_wastes_one_at_most(record_property: RecordProperty) -> None:
    record_property("leaders lost in a drain", check_every_moment(60.0, step_seconds=60))


@pytest.mark.rule("coordinator 9.5/2")
@pytest.mark.parametrize(
    ("drain_seconds", "step_seconds"),
    [
        pytest.param(60.0, 10, id="a-short-drain", marks=pytest.mark.slow),
        pytest.param(600.0, 100, id="moments-of-the-longest-drain", marks=pytest.mark.slow),
        pytest.param(600.0, 10, id="the-longest-drain", marks=pytest.mark.long),
    ],
)
def test_a_leader_lost_at_any_moment_of_a_drain_wastes_one_at_most(
    drain_seconds: float, step_seconds: int, record_property: RecordProperty
) -> None:
    record_property("leaders lost in a drain", check_every_moment(drain_seconds, step_seconds))
