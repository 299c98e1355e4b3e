"""Safety limits at their bounds and in the log, state of parking, clocks that jump (docs/spec/shard.md §6, §7, §15)."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.shard.safety_limits import reclaim_cap
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def bound_fleet(count: int) -> ScriptedProvider:
    """Return a provider with that many machines Configured for c1."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:03d}", S.CONFIGURED, cluster="c1") for number in range(count)))
    return provider


# ---- limit 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 6/1", "shard 16/2")
@pytest.mark.parametrize(("configured", "cap"), [(0, 1), (1, 1), (19, 1), (20, 1), (21, 1), (40, 2), (1000, 50)])
def test_a_period_sees_a_twentieth_of_the_cluster_and_at_least_one(configured: int, cap: int) -> None:
    """The product is cut, not rounded."""
    assert reclaim_cap(0.05, configured) == cap


@pytest.mark.rule("shard 6/1", "shard 15/22")
def test_a_cluster_of_1000_that_wants_nothing_is_gone_after_107_periods() -> None:
    """The cap shrinks with the cluster: some eighteen minutes, not at once."""
    left, periods = 1000, 0
    while left:
        left -= min(left, reclaim_cap(0.05, left))
        periods += 1

    assert periods == 107


@pytest.mark.rule("shard 6/2", "shard 8/10")
@pytest.mark.parametrize(("configured", "cap"), [(19, 1), (20, 1), (21, 1), (40, 2)])
async def test_the_head_of_the_order_is_kept_and_the_tail_derived_again(configured: int, cap: int) -> None:
    """What is dropped is counted, wakes nothing, and comes first in the next period."""
    world = World(bound_fleet(configured))
    world.connect("c1").report()
    world.shard._trigger._wakeup.clear()
    first = await world.cycle()
    assert (first.enqueued, first.capped) == (cap, configured - cap)
    assert world.metric("reclaims_capped_total") == configured - cap
    assert first.decision is not None
    order = [action.machine_id for action in first.decision.actions]
    assert [name for _kind, name, _outcome in world.outcomes()] == order[:cap]
    assert not world.shard._trigger._wakeup.is_set()

    await world.cycle()
    assert [name for _kind, name, _outcome in world.outcomes()][: cap + 1] == order[: cap + 1]


# ---- limits 2 and 4 in the log -----------------------------------------------------------------------------------


@pytest.mark.rule("shard 6/5")
async def test_the_third_suspicious_roll_up_is_believed_with_a_warning() -> None:
    """Those before it were held with one."""
    world = World()
    operator = world.connect("c1")
    operator.report(*(need("c1", "4", priority=number) for number in range(20)))
    with capture_logs() as logs:
        outcomes = [operator.report() for _ in range(3)]

    assert outcomes == ["held", "held", "accepted"]
    told = [(line["event"], line["log_level"]) for line in logs if line["event"].startswith("rollup.")]
    assert told == [
        ("rollup.quarantined", "warning"),
        ("rollup.quarantined", "warning"),
        ("rollup.confirmed", "warning"),
    ]


