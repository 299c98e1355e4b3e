"""What the simulated cloud does by itself: warnings, waves, outages, stages, late effects.

docs/spec/provider.md §21.
"""

import asyncio
from collections.abc import Iterator

import pytest

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import FoundKind, LateResult, Op, Transient
from bigfleet.provider.backends.simulated.backend import SimulatedBackend
from bigfleet.provider.backends.simulated.book import MemoryHostBook, SimulatedHost
from bigfleet.provider.backends.simulated.cloud import CallFailed, OutOfStock, PoolStatus, SimulatedCloud
from bigfleet.provider.backends.simulated.life import LifeStage, stage_of
from bigfleet.provider.backends.simulated.world import CloudWorld
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.kinds import Kind
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.simulated_world import (
    ON_DEMAND,
    ON_DEMAND_ID,
    SPOT,
    SPOT_ID,
    make_cloud,
    make_simulated,
    world_of,
)
from tests.provider.harness import metric, started

pytestmark = pytest.mark.virtual_time
S = MachineState
NEVER_NANOS = 2**62


async def ran(cloud: SimulatedCloud, machine_id: str = ON_DEMAND_ID) -> SimulatedHost:
    """Return the machine's host once it runs."""
    return await cloud.create(machine_id, "op-1", NEVER_NANOS)


class Pushes:
    """A feed that notes what it is told, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str, object]] = []

    def _note(self, what: str, detail: object) -> None:
        self.told.append((round(LoopClock().monotonic_seconds(), 3), what, detail))

    async def report_price(self, ids: object, usd_per_hour: float) -> None:
        self._note("price", usd_per_hour)

    async def report_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None = None) -> None:
        self._note(id, (probability, reclaim_at_unix_nanos))

    async def report_lost(self, id: str, reason: str) -> None:
        self._note(id, reason)


async def pushed(cloud: SimulatedCloud, seconds: float) -> Pushes:
    """Return what the backend pushes in that time."""
    pushes = Pushes()
    feeding = asyncio.create_task(SimulatedBackend(cloud, provider="sim", clock=LoopClock()).feed(pushes))
    await asyncio.sleep(seconds)
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    return pushes


def second_of(unix_nanos: int | None) -> float:
    """Return a time of the wall clock as the loop's seconds."""
    assert unix_nanos is not None
    clock = LoopClock()
    return clock.monotonic_seconds() + (unix_nanos - clock.unix_nanos()) / NANOS_PER_SECOND


async def test_a_wave_takes_its_share_of_one_pool_with_hint_and_notice() -> None:
    cloud = make_cloud(
        world_of(
            "pools: [{instance_type: std.2x8, zone: a, count: 200, capacity_type: reserved},"
            " {instance_type: std.2x8, zone: b, count: 5, capacity_type: reserved}]\n"
            "interruption: {hint_share: 1, without_notice_share: 0,"
            " waves: [{pool: reserved/std.2x8/a, at_seconds: 5000, share: 0.4}]}"
        )
    )
    hosts = dict(cloud.hosts())
    pushes = await pushed(cloud, 6000)
    lost = [(at, name) for at, name, detail in pushes.told if isinstance(detail, str)]
    assert {at for at, _name in lost} == {5000}
    assert all("/a/" in name for _at, name in lost)
    assert 60 < len(lost) < 100
    name = lost[0][1]
    ends = round(hosts[name].dies_unix_nanos or 0)
    assert [(at, detail) for at, told, detail in pushes.told if told == name] == [
        (4400, (0.5, None)),
        (4880, (0.99, ends)),
        (5000, f"the cloud took host {hosts[name].ref}"),
    ]
    assert len(cloud.hosts()) == 205 - len(lost)


async def test_a_wave_finds_only_hosts_of_its_time() -> None:
    world = world_of(ON_DEMAND + "interruption: {waves: [{pool: on-demand/std.8x32/z, at_seconds: 500, share: 1}]}")
    cloud = make_cloud(world)
    early = await ran(cloud)
    await asyncio.sleep(1000)
    assert cloud.host(ON_DEMAND_ID) is None
    late = await ran(cloud)
    assert (early.dies_unix_nanos is None, late.dies_unix_nanos) == (False, None)


