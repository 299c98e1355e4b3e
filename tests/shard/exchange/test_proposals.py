"""Tests that a shard searches exchanges outside its cycles: decisions do not change, and results can be read."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.engine.decision import Action
from bigfleet.exchange.between_clusters import MoveQuestion, find_move
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import (
    BlockReason,
    ClusterExchanges,
    ExchangeMode,
    ExchangeProposal,
    ExchangeQuestion,
    ExclusionReason,
    WaitReason,
)
from bigfleet.model.compute import compute_inline
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.cluster_policy import ClusterPolicies, ClusterPolicy
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.cycle.test_pods import pods
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
MINUTE = 60.0

pytestmark = pytest.mark.virtual_time


def dear(number: int, cluster: str = "c1") -> Machine:
    """Return a machine at $3.00 that serves."""
    return machine(
        f"{cluster}-dear{number}",
        S.CONFIGURED,
        cluster=ClusterId(cluster),
        instance_type="dear",
        capacity_type=CapacityType.ON_DEMAND,
        price_usd_per_hour=3.0,
    )


def spot(number: int) -> Machine:
    """Return a machine of 8 cpu at $0.30 on offer."""
    return machine(
        f"spot{number}",
        S.SPECULATIVE,
        instance_type="cheap",
        capacity_type=CapacityType.SPOT,
        allocatable={"cpu": "8", "memory": "32Gi"},
        price_usd_per_hour=0.3,
        interruption_probability=0.0001,
    )


class Workers:
    """Search in this process; busy for as long as the test says."""

    def __init__(self) -> None:
        self.is_idle = True
        self.questions: list[ExchangeQuestion] = []
        self.pairs: list[tuple[str, str]] = []
        self.fault: Exception | None = None

    async def find_exchanges(self, question: ExchangeQuestion) -> ClusterExchanges:
        """Return what can be exchanged."""
        self.questions.append(question)
        if self.fault is not None:
            raise self.fault
        return find_exchanges(question)

    async def find_move(self, question: MoveQuestion) -> ExchangeProposal | None:
        """Return the move of a pair of clusters."""
        self.pairs.append((question.giver.cluster, question.taker.cluster))
        if self.fault is not None:
            raise self.fault
        return find_move(question)


class Fleet:
    """A shard with clusters of dear machines, and what looks for exchanges."""

    def __init__(
        self,
        *more: Machine,
        mode: ExchangeMode = ExchangeMode.PROPOSE,
        workers: Workers | None = None,
        synchronous: bool = True,
        **world: Any,
    ) -> None:
        self.provider = ScriptedProvider(synchronous=synchronous)
        self.provider.add(dear(0), dear(1), *(spot(number) for number in range(4)), *more)
        self.log = MemoryAuditLog()
        self.world = World(self.provider, audit_log=self.log, **world)
        self.exchanges = ExchangeProposals(
            shard=self.world.shard, mode=mode, clock=LoopClock(), compute=compute_inline, workers=workers
        )
        self.operator = self.world.connect("c1")
        self.operator.report(pods("c1", ("500m", 12)))
        self.actions: list[Sequence[Action]] = []

    async def minutes(self, count: int, *, looks: bool = True) -> None:
        """Let time pass, with a cycle and a look in each minute."""
        for _ in range(count):
            await asyncio.sleep(MINUTE)
            report = await self.world.cycle()
            assert report.decision is not None
            self.actions.append(report.decision.actions)
            if looks:
                await self.exchanges.look()

    def only(self) -> ClusterExchanges:
        """Return what was found for the only cluster."""
        (found,) = self.exchanges.found()
        return found.exchanges

    def records(self) -> list[dict[str, object]]:
        """Return the audit records of proposals."""
        found = [json.loads(line) for line in self.log.lines]
        return [record for record in found if record["kind"] == "ProposeExchange"]


async def test_a_price_must_have_been_there_before_it_counts() -> None:
    """For a quarter of an hour nothing is proposed, and then the exchange of both machines."""
    fleet = Fleet()
    await fleet.minutes(15)
    assert fleet.only().excluded == ((ExclusionReason.PRICE, 2),)
    assert fleet.only().proposals == ()

    await fleet.minutes(1)
    (proposal,) = fleet.only().proposals
    assert proposal.machine_ids == ("c1-dear0", "c1-dear1")
    assert proposal.waits_for is None
    assert proposal.gate.saving_usd_per_hour == pytest.approx(5.70)


async def test_propose_decides_as_off_does() -> None:
    """Every action of every cycle, and every call of the provider, is equal; demand and offers change meanwhile."""

    async def course(*, looks: bool) -> tuple[str, str]:
        fleet = Fleet(dear(2))
        await fleet.minutes(20, looks=looks)
        assert bool(fleet.exchanges.found()) is looks
        fleet.operator.report(pods("c1", ("500m", 30)), pods("c1", ("1", 4), priority=200))
        await fleet.minutes(10, looks=looks)
        fleet.operator.report(pods("c1", ("500m", 4)))
        await fleet.minutes(30, looks=looks)
        machines = sorted(str(each) for each in fleet.provider.records.values())
        return repr(fleet.actions), repr(machines)

    assert await course(looks=True) == await course(looks=False)


async def test_metrics_and_audit_say_what_is_proposed() -> None:
    """A saving in dollars an hour, and one record when a proposal becomes ready."""
    fleet = Fleet()
    await fleet.minutes(20)

    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="promised") == pytest.approx(5.70)
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="waiting") == 0
    assert fleet.world.metric("exchange_proposals", waits_for="nothing") == 1
    (record,) = fleet.records()
    assert (record["cluster"], record["machines"], record["outcome"]) == ("c1", 2, "proposed")
    assert record["saving_usd_per_hour"] == pytest.approx(5.70)
    assert "1.25 ×" in str(record["message"])


async def test_an_equal_question_is_not_searched_again() -> None:
    """At rest the search costs nothing."""
    workers = Workers()
    fleet = Fleet(workers=workers)
    await fleet.minutes(30)

    # Before prices count, and after.
    assert len(workers.questions) == 2
    assert fleet.world.metric("exchange_searches_total", outcome="unchanged") == 28


async def test_a_search_waits_for_the_planner() -> None:
    """A composition that is planned delays machines for pods; a proposal delays nothing."""
    workers = Workers()
    fleet = Fleet(workers=workers)
    await fleet.minutes(1, looks=False)
    workers.is_idle = False
    looking = asyncio.create_task(fleet.exchanges.look())
    await asyncio.sleep(30)
    assert workers.questions == []

    workers.is_idle = True
    await looking
    assert len(workers.questions) == 1


async def test_a_search_that_fails_is_named_and_tried_again() -> None:
    """A worker that died does not hide the other clusters, nor end the shard."""
    workers = Workers()
    fleet = Fleet(workers=workers)
    workers.fault = RuntimeError("the worker died")
    await fleet.minutes(17)
    assert fleet.only().blocked is BlockReason.SEARCH_FAILED
    assert fleet.world.metric("exchange_searches_total", outcome="failed") >= 1

    workers.fault = None
    await fleet.minutes(1)
    assert fleet.only().proposals


async def test_a_new_machine_cools_for_six_hours() -> None:
    """A machine that was configured a short while ago is excluded; those that served at the start are not new."""
    fleet = Fleet()
    await fleet.minutes(2)
    fleet.provider.records["c1-dear0"] = dear(0)
    idle = replace(dear(2), state=S.IDLE, cluster=ClusterId(""))
    fleet.provider.add(idle)
    fleet.operator.report(pods("c1", ("500m", 12)), pods("c1", ("3", 1), priority=200))
    await fleet.minutes(20)
    new = [each.id for each in fleet.provider.records.values() if each.state is S.CONFIGURED and "dear" not in each.id]
    bound = "c1-dear2" if fleet.world.state("c1-dear2") is S.CONFIGURED else new[0]

    assert dict(fleet.only().excluded) == {ExclusionReason.COOLING: 1}
    assert all(bound not in each.machine_ids for each in fleet.only().proposals)

    await asyncio.sleep(6 * 3600)
    await fleet.minutes(17)
    assert ExclusionReason.COOLING not in dict(fleet.only().excluded)


async def test_a_cluster_without_a_session_is_left_as_it_is() -> None:
    """Its pods could not be evicted under their budgets."""
    fleet = Fleet()
    await fleet.minutes(17)
    assert fleet.only().proposals

    fleet.world.shard.sessions.close(fleet.operator.session, CloseReason.GONE)
    await fleet.minutes(1)
    assert fleet.only().blocked is BlockReason.OPERATOR_AWAY
    assert fleet.world.metric("exchange_blocked_clusters", reason="operator-away") == 1
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="promised") == 0


async def test_a_held_roll_up_blocks_exchanges() -> None:
    """A roll-up that lost its demand at once says nothing about what the cluster needs."""
    fleet = Fleet(*(dear(number) for number in range(2, 12)))
    fleet.operator.report(pods("c1", ("500m", 90)))
    await fleet.minutes(17)
    fleet.operator.report(pods("c1", ("500m", 1)))
    await fleet.minutes(1)

    assert fleet.only().blocked is BlockReason.QUARANTINED


async def test_a_look_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters take turns when they hold more machines than one look may read."""
    monkeypatch.setattr("bigfleet.shard.exchange.proposals.MACHINES_MAX", 3)
    fleet = Fleet(dear(0, "c2"), dear(1, "c2"))
    fleet.world.connect("c2").report(pods("c2", ("500m", 12)))
    await fleet.minutes(1)
    assert [each.exchanges.cluster for each in fleet.exchanges.found()] == ["c1"]

    await fleet.minutes(1)
    assert [each.exchanges.cluster for each in fleet.exchanges.found()] == ["c1", "c2"]
    await fleet.minutes(32)
    assert all(each.exchanges.proposals for each in fleet.exchanges.found())