@pytest.mark.rule("shard 6/11")
async def test_what_the_brake_holds_back_and_believes_is_logged_at_error() -> None:
    """With how many machines and of how many."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:02d}", S.IDLE) for number in range(30)))
    world = World(provider)
    await world.cycle()
    provider.records.clear()
    with capture_logs() as logs:
        for _ in range(3):
            await world.cycle()

    told = [
        (line["event"], line["log_level"], line["machines"], line["known"])
        for line in logs
        if line["event"].startswith("inventory.removals_")
    ]
    held, believed = ("inventory.removals_braked", "error", 30, 30), ("inventory.removals_accepted", "error", 30, 30)
    assert told == [held, held, believed]


# ---- dry run ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 6/19")
async def test_a_dry_run_says_each_action_in_one_line() -> None:
    """At info; a pause says none."""
    lines = {}
    for name, settings in (("dry", ShardSettings(dry_run=True)), ("pause", ShardSettings(actuation_paused=True))):
        provider = bound_fleet(3)
        provider.add(machine("idle", S.IDLE))
        world = World(provider, settings=settings)
        world.connect("c1").report()
        world.connect("c2").report(need("c2", "4"))
        with capture_logs() as logs:
            await world.cycle()
        lines[name] = [
            (line["log_level"], line["kind"], line["machine"]) for line in logs if line["event"] == "action.suppressed"
        ]

    assert sorted(lines["dry"]) == [
        ("info", "Bootstrap", "idle"),
        *(("info", "Reclaim", f"m{number:03d}") for number in range(3)),
    ]
    assert lines["pause"] == []


@pytest.mark.rule("shard 6/20")
async def test_max_actions_are_not_counted_under_a_pause() -> None:
    """Safety limit 1 and the limit of actions are skipped: everything is shown."""
    world = World(bound_fleet(40), settings=ShardSettings(actuation_paused=True, actions_per_cycle_max=3))
    world.connect("c1").report()
    await world.cycle()

    assert world.metric("actions_suppressed_total", kind="Reclaim") == 40
    assert (world.metric("actions_deferred_total"), world.metric("reclaims_capped_total")) == (0, 0)
    assert world.metric("actuation_paused") == 1


# ---- parking ----------------------------------------------------------------------------------------------------


def gang(group: str) -> Need:
    """Return a row whose machines must share a zone, and that no machine can host alone."""
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    row = need("c1", "8", group=group)
    return Need(cluster=row.cluster, profile=profile, aggregate=row.aggregate, min_unit=row.min_unit, group=group)


@pytest.mark.rule("shard 7/4")
async def test_parking_remembers_the_stalled_gangs_of_the_last_cycle_and_no_others() -> None:
    """However many there were before."""
    world = World()
    operator = world.connect("c1")
    kept = []
    for groups in (["a", "b", "c"], ["a", "b", "c"], ["b"], []):
        operator.report(*map(gang, groups), need("c1", "400"))
        await world.cycle()
        kept.append({key.group: age for key, age in world.shard._ages.parking.items()})

    assert kept == [{"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}, {"b": 3}, {}]


@pytest.mark.rule("shard 7/2", "shard 15/23")
async def test_a_parked_gang_may_try_again_at_age_32_for_one_period() -> None:
    """It is shown as short all the time, and buys nothing."""
    world = World()
    world.connect("c1").report(gang("g"))
    parked = []
    for _ in range(35):
        await world.cycle()
        parked.append(world.shard.view.needs[0].parked)

    # The first eight periods try; the 33rd (age 32) tries again.
    assert [number for number, is_parked in enumerate(parked) if not is_parked] == [*range(8), 32]
    assert world.outcomes() == []
    assert world.shard.shortfall_ledger[gang("g").fingerprint].age_cycles == 35


# ---- clocks that jump -------------------------------------------------------------------------------------------


@pytest.fixture(params=[10**9, -(10**9)], ids=["forwards", "backwards"])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets the wall clock jump by thirty years; the monotonic one goes on."""
    truth, offset = LoopClock.unix_nanos, [0]

    def wall(clock: LoopClock) -> int:
        return truth(clock) + offset[0] * NANOS_PER_SECOND

    def jump_now() -> None:
        offset[0] = request.param

    monkeypatch.setattr(LoopClock, "unix_nanos", wall)
    return jump_now


@pytest.mark.rule("shard 15/25")
async def test_holds_ages_and_deadlines_do_not_follow_the_wall_clock(jump: Callable[[], None]) -> None:
    """An idle hold, a strike's hold, a shortfall's age and a drain's grace last as long as they would have (§15)."""
    provider = ScriptedProvider()
    provider.add(
        machine("spot", S.IDLE, capacity_type=CapacityType.ON_DEMAND, instance_type="other"),
        machine("m1", S.IDLE),
        machine("m2", S.CONFIGURED, cluster="c2", instance_type="other"),
    )
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED] * 3
    world = World(provider)
    operator, leaves = world.connect("c1"), world.connect("c2")
    leaves.drain = None
    row = need("c1", "4")
    operator.report(row)
    for _ in range(3):
        await world.cycle()
    assert (world.state("m1"), world.shard.machine_backoff.is_held("m1")) == (S.FAILED, True)
    started = world.shard._clock.monotonic_seconds()
    await world.cycle()
    jump()
    await world.cycle()
    assert world.shard.machine_backoff.is_held("m1")
    assert world.shard.shortfall_ledger[row.fingerprint].age_cycles == 2
    assert [kind for kind, *_rest in world.outcomes()].count("Delete") == 0

    leaves.report()
    await world.cycle()
    assert world.shard._clock.monotonic_seconds() - started == 600
    assert provider.grace_seconds["m2"] == 0
    await world.cycle()
    assert ("Delete", "spot", "success") in world.outcomes()
    await world.shard._clock.sleep(1199)
    await world.cycle()
    assert world.shard.machine_backoff.is_held("m1")
    await world.shard._clock.sleep(1)
    await world.cycle()
    assert not world.shard.machine_backoff.holds("m1", S.IDLE)
