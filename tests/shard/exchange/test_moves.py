"""Tests that a machine of one cluster is moved to another where that is cheaper, and that it stays there."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from bigfleet.exchange.course import ExchangeEnd, ExchangePhase
from bigfleet.exchange.values import BlockReason, ExchangeKind, ExchangeMode, ExchangeProposal, WaitReason
from bigfleet.model.compute import compute_inline
from bigfleet.model.frames import (
    CAPABILITY_DRAIN_FORECAST,
    CAPABILITY_DRAIN_RESULT,
    DrainForecast,
    DrainForecastRequest,
    DrainOutcome,
    ForecastOutcome,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.cluster_policy import ClusterPolicies, ClusterPolicy
from bigfleet.shard.exchange.exchange_records import ExchangeRecord, MemoryExchanges
from bigfleet.shard.exchange.execution import PROMISED_SECONDS
from bigfleet.shard.exchange.moves import PAIRS_MAX
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.cycle.test_pods import pods
from tests.shard.exchange.test_proposals import MINUTE, Workers
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
OWN, DEAR, CHEAP = "own", "dear", "cheap"
#: What the taker saves by the hour less what the giver rents.
SAVED: Final = 2.7

pytestmark = pytest.mark.virtual_time


def own(cluster: str, number: int = 0) -> Machine:
    """Return a Reserved machine of 4 cpu that serves a cluster."""
    return serving(cluster, f"{cluster}-own{number}", OWN, CapacityType.RESERVED, 0.5)


def dear(cluster: str, number: int = 0) -> Machine:
    """Return a machine of 4 cpu at $3.00 that serves a cluster."""
    return serving(cluster, f"{cluster}-dear{number}", DEAR, CapacityType.ON_DEMAND, 3.0)


def serving(cluster: str, name: str, kind: str, capacity_type: CapacityType, price: float) -> Machine:
    """Return a machine that serves a cluster."""
    return machine(
        name,
        S.CONFIGURED,
        cluster=ClusterId(cluster),
        instance_type=kind,
        capacity_type=capacity_type,
        price_usd_per_hour=price,
    )


def cheap(number: int) -> Machine:
    """Return a spot machine of 4 cpu at $0.30 on offer."""
    return machine(
        f"cheap{number}",
        S.SPECULATIVE,
        instance_type=CHEAP,
        capacity_type=CapacityType.SPOT,
        price_usd_per_hour=0.3,
    )


def on_types(*names: str) -> Profile:
    """Return the profile of pods that run on these instance types only."""
    where = Requirement("node.kubernetes.io/instance-type", Operator.IN, names)
    return Profile(requirements=(where,), priority=100)


class TwoClusters:
    """A shard with a giver, whose pods run on any machine, and a taker, whose pods do not run on what is on offer."""

    def __init__(
        self,
        *more: Machine,
        mode: ExchangeMode = ExchangeMode.ON,
        workers: Workers | None = None,
        synchronous: bool = True,
        forecasts: bool = False,
        **world: Any,
    ) -> None:
        self.provider = ScriptedProvider(synchronous=synchronous)
        self.provider.add(own("giver"), dear("taker"), *(cheap(number) for number in range(3)), *more)
        self.log = MemoryAuditLog()
        self.mode, self.workers = mode, workers
        self.capabilities = (CAPABILITY_DRAIN_RESULT, *((CAPABILITY_DRAIN_FORECAST,) if forecasts else ()))
        self.facts = {"reclaim_after_seconds": 600.0, "exchange_store": MemoryExchanges(), **world}
        self.pods = {"giver": 1, "taker": 1}
        self.start()

    def start(self, epoch: int = 1) -> None:
        """Start the shard, in place of one that runs."""
        self.world = World(self.provider, epoch=epoch, audit_log=self.log, **self.facts)
        self.exchanges = ExchangeProposals(
            shard=self.world.shard, mode=self.mode, clock=LoopClock(), compute=compute_inline, workers=self.workers
        )
        self.operators = {name: self.world.connect(name, *self.capabilities) for name in self.pods}
        for name in self.pods:
            self.report(name)

    def report(self, cluster: str, count: int = 0) -> None:
        """Send a roll-up: pods that each fill a machine."""
        self.pods[cluster] = count or self.pods[cluster]
        row = pods(cluster, ("3500m", self.pods[cluster]))
        row = replace(row, profile=on_types(OWN, DEAR)) if cluster == "taker" else row
        self.operators[cluster].report(row)

    async def minutes(self, count: int, *, looks: bool = True) -> None:
        """Let time pass, with a cycle and a look in each minute; every pod has a place all the time."""
        for _ in range(count):
            await asyncio.sleep(MINUTE)
            report = await self.world.cycle()
            assert report.decision is not None
            if looks:
                await self.exchanges.look()
            for cluster, wanted in self.pods.items():
                assert len(self.holds(cluster)) >= wanted, f"{cluster} holds {self.holds(cluster)}"

    async def until_record(self, number: int, phase: ExchangePhase | None = None) -> ExchangeRecord:
        """Let time pass until so many exchanges were begun, and the last one is in a phase; return its record."""
        for _ in range(90):
            records = self.records()
            if len(records) >= number and (phase is None or phase is self.phase(records[number - 1])):
                return records[number - 1]
            await self.minutes(1)
        raise AssertionError(f"no exchange {number} in phase {phase}: {self.records()}")

    def phase(self, record: ExchangeRecord) -> ExchangePhase:
        """Return the phase of an exchange."""
        course = self.world.shard.exchanges.course_of(record.cluster)
        return ExchangePhase.ENDED if record.end or course is None else course.phase

    def records(self) -> list[ExchangeRecord]:
        """Return what is recorded of exchanges."""
        return self.world.shard.exchanges.records

    def holds(self, cluster: str) -> list[str]:
        """Return the machines that serve a cluster."""
        found = [each for each in self.provider.records.values() if each.cluster == cluster]
        return sorted(each.id for each in found if each.state is S.CONFIGURED)

    def proposals(self, cluster: str) -> list[ExchangeProposal]:
        """Return what is proposed for a cluster."""
        return [each for found in self.exchanges.found(cluster) for each in found.exchanges.proposals]

    def rent(self) -> float:
        """Return what the clusters rent, dollars an hour."""
        bound = [each for each in self.provider.records.values() if each.cluster]
        return sum(each.price_usd_per_hour for each in bound if each.instance_type != OWN)


# ---- shown -----------------------------------------------------------------------------------------------------------


async def test_a_move_is_shown_audited_and_counted() -> None:
    """Under the giver, once; nothing is carried out in the mode that proposes."""
    fleet = TwoClusters(mode=ExchangeMode.PROPOSE)
    await fleet.minutes(30)

    (move,) = fleet.proposals("giver")
    assert fleet.proposals("taker") == []
    assert (move.kind, move.taker, move.waits_for) == (ExchangeKind.BETWEEN_CLUSTERS, "taker", None)
    assert move.gate.saving_usd_per_hour == pytest.approx(SAVED)
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="promised") == pytest.approx(SAVED)
    records = [json.loads(line) for line in fleet.log.lines]
    (proposed,) = [record for record in records if record["kind"] == "ProposeExchange"]
    assert (proposed["cluster"], proposed["saving_usd_per_hour"]) == ("giver", pytest.approx(SAVED))
    assert "move to taker" in proposed["message"]
    assert fleet.records() == []
    assert (fleet.holds("giver"), fleet.holds("taker")) == (["giver-own0"], ["taker-dear0"])


async def test_a_pair_that_did_not_change_is_not_searched_again() -> None:
    """Nor one without a move."""
    workers = Workers()
    fleet = TwoClusters(mode=ExchangeMode.PROPOSE, workers=workers)
    await fleet.minutes(40)
    assert workers.pairs == [("giver", "taker")]
    for number in range(3):
        fleet.provider.records[f"cheap{number}"] = replace(cheap(number), price_usd_per_hour=4.0)
    await fleet.minutes(40)
    assert fleet.proposals("giver") == []
    assert workers.pairs == [("giver", "taker")] * 2


async def test_a_search_that_fails_is_tried_again() -> None:
    """The other proposals are not lost."""
    workers = Workers()
    fleet = TwoClusters(mode=ExchangeMode.PROPOSE, workers=workers)
    await fleet.minutes(14)
    workers.fault = RuntimeError("the worker died")
    await fleet.minutes(3)
    assert workers.pairs[-1:] in ([], [("giver", "taker")])
    workers.fault = None
    await fleet.minutes(3)
    assert len(fleet.proposals("giver")) == 1


async def test_the_pairs_of_a_look_are_bounded() -> None:
    """Further ones have their turn in the next looks."""
    workers = Workers()
    fleet = TwoClusters(mode=ExchangeMode.PROPOSE, workers=workers)
    names = [f"more{number:02}" for number in range(PAIRS_MAX)]
    fleet.provider.add(*(dear(name) for name in names))
    fleet.operators |= {name: fleet.world.connect(name) for name in names}
    for name in names:
        fleet.operators[name].report(pods(name, ("3500m", 1), profile=on_types(OWN, DEAR)))
    counts = []
    for _ in range(30):
        before = len(workers.pairs)
        await fleet.minutes(1)
        counts.append(len(workers.pairs) - before)
    assert max(counts) <= PAIRS_MAX
    assert {giver for giver, _ in workers.pairs} == {"giver"}
    assert len({taker for _, taker in workers.pairs}) >= PAIRS_MAX


# ---- carried out -----------------------------------------------------------------------------------------------------


async def test_a_machine_moves_and_nothing_moves_back() -> None:
    """The giver rents a cheap machine first, its own one leaves, the taker gets it and lets the dear one go."""
    fleet = TwoClusters()
    await fleet.until_record(1, ExchangePhase.ACQUIRING)
    assert fleet.rent() == pytest.approx(3.0)
    first = await fleet.until_record(1, ExchangePhase.ENDED)
    assert (first.cluster, first.taker, first.end, first.left) == ("giver", "taker", "done", 1)
    assert fleet.holds("taker") == ["taker-dear0"]
    second = await fleet.until_record(2, ExchangePhase.ENDED)

    assert (second.cluster, second.end, second.giver_exchange_id) == ("taker", "done", first.id)
    assert fleet.holds("taker") == ["giver-own0"]
    (came,) = fleet.holds("giver")
    assert came.startswith(CHEAP)
    assert fleet.rent() == pytest.approx(0.3)
    # Twice a delay of ten minutes, and some looks.
    assert (second.ended_unix_nanos - first.begun_unix_nanos) / 1e9 <= 2100
    # Each part promises what its own cluster saves; together it is what was proposed.
    assert [each.promised_usd_per_hour for each in (first, second)] == pytest.approx([-0.3, 3.0])
    assert [each.realised_usd_per_hour for each in (first, second)] == pytest.approx([-0.3, 3.0])
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="ended") == pytest.approx(SAVED)
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="realised") == pytest.approx(SAVED)

    calls = len(fleet.provider.calls)
    await asyncio.sleep(7 * 3600)
    await fleet.minutes(60)
    # What the taker rented is given back; after that nothing happens.
    assert [method for method, _, _ in fleet.provider.calls[calls:]] == ["delete"]
    assert len(fleet.records()) == 2
    assert fleet.proposals("giver") == fleet.proposals("taker") == []


async def test_a_fleet_of_several_machines_becomes_cheap_one_after_the_other() -> None:
    """Three machines of the giver, three dear ones of the taker: then it stays as it is."""
    fleet = TwoClusters(own("giver", 1), own("giver", 2), dear("taker", 1), dear("taker", 2))
    fleet.report("giver", 3)
    fleet.report("taker", 3)
    await fleet.minutes(300)

    assert fleet.holds("taker") == ["giver-own0", "giver-own1", "giver-own2"]
    assert fleet.rent() == pytest.approx(0.9)
    assert [each.end for each in fleet.records()] == ["done"] * 6
    assert sum(each.realised_usd_per_hour for each in fleet.records()) == pytest.approx(3 * SAVED)
    await asyncio.sleep(7 * 3600)
    await fleet.minutes(60)
    assert len([each for each in fleet.records() if each.begun_unix_nanos]) == 6


async def test_a_move_needs_both_clusters_switched_on() -> None:
    """A taker that only proposes keeps its machines, so the giver gives none."""
    for cluster in ("giver", "taker"):
        fleet = TwoClusters()
        policies = ClusterPolicies(by_cluster={cluster: ClusterPolicy(exchange=ExchangeMode.PROPOSE)})
        fleet.world.shard.policies = policies
        await fleet.minutes(30)
        assert [each.waits_for for each in fleet.proposals("giver")] == [None]
        assert fleet.records() == []


async def test_a_taker_that_is_switched_off_ends_the_part_of_the_giver() -> None:
    """Nothing has left yet."""
    fleet = TwoClusters()
    await fleet.until_record(1, ExchangePhase.DRAINING)
    policies = ClusterPolicies(by_cluster={"taker": ClusterPolicy(exchange=ExchangeMode.PROPOSE)})
    fleet.world.shard.policies = policies
    await fleet.minutes(1)
    (record,) = fleet.records()
    assert (record.end, record.left) == ("switched-off", 0)
    await fleet.minutes(60)
    assert fleet.holds("giver") == ["giver-own0"]


async def test_a_price_that_moves_back_ends_the_part_of_the_giver() -> None:
    """What it rents would cost more than half of what the taker saves."""
    fleet = TwoClusters()
    await fleet.until_record(1, ExchangePhase.DRAINING)
    for name, known in list(fleet.provider.records.items()):
        if known.instance_type == CHEAP:
            fleet.provider.records[name] = replace(known, price_usd_per_hour=2.0)
    await fleet.minutes(1)
    (record,) = fleet.records()
    assert record.end == ExchangeEnd.PRICE_MOVED.value


# ---- the taker changes its mind --------------------------------------------------------------------------------------


async def test_a_machine_that_the_taker_no_longer_wants_is_free_for_all_after_a_while() -> None:
    """The taker refuses its drain, so its exchange does not begin; the machine stays Idle, and nothing goes round."""
    fleet = TwoClusters(forecasts=True)

    def fits(request: DrainForecastRequest) -> DrainForecast:
        return DrainForecast(request_id=request.request_id, outcome=ForecastOutcome.FITS)

    def refuses(request: DrainForecastRequest) -> DrainForecast:
        first = request.machine_ids[0]
        outcome = ForecastOutcome.WOULD_NOT_FIT
        return DrainForecast(request_id=request.request_id, outcome=outcome, machine_id=first, message="a pod")

    for operator in fleet.operators.values():
        operator.forecast = fits
    await fleet.until_record(1, ExchangePhase.DRAINING)
    fleet.operators["taker"].forecast = refuses
    await fleet.until_record(1, ExchangePhase.ENDED)
    assert len(fleet.world.shard.exchanges.promises()) == 1
    await fleet.minutes(int(PROMISED_SECONDS / 60) + 2)

    assert fleet.world.shard.exchanges.promises() == []
    assert fleet.holds("taker") == ["taker-dear0"]
    assert fleet.provider.records["giver-own0"].state is S.IDLE
    await fleet.minutes(120)
    assert len(fleet.records()) == 1


async def test_only_the_taker_exchanges_for_what_was_given_for_it() -> None:
    """Another cluster waits for stock; the taker is away for a moment."""
    fleet = TwoClusters(dear("other"), dear("other", 1), forecasts=False)
    fleet.pods["other"] = 2
    fleet.operators["other"] = fleet.world.connect("other")
    fleet.operators["other"].report(pods("other", ("3500m", 2), profile=on_types(OWN, DEAR)))
    first = await fleet.until_record(1, ExchangePhase.DRAINING)
    taker = first.taker
    assert taker in ("taker", "other")
    other = "other" if taker == "taker" else "taker"
    fleet.world.shard.sessions.close(fleet.operators[taker].session, CloseReason.GONE)
    await fleet.until_record(1, ExchangePhase.ENDED)
    await fleet.minutes(3)
    assert [each.waits_for for each in fleet.proposals(other)] == [WaitReason.NO_STOCK]
    assert len(fleet.records()) == 1

    await fleet.minutes(int(PROMISED_SECONDS / 60) + 2)
    assert [(each.cluster, each.giver_exchange_id) for each in fleet.records()[1:]] == [(other, "")]


async def test_pods_may_use_what_was_given_at_any_time() -> None:
    """A promise is no reason for a pod to wait: the giver needs its machine again."""
    fleet = TwoClusters()
    for number in range(3):
        del fleet.provider.records[f"cheap{number}"]
    fleet.provider.add(cheap(0))
    await fleet.until_record(1, ExchangePhase.ENDED)
    fleet.world.shard.sessions.close(fleet.operators["taker"].session, CloseReason.GONE)
    fleet.operators["giver"].report(pods("giver", ("3500m", 2)))
    await fleet.minutes(2)
    assert fleet.holds("giver") == ["cheap0", "giver-own0"]


async def test_a_move_is_not_begun_when_either_operator_says_that_pods_would_not_fit() -> None:
    """The taker is asked before the giver lets anything go."""
    for cluster in ("giver", "taker"):
        fleet = TwoClusters(forecasts=True)

        def answer(request: DrainForecastRequest, *, outcome: ForecastOutcome) -> DrainForecast:
            first = request.machine_ids[0]
            return DrainForecast(request_id=request.request_id, outcome=outcome, machine_id=first, message="a pod")

        for name, operator in fleet.operators.items():
            outcome = ForecastOutcome.WOULD_NOT_FIT if name == cluster else ForecastOutcome.FITS
            operator.forecast = partial(answer, outcome=outcome)
        await fleet.minutes(30)
        assert fleet.records() == []
        asked = [f for f in fleet.operators[cluster].frames if isinstance(f, DrainForecastRequest)]
        assert asked


async def test_a_move_begins_when_both_operators_have_answered() -> None:
    """It waits while one of them has not."""
    fleet = TwoClusters(forecasts=True)
    fleet.operators["giver"].forecast = lambda request: DrainForecast(
        request_id=request.request_id, outcome=ForecastOutcome.FITS
    )
    await fleet.minutes(30)
    assert fleet.records() == []
    assert [each.waits_for for each in fleet.proposals("giver")] == [WaitReason.FORECAST]
    fleet.operators["taker"].forecast = fleet.operators["giver"].forecast
    await fleet.minutes(2)
    assert [each.cluster for each in fleet.records()] == ["giver"]


# ---- restarts --------------------------------------------------------------------------------------------------------


async def test_a_restart_between_the_parts_forgets_no_promise() -> None:
    """The taker's part begins when its prices count again; both records are linked."""
    fleet = TwoClusters()
    first = await fleet.until_record(1, ExchangePhase.DRAINING)
    while fleet.phase(fleet.records()[0]) is not ExchangePhase.ENDED:
        await fleet.minutes(1, looks=False)
    fleet.start(epoch=2)
    await fleet.minutes(1, looks=False)
    assert [each.exchange_id for each in fleet.world.shard.exchanges.promises()] == [first.id]
    second = await fleet.until_record(2, ExchangePhase.ENDED)
    assert (second.cluster, second.giver_exchange_id, second.end) == ("taker", first.id, "done")
    assert fleet.rent() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (1, ExchangePhase.DRAINING),
        pytest.param(2, ExchangePhase.ACQUIRING, marks=pytest.mark.slow),
        pytest.param(1, ExchangePhase.ACQUIRING, marks=pytest.mark.slow),
        pytest.param(2, ExchangePhase.DRAINING, marks=pytest.mark.slow),
    ],
)
async def test_a_restart_within_a_part_ends_it_and_leaves_a_sound_fleet(phase: ExchangePhase, number: int) -> None:
    """Nothing dangles: every machine is bound, Idle or on offer, and the fleet is at rest within hours."""
    fleet = TwoClusters()
    await fleet.until_record(number, phase)
    fleet.start(epoch=2)
    assert fleet.records()[number - 1].end == "restarted"
    await fleet.minutes(60)
    calls = len(fleet.provider.calls)
    await fleet.minutes(60)
    assert [method for method, _, _ in fleet.provider.calls[calls:]] in ([], ["delete"])
    states = {each.state for each in fleet.provider.records.values()}
    assert states <= {S.CONFIGURED, S.IDLE, S.SPECULATIVE}
    # The cluster that takes the Idle machine first keeps it while it cools.
    for _ in range(3):
        await asyncio.sleep(7 * 3600)
        await fleet.minutes(100)
    assert fleet.rent() == pytest.approx(0.3)


async def test_a_cluster_in_a_move_is_shown_as_under_way() -> None:
    """The giver is blocked, the taker is not yet."""
    fleet = TwoClusters()
    await fleet.until_record(1, ExchangePhase.DRAINING)
    await fleet.minutes(1)
    blocked = {found.exchanges.cluster: found.exchanges.blocked for found in fleet.exchanges.found()}
    assert blocked == {"giver": BlockReason.EXCHANGE_UNDER_WAY, "taker": None}
    fleet.operators["taker"].drain = (DrainOutcome.DRAINED, 5.0)