async def test_a_zone_outage_takes_everything_unwarned_and_gives_nothing_until_it_is_over() -> None:
    world = world_of(
        "pools: [{instance_type: std.2x8, zone: a, count: 2, capacity_type: bare_metal},"
        " {instance_type: std.2x8, zone: b, count: 2}]\n"
        "interruption: {zone_outages: [{zone: a, from_seconds: 100, to_seconds: 2000}]}"
    )
    cloud = make_cloud(world)
    name = "sim/bare-metal/std.2x8/a/000"
    core = await started(make_simulated(cloud, failed_hold_seconds=60))
    await asyncio.sleep(101)
    assert (await core.get(name)).machine.last_error.startswith("HOST_LOST: ")
    await asyncio.sleep(100)
    assert (await core.get(name)).state is S.SPECULATIVE
    await core.create(name)
    await asyncio.sleep(3)
    assert (await core.get(name)).machine.last_error.startswith("STOCKOUT: ")
    await asyncio.sleep(2000)
    await core.create(name)
    await asyncio.sleep(299)
    record = await core.get(name)
    assert record.state in (S.IDLE, S.CREATING)
    host = cloud.host(name)
    assert host is not None
    assert host.dies_unix_nanos is None


async def test_a_delete_before_the_end_cancels_it() -> None:
    cloud = make_cloud(world_of(SPOT % ", interruption_probability: 0.99"))
    host = await ran(cloud, SPOT_ID)
    feeding = asyncio.create_task(pushed(cloud, 40_000))
    await asyncio.sleep(1)
    await cloud.delete(SPOT_ID, "op-2", NEVER_NANOS)
    pushes = await feeding
    assert host.dies_unix_nanos is not None
    assert [entry for entry in pushes.told if isinstance(entry[2], str)] == []


async def test_half_are_hinted_and_two_in_a_hundred_are_not_noticed() -> None:
    cloud = make_cloud(world_of(SPOT.replace("count: 4", "count: 600") % ""))
    for name in cloud.offers:
        cloud._make_host(cloud.offers[name], "op", NEVER_NANOS)
    hosts = [host for _name, host in cloud.hosts()]
    hinted = sum(host.hint_unix_nanos is not None for host in hosts)
    unnoticed = sum(host.notice_unix_nanos is None for host in hosts)
    assert 250 < hinted < 350
    assert 2 < unnoticed < 30
    for host in hosts:
        assert host.dies_unix_nanos is not None
        for warning in (host.hint_unix_nanos, host.notice_unix_nanos):
            assert warning is None or host.running_unix_nanos < warning <= host.dies_unix_nanos


async def hazards(world: CloudWorld) -> float:
    """Return the mean time that spot hosts of a world last, in hours."""
    cloud = make_cloud(world)
    for name in cloud.offers:
        cloud._make_host(cloud.offers[name], "op", NEVER_NANOS)
    lasted = [(host.dies_unix_nanos or 0) - host.running_unix_nanos for _name, host in cloud.hosts()]
    return sum(lasted) / len(lasted) / NANOS_PER_SECOND / 3600


async def test_hosts_die_at_the_declared_hazard_times_the_truth_factor() -> None:
    pools = SPOT.replace("count: 4", "count: 2000") % ", interruption_probability: 0.2"
    honest = await hazards(world_of(pools))
    optimistic = await hazards(world_of(pools + "interruption: {truth_factor: 2}"))
    # 1 / -ln(1 - 0.2) and 1 / -ln(1 - 0.4) hours.
    assert 4.48 * 0.93 < honest < 4.48 * 1.07
    assert 1.96 * 0.93 < optimistic < 1.96 * 1.07
    never = make_cloud(world_of(pools + "interruption: {truth_factor: 0}"))
    assert (await ran(never, SPOT_ID)).dies_unix_nanos is None


async def test_a_calm_world_takes_nothing_even_what_was_doomed_before() -> None:
    text = SPOT % ", interruption_probability: 0.99" + (
        "interruption: {waves: [{pool: spot/std.8x32/z, at_seconds: 900, share: 1}],"
        " zone_outages: [{zone: z, from_seconds: 950, to_seconds: 2000}]}\n"
        "stockouts: [{from_seconds: 0, to_seconds: 9000}]\n"
        "faults: {create_error: 1, transient: 1}"
    )
    book = MemoryHostBook()
    doomed = make_cloud(world_of(text.replace("from_seconds: 0,", "from_seconds: 8999,").split("faults")[0]), book=book)
    await ran(doomed, SPOT_ID)
    doomed.close()
    calm = make_cloud(world_of(text), book=book, is_calm=True)
    await ran(calm, "sim/spot/std.8x32/z/001")
    pushes = await pushed(calm, 100_000)
    assert pushes.told == []
    assert len(calm.hosts()) == 2