async def test_the_mode_is_that_of_the_policy() -> None:
    """A cluster's own entry goes before the flag."""
    fleet = Fleet(mode=ExchangeMode.OFF)
    await fleet.minutes(17)
    assert fleet.exchanges.found() == []

    policy = ClusterPolicy(exchange=ExchangeMode.PROPOSE)
    fleet.world.shard.policies = ClusterPolicies(by_cluster={"c1": policy})
    await fleet.minutes(17)
    assert fleet.only().proposals

    fleet.world.shard.policies = ClusterPolicies()
    await fleet.minutes(1)
    assert fleet.exchanges.found() == []
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="promised") == 0


async def test_a_jump_of_a_price_for_one_minute_proposes_nothing() -> None:
    """At $1.50 spot is no reason to move two machines at $3.00 that it cannot replace by less; at $0.01 it is wrong."""
    fleet = Fleet()
    for number in range(4):
        fleet.provider.records[f"spot{number}"] = replace(spot(number), price_usd_per_hour=5.9)
    await fleet.minutes(20)
    assert [each for each in fleet.only().proposals if each.waits_for is None] == []

    for number in range(4):
        fleet.provider.records[f"spot{number}"] = replace(spot(number), price_usd_per_hour=0.06)
    await fleet.minutes(1)
    for number in range(4):
        fleet.provider.records[f"spot{number}"] = replace(spot(number), price_usd_per_hour=5.9)
    await fleet.minutes(5)

    assert fleet.records() == []


async def test_the_background_loop_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed look is counted, and the next one starts over."""
    fleet = Fleet()
    await fleet.minutes(1, looks=False)
    running = asyncio.create_task(fleet.exchanges.run())
    calls: list[None] = []

    async def fails() -> None:
        calls.append(None)
        raise RuntimeError("a defect")

    monkeypatch.setattr(fleet.exchanges, "look", fails)
    await asyncio.sleep(3 * MINUTE + 1)
    running.cancel()

    assert len(calls) == 3
    assert fleet.world.metric("exchange_searches_total", outcome="failed") == 3


def test_reasons_of_waiting_are_values() -> None:
    """The metric has a series for each."""
    names = {"saves-too-little", "does-not-pay", "budget", "does-not-pack", "no-stock", "forecast", "would-not-fit"}
    assert {reason.value for reason in WaitReason} == names
