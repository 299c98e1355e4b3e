"""The simulated cloud: determinism, stages, interruptions, stockouts, faults, restart (docs/spec/provider.md §21)."""

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model import labels as keys
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backends.simulated.book import SqliteHostBook
from bigfleet.provider.backends.simulated.catalogue import load_catalogue
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.fleet import build_seed_fleet
from bigfleet.provider.backends.simulated.world import CloudWorld
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.provider.backends.simulated_world import (
    ON_DEMAND,
    ON_DEMAND_ID,
    SPOT,
    SPOT_ID,
    live,
    make_cloud,
    make_simulated,
    trace,
    world_of,
)
from tests.provider.harness import refusal_of, started

ROOT = Path(__file__).parents[3]
S = MachineState
virtual_time = pytest.mark.virtual_time


@virtual_time
async def test_prices_and_probabilities_of_the_default_world_are_as_stated() -> None:
    cloud = make_cloud(CloudWorld())
    catalogue = load_catalogue(None)
    now = LoopClock().unix_nanos()
    declared: dict[object, float] = {}
    for offer in cloud.offers.values():
        on_demand = catalogue[offer.slot.instance_type].on_demand_usd_per_hour
        price, probability = cloud.economy.price_usd_per_hour(offer, now), cloud.economy.probability(offer)
        match offer.slot.capacity_type:
            case CapacityType.BARE_METAL:
                assert (price, probability) == (0, 0)
            case CapacityType.RESERVED:
                assert price == pytest.approx(0.6 * on_demand)
                assert probability == 0
            case CapacityType.ON_DEMAND:
                assert (price, probability) == (on_demand, 0)
            case _:
                assert price == pytest.approx(0.3 * on_demand)
                assert declared.setdefault(offer.market, probability) == probability
    assert set(declared.values()) <= {0.000035, 0.00011, 0.00019, 0.00027, 0.0005}
    assert len(set(declared.values())) > 1


@virtual_time
async def test_the_default_world_is_the_sample_mix() -> None:
    core = await started(make_simulated(make_cloud(CloudWorld())))
    machines = [record.machine for record in (await core.list()).records]
    counts = {kind: sum(m.capacity_type is kind for m in machines) for kind in CapacityType}
    assert len(machines) == 120
    assert counts == {
        CapacityType.UNSPECIFIED: 0,
        CapacityType.BARE_METAL: 28,
        CapacityType.RESERVED: 20,
        CapacityType.ON_DEMAND: 48,
        CapacityType.SPOT: 24,
    }
    for machine in machines:
        is_idle = machine.capacity_type in (CapacityType.BARE_METAL, CapacityType.RESERVED)
        assert machine.state is (S.IDLE if is_idle else S.SPECULATIVE)
        assert machine.labels[keys.REGION] == "sim-1"
        assert machine.labels[keys.RACK].startswith(machine.zone)
        assert machine.resources == machine.allocatable
        assert (machine.price_usd_per_hour == 0) == (machine.capacity_type is CapacityType.BARE_METAL)
        assert (machine.interruption_probability > 0) == (machine.capacity_type is CapacityType.SPOT)
    bare = next(m for m in machines if m.capacity_type is CapacityType.BARE_METAL)
    assert (await refusal_of(core.delete(bare.id)))[0] is Code.UNIMPLEMENTED


def run_world(seed: int) -> list[tuple[float, str, str, float]]:
    async def main() -> list[tuple[float, str, str, float]]:
        world = world_of(
            SPOT % ""
            + "interruption: {probabilities: [0.3]}\nfaults: {create_error: 0.2, transient: 0.2, join_never: 0.1}"
        )
        core = await started(make_simulated(make_cloud(world, seed=seed)))
        seen = await live(core, 4000)
        await core.stop()
        return seen

    return run_virtual(main)


def test_equal_seeds_give_equal_worlds_and_others_differ() -> None:
    first = run_world(7)
    assert first == run_world(7)
    assert first != run_world(8)
    assert {state for _at, _id, state, _price in first} >= {"CREATING", "CONFIGURED", "FAILED"}


