"""The reclaim delay: a machine is reclaimed after it has been excess without interruption for long enough (rail 5)."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.shard.audit.log import AuditLog
from bigfleet.shard.cycle.reclaim_delay import ExcessTimers
from bigfleet.shard.ports import JoinGate, ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, World, at, machine, need

S = MachineState
AFTER_SECONDS = 600.0
CYCLE_SECONDS = 10.0


def world_of(
    machines: int,
    *,
    settings: ShardSettings | None = None,
    after_seconds: float = AFTER_SECONDS,
    audit_log: AuditLog | None = None,
) -> World:
    """Return a shard with that many machines Configured for c1, whose operator answers drains."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number}", S.CONFIGURED, cluster="c1") for number in range(machines)))
    settings = settings or ShardSettings(reclaim_cap_fraction=0)
    return World(provider, settings=settings, reclaim_after_seconds=after_seconds, audit_log=audit_log)


async def cycles(world: World, count: int, *, is_timer: bool = True) -> list[int]:
    """Run cycles ten seconds apart; return how many actions each enqueued."""
    enqueued = []
    for _ in range(count):
        enqueued.append((await world.step(is_timer=is_timer)).enqueued)
        await world.shard._clock.sleep(CYCLE_SECONDS)
    return enqueued


@pytest.mark.rule("shard 6/13")
@pytest.mark.virtual_time
async def test_a_machine_is_reclaimed_after_ten_minutes_of_excess() -> None:
    """In the 61st timer cycle at ten seconds each, and not before."""
    world = world_of(3)
    world.connect("c1").report(need("c1", "4"))

    assert await cycles(world, 62) == [0] * 60 + [2, 0]
    assert [kind for kind, *_rest in world.outcomes()] == ["Reclaim", "Reclaim"]


@pytest.mark.rule("shard 6/13")
@pytest.mark.virtual_time
async def test_a_machine_that_becomes_useful_again_starts_over() -> None:
    """One cycle in which a row claims it is enough, a woken one too."""
    for is_timer in (True, False):
        world = world_of(2)
        operator = world.connect("c1")
        operator.report(need("c1", "4"))
        assert await cycles(world, 59) == [0] * 59
        operator.report(need("c1", "8"))
        await world.step(is_timer=is_timer)
        operator.report(need("c1", "4"))
        assert await cycles(world, 61) == [0] * 60 + [1], is_timer


@pytest.mark.rule("shard 6/13")
@pytest.mark.virtual_time
async def test_a_machine_that_is_used_while_the_provider_takes_no_calls_starts_over() -> None:
    """Nothing is enqueued during the back-off, and decisions go on."""
    world = world_of(2)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    assert await cycles(world, 50) == [0] * 50
    world.shard.executors.provider_backoff.refused()
    operator.report(need("c1", "8"))
    await world.step()
    operator.report(need("c1", "4"))

    assert await cycles(world, 61) == [0] * 60 + [1]


@pytest.mark.rule("shard 6/13")
@pytest.mark.virtual_time
async def test_the_delay_goes_on_while_the_provider_takes_no_calls() -> None:
    """A machine that was excess all the time is reclaimed no later than without the back-off."""
    world = world_of(2)
    world.connect("c1").report(need("c1", "4"))
    assert await cycles(world, 50) == [0] * 50
    world.shard.executors.provider_backoff.refused()

    assert await cycles(world, 11) == [0] * 10 + [1]


@pytest.mark.rule("shard 6/14")
@pytest.mark.virtual_time
async def test_the_delay_is_measured_on_timer_cycles() -> None:
    """Woken cycles neither start nor end it, however much time they span."""
    world = world_of(2)
    world.connect("c1").report(need("c1", "4"))
    assert await cycles(world, 100, is_timer=False) == [0] * 100
    assert world.metric("reclaim_delayed_machines") == 1
    await cycles(world, 1)
    assert await cycles(world, 100, is_timer=False) == [0] * 100
    assert await cycles(world, 1) == [1]


