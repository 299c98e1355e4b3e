"""Safety limit 7: a row does not go on to preempt machines that other clusters then get (docs/spec/shard.md §6)."""

import asyncio
import dataclasses

import pytest
from structlog.testing import capture_logs

from bigfleet.engine.decision import Action, ActionKind, Preemptor
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.vain_preemptions import HOLD_MAX_SECONDS, VainPreemptions
from bigfleet.shard.safety_limits import choose
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
ROW = Preemptor("shop", "p=100", "")


@dataclasses.dataclass
class SetClock(Clock):
    """A clock that a test sets."""

    seconds: float = 0.0

    def monotonic_seconds(self) -> float:
        """Return what was set."""
        return self.seconds

    def unix_nanos(self) -> int:
        """Return the same in nanoseconds."""
        return int(self.seconds * NANOS_PER_SECOND)

    async def sleep(self, seconds: float) -> None:
        """Let the time pass at once."""
        self.seconds += seconds


def preempt(machine_id: str, row: Preemptor = ROW) -> Action:
    """Return a preemption for the row."""
    return Action(
        kind=ActionKind.PREEMPT,
        machine_id=MachineId(machine_id),
        cluster=ClusterId("lab"),
        reason="phase2.inversion",
        preemptor=row,
    )


def bind(machine_id: str, cluster: str) -> Action:
    """Return a Bootstrap for the cluster."""
    return Action(
        kind=ActionKind.BOOTSTRAP,
        machine_id=MachineId(machine_id),
        cluster=ClusterId(cluster),
        reason="phase1.idle",
    )


def in_vain(vain: VainPreemptions, rounds: int) -> None:
    """Let the row preempt a machine that its victim then gets again, so many times."""
    for _ in range(rounds):
        vain.follow([preempt("m1")])
        vain.follow([bind("m1", "lab")])


@pytest.mark.rule("shard 6/23")
def test_one_round_in_vain_holds_nothing_and_the_second_holds_for_ten_minutes() -> None:
    """Higher demand that came meanwhile may have taken the machine once."""
    clock = SetClock()
    vain = VainPreemptions(clock)

    in_vain(vain, 1)
    assert vain.held() == frozenset()
    with capture_logs() as logs:
        in_vain(vain, 1)
    assert vain.held() == {ROW}
    clock.seconds = 599.0
    assert vain.held() == {ROW}
    clock.seconds = 600.0
    assert vain.held() == frozenset()
    (entry,) = logs
    assert (entry["event"], entry["cluster"], entry["taken_by"], entry["held_seconds"]) == (
        "action.preempted_in_vain",
        "shop",
        "lab",
        600.0,
    )


@pytest.mark.rule("shard 6/23")
def test_each_further_round_doubles_the_time_to_a_day() -> None:
    clock = SetClock()
    vain = VainPreemptions(clock)
    in_vain(vain, 3)
    clock.seconds = 1_199.0
    assert vain.held() == {ROW}
    clock.seconds = 1_200.0
    assert vain.held() == frozenset()
    in_vain(vain, 20)
    clock.seconds += HOLD_MAX_SECONDS - 1
    assert vain.held() == {ROW}
    clock.seconds += 1
    assert vain.held() == frozenset()


@pytest.mark.rule("shard 6/24")
def test_a_machine_that_its_cluster_gets_ends_the_count() -> None:
    vain = VainPreemptions(SetClock())
    in_vain(vain, 1)
    vain.follow([preempt("m1")])
    vain.follow([bind("m1", "shop")])
    in_vain(vain, 1)

    assert vain.held() == frozenset()


@pytest.mark.rule("shard 6/23")
def test_machines_that_are_bound_in_one_cycle_are_one_round() -> None:
    """A row whose cluster gets one of them has not preempted in vain."""
    vain = VainPreemptions(SetClock())
    vain.follow([preempt("m1"), preempt("m2"), preempt("m3")])
    assert vain.follow([bind("m1", "lab"), bind("m2", "lab"), bind("m3", "lab")]) == 1
    assert vain.held() == frozenset()
    vain.follow([preempt("m1"), preempt("m2")])
    assert vain.follow([bind("m1", "lab"), bind("m2", "shop")]) == 0


@pytest.mark.rule("shard 6/23")
def test_machines_of_one_decision_are_one_round_though_their_drains_end_in_different_cycles() -> None:
    """Higher demand that came meanwhile may have taken them all."""
    vain = VainPreemptions(SetClock())
    vain.follow([preempt("m1"), preempt("m2"), preempt("m3")])

    assert [vain.follow([bind(each, "lab")]) for each in ("m1", "m2", "m3")] == [1, 0, 0]
    assert vain.held() == frozenset()
    vain.follow([preempt("m1"), preempt("m2")])
    assert [vain.follow([bind("m1", "shop")]), vain.follow([bind("m2", "lab")])] == [0, 0]


@pytest.mark.rule("shard 6/23")
def test_two_decisions_are_two_rounds_though_their_drains_overlap() -> None:
    vain = VainPreemptions(SetClock())
    vain.follow([preempt("m1"), preempt("m2")])
    vain.follow([preempt("m3")])

    assert [vain.follow([bind(each, "lab")]) for each in ("m1", "m3", "m2")] == [1, 1, 0]
    assert vain.held() == {ROW}


@pytest.mark.rule("shard 6/24")
def test_a_row_that_leaves_the_demand_is_forgotten() -> None:
    vain = VainPreemptions(SetClock())
    in_vain(vain, 2)
    vain.keep_only(lambda _row: False)

    assert vain.held() == frozenset()
    in_vain(vain, 1)
    assert vain.held() == frozenset()


@pytest.mark.rule("shard 6/23")
def test_a_held_row_preempts_nothing_and_others_do() -> None:
    """What it binds goes on."""
    other = Preemptor("shop", "p=200", "")
    actions = [preempt("m1"), preempt("m2", other), bind("m3", "shop")]

    chosen = choose(
        actions,
        in_flight=frozenset(),
        backed_off=frozenset(),
        in_vain=frozenset({ROW}),
        fraction=0.0,
        configured_by_cluster={},
        spent={},
        actions_max=0,
        room=10,
    )

    assert [action.machine_id for action in chosen.actions] == ["m2", "m3"]
    assert chosen.refused == 1


@pytest.mark.rule("shard 6/23")
async def test_no_more_machines_are_drained_for_a_row_that_gets_none_of_them() -> None:
    """For each machine that drains, a higher row of another cluster wants one more, and takes it."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(9)))
    world = World(provider)
    low, row, high = world.connect("low"), world.connect("row"), world.connect("high")
    low.report(need("low", "36", priority=10))
    await world.settle()
    row.report(need("row", "4", priority=100))

    async def drain_until(seconds: float) -> int:
        """Let cycles pass; return how many machines were preempted for the row by then."""
        await asyncio.sleep(seconds)
        for _ in range(30):
            await world.cycle()
            world.provider.settle()
            high.report(need("high", str(4 * _preempted(world)), priority=1000))
        return _preempted(world)

    # When the second one is bound, the third drains already; its round in vain doubles the time.
    assert await drain_until(0) == 3
    assert (world.metric("preemptions_vain_total"), world.metric("preemption_held_rows")) == (3, 1)
    assert await drain_until(600) == 3
    assert await drain_until(600) > 3


def _preempted(world: World) -> int:
    return sum(1 for kind, _machine, _outcome in world.outcomes() if kind == "Preempt")
