"""Stockouts: a pool without capacity is left alone by all rows and probed once per back-off; its rows are short."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, Options
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, UnmetReason
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need, RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.rpc.wire.list_response import unreadable
from bigfleet.shard.inventory import fleet_queries
from bigfleet.shard.ports import FenceToken, ListedMachine, ProviderRefusal, RefusalKind, ShardSettings, TransitionAck
from tests.shard.world import ScriptedProvider, World, at, machine, need

S = MachineState
CYCLE_SECONDS = 10.0
CHEAP = CapacityPool("cheap", "za", CapacityType.ON_DEMAND)

pytestmark = pytest.mark.virtual_time


@dataclass
class SellsOut(ScriptedProvider):
    """Has no stock of some types: Create is refused at once, or accepted and then failed."""

    sold_out: set[str] = field(default_factory=set)
    creates: list[str] = field(default_factory=list)

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        self.creates.append(self.records[machine_id].instance_type)
        if self.synchronous and self.creates[-1] in self.sold_out:
            raise ProviderRefusal(RefusalKind.EXHAUSTED, "no capacity")
        return await super().create(machine_id, token)

    def settle(self, *machine_ids: str) -> None:
        for record in list(self.records.values()):
            if record.state is S.CREATING and record.instance_type in self.sold_out:
                self.fail(record.id, "STOCKOUT: no capacity")
        super().settle(*machine_ids)

    def recover(self) -> None:
        """Offer failed slots again."""
        for record in list(self.records.values()):
            if record.state is S.FAILED:
                self.records[record.id] = replace(record, state=S.SPECULATIVE, last_error="")


def slots(provider: ScriptedProvider, kind: str, count: int, price: float) -> None:
    """Add slots of 4 cpu."""
    offer = {"instance_type": kind, "price_usd_per_hour": price, "capacity_type": CapacityType.ON_DEMAND}
    provider.add(*(machine(f"{kind}-{number:04d}", S.SPECULATIVE, **offer) for number in range(count)))


def row(machines: int, *, cluster: str = "c1") -> Need:
    """Return a row that any type serves."""
    amount, unit = parse_vector({"cpu": str(4 * machines)}), parse_vector({"cpu": "4"})
    return Need(ClusterId(cluster), Profile(requirements=(), priority=100), amount, unit)


async def run(world: World, provider: SellsOut, seconds: float) -> list[int]:
    """Cycle every ten seconds, transitions ending in between; return the Creates of each cycle."""
    creates = []
    for _ in range(int(seconds / CYCLE_SECONDS)):
        before = len(provider.creates)
        await world.cycle()
        creates.append(len(provider.creates) - before)
        # What failed is shown as such in one List.
        provider.recover()
        provider.settle()
        await world.shard._clock.sleep(CYCLE_SECONDS)
    return creates


@pytest.mark.rule("shard 9.8/1", "shard 15/12")
@pytest.mark.parametrize("synchronous", [True, False], ids=["refused", "failed later"])
@pytest.mark.parametrize("count", [12, 200, 2000])
async def test_another_type_is_asked_for_within_two_cycles(count: int, synchronous: bool) -> None:
    """With 10 machines wanted at most 13 Creates are wasted, however many slots are sold out."""
    provider = SellsOut(synchronous=synchronous, sold_out={"cheap"})
    slots(provider, "cheap", count, 1.0)
    slots(provider, "dear", 20, 2.0)
    world = World(provider)
    world.connect("c1").report(row(10))
    creates = await run(world, provider, 300)

    wasted = provider.creates.count("cheap")
    first = next(cycle for cycle in range(len(creates)) if "dear" in provider.creates[: sum(creates[: cycle + 1])])
    assert (wasted <= 13, first <= 2, provider.creates.count("dear")) == (True, True, 10)
    assert world.shard.view.needs[0].satisfied


@pytest.mark.rule("shard 9.8/3", "shard 15/12")
@pytest.mark.parametrize("synchronous", [True, False], ids=["refused", "failed later"])
async def test_a_row_whose_creations_fail_is_short_and_ages(synchronous: bool) -> None:
    """While its machines are being created it is not; from the first failure on it is in every cycle."""
    provider = SellsOut(synchronous=synchronous, sold_out={"cheap"})
    slots(provider, "cheap", 200, 1.0)
    world = World(provider)
    operator = world.connect("c1", "need-status")
    operator.report(row(3))
    await world.step()
    assert world.shard.view.needs[0].satisfied
    await run(world, provider, 3600)

    view = world.shard.view.needs[0]
    assert (view.satisfied, view.reason, view.unmet_age_cycles >= 355) == (False, UnmetReason.STOCKOUT, True)
    entry = world.shard.shortfall_ledger[row(3).fingerprint]
    assert (entry.age_cycles >= 355, entry.deficit) == (True, {"cpu": 12_000})
    assert world.metric("shortfall_rows", **{"reason": "stockout", "class": "batch"}) == 1
    assert operator.verdicts()[-1].rows[0].reason is UnmetReason.STOCKOUT
    # Three at first, then one probe after 3, 6, 12 and 24 minutes each.
    assert len(provider.creates) <= 3 + 4


@pytest.mark.rule("shard 9.8/1", "shard 9.8/2")
async def test_a_pool_is_shared_by_all_clusters_and_comes_back_with_a_probe_that_succeeds() -> None:
    """Back-off of three minutes, doubled; the probe is one Create, for any row."""
    provider = SellsOut(synchronous=True, sold_out={"cheap"})
    slots(provider, "cheap", 50, 1.0)
    world = World(provider)
    for cluster in ("c1", "c2", "c3"):
        world.connect(cluster).report(row(4, cluster=cluster))
    creates = await run(world, provider, 600)
    assert [cycle for cycle, number in enumerate(creates) if number] == [0, 18, 54]
    assert creates[0] == creates[18] == creates[54] == 1
    assert (world.metric("capacity_pools_sold_out"), world.metric("stockouts_total")) == (1, 3)

    provider.sold_out.clear()
    creates = await run(world, provider, 900)
    assert sum(creates) == 12
    assert world.metric("capacity_pools_sold_out") == 0
    assert all(view.satisfied for view in world.shard.view.needs)


@pytest.mark.rule("shard 9.8/2")
async def test_a_stockout_is_no_strike_against_the_machine() -> None:
    """One back-off and not two: the slot is never held for it."""
    provider = SellsOut(synchronous=True, sold_out={"cheap"})
    slots(provider, "cheap", 1, 1.0)
    world = World(provider)
    world.connect("c1").report(row(1))
    await run(world, provider, 3600)

    assert (len(provider.creates), len(world.shard.machine_backoff)) == (5, 0)
    assert {outcome for _kind, _machine, outcome in world.outcomes()} == {"exhausted"}


@pytest.mark.rule("shard 9.8/2")
async def test_sold_out_machines_are_neither_given_away_nor_told_as_available() -> None:
    """Until the pool is available again."""
    provider = SellsOut(synchronous=True, sold_out={"cheap"})
    slots(provider, "cheap", 5, 1.0)
    world = World(provider)
    operator = world.connect("c1")
    operator.report(row(1))
    await run(world, provider, 30)

    assert (operator.hints()[-1].available_count, len(world.shard.taken)) == (0, 5)


@pytest.mark.rule("shard 9.8/3")
async def test_what_was_failed_by_the_backend_is_a_shortfall_too() -> None:
    """Not for want of stock: the pool stays, the slots fail one after the other, and the row is short meanwhile."""
    provider = SellsOut()
    slots(provider, "cheap", 3, 1.0)
    world = World(provider)
    world.connect("c1").report(row(1))
    await world.cycle()
    for record in provider.records.values():
        if record.state is S.CREATING:
            provider.fail(record.id, "BACKEND: quota")
    report = await world.cycle()

    assert report.decision is not None
    assert [action.kind.label for action in report.decision.actions] == ["Provision"]
    assert (world.shard.view.needs[0].reason, world.metric("capacity_pools_sold_out")) == (UnmetReason.STOCKOUT, 0)


@pytest.mark.rule("shard 9.8/1")
async def test_three_creations_that_fail_for_any_reason_count_as_a_stockout() -> None:
    """A type that always refuses Create does not keep its row from another type."""
    provider = ScriptedProvider(synchronous=True)
    slots(provider, "cheap", 200, 1.0)
    slots(provider, "dear", 3, 2.0)
    for number in range(200):
        provider.refusals["create", f"cheap-{number:04d}"] = [RefusalKind.REFUSED] * 99
    world = World(provider)
    world.connect("c1").report(row(1))
    for _ in range(5):
        await world.cycle()
        await world.shard._clock.sleep(CYCLE_SECONDS)

    tried = [name for method, name, _sequence in provider.calls if method == "create"]
    assert [name.partition("-")[0] for name in tried] == ["cheap"] * 3 + ["dear"]


@dataclass
class FailsLater(ScriptedProvider):
    """Accepts each Create; those of some types end Failed, with a code other than STOCKOUT, and the slot returns."""

    broken: set[str] = field(default_factory=set)

    def settle(self, *machine_ids: str) -> None:
        for record in list(self.records.values()):
            if record.state is S.FAILED:
                self.records[record.id] = replace(record, state=S.SPECULATIVE, last_error="")
            elif record.state is S.CREATING and record.instance_type in self.broken:
                self.fail(record.id, "TIMEOUT: timeout after 120 s")
        super().settle(*machine_ids)


@pytest.mark.rule("shard 9.8/2")
async def test_each_probe_that_fails_for_any_reason_doubles_the_back_off_and_the_next_is_another_machine() -> None:
    provider = FailsLater(broken={"cheap"})
    slots(provider, "cheap", 10, 1.0)
    world = World(provider)
    world.connect("c1").report(row(1))
    seconds = []
    for number in range(int(2.5 * 3600 / CYCLE_SECONDS)):
        before = len(provider.calls)
        await world.cycle()
        seconds += [number * CYCLE_SECONDS] * sum(call[0] == "create" for call in provider.calls[before:])
        provider.settle()
        await world.shard._clock.sleep(CYCLE_SECONDS)

    tried = [name for method, name, _sequence in provider.calls if method == "create"]
    gaps = [later - earlier for earlier, later in pairwise(seconds)]
    # Three that fail at first, then one after each back-off of 3, 6, 12, 24, 48 and 60 minutes.
    assert [int(gap // 60) for gap in gaps[2:]] == [3, 6, 12, 24, 48]
    assert len(set(tried[3:])) == 5


@pytest.mark.rule("shard 9.8/4")
async def test_a_machine_that_fails_to_bootstrap_waits_behind_others() -> None:
    """The others are tried first; without another it is tried again at once."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    for number in range(2):
        provider.refusals["configure", f"m{number}"] = [RefusalKind.REFUSED]
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = lambda request: BootstrapResponse(request_id=request.request_id, user_data=b"#")
    operator.report(need("c1", "4"))
    for _ in range(3):
        await world.cycle()
    tried = [name for method, name, _sequence in provider.calls if method == "configure"]
    assert tried == ["m0", "m1", "m2"]

    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m0", S.IDLE))
    provider.refusals["configure", "m0"] = [RefusalKind.REFUSED]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    await world.cycle()
    assert world.state("m0") is S.CONFIGURED