@pytest.mark.rule("shard 6/15", "shard 15/22")
@pytest.mark.virtual_time
async def test_the_cap_applies_after_the_delay() -> None:
    """Of 40 machines that are due at once two go in each period; the delayed ones spend nothing of the cap."""
    world = world_of(40, settings=ShardSettings(reclaim_cap_fraction=0.05))
    world.connect("c1").report()
    first = await world.step()
    assert (first.delayed, first.capped, world.metric("reclaims_capped_total")) == (40, 0, 0)
    await world.shard._clock.sleep(AFTER_SECONDS)
    due = await world.step()

    assert (due.delayed, due.capped, due.enqueued) == (0, 38, 2)


@pytest.mark.rule("shard 6/15")
@pytest.mark.virtual_time
async def test_preemption_and_unjoined_machines_are_not_delayed() -> None:
    """A starving row and a machine without a node cannot wait for it."""
    provider = ScriptedProvider()
    provider.add(machine("low", S.CONFIGURED, cluster="c2", assigned_priority=1))
    world = World(provider, reclaim_after_seconds=AFTER_SECONDS)
    world.connect("c1").report(need("c1", "4", priority=1_000_000))
    await world.step()
    assert [(r.action.kind.label, r.action.machine_id) for r in world.shard.ledger.history] == [("Preempt", "low")]

    settings = ShardSettings(join_gate=JoinGate.ENFORCE, join_deadline_seconds=30)
    world = world_of(1, settings=settings)
    world.connect("c1", "node-status", "drain-result").report()
    found = await cycles(world, 12)
    assert sum(found) == 1
    assert world.shard.ledger.history[0].action.reason == "phase3.unjoined"


@pytest.mark.rule("shard 6/14")
@pytest.mark.virtual_time
async def test_without_a_delay_reclaims_are_at_once() -> None:
    """`--reclaim-after 0` keeps nothing in memory, and woken cycles reclaim as well."""
    world = world_of(2, after_seconds=0)
    world.connect("c1").report(need("c1", "4"))
    report = await world.step(is_timer=False)

    assert (report.enqueued, report.delayed, world.metric("reclaim_delayed_machines")) == (1, 0, 0)
    assert not world.shard.guardrails.excess.since_seconds


@pytest.mark.rule("shard 6/16")
@pytest.mark.parametrize(
    ("wait_seconds", "undisturbed"), [(3600.0, 361), (600.0, 61), (math.inf, 720)], ids=["1h", "10m", "never"]
)
@pytest.mark.virtual_time
async def test_without_a_session_a_reclaim_waits_as_long_as_the_flag_says(
    wait_seconds: float, undisturbed: int
) -> None:
    """Its last accepted demand stands, so what was excess stays excess; no program honours budgets (§9.3, D2'')."""
    world = world_of(2, settings=ShardSettings(reclaim_cap_fraction=0, reclaim_without_session_seconds=wait_seconds))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await cycles(world, 30)
    world.shard.sessions.close(operator.session, CloseReason.GONE)

    assert await cycles(world, undisturbed) == [0] * undisturbed
    assert sum(await cycles(world, 5)) == (0 if math.isinf(wait_seconds) else 1)


@pytest.mark.rule("shard 6/16")
@pytest.mark.virtual_time
async def test_a_drain_without_a_session_is_counted_warned_of_and_recorded() -> None:
    """Also when it begins after the hour; a drain with an operator says the contrary."""
    log = MemoryAuditLog()
    world = world_of(3, settings=ShardSettings(reclaim_cap_fraction=0), audit_log=log)
    operator = world.connect("c1")
    operator.report(need("c1", "8"))
    await cycles(world, 61)
    await world.shard.actuator.run_inline()
    operator.report(need("c1", "4"))
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    with capture_logs() as logs:
        await cycles(world, 365)
        await world.shard.actuator.run_inline()

    assert world.metric("drains_without_session_total") == 1
    (line,) = [each for each in logs if each["event"] == "drain.started_without_session"]
    assert "PodDisruptionBudgets are not honoured" in line["advice"]
    reclaims = [each for each in log.records if each["kind"] == "Reclaim"]
    assert [each["without_session"] for each in reclaims] == [False, True]