@pytest.mark.parametrize("time_scale", [1.0, 0.001, 10.0])
async def test_the_time_scale_multiplies_every_duration(time_scale: float) -> None:
    world = world_of(
        SPOT % ", interruption_probability: 0.5"
        + "dwell: {slow_share: 0}\nprice: {step_seconds: 4000}\n"
        + "interruption: {hint_share: 1, without_notice_share: 0}"
    )
    cloud = make_cloud(world, time_scale=time_scale)
    reference = make_cloud(world)
    for made in (cloud, reference):
        made._make_host(made.offers[SPOT_ID], "op", NEVER_NANOS)
    host, plain = cloud.host(SPOT_ID), reference.host(SPOT_ID)
    assert host is not None
    assert plain is not None
    for name in ("running_unix_nanos", "dies_unix_nanos", "notice_unix_nanos", "hint_unix_nanos"):
        scaled = getattr(host, name) - host.requested_unix_nanos
        assert scaled == pytest.approx((getattr(plain, name) - plain.requested_unix_nanos) * time_scale, abs=10)
    now = LoopClock().unix_nanos()
    assert cloud.economy.next_price_unix_nanos(now) - now == round(4000 * time_scale * NANOS_PER_SECOND)
    assert cloud.economy.world_second_nanos == round(time_scale * NANOS_PER_SECOND)


async def test_a_spot_price_is_pushed_when_it_changes_also_after_a_restart_in_between() -> None:
    cloud = make_cloud(world_of(SPOT % "" + "interruption: {truth_factor: 0}"))
    await asyncio.sleep(130)
    pushes = await pushed(cloud, 1000)
    assert [at for at, what, _price in pushes.told if what == "price"] == [130, 300, 600, 900]
    assert len({price for _at, _what, price in pushes.told}) == 4


def stages(host: SimulatedHost, until_unix_nanos: int) -> Iterator[LifeStage]:
    """Yield each stage that a host passes, in order."""
    last = None
    for step in range(1001):
        at = host.requested_unix_nanos + (until_unix_nanos - host.requested_unix_nanos) * step // 1000
        stage = stage_of(host, at)
        if stage is not last:
            yield stage
        last = stage


async def test_a_host_passes_its_stages_in_order() -> None:
    cloud = make_cloud(world_of(ON_DEMAND), is_calm=True)
    host = await ran(cloud)
    await asyncio.sleep(100)
    cloud.configure(ON_DEMAND_ID, "c", "op-2", NEVER_NANOS)
    ready = host.ready_unix_nanos
    assert ready is not None
    assert list(stages(host, ready)) == [
        LifeStage.REQUESTED, LifeStage.BOOTING, LifeStage.RUNNING, LifeStage.BOOTSTRAPPING, LifeStage.JOINING,
        LifeStage.READY,
    ]  # fmt: skip
    await asyncio.sleep(300)
    draining = asyncio.create_task(cloud.drain(ON_DEMAND_ID, 1, "op-3", NEVER_NANOS))
    await asyncio.sleep(0.5)
    assert cloud.stage(host) is LifeStage.DRAINING
    await draining
    assert cloud.stage(host) is LifeStage.RUNNING
    assert cloud.cluster(host) == ""
    deleting = asyncio.create_task(cloud.delete(ON_DEMAND_ID, "op-4", NEVER_NANOS))
    await asyncio.sleep(0.5)
    assert cloud.stage(host) is LifeStage.DELETING
    await deleting
    assert cloud.host(ON_DEMAND_ID) is None


async def test_a_drain_is_cut_at_its_grace() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + "dwell: {drain: {median_seconds: 500, p99_seconds: 500}}"), is_calm=True)
    await ran(cloud)
    for grace_seconds, lasts_seconds in ((7, 7), (0, 500)):
        cloud.configure(ON_DEMAND_ID, "c", f"op-c{grace_seconds}", NEVER_NANOS)
        begun = LoopClock().monotonic_seconds()
        await cloud.drain(ON_DEMAND_ID, grace_seconds, f"op-d{grace_seconds}", NEVER_NANOS)
        assert LoopClock().monotonic_seconds() - begun == pytest.approx(lasts_seconds, abs=0.01)


async def test_what_was_begun_lands_though_nobody_waits() -> None:
    cloud = make_cloud(world_of(ON_DEMAND), is_calm=True)
    await ran(cloud)
    cloud.configure(ON_DEMAND_ID, "c", "op-2", NEVER_NANOS)
    for begun, ends in ((cloud.drain(ON_DEMAND_ID, 0, "op-3", NEVER_NANOS), LifeStage.RUNNING),
                        (cloud.delete(ON_DEMAND_ID, "op-4", NEVER_NANOS), None)):  # fmt: skip
        task = asyncio.ensure_future(begun)
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(300)
        host = cloud.host(ON_DEMAND_ID)
        assert (host and cloud.stage(host)) is ends