@pytest.mark.parametrize("hash_seed", ["0", pytest.param("1", marks=pytest.mark.slow), "4242"])
def test_a_world_is_the_same_to_the_nanosecond_whatever_the_hash_seed(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"src{os.pathsep}."}
    command = [sys.executable, "-m", "tests.provider.backends.simulated_world", "5"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == trace(5)


@settings(max_examples=in_proportion(100), deadline=None)
@given(st.integers(), st.text(max_size=5), st.text(max_size=5), st.integers(0, 2**40))
def test_a_draw_depends_on_its_key_alone(seed: int, topic: str, subject: str, number: int) -> None:
    draws = KeyedDraws(seed)
    value = draws.uniform(topic, subject, number)
    assert 0 < value < 1
    assert value == KeyedDraws(seed).uniform(topic, subject, number)
    assert math.isfinite(draws.normal(topic, subject, number))


def test_log_normal_draws_have_their_median_and_tail() -> None:
    draws = KeyedDraws(3)
    values = sorted(draws.log_normal(40, 120, "t", "s", number) for number in range(4000))
    assert 37 < values[2000] < 43
    assert 100 < values[3960] < 145


@virtual_time
async def test_traffic_on_one_machine_moves_nothing_on_another() -> None:
    refs = []
    for is_busy in (False, True):
        cloud = make_cloud(world_of(ON_DEMAND), is_calm=True)
        core = await started(make_simulated(cloud))
        if is_busy:
            await core.create("sim/on-demand/std.8x32/z/001")
            await asyncio.sleep(50)
        begun_nanos = LoopClock().unix_nanos()
        await core.create(ON_DEMAND_ID)
        await asyncio.sleep(1)
        host = cloud.host(ON_DEMAND_ID)
        assert host is not None
        refs.append((host.ref, host.running_unix_nanos - begun_nanos))
        await core.stop()
    assert refs[0] == refs[1]


@virtual_time
async def test_configured_waits_for_the_join() -> None:
    core = await started(make_simulated(make_cloud(world_of(ON_DEMAND), is_calm=True)))
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(280)
    await core.configure(ON_DEMAND_ID, "c", b"", {})
    await asyncio.sleep(1)
    record = await core.get(ON_DEMAND_ID)
    assert record.state is S.CONFIGURING
    await asyncio.sleep(280)
    record = await core.get(ON_DEMAND_ID)
    assert record.state is S.CONFIGURED
    assert record.machine.node_name == f"node-{record.machine.host.ref}"


@virtual_time
async def test_a_spot_host_is_warned_of_taken_and_its_slot_comes_back() -> None:
    world = world_of(
        SPOT % ", interruption_probability: 0.9" + "interruption: {hint_share: 1, without_notice_share: 0}"
    )
    cloud = make_cloud(world)
    core = await started(make_simulated(cloud))
    await core.create(SPOT_ID)
    seen: list[tuple[str, float]] = []
    for _ in range(200_000):
        record = await core.get(SPOT_ID)
        entry = (record.state.name, record.machine.interruption_probability)
        if not seen or seen[-1] != entry:
            seen.append(entry)
        if record.state is S.FAILED:
            assert record.machine.last_error.startswith("INTERRUPTED: ")
        if len(seen) > 3 and record.state is S.SPECULATIVE:
            break
        await asyncio.sleep(5)
    assert ("IDLE", 0.99) in seen
    assert seen[-2:] == [("FAILED", 0.99), ("SPECULATIVE", 0.9)]
    assert cloud.hosts() == []


@virtual_time
async def test_a_planned_stockout_fails_the_create_and_ends() -> None:
    world = world_of(ON_DEMAND + "stockouts: [{from_seconds: 0, to_seconds: 600, zone: z}]")
    core = await started(make_simulated(make_cloud(world)))
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(3)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("STOCKOUT: no OnDemand std.8x32 in z")
    await asyncio.sleep(700)
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(295)
    assert (await core.get(ON_DEMAND_ID)).state is S.IDLE


@virtual_time
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("create_error", "BACKEND: CallFailed: the cloud refused the request"),
        ("error_after_effect", "BACKEND: CallFailed: the connection broke after create was done"),
        ("effect_after_timeout", "TIMEOUT: timeout: create did not end in 300 s"),
        ("transient", "TIMEOUT: timeout: create did not end in 300 s"),
    ],
)
async def test_faults_end_in_failed_and_no_host_is_forgotten(fault: str, error: str) -> None:
    cloud = make_cloud(world_of(ON_DEMAND + f"faults: {{{fault}: 1}}"))
    core = await started(make_simulated(cloud))
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(320)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error == error
    await asyncio.sleep(1000)
    record = await core.get(ON_DEMAND_ID)
    hosts = dict(cloud.hosts())
    assert record.state is (S.IDLE if hosts else S.SPECULATIVE)
    assert (fault == "error_after_effect") == bool(hosts)
    await core.stop()
    cloud.close()


