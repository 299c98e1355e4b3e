"""When a shard cycles, what one cycle may do, and what never holds one up (docs/spec/shard.md §3, §6 to §8)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from bigfleet.engine.decision import ActionKind
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.frames import ECHO_RESYNC, Acknowledgement, Hello
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.ports import FenceToken, ShardSettings, TransitionAck
from tests.shard.world import Offer, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
T = TypeVar("T")


class Starts:
    """Notes when each cycle of a running shard starts, and whether it is a timer cycle."""

    def __init__(self, world: World) -> None:
        self.of_timer: list[float] = []
        self.woken: list[float] = []
        self._step = world.shard.step
        self._clock = world.shard._clock
        world.shard.step = self._noted  # type: ignore[method-assign]

    async def _noted(self, *, is_timer: bool = True) -> CycleReport:
        (self.of_timer if is_timer else self.woken).append(round(self._clock.monotonic_seconds(), 6))
        return await self._step(is_timer=is_timer)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[Starts]:
    """Let the shard run by itself while the context lasts."""
    starts = Starts(world)
    task = asyncio.create_task(world.shard.run())
    await asyncio.sleep(0)
    yield starts
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def gang(cluster: str, cpu: str) -> Need:
    """Return a row whose machines must share a zone, and that no single machine can host."""
    row = need(cluster, cpu, group="gang")
    profile = type(row.profile)(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    return Need(cluster=row.cluster, profile=profile, aggregate=row.aggregate, min_unit=row.min_unit, group="gang")


def idle_fleet(count: int) -> ScriptedProvider:
    """Return a provider with that many Idle machines."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:02d}", S.IDLE) for number in range(count)))
    return provider


def bound_fleet(count: int, cluster: str = "c1") -> ScriptedProvider:
    """Return a provider with that many machines Configured for the cluster."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:02d}", S.CONFIGURED, cluster=cluster) for number in range(count)))
    return provider


# ---- when -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/1")
async def test_the_timer_alone_cycles_at_its_interval() -> None:
    """The first cycle is at once."""
    world = World()
    async with running(world) as starts:
        await world.shard._clock.sleep(35)

    assert (starts.of_timer, starts.woken) == ([0, 10, 20, 30], [])


@pytest.mark.rule("shard 3/2")
async def test_a_burst_of_wake_ups_gives_one_extra_cycle() -> None:
    """Fifty changed roll-ups at once are decided on together."""
    world = World()
    operators = [world.connect(f"c{number}") for number in range(50)]
    async with running(world) as starts:
        await world.shard._clock.sleep(3)
        for operator in operators:
            operator.report(need(operator.session.cluster, "4"))
        await world.shard._clock.sleep(6)

    assert (starts.of_timer, starts.woken) == ([0], [3])


@pytest.mark.rule("shard 3/2")
async def test_woken_cycles_keep_the_least_gap() -> None:
    """However fast demand changes, they start half a second apart, and after a timer cycle too."""
    world = World()
    async with running(world) as starts:
        for _ in range(39):
            world.shard.wake()
            await world.shard._clock.sleep(0.05)

    assert (starts.of_timer, starts.woken) == ([0], [0.5, 1.0, 1.5])


@pytest.mark.rule("shard 3/3")
async def test_a_wake_up_during_a_cycle_is_remembered_once() -> None:
    """What came while a List was under way is decided on together, after a second's rest."""
    world = World()
    world.provider.during_list = lambda: world.shard._clock.sleep(2)
    async with running(world) as starts:
        for _ in range(5):
            await world.shard._clock.sleep(0.3)
            world.shard.wake()
        await world.shard._clock.sleep(7)

    assert (starts.of_timer, starts.woken) == ([0], [3])