@pytest.mark.rule("shard 9.8/2")
async def test_a_restart_forgets_back_offs_and_pools_without_demand_are_forgotten() -> None:
    """An hour after its end a back-off begins with three minutes again."""
    provider = SellsOut(synchronous=True, sold_out={"cheap"})
    slots(provider, "cheap", 5, 1.0)
    world = World(provider)
    operator = world.connect("c1")
    operator.report(row(1))
    await run(world, provider, 20)
    operator.report()
    await world.step()
    assert CHEAP in world.shard.stockouts._pools
    await world.shard._clock.sleep(180 + 3600)
    await world.step()

    assert (world.shard.stockouts._pools, world.shard.stockouts.failing()) == ({}, {})
    assert World(provider, epoch=2).shard.stockouts._pools == {}


@dataclass
class TakesBack(ScriptedProvider):
    """Accepts each Configure, and shows the machine as Idle in its answer or afterwards."""

    at_once: bool = False

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        ack = await super().configure(machine_id, cluster, blob, metadata, token)
        if not self.at_once:
            return ack
        self.take_back()
        return replace(ack, record=ListedMachine(self.records[machine_id], {}))

    def take_back(self) -> None:
        """Undo what was accepted."""
        for record in list(self.records.values()):
            if record.state is S.CONFIGURING:
                self.records[record.id] = replace(record.without_binding(), state=S.IDLE)