async def idle(core: CapacityCore) -> None:
    """Bring the first on-demand machine to IDLE."""
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(299)
    assert (await core.get(ON_DEMAND_ID)).state is S.IDLE


LATE = "faults: {effect_after_timeout: 1}\ndwell: {slow_share: 0}"


def let_begin(cloud: SimulatedCloud) -> None:
    """Give the first machine a host, which a world whose every call is late never hands out."""
    cloud._make_host(cloud.offers[ON_DEMAND_ID], "op-orphan", LoopClock().unix_nanos())


async def orphan_idle(cloud: SimulatedCloud) -> CapacityCore:
    """Return a core that found a host of the first machine by its inventory."""
    let_begin(cloud)
    await asyncio.sleep(200)
    core = await started(make_simulated(cloud, failed_hold_seconds=60))
    assert (await core.get(ON_DEMAND_ID)).state is S.IDLE
    return core


async def test_a_late_host_is_compensated() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + LATE))
    core = await started(make_simulated(cloud, failed_hold_seconds=60))
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(301)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("TIMEOUT: ")
    assert len(cloud.hosts()) == 1
    await asyncio.sleep(200)
    assert cloud.hosts() == []
    assert metric(core, "late_results_total", kind="create", compensated="yes") == 1
    assert (await core.get(ON_DEMAND_ID)).state is S.SPECULATIVE
    assert cloud.pools()[0].billed_seconds == 0


async def test_a_late_join_is_found_serving() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + LATE))
    core = await orphan_idle(cloud)
    await core.configure(ON_DEMAND_ID, "c", b"", {"k": "v"})
    await asyncio.sleep(301)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("NOT_READY: timeout")
    await asyncio.sleep(200)
    record = await core.get(ON_DEMAND_ID)
    assert (record.state, record.machine.cluster, dict(record.metadata)) == (S.CONFIGURED, "c", {"k": "v"})


async def test_a_late_drain_and_a_late_delete_are_found_done() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + LATE))
    core = await orphan_idle(cloud)
    await core.configure(ON_DEMAND_ID, "c", b"", {})
    await asyncio.sleep(500)
    await core.drain(ON_DEMAND_ID, 0)
    await asyncio.sleep(601)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("TIMEOUT: ")
    await asyncio.sleep(300)
    assert (await core.get(ON_DEMAND_ID)).state is S.IDLE
    await core.delete(ON_DEMAND_ID)
    await asyncio.sleep(301)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("TIMEOUT: ")
    await asyncio.sleep(700)
    assert (await core.get(ON_DEMAND_ID)).state is S.SPECULATIVE
    assert cloud.hosts() == []


async def test_a_call_that_worked_may_fail_all_the_same() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + "faults: {error_after_effect: 1}"))
    with pytest.raises(CallFailed, match="create was done"):
        await ran(cloud)
    with pytest.raises(CallFailed, match="configure was done"):
        cloud.configure(ON_DEMAND_ID, "c", "op-2", NEVER_NANOS)
    host = cloud.host(ON_DEMAND_ID)
    assert host is not None
    assert host.cluster == "c"
    with pytest.raises(CallFailed, match="drain was done"):
        await cloud.drain(ON_DEMAND_ID, 0, "op-3", NEVER_NANOS)
    assert cloud.cluster(host) == ""
    with pytest.raises(CallFailed, match="delete was done"):
        await cloud.delete(ON_DEMAND_ID, "op-4", NEVER_NANOS)
    assert cloud.hosts() == []


async def test_a_refused_request_makes_nothing() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + "faults: {create_error: 1}"))
    with pytest.raises(CallFailed, match="refused the request"):
        await ran(cloud)
    assert cloud.hosts() == []
    assert [pool.billed_seconds for pool in cloud.pools()] == [0]


@pytest.mark.parametrize(
    ("fault", "is_seen"),
    [
        ("price_nan", lambda fact: fact.price_usd_per_hour != fact.price_usd_per_hour),
        ("price_negative", lambda fact: fact.price_usd_per_hour < 0),
        ("price_x100", lambda fact: fact.price_usd_per_hour == pytest.approx(40)),
        ("probability_over_1", lambda fact: fact.interruption_probability > 1),
    ],
)
async def test_a_bad_fact_is_in_every_pass_but_the_first(fault: str, is_seen: object) -> None:
    cloud = make_cloud(world_of(ON_DEMAND + f"faults: {{{fault}: 1}}"))
    backend = SimulatedBackend(cloud, provider="sim", clock=LoopClock())
    assert callable(is_seen)
    assert not any(is_seen(fact) for fact in await backend.inventory())
    assert all(is_seen(fact) for fact in await backend.inventory())