@pytest.mark.rule("shard 3/3")
async def test_a_timer_cycle_takes_a_pending_wake_up_with_it() -> None:
    """No woken cycle follows for what the timer cycle has already seen."""
    world = World()
    async with running(world) as starts:
        await world.shard._clock.sleep(9.6)
        world.shard.wake()
        await world.shard._clock.sleep(0.1)
        world.shard.wake()
        await world.shard._clock.sleep(5)

    assert (starts.of_timer, starts.woken) == ([0, 10], [9.6])


@pytest.mark.rule("shard 1/2")
async def test_without_a_gap_there_are_timer_cycles_alone() -> None:
    """A wake-up changes nothing then."""
    world = World(settings=ShardSettings(wake_gap_seconds=None))
    async with running(world) as starts:
        for _ in range(8):
            world.shard.wake()
            await world.shard._clock.sleep(2)

    assert (starts.of_timer, starts.woken) == ([0, 10], [])


@pytest.mark.rule("shard 3/5")
async def test_ticks_missed_by_a_long_cycle_are_one() -> None:
    """Three ticks fire during a List of 25 s; one cycle follows, at once."""
    world = World()
    world.provider.during_list = lambda: world.shard._clock.sleep(25)
    async with running(world) as starts:
        await world.shard._clock.sleep(60)

    assert (starts.of_timer, starts.woken) == ([0, 25, 50], [])


@pytest.mark.rule("shard 3/12")
async def test_no_cycle_waits_for_an_action_or_a_stream() -> None:
    """Calls that never return and an operator that never reads change no start."""

    class Hangs(ScriptedProvider):
        async def configure(self, *arguments: Any) -> TransitionAck:
            await world.shard._clock.sleep(1e9)
            raise AssertionError("this call never returns")

    provider = Hangs()
    provider.add(*(machine(f"m{number:02d}", S.IDLE) for number in range(8)))
    world = World(provider, settings=ShardSettings(execute_timeout_seconds=1e6, execute_concurrency_max=2))
    world.connect("c1").report(need("c1", "16"))
    unread = world.shard.sessions.open(Hello(cluster_id="c2"))
    world.shard.take_rollup(unread, Offer("c2", (need("c2", "16"),)))
    async with running(world) as starts:
        await world.shard._clock.sleep(45)

        assert starts.of_timer == [0, 10, 20, 30, 40]
        assert world.metric("execute_inflight") == 2


# ---- what only a timer cycle does -------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/6", "shard 7/1", "shard 15/23")
async def test_parking_ages_on_timer_cycles_only() -> None:
    """The ninth stalled timer period is the first parked one, whatever demand does in between."""
    world = World()
    world.connect("c1").report(gang("c1", "8"))
    parked = []
    for _ in range(10):
        await world.cycle(is_timer=True)
        parked.append(world.shard.view.needs[0].parked)
        for _ in range(3):
            await world.cycle(is_timer=False)

    assert parked == [False] * 8 + [True] * 2


@pytest.mark.rule("shard 3/6", "shard 7/3")
async def test_a_woken_cycle_may_forget_a_parking_age() -> None:
    """A class that has hope again starts at zero."""
    world = World()
    operator = world.connect("c1")
    operator.report(gang("c1", "8"))
    for _ in range(7):
        await world.cycle()
    operator.report()
    await world.cycle(is_timer=False)
    operator.report(gang("c1", "8"))
    await world.cycle()

    assert world.shard.view.needs[0].parked_age_cycles == 1


@pytest.mark.rule("shard 3/6", "shard 11.1/2", "shard 11.1/5")
async def test_shortfalls_age_on_timer_cycles_and_are_dropped_by_any() -> None:
    """A new one has age 1; one that was away in any cycle starts again."""
    world = World()
    operator = world.connect("c1")
    row = need("c1", "8")
    operator.report(row)
    ages = []
    for is_timer in (False, True, False, False, True):
        await world.cycle(is_timer=is_timer)
        ages.append(
            (world.shard.shortfall_ledger[row.fingerprint].age_cycles, world.shard.view.needs[0].unmet_age_cycles)
        )
    operator.report()
    await world.cycle(is_timer=False)
    assert world.shard.shortfall_ledger == {}
    operator.report(row)
    await world.cycle()

    assert ages == [(1, 1), (2, 2), (2, 2), (2, 2), (3, 3)]
    assert world.shard.shortfall_ledger[row.fingerprint].age_cycles == 1