@pytest.mark.rule("shard 9.8/4")
@pytest.mark.parametrize("at_once", [False, True], ids=["in a List", "in the answer"])
async def test_a_provider_that_takes_back_each_accepted_configure_is_asked_ever_less(at_once: bool) -> None:
    """After three times the machine is set aside, also without another one, and no bootstrap data is asked for."""
    provider = TakesBack(at_once=at_once)
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    for _ in range(60):
        await world.cycle()
        provider.take_back()
        await world.shard._clock.sleep(CYCLE_SECONDS)
    tried = [name for method, name, _sequence in provider.calls if method == "configure"]
    assert tried == ["m0"] * 3

    provider.at_once = False
    await world.shard._clock.sleep(3600)
    await world.cycle()
    await world.cycle()
    provider.settle()
    await world.cycle()
    assert world.state("m0") is S.CONFIGURED


@dataclass
class AnswersBadly(ScriptedProvider):
    """Answers each Configure with noise, too late, or not at all, and does nothing; sound machines are configured."""

    how: str = "noise"
    sound: set[str] = field(default_factory=set)

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        if machine_id in self.sound:
            return await super().configure(machine_id, cluster, blob, metadata, token)
        self.calls.append(("configure", machine_id, token.sequence))
        if self.how == "too late":
            await asyncio.sleep(2 * ShardSettings().execute_timeout_seconds)
        raise (
            unreadable("TransitionAck")
            if self.how == "noise"
            else ProviderRefusal(RefusalKind.of_status("UNAVAILABLE"), "the connection broke")
        )


