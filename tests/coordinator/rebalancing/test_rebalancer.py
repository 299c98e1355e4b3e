"""A leader's passes from end to end, on values and a clock that tests move: what it tells, remembers and forgets."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from bigfleet.coordinator.commands import SetQuota, UpsertProvider
from bigfleet.coordinator.delivery import State
from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.leader_term import CoordinatorSettings, Term
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.rebalancer import InFlight, in_flight, ownership_overlap
from bigfleet.coordinator.stores.protocol import LeaderInfo as Name
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.coordinator.tables import QuotaKey
from bigfleet.coordinator.transfers import Skip, Tier
from bigfleet.model.ids import Fingerprint, MachineId, ShardId
from bigfleet.model.instructions import Ack, CrossShardDrain, InstructionOutcome, ReassignSpeculative, TransferOwnership
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Base, Domain, Owned, Reservation
from bigfleet.model.shard_report import CapacityCount, Holding, ShardReport, ShardSummary, Shortfall
from bigfleet.model.states import CapacityType, MachineState

PROVIDER = "provider:9100"
EAST0, EAST1 = ShardId("east-0"), ShardId("east-1")
CYCLE_SECONDS = 30.0
COOLDOWN_SECONDS = 240.0
SIZE = {"cpu": 16_000}
ZONES = {EAST0: "b", EAST1: "a"}
#: What two machines of SIZE close.
DEFICIT = {"cpu": 31_000}


class HandClock:
    """A clock that stands until a test moves it."""

    def __init__(self) -> None:
        self.now_seconds = 1_000.0

    def monotonic_seconds(self) -> float:
        return self.now_seconds

    def unix_nanos(self) -> int:
        return int(self.now_seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.now_seconds += seconds


class Fleet:
    """Two shards behind one provider and their leader; what a shard holds is kept here between its reports."""

    def __init__(self, term: Term, clock: HandClock, store: SqliteStateStore, registry: CollectorRegistry) -> None:
        self.term = term
        self.clock = clock
        self.store = store
        self.registry = registry
        self.owned = {
            shard: Owned(base=Base.DOMAINS, domains=frozenset({Domain("zone", zone)})) for shard, zone in ZONES.items()
        }
        self.kept: dict[ShardId, tuple[Reservation, ...]] = {EAST0: (), EAST1: ()}
        self.cycles = {EAST0: 0, EAST1: 0}

    @classmethod
    async def make(cls, path: Any, **settings: Any) -> "Fleet":
        clock, registry = HandClock(), CollectorRegistry()
        store = SqliteStateStore(path / "c.db", leader=Name("r0", ""))
        leader = Leader(store, await store.campaign(), clock=clock, report_cycle_seconds=CYCLE_SECONDS)
        metrics = CoordinatorMetrics(registry)
        term = Term(leader, settings=CoordinatorSettings(**settings), clock=clock, metrics=metrics)
        return cls(term, clock, store, registry)

    async def tell(self, shard: ShardId, *acks: Ack, **fields: Any) -> ReportAnswer:
        """Report for a shard: `idle`, `speculative` and `bound` machines, and a `shortfall`."""
        self.cycles[shard] += 1
        rows = {name: fields.get(name, 0) for name in ("idle", "speculative", "bound")}
        summary = ShardSummary(
            provider_address=PROVIDER,
            type_counts={"m6i": sum(rows.values())},
            idle=self._row(shard, rows["idle"]),
            speculative=self._row(shard, rows["speculative"]),
        )
        shortfall = fields.get("shortfall")
        return await self.term.report(
            ShardReport(
                shard_id=shard,
                epoch=1,
                cycle=self.cycles[shard],
                echoed_term=self.term.term if self.cycles[shard] > 1 else 0,
                summary=summary,
                shortfalls=() if shortfall is None else (shortfall,),
                acks=acks,
                holding=Holding(owned=self.owned[shard], reservations=self.kept[shard]),
            )
        )

    def _row(self, shard: ShardId, count: int) -> tuple[CapacityCount, ...]:
        row = CapacityCount("m6i", ZONES[shard], CapacityType.ON_DEMAND, count, SIZE)
        return (row,) if count else ()

    async def passes(self, *, after_seconds: float = 0.0, **fields: Mapping[str, Any]) -> None:
        """Let time pass, both shards report, and a pass run."""
        self.clock.now_seconds += after_seconds
        for name, shard in (("east0", EAST0), ("east1", EAST1)):
            await self.tell(shard, **fields.get(name, {}))
        self.term.rebalance()

    def flights(self) -> InFlight:
        return in_flight(self.term.ephemeral, self.term.heard, self.clock.now_seconds)

    def flying(self) -> Mapping[str, int]:
        """Return what is on its way to the only shortfall."""
        return next(iter(self.flights().moving.values()), {})

    def skipped(self) -> Skip | None:
        plan = self.term.rebalancing.last
        assert plan is not None
        return next(iter(plan.skipped().values()), None)


def short(*, age: int = 6, deficit: Mapping[str, int] = DEFICIT, priority: int = 700_000) -> Shortfall:
    return Shortfall(
        fingerprint=Fingerprint("f"),
        requirements=(),
        deficit=deficit,
        min_unit={"cpu": 4_000},
        priority=priority,
        age_cycles=age,
        interruption_bucket=11,
        is_topology_constrained=False,
    )


STARVING = {"shortfall": short()}
RICH = {"idle": 12}


@pytest.mark.rule("coordinator 5/4")
async def test_no_pass_runs_in_the_first_cooldown_of_a_term(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    await fleet.passes(east0=STARVING, east1=RICH)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS - 1, east0=STARVING, east1=RICH)
    assert fleet.term.rebalancing.last is None

    await fleet.passes(after_seconds=1, east0=STARVING, east1=RICH)

    (entry,) = fleet.term.instructions()
    assert isinstance(entry.instruction.payload, TransferOwnership)
    assert (entry.to, entry.move and entry.move.count) == (EAST1, 2)


@pytest.mark.rule("coordinator 1/5")
async def test_a_dry_run_proposes_and_tells_nobody(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path, is_dry_run=True)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1=RICH)

    assert [(move.donor, move.count) for move in fleet.term.proposed] == [(EAST1, 2)]
    assert fleet.term.instructions() == ()
    assert (await fleet.tell(EAST1, **RICH)).instructions == ()


@pytest.mark.rule("coordinator 7.1/3")
async def test_what_is_in_flight_is_not_asked_for_again_until_the_recipient_has_reported_it(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1=RICH)
    (release,) = (await fleet.tell(EAST1, **RICH)).instructions
    assert fleet.flying() == {"cpu": 32_000}

    await fleet.passes(after_seconds=CYCLE_SECONDS, east0=STARVING, east1=RICH)
    assert fleet.skipped() is Skip.IN_FLIGHT

    # One of the two is found, and given up.
    machine = Machine(id=MachineId("m1"), state=MachineState.IDLE)
    fleet.owned[EAST1] = fleet.owned[EAST1].released(machine, release.version, to=EAST0)
    await fleet.tell(
        EAST1, Ack(release.instruction_id, InstructionOutcome.ACCEPTED, machine_ids=(machine.id,)), idle=11
    )
    assert fleet.flying() == {"cpu": 16_000}
    (adopt,) = (await fleet.tell(EAST0, **STARVING)).instructions
    assert adopt.instruction_id == f"{release.instruction_id}/adopt"
    fleet.owned[EAST0] = fleet.owned[EAST0].adopted(machine.id, release.version, by_gift_of=EAST1)
    await fleet.tell(EAST0, Ack(adopt.instruction_id, InstructionOutcome.ACCEPTED), **STARVING)
    assert fleet.flying() == {"cpu": 16_000}
    fleet.clock.now_seconds += 1
    await fleet.tell(EAST0, shortfall=short(deficit={"cpu": 15_000}))
    assert fleet.flying() == {}

    # What is still short waits for the flow's cooldown, which began with the emission.
    left = {"shortfall": short(deficit={"cpu": 15_000})}
    await fleet.passes(east0=left, east1=RICH)
    assert fleet.skipped() is Skip.COOLDOWN
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=left, east1=RICH)
    assert fleet.skipped() is None


@pytest.mark.rule("coordinator 6/6")
async def test_an_instruction_that_nobody_answers_expires_and_is_in_flight_no_more(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1=RICH)
    fleet.clock.now_seconds += 10 * CYCLE_SECONDS
    (entry,) = fleet.term.instructions()

    assert entry.state is State.EXPIRED
    await fleet.passes(east0=STARVING, east1=RICH)
    assert [entry.state for entry in fleet.term.instructions()] == [State.EXPIRED, State.PENDING]


@pytest.mark.rule("coordinator 7.3/1")
async def test_slots_move_with_their_quota_which_is_booked_before_the_recipient_is_told(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    key = QuotaKey("aws", "eu-west-1")
    await fleet.passes(east0=STARVING, east1={"speculative": 40})
    await fleet.term.commit(UpsertProvider("aws", PROVIDER, "eu-west-1"))
    await fleet.term.commit(SetQuota(key, {EAST0: 100, EAST1: 300}))
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1={"speculative": 40})
    (release,) = (await fleet.tell(EAST1, speculative=40)).instructions
    assert isinstance(release.payload, ReassignSpeculative)

    slots = [Machine(id=MachineId(name), state=MachineState.SPECULATIVE) for name in ("s1", "s2")]
    for slot in slots:
        fleet.owned[EAST1] = fleet.owned[EAST1].released(slot, release.version, to=EAST0)
    ack = Ack(release.instruction_id, InstructionOutcome.ACCEPTED, machine_ids=tuple(slot.id for slot in slots))
    fleet.store._connection.execute("PRAGMA query_only = 1")
    await fleet.tell(EAST1, ack, speculative=38)
    assert (await fleet.tell(EAST0, **STARVING)).instructions == ()
    fleet.store._connection.execute("PRAGMA query_only = 0")
    await fleet.tell(EAST1, speculative=38)

    assert fleet.term.tables.quotas[key].slots_of == {EAST0: 102, EAST1: 298}
    (adopt,) = (await fleet.tell(EAST0, **STARVING)).instructions
    assert adopt.payload == ReassignSpeculative(
        from_shard=EAST1, to_shard=EAST0, machine_ids=(slots[0].id, slots[1].id)
    )
    # Seen again, the same hand-over is not booked twice.
    await fleet.tell(EAST1, speculative=38)
    assert fleet.term.tables.quotas[key].slots_of == {EAST0: 102, EAST1: 298}


@pytest.mark.rule("coordinator 7.3/1")
async def test_slots_that_are_taken_back_bring_their_quota_back_once(tmp_path: Any) -> None:
    """Their recipient has refused them for good; the quota is booked before the donor is instructed."""
    fleet = await Fleet.make(tmp_path)
    key = QuotaKey("aws", "eu-west-1")
    await fleet.passes(east0=STARVING, east1={"speculative": 40})
    await fleet.term.commit(UpsertProvider("aws", PROVIDER, "eu-west-1"))
    await fleet.term.commit(SetQuota(key, {EAST0: 100, EAST1: 300}))
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1={"speculative": 40})
    (release,) = (await fleet.tell(EAST1, speculative=40)).instructions
    slots = [Machine(id=MachineId(name), state=MachineState.SPECULATIVE) for name in ("s1", "s2")]
    for slot in slots:
        fleet.owned[EAST1] = fleet.owned[EAST1].released(slot, release.version, to=EAST0)
    ids = tuple(slot.id for slot in slots)
    await fleet.tell(EAST1, Ack(release.instruction_id, InstructionOutcome.ACCEPTED, machine_ids=ids), speculative=38)
    (adopt,) = (await fleet.tell(EAST0, **STARVING)).instructions
    assert fleet.term.tables.quotas[key].slots_of == {EAST0: 102, EAST1: 298}

    await fleet.tell(EAST0, Ack(adopt.instruction_id, InstructionOutcome.REJECTED_INVALID, "no room"), **STARVING)
    fleet.store._connection.execute("PRAGMA query_only = 1")
    assert (await fleet.tell(EAST1, speculative=38)).instructions == ()
    fleet.store._connection.execute("PRAGMA query_only = 0")
    for _ in range(2):
        (back,) = (await fleet.tell(EAST1, speculative=38)).instructions
        assert back.payload == TransferOwnership(from_shard=EAST1, to_shard=EAST1, machine_ids=ids)
        assert fleet.term.tables.quotas[key].slots_of == {EAST0: 100, EAST1: 300}


@pytest.mark.rule("coordinator 7.4/3")
async def test_drained_machines_are_handed_over_when_they_are_ready_and_only_then(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    desperate = {"shortfall": short(age=13)}
    poor = {"bound": 30}
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=desperate, east1=poor)
    (drain,) = (await fleet.tell(EAST1, **poor)).instructions
    assert isinstance(drain.payload, CrossShardDrain)

    def kept(name: str, *, is_ready: bool) -> Reservation:
        return Reservation(
            machine_id=MachineId(name),
            to_shard=EAST0,
            instruction_id=drain.instruction_id,
            is_ready=is_ready,
            instance_type="m6i",
            zone="a",
        )

    fleet.kept[EAST1] = (kept("d1", is_ready=False), kept("d2", is_ready=True))
    await fleet.tell(EAST1, Ack(drain.instruction_id, InstructionOutcome.ACCEPTED), **poor)
    assert fleet.flights().draining_donors == {EAST1}
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=desperate, east1=poor)

    (transfer,) = (entry for entry in fleet.term.instructions() if not entry.state.is_final)
    assert transfer.move is not None
    assert (transfer.move.tier, transfer.move.machine_ids) == (Tier.READY, ("d2",))
    # On its way already, it is not handed over again; what is drained is nobody else's drain.
    await fleet.passes(after_seconds=CYCLE_SECONDS, east0=desperate, east1=poor)
    assert [entry.move and entry.move.tier for entry in fleet.term.instructions()] == [Tier.PREEMPT, Tier.READY]


@pytest.mark.rule("coordinator 7.4/4", "coordinator 12/17")
async def test_a_donor_that_found_no_victim_is_not_asked_again_for_a_cooldown(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    desperate, poor = {"shortfall": short(age=13)}, {"bound": 30}
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=desperate, east1=poor)
    (drain,) = (await fleet.tell(EAST1, **poor)).instructions
    fleet.clock.now_seconds += CYCLE_SECONDS
    await fleet.tell(
        EAST1, Ack(drain.instruction_id, InstructionOutcome.REJECTED_INVALID, "nothing is cheaper"), **poor
    )

    await fleet.passes(after_seconds=COOLDOWN_SECONDS - 1, east0=desperate, east1=poor)
    assert len(fleet.term.instructions()) == 1
    await fleet.passes(after_seconds=1, east0=desperate, east1=poor)
    assert len(fleet.term.instructions()) == 2


@pytest.mark.rule("coordinator 7.1/1", "coordinator 9.1/5")
async def test_shards_that_may_own_the_same_machines_are_kept_out(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    fleet.owned[EAST0] = replace(fleet.owned[EAST0], base=Base.ALL)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0=STARVING, east1=RICH)

    assert fleet.skipped() is Skip.BASE
    assert ownership_overlap(fleet.term.ephemeral, fleet.term.tables) == {EAST0, EAST1}
    assert fleet.term.figures().ownership_overlap == 2


@pytest.mark.rule("coordinator 9.1/5")
async def test_an_overlap_is_logged_once_when_a_second_pass_in_a_row_finds_it(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    fleet.owned[EAST0] = replace(fleet.owned[EAST0], base=Base.ALL)

    async def logged_in_a_pass() -> list[Any]:
        with structlog.testing.capture_logs() as logs:
            await fleet.passes(after_seconds=COOLDOWN_SECONDS)
        return [entry for entry in logs if entry["event"] == "coordinator.overlap_found"]

    assert await logged_in_a_pass() == []
    (warning,) = await logged_in_a_pass()
    assert (warning["log_level"], warning["shards"]) == ("warning", [EAST0, EAST1])
    assert "--ownership assigned" in warning["advice"]
    assert await logged_in_a_pass() == []

    fleet.owned[EAST0] = replace(fleet.owned[EAST0], base=Base.DOMAINS)
    assert await logged_in_a_pass() == []


@pytest.mark.rule("coordinator 5/1", "coordinator 12/11")
async def test_silent_shards_give_and_get_nothing_and_stay_listed(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0={}, east1=RICH)
    fleet.clock.now_seconds += 3 * CYCLE_SECONDS + 1
    await fleet.tell(EAST0, **STARVING)
    fleet.term.rebalance()

    assert fleet.term.instructions() == ()
    assert set(fleet.term.heard) == {EAST0, EAST1}
    assert not fleet.term.is_alive(EAST1)


@pytest.mark.rule("coordinator 7/2")
async def test_every_pass_counts_what_it_gave_and_why_it_gave_nothing(tmp_path: Any) -> None:
    fleet = await Fleet.make(tmp_path)
    await fleet.passes(after_seconds=COOLDOWN_SECONDS, east0={"shortfall": short(age=5)}, east1=RICH)
    await fleet.passes(east0=STARVING, east1=RICH)

    def value(name: str, **labels: str) -> float | None:
        return fleet.registry.get_sample_value(f"bigfleet_coordinator_{name}", labels)

    assert value("rebalance_skipped_total", reason="age") == 1
    assert value("rebalance_moves_total", tier="1") == 1
    assert value("rebalance_machines_total", tier="1") == 2
    assert value("rebalance_moves_total", tier="3") == 0
    assert value("rebalance_pass_seconds_count") == 2