@pytest.mark.rule("shard 3/6", "shard 6/3", "shard 15/22")
async def test_the_reclaim_cap_is_spent_over_woken_cycles_and_refilled_by_the_timer() -> None:
    """40 machines at 0.05 give two a period; what is capped wakes nothing."""
    world = World(bound_fleet(40))
    world.connect("c1").report()
    world.shard._trigger._wakeup.clear()
    first = await world.cycle(is_timer=True)
    woken = [await world.cycle(is_timer=False) for _ in range(3)]
    second = await world.cycle(is_timer=True)

    assert (first.enqueued, first.capped) == (2, 38)
    assert [report.enqueued for report in woken] == [0, 0, 0]
    assert second.enqueued == 1
    assert not world.shard._trigger._wakeup.is_set()


@pytest.mark.rule("shard 6/4")
async def test_only_reclaims_are_capped() -> None:
    """A cluster may be given as much at once as it asks for."""
    world = World(idle_fleet(30))
    world.connect("c1").report(need("c1", "120"))

    assert (await world.cycle()).enqueued == 30


# ---- before the first view --------------------------------------------------------------------------------------


@pytest.mark.rule("shard 1/15")
async def test_no_phase_runs_before_the_first_successful_reconcile() -> None:
    """An unread inventory is not an empty one: no shortfall, no view, no action; sessions are served all the same."""
    provider = idle_fleet(1)
    provider.list_fails = True
    world = World(provider)
    operator = world.connect("c1")
    assert operator.report(need("c1", "8")) == "accepted"
    for _ in range(3):
        assert (await world.cycle()).decision is None
    assert (world.shard.is_ready, world.shard.shortfall_ledger, world.shard.view.cycle) == (False, {}, 0)

    provider.list_fails = False
    assert (await world.cycle()).enqueued == 1
    assert (world.shard.is_ready, world.shard.view.cycle) == (True, 4)


@pytest.mark.rule("shard 10.1/7")
async def test_sessions_that_came_too_early_are_sent_their_machines_after_the_first_list() -> None:
    """Before, nothing says that a cluster has no machines; after, each is sent once, followed by the ack."""
    world = World(bound_fleet(3))
    operator = world.connect("c1")
    world.provider.list_fails = True
    await world.cycle()
    before = [frame.echo for frame in operator.frames if isinstance(frame, Acknowledgement)]
    world.provider.list_fails = False
    await world.cycle()

    echoes = [frame.echo for frame in operator.frames if isinstance(frame, Acknowledgement)]
    assert (before, echoes) == (["hello"], ["hello", ECHO_RESYNC])
    assert [operator.states(f"m0{number}") for number in range(3)] == [[S.CONFIGURED]] * 3


@pytest.mark.rule("shard 3/9")
async def test_nothing_is_reclaimed_before_the_clusters_first_roll_up() -> None:
    """After a restart the machines of a cluster that has not spoken stay; the others' excess goes."""
    provider = bound_fleet(2, "c1")
    provider.add(machine("other", S.CONFIGURED, cluster="c2"))
    world = World(provider, epoch=2)
    one, two = world.connect("c1"), world.connect("c2")
    two.report()
    await world.cycle()
    assert world.outcomes() == [("Reclaim", "other", "success")]

    one.report()
    await world.cycle()
    assert ("Reclaim", "m00", "success") in world.outcomes()