async def configures(world: World, provider: AnswersBadly, seconds: float) -> list[str]:
    """Cycle every ten seconds; return the machines whose Configure was called."""
    first = len(provider.calls)
    for _ in range(int(seconds / CYCLE_SECONDS)):
        await world.cycle()
        provider.settle()
        await world.shard._clock.sleep(CYCLE_SECONDS)
    return [name for _method, name, _sequence in provider.calls[first:]]


@pytest.mark.rule("shard 9.8/4")
@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("noise", "too late")), "connection"]
)
async def test_a_machine_whose_configures_get_no_usable_answer_is_asked_ever_less(how: str) -> None:
    """Three in a row set it aside for 12 min, then 24 min, 48 min and 1 h, and no bootstrap data is asked for."""
    provider = AnswersBadly(how=how)
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    assert await configures(world, provider, 600) == ["m0"] * 3
    assert len([each for each in operator.frames if isinstance(each, BootstrapRequest)]) == 3
    assert not world.shard.view.needs[0].satisfied

    # 12, 36, 84 and 144 minutes after the third one.
    assert len(await configures(world, provider, 3 * 3600)) == 4
    provider.sound.add("m0")
    await configures(world, provider, 3600)
    assert world.state("m0") is S.CONFIGURED


@pytest.mark.rule("shard 9.8/4")
@pytest.mark.parametrize("how", ["noise", "too late", "connection"])
async def test_another_machine_is_used_when_a_configure_gets_no_usable_answer(how: str) -> None:
    """It is configured in the first cycle that sees the outcome, although its price is higher."""
    provider = AnswersBadly(how=how, sound={"m1"})
    provider.add(machine("m0", S.IDLE), machine("m1", S.IDLE, price_usd_per_hour=2.0))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    assert await configures(world, provider, 600) == ["m0", "m1"]
    assert world.state("m1") is S.CONFIGURED


async def test_an_outage_of_the_provider_does_not_set_a_machine_aside() -> None:
    """A machine that was being configured in it is configured as soon as the provider answers again."""
    provider = AnswersBadly(how="connection")
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    provider.list_fails = True
    assert await configures(world, provider, 600) == []
    provider.list_fails = False
    provider.sound.add("m0")
    assert await configures(world, provider, 60) == ["m0"]
    assert world.state("m0") is S.CONFIGURED