async def test_a_partial_inventory_breaks_half_way_and_a_stale_one_is_the_one_before() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + "faults: {inventory_partial: 1}"))
    backend = SimulatedBackend(cloud, provider="sim", clock=LoopClock())
    assert len(list(await backend.inventory())) == 4
    seen: list[str] = []
    with pytest.raises(ConnectionError, match="broke half way"):
        seen.extend(fact.id for fact in await backend.inventory())
    assert len(seen) == 2
    stale_cloud = make_cloud(world_of(ON_DEMAND + "faults: {inventory_stale: 1}"))
    stale = SimulatedBackend(stale_cloud, provider="sim", clock=LoopClock())
    before = list(await stale.inventory())
    await ran(stale_cloud)
    assert list(await stale.inventory()) == before


async def test_a_stockout_lasts_as_drawn_and_is_answered_after_two_seconds() -> None:
    cloud = make_cloud(
        world_of(ON_DEMAND + "stockout: {available_seconds_mean: 7200, out_seconds_mean: 1200}"), time_scale=1.0
    )
    market = cloud.offers[ON_DEMAND_ID].market
    out = 0
    for _ in range(20_000):
        await asyncio.sleep(60)
        out += cloud.economy.is_stocked_out(market, LoopClock().unix_nanos())
    assert 0.11 < out / 20_000 < 0.18
    for _ in range(20_000):
        if cloud.economy.is_stocked_out(market, LoopClock().unix_nanos()):
            break
        await asyncio.sleep(60)
    begun = LoopClock().monotonic_seconds()
    with pytest.raises(OutOfStock, match=r"no OnDemand std\.8x32 in z now"):
        await ran(cloud)
    assert LoopClock().monotonic_seconds() - begun == pytest.approx(2, abs=0.01)


async def test_adopt_tells_what_the_cloud_proves_and_errs_while_it_cannot() -> None:
    cloud = make_cloud(world_of(ON_DEMAND + "faults: {join_never: 0}"), is_calm=True)
    backend = SimulatedBackend(cloud, provider="sim", clock=LoopClock())
    core = await started(make_simulated(cloud))

    async def found() -> FoundKind:
        return (await backend.adopt((await core.get(ON_DEMAND_ID)).machine)).kind

    assert await found() is FoundKind.NO_HOST
    await idle(core)
    assert await found() is FoundKind.CLEAN
    await core.configure(ON_DEMAND_ID, "c", b"", {})
    await asyncio.sleep(1)
    with pytest.raises(Transient, match="bootstrapping"):
        await found()
    await asyncio.sleep(299)
    assert await found() is FoundKind.SERVING
    host = cloud.host(ON_DEMAND_ID)
    assert host is not None
    host.cluster = "another"
    assert await found() is FoundKind.DIRTY
    late = LateResult(op=Op(id="op-x", kind=Kind.DRAIN, attempt=1, deadline_monotonic_seconds=0))
    await backend.compensate((await core.get(ON_DEMAND_ID)).machine, late)
    assert cloud.host(ON_DEMAND_ID) is host


async def test_hours_are_billed_by_pool_also_of_a_pool_that_is_offered_no_more() -> None:
    book = MemoryHostBook()
    cloud = make_cloud(world_of(ON_DEMAND), is_calm=True, book=book)
    await ran(cloud)
    await asyncio.sleep(7200)
    cloud.close()
    cloud = make_cloud(world_of(SPOT % ""), is_calm=True, book=book)
    before, now = cloud.pools()
    # The host was billed from a moment between two ticks of the clock.
    assert before.billed_seconds in (7200, 7201)
    assert (before.name, before.offered, before.hosts) == ("on-demand/std.8x32/z", 0, 1)
    assert now == PoolStatus(name="spot/std.8x32/z", offered=4, hosts=0, billed_seconds=0)
    backend = SimulatedBackend(cloud, provider="sim", clock=LoopClock())
    status = backend.status()
    assert status["pool spot/std.8x32/z"] == "4 offered, 0 hosts, billed 0 s (0.0000 host-hours)"
    assert status["pool on-demand/std.8x32/z"].startswith("0 offered, 1 hosts, billed 720")


async def test_seconds_of_a_faster_world_are_billed_as_its_own() -> None:
    cloud = make_cloud(world_of(ON_DEMAND), is_calm=True, time_scale=0.001)
    await ran(cloud)
    await asyncio.sleep(3.6)
    assert 3600 <= cloud.pools()[0].billed_seconds <= 3601