# ---- errors and postures ----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/11")
async def test_an_error_in_a_cycle_is_counted_and_the_loop_lives() -> None:
    """Nothing of that cycle is enqueued; the next one decides afresh."""
    world = World(idle_fleet(1))
    world.connect("c1").report(need("c1", "4"))
    compute, failures = world.shard.compute, [KeyError("a defect"), ZeroDivisionError("another")]

    async def flawed(work: Callable[[], T]) -> T:
        if failures:
            raise failures.pop()
        return await compute(work)

    world.shard.compute = flawed
    async with running(world) as starts:
        await world.shard._clock.sleep(5)
        assert (world.metric("cycle_failures_total"), world.outcomes()) == (1, [])
        assert world.metric("cycle_last_success_timestamp_seconds") == 0
        await world.shard._clock.sleep(20)

    assert starts.of_timer == [0, 10, 20]
    assert (world.metric("cycle_failures_total"), len(world.outcomes())) == (2, 1)
    assert world.metric("cycle_last_success_timestamp_seconds") * NANOS_PER_SECOND > 0


@pytest.mark.rule("shard 6/9", "shard 6/19", "shard 6/20", "shard 15/27")
@pytest.mark.parametrize(
    ("settings", "label"),
    [
        (ShardSettings(actuation_paused=True), "suppressed"),
        (ShardSettings(dry_run=True), "dryrun"),
        (ShardSettings(actuation_paused=True, dry_run=True), "suppressed"),
    ],
)
async def test_a_pause_and_a_dry_run_call_nobody(settings: ShardSettings, label: str) -> None:
    """Deciding, reporting and reading go on; every action is counted and shown, none capped, none carried out."""
    provider = bound_fleet(40)
    provider.add(machine("idle", S.IDLE), machine("spot", S.IDLE, capacity_type=CapacityType.SPOT))
    world = World(provider, settings=settings)
    world.connect("c1").report()
    world.connect("c2").report(need("c2", "4"))
    await world.shard._clock.sleep(1)
    await world.cycle()
    provider.add(machine("late", S.IDLE))
    await world.shard._clock.sleep(100)
    await world.cycle()

    assert (provider.calls, len(world.shard.inventory)) == ([], 43)
    counter = "actions_suppressed_total" if label == "suppressed" else "actions_dryrun_total"
    assert [world.metric(counter, kind=kind) for kind in ("Reclaim", "Bootstrap", "Delete")] == [80, 2, 1]
    assert {label} == {outcome for _kind, _machine, outcome in world.outcomes()}
    assert sum(world.metric("actions_total", kind=kind.label) for kind in ActionKind) == 0
    assert (world.metric("reclaims_capped_total"), world.shard.view.needs[0].satisfied) == (0, True)


# ---- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/4", "shard 6/18")
async def test_what_the_action_limit_puts_off_wakes_one_more_cycle() -> None:
    """Ten bootstraps at three a cycle take four cycles, three of them woken, and no fifth."""
    world = World(idle_fleet(10), settings=ShardSettings(actions_per_cycle_max=3))
    world.connect("c1").report(need("c1", "40"))
    async with running(world) as starts:
        await world.shard._clock.sleep(9)

    assert (starts.of_timer, starts.woken) == ([0], [0.5, 1.0, 1.5])
    assert (len(world.outcomes()), world.metric("actions_deferred_total")) == (10, 7 + 4 + 1)


@pytest.mark.rule("shard 8/6", "shard 15/24")
async def test_a_full_queue_drops_and_the_next_cycle_derives_again() -> None:
    """Nothing blocks, and what was dropped leaves no trace in the ledger."""
    world = World(idle_fleet(6), settings=ShardSettings(execute_concurrency_max=1))
    world.connect("c1").report(need("c1", "24"))
    report = await world.step()
    assert (report.enqueued, world.metric("actions_dropped_total")) == (2, 4)
    assert [f"m0{n}" for n in range(6) if world.shard.ledger.is_pending(f"m0{n}")] == ["m00", "m01"]

    await world.shard.actuator.run_inline()
    await world.settle(4)
    assert sum(1 for each in world.shard.inventory if each.state is S.CONFIGURED) == 6