@pytest.mark.rule("shard 9.8/4")
async def test_the_first_machine_that_works_again_ends_the_waits_of_the_others() -> None:
    """After a repair of the provider; a machine that is broken itself is tried once, and waits for longer then."""
    provider = AnswersBadly()
    provider.add(machine("broken", S.IDLE), machine("m0", S.IDLE, zone="z0"), machine("m1", S.IDLE, zone="z1"))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "12"))
    await configures(world, provider, 600)
    assert world.metric("machines_set_aside") == 3
    # Two are repaired while they wait; m0 is the first whose wait ends.
    provider.sound.update(("m0", "m1"))
    world.shard.stockouts._aside[MachineId("m0")].until_seconds -= 600
    tried = await configures(world, provider, 60)
    assert (tried[0], sorted(tried)) == ("m0", ["broken", "m0", "m1"])
    assert [world.state(name) for name in ("m0", "m1", "broken")] == [S.CONFIGURED, S.CONFIGURED, S.IDLE]
    assert world.metric("machines_set_aside") == 1
    assert await configures(world, provider, 1380) == []
    assert await configures(world, provider, 120) == ["broken"]


@pytest.mark.rule("shard 9.8/4")
@pytest.mark.parametrize(("machines", "set_aside"), [(101, 100), (100, 0)], ids=["with another", "without another"])
async def test_machines_that_wait_for_one_row_cost_one_look_at_the_fleet(
    monkeypatch: pytest.MonkeyPatch, machines: int, set_aside: int
) -> None:
    """A hundred refused Configures: the row is looked up once and the columns are read once."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:03d}", S.IDLE, zone=f"z{number % 50}") for number in range(machines)))
    world = World(provider)
    await world.step()
    wanted = need("c1", "400")
    for number in range(100):
        idle = at(world, f"m{number:03d}")
        configuring = replace(
            idle, state=S.CONFIGURING, cluster=wanted.cluster, assigned_need_fingerprint=wanted.fingerprint
        )
        world.shard.stockouts.observed(configuring, idle)
    rows: list[RowKey] = []
    looks: list[Options] = []

    def row_of(key: RowKey) -> Need:
        rows.append(key)
        return wanted

    def sold_out(view: ColumnSnapshot, options: Options) -> object:
        looks.append(options)
        return sold_out_rows(view, options)

    monkeypatch.setattr(fleet_queries, "sold_out_rows", sold_out)
    view = world.shard.inventory.snapshot()
    unavailable = world.shard.stockouts.unavailable(view, is_pending=lambda _machine: False, rows_of=row_of)

    assert len(unavailable.set_aside) == set_aside
    assert (rows, len(looks)) == ([wanted.key], 1)


async def test_a_configure_of_a_machine_that_left_the_shard_is_forgotten() -> None:
    """A machine that is handed over while it is Configuring is not seen to end that."""
    provider = AnswersBadly(sound={"m0"})
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    assert world.shard.stockouts._configured == {"m0"}
    world.shard.ingest.drop(MachineId("m0"))
    del provider.records[MachineId("m0")]
    await world.cycle()
    assert world.shard.stockouts._configured == set()


@dataclass
class AnswersWithGarbage(SellsOut):
    """Lists sound prices; what it has created of some types has none."""

    def settle(self, *machine_ids: str) -> None:
        """Creations do not fail."""
        ScriptedProvider.settle(self, *machine_ids)

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        self.creates.append(self.records[machine_id].instance_type)
        ack = await ScriptedProvider.create(self, machine_id, token)
        if self.creates[-1] in self.sold_out:
            self.records[machine_id] = broken = replace(self.records[machine_id], price_usd_per_hour=math.nan)
            return replace(ack, record=ListedMachine(broken, {}))
        return ack


@pytest.mark.rule("shard 9.8/1")
@pytest.mark.parametrize("synchronous", [True, False])
async def test_a_pool_whose_created_machines_are_unusable_is_left_alone(synchronous: bool) -> None:
    """The provider runs and bills each of them, and the shard can use none: one at first, then one for each probe."""
    provider = AnswersWithGarbage(synchronous=synchronous, sold_out={"cheap"})
    slots(provider, "cheap", 50, 1.0)
    slots(provider, "dear", 20, 2.0)
    world = World(provider)
    world.connect("c1").report(row(3))
    await run(world, provider, 600)
    assert (provider.creates.count("cheap"), provider.creates.count("dear")) == (1, 3)

    provider.records = {each: one for each, one in provider.records.items() if one.instance_type == "cheap"}
    await run(world, provider, 3600)
    assert provider.creates.count("cheap") <= 1 + 4