@virtual_time
async def test_a_join_that_never_comes_is_found_clean_and_reused() -> None:
    core = await started(make_simulated(make_cloud(world_of(ON_DEMAND + "faults: {join_never: 1}"))))
    await core.create(ON_DEMAND_ID)
    await asyncio.sleep(295)
    await core.configure(ON_DEMAND_ID, "c", b"", {})
    await asyncio.sleep(301)
    assert (await core.get(ON_DEMAND_ID)).machine.last_error.startswith("NOT_READY: ")
    await asyncio.sleep(610)
    assert (await core.get(ON_DEMAND_ID)).state is S.IDLE


@virtual_time
async def test_bad_prices_of_the_inventory_never_reach_a_record() -> None:
    faults = "faults: {price_nan: 0.3, price_negative: 0.3, probability_over_1: 0.3, inventory_partial: 0.2}"
    core = await started(make_simulated(make_cloud(world_of(SPOT % "" + faults))))
    for _ in range(40):
        await asyncio.sleep(60)
        for record in (await core.list()).records:
            assert 0 < record.machine.price_usd_per_hour < 1
            assert 0 < record.machine.interruption_probability < 1


@virtual_time
async def test_a_spot_price_walks_within_its_bounds_and_a_calm_one_stands() -> None:
    for is_calm in (False, True):
        core = await started(make_simulated(make_cloud(world_of(SPOT % ""), is_calm=is_calm)))
        prices = set()
        for _ in range(60):
            await asyncio.sleep(300)
            prices.add((await core.get(SPOT_ID)).machine.price_usd_per_hour)
        await core.stop()
        assert all(0.4 * 0.15 <= price <= 0.4 * 0.95 for price in prices)
        assert len(prices) == 1 if is_calm else len(prices) > 20


@virtual_time
async def test_the_cloud_outlives_the_provider(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    async def begin() -> tuple[CapacityCore, SimulatedCloud]:
        cloud = make_cloud(world_of(ON_DEMAND), book=SqliteHostBook(tmp_path / "s.db.cloud"), is_calm=True)
        return await started(make_simulated(cloud, SqliteProviderStore(path, is_power_safe=False))), cloud

    core, cloud = await begin()
    ack = await core.create(ON_DEMAND_ID)
    await asyncio.sleep(5)
    await core.stop()
    cloud.close()
    core, cloud = await begin()
    assert (await core.get(ON_DEMAND_ID)).state is S.CREATING
    await asyncio.sleep(295)
    record = await core.get(ON_DEMAND_ID)
    assert record.state is S.IDLE
    assert (await core.create(ON_DEMAND_ID)).operation_id == ack.operation_id
    assert [host.ref for _id, host in cloud.hosts()] == [record.machine.host.ref]
    await core.stop()
    cloud.close()


def test_seeded_slots_are_the_fake_mix() -> None:
    offers = build_seed_fleet(9, "sim")
    assert len({offer.slot.id for offer in offers}) == 9
    assert sum(offer.slot.capacity_type is CapacityType.SPOT for offer in offers) == 3
    assert {offer.own_price_usd_per_hour for offer in offers} == {0.12, 0.40}


def test_declared_probabilities_are_monthly_rates_within_one_hour() -> None:
    """The default choices are the usual bands of interruption per month, so that costs are dollars per hour."""
    monthly = [1 - (1 - each) ** 720 for each in CloudWorld().interruption.probabilities]

    assert monthly == pytest.approx([0.025, 0.075, 0.125, 0.175, 0.30], abs=0.005)