@pytest.mark.rule("shard 6/16")
@pytest.mark.virtual_time
async def test_what_waits_for_a_session_says_so() -> None:
    """Once the reclaim delay is over; until then the delay is the reason."""
    world = world_of(2)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await cycles(world, 30)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    (excess,) = world.shard.guardrails.excess.since_seconds
    found = at(world, excess)

    assert world.shard.guardrails.delay_of(found)[1] == "excess"
    await cycles(world, 40)
    assert world.shard.guardrails.delay_of(found)[1] == "no_session"
    world.connect("c1")
    await cycles(world, 1)
    assert world.shard.guardrails.delay_of(found) == (0, "")


@pytest.mark.rule("shard 6/16")
@pytest.mark.virtual_time
async def test_machines_of_a_retired_cluster_wait_until_it_is_silent() -> None:
    """Its operator will not come back, so neither the hour nor `never` applies."""
    world = world_of(2, settings=ShardSettings(reclaim_cap_fraction=0, reclaim_without_session_seconds=math.inf))
    operator = world.connect("c1")
    operator.report(need("c1", "8"))
    await cycles(world, 1)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    await cycles(world, 61)
    world.shard.retirement.retire("c1", owner="", reason="gone", force=False, hold_seconds=3600)

    assert sum(await cycles(world, 62)) == 2


@pytest.mark.rule("shard 9.3/4")
@pytest.mark.virtual_time
async def test_an_operator_that_comes_back_is_asked_for_what_was_due_meanwhile() -> None:
    """As one that was restarted: its pods have budgets that nobody else honours."""
    world = world_of(2)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await cycles(world, 59)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    assert await cycles(world, 5) == [0] * 5
    world.connect("c1")

    assert sum(await cycles(world, 1)) == 1
    assert world.metric("drains_without_session_total") == 0


@pytest.mark.rule("shard 6/17")
@pytest.mark.virtual_time
async def test_the_delay_is_shown() -> None:
    """As gauges, in the report of the cycle and in one log line when delays start."""
    world = world_of(3)
    world.connect("c1").report(need("c1", "4"))
    with capture_logs() as logs:
        report = await world.step()
        await world.step()

    assert report.delayed == 2
    assert (world.metric("reclaim_delayed_machines"), world.metric("reclaim_after_seconds")) == (2, 600)
    lines = [line for line in logs if line["event"] == "reclaim.delay_started"]
    assert [(line["machines"], line["waiting"]) for line in lines] == [(2, 2)]


@pytest.mark.rule("shard 6/13")
@given(st.lists(st.tuples(st.booleans(), st.frozensets(st.integers(0, 5))), max_size=40), st.integers(0, 6))
@settings(deadline=None)
def test_due_means_excess_in_every_cycle_since_a_timer_cycle_that_long_ago(
    course: list[tuple[bool, frozenset[int]]], after: int
) -> None:
    """Compared with the whole history; what is remembered is never more than what is excess."""
    excess = ExcessTimers()
    for now, (is_timer, found) in enumerate(course):
        ids = [MachineId(str(number)) for number in sorted(found)]
        excess = excess.followed_by(ids, now_seconds=float(now), is_timer=is_timer)
        past = course[: now + 1]
        timers = [moment for moment, (was_timer, _found) in enumerate(past) if was_timer]
        due = {
            number
            for number in found
            if after == 0
            or any(
                timers[-1] - start >= after and all(number in each for _timer, each in past[start:]) for start in timers
            )
        }
        assert {int(name) for name in ids if excess.is_due(name, float(after))} == due
        assert set(excess.since_seconds) <= set(ids)
        assert excess.waiting(float(after)) == len(found) - len(due)