@pytest.mark.rule("shard 8/2")
async def test_a_machine_in_flight_is_decided_on_but_not_queued_twice() -> None:
    """The second decision is dropped and counted."""
    world = World(idle_fleet(1))
    world.connect("c1").report(need("c1", "4"))
    first, second = await world.step(), await world.shard.step()

    assert (first.enqueued, second.enqueued, world.metric("actions_deduped_total")) == (1, 0, 1)


@pytest.mark.rule("shard 8/4")
async def test_an_action_that_no_longer_applies_is_not_carried_out() -> None:
    """The live record counts: a machine that left its state between decision and start is left alone."""
    world = World(idle_fleet(1))
    world.connect("c1").report(need("c1", "4"))
    await world.step()
    record = world.shard.ledger.history[0]
    world.shard.ingest.fail(world.machine("m00"), "something happened")
    await world.shard.actuator.run_inline()

    assert (record.outcome_label, world.provider.calls) == ("stale", [])


@pytest.mark.rule("shard 1/17")
async def test_a_stopping_shard_starts_no_queued_action_and_gives_running_calls_ten_seconds() -> None:
    """What cannot end in that time is cancelled and left as it is."""

    class Slow(ScriptedProvider):
        async def drain(self, *arguments: Any) -> TransitionAck:
            await world.shard._clock.sleep(5 if arguments[0] == "m00" else 50)
            return await super().drain(*arguments)

    provider = Slow(synchronous=True)
    provider.add(*(machine(f"m{number:02d}", S.CONFIGURED, cluster="c1") for number in range(4)))
    settings = ShardSettings(execute_concurrency_max=2, execute_timeout_seconds=100, reclaim_cap_fraction=0)
    world = World(provider, settings=settings)
    world.connect("c1", "no-capability").report()
    await _run_for_one_second(world)

    assert world.shard._clock.monotonic_seconds() == 11
    assert [outcome for _kind, _machine, outcome in world.outcomes()] == ["success", "ctx_canceled", "", ""]
    assert [call[1] for call in provider.calls] == ["m00"]
    assert S.DRAINING is world.state("m01")


@pytest.mark.rule("shard 1/17")
async def test_a_stopping_shard_waits_for_no_operator() -> None:
    """An action that waits for a blob, a drain or a slot ends at once and makes no call any more."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("drains", S.CONFIGURED, cluster="c1"), machine("boots", S.IDLE))
    world = World(provider)
    leaves, joins = world.connect("c1"), world.connect("c2")
    leaves.drain, joins.answer = None, None
    leaves.report()
    joins.report(need("c2", "4"))
    await _run_for_one_second(world)

    assert world.shard._clock.monotonic_seconds() == 1
    assert [outcome for _kind, _machine, outcome in world.outcomes()] == ["ctx_canceled", "ctx_canceled"]
    assert provider.calls == []


async def _run_for_one_second(world: World) -> None:
    task = asyncio.create_task(world.shard.run())
    await world.shard._clock.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.rule("shard 9.1/3")
async def test_every_token_is_fresh_over_woken_and_timer_cycles() -> None:
    """Sequence numbers rise by the attempt, and the epoch is the process's."""
    seen: list[FenceToken] = []

    class Notes(ScriptedProvider):
        async def configure(self, *arguments: Any) -> TransitionAck:
            seen.append(arguments[-1])
            return await super().configure(*arguments)

    provider = Notes()
    provider.add(*(machine(f"m{number:02d}", S.IDLE) for number in range(4)))
    world = World(provider, epoch=7)
    operator = world.connect("c1")
    for cpu in ("4", "8", "12"):
        operator.report(need("c1", cpu))
        await world.cycle(is_timer=cpu == "8")

    assert [(token.epoch, token.sequence) for token in seen] == [(7, 1), (7, 2), (7, 3)]
