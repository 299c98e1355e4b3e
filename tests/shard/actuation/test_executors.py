"""What an action makes of answers that are wrong, late or beside the point (docs/spec/shard.md §9.1, §9.4, §9.6).

The ordinary ways of every action are in test_flows.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.actuation.executors import DISAGREEMENT_CAUSE
from bigfleet.shard.ports import ListedMachine, RefusalKind, ShardSettings, TransitionAck
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


class Answers(ScriptedProvider):
    """Answers every call with one given record, whatever was asked."""

    answer: ListedMachine

    async def configure(self, *_arguments: Any) -> TransitionAck:
        """Return the given record."""
        return TransitionAck(operation_id="op", record=self.answer)

    async def drain(self, *_arguments: Any) -> TransitionAck:
        """Return the given record."""
        return TransitionAck(operation_id="op", record=self.answer)


async def bootstrapped_with(answer: ListedMachine) -> World:
    """Return a world after a bootstrap of m1 for c1 that was answered so."""
    provider = Answers()
    provider.answer = answer
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    return world


@pytest.mark.rule("shard 9.2/12", "shard 16/1")
@pytest.mark.parametrize(
    ("answer", "outcome", "state"),
    [
        (machine("m1", S.CONFIGURED, cluster="c1"), "success", S.CONFIGURED),
        (machine("m1", S.CONFIGURING, cluster="c1"), "success", S.CONFIGURING),
        (machine("m1", S.CONFIGURING), "success", S.CONFIGURING),
        (machine("m1", S.CONFIGURED, cluster="c2"), "transition_error", S.CONFIGURED),
        (machine("m1", S.IDLE), "transition_raced_to_idle", S.IDLE),
        (machine("m1", S.FAILED, last_error="broken"), "transition_error", S.FAILED),
        (machine("m1", S.CONFIGURED, cluster="c1", price_usd_per_hour=-1.0), "invalid_record", S.FAILED),
        (machine("m2", S.CONFIGURED, cluster="c1"), "invalid_record", S.FAILED),
    ],
)
async def test_each_answer_to_configure(answer: Any, outcome: str, state: MachineState) -> None:
    """What the record shows is taken, unless it is broken or speaks of another machine: then the machine is held."""
    world = await bootstrapped_with(ListedMachine(answer, {}))

    assert world.outcomes() == [("Bootstrap", "m1", outcome)]
    assert world.state("m1") is state
    assert (world.metric("machines_held") > 0 or len(world.shard.machine_backoff) > 0) is (outcome == "invalid_record")
    assert "m2" not in world.shard.inventory


async def test_an_answer_to_drain_about_another_machine_is_not_believed() -> None:
    """The other machine stays as it is, this one is held."""
    provider = Answers()
    provider.answer = ListedMachine(machine("m2", S.IDLE), {})
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    world.connect("c1", "none").report()
    await world.cycle()

    assert world.outcomes() == [("Reclaim", "m1", "invalid_record")]
    assert (world.state("m1"), "m2" in world.shard.inventory) == (S.FAILED, False)


@pytest.mark.rule("shard 9.6/6")
async def test_a_get_about_another_machine_settles_nothing() -> None:
    """After a refusal the machine is asked for; an answer about another one is left aside, and the List tells."""

    class Confused(ScriptedProvider):
        async def get(self, machine_id: MachineId) -> ListedMachine:
            return ListedMachine(machine("m2", S.IDLE), {})

    provider = Confused()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    assert (world.state("m1"), "m2" in world.shard.inventory) == (S.CONFIGURING, False)

    await world.settle()
    assert world.state("m1") is S.CONFIGURED


@pytest.mark.rule("shard 9.1/1")
@pytest.mark.parametrize(
    ("kind", "state", "outcome"),
    [
        (ActionKind.RECLAIM, S.IDLE, "noop"),
        (ActionKind.PREEMPT, S.IDLE, "noop"),
        (ActionKind.DELETE, S.SPECULATIVE, "noop"),
        (ActionKind.RECLAIM, S.DRAINING, "stale"),
        (ActionKind.DELETE, S.CONFIGURED, "stale"),
        (ActionKind.PROVISION, S.IDLE, "stale"),
        (ActionKind.BOOTSTRAP, S.FAILED, "stale"),
    ],
)
async def test_a_machine_that_moved_on_is_left_alone(kind: ActionKind, state: MachineState, outcome: str) -> None:
    """Where the goal already holds nothing is to be done; anywhere else nothing may be done any more."""
    bound = {"cluster": "c1"} if state in (S.CONFIGURED, S.DRAINING) else {}
    cause = {"last_error": "broken"} if state is S.FAILED else {}
    provider = ScriptedProvider()
    provider.add(machine("m1", state, capacity_type=CapacityType.SPOT, **bound, **cause))
    world = World(provider)
    await world.step()
    action = Action(
        kind=kind,
        machine_id=MachineId("m1"),
        cluster=ClusterId("c1"),
        reason="test",
        profile=need("c1", "4").profile,
    )
    record = world.shard.ledger.record(action, 1)

    assert (await world.shard.executors.execute(record)).value == outcome
    assert provider.calls == []


@pytest.mark.rule("shard 9.2/3")
@pytest.mark.parametrize(
    ("refusals", "outcomes"),
    [
        ({}, [("Provision", "s1", "success"), ("Bootstrap", "s1", "success")]),
        (
            {("configure", "s1"): [RefusalKind.EXHAUSTED]},
            [("Provision", "s1", "success"), ("Bootstrap", "s1", "exhausted")],
        ),
        ({("create", "s1"): [RefusalKind.EXHAUSTED]}, [("Provision", "s1", "exhausted")]),
    ],
)
async def test_a_machine_that_is_made_at_once_goes_on_as_a_bootstrap(
    refusals: dict[tuple[str, str], list[RefusalKind]], outcomes: list[tuple[str, str, str]]
) -> None:
    """A new action with its own id and outcome, in the same entry of the ledger and the same slot."""
    provider = ScriptedProvider(synchronous=True, refusals=refusals)
    provider.add(machine("s1", S.SPECULATIVE, capacity_type=CapacityType.SPOT))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()

    assert world.outcomes() == outcomes
    assert len({record.action_id for record in world.shard.ledger.history}) == len(outcomes)
    assert not world.shard.ledger.is_pending("s1")
    assert world.metric("execute_inflight") == 0
    for kind, _machine, outcome in outcomes:
        assert world.metric("actions_total", kind=kind) == 1
        assert world.metric("action_execute_outcomes_total", kind=kind, outcome=outcome) == 1


async def released(provider: ScriptedProvider) -> World:
    """Return a world after the Delete of an on-demand machine whose hold was over."""
    provider.add(machine("m1", S.IDLE, capacity_type=CapacityType.ON_DEMAND))
    world = World(provider)
    await world.cycle()
    await world.shard._clock.sleep(600)
    await world.cycle()
    return world


@pytest.mark.rule("shard 9.4/3")
@pytest.mark.parametrize(
    ("refusal", "outcome"),
    [(RefusalKind.NOT_SUPPORTED, "not_supported"), (RefusalKind.REFUSED, "provider_error")],
)
async def test_a_machine_that_cannot_be_deleted_is_not_tried_again(refusal: RefusalKind, outcome: str) -> None:
    """Its capacity type promised otherwise: it is held for good."""
    provider = ScriptedProvider()
    provider.refusals["delete", "m1"] = [refusal]
    world = await released(provider)
    await world.shard._clock.sleep(100_000)
    await world.settle()

    assert world.outcomes() == [("Delete", "m1", outcome)]
    assert (world.state("m1"), world.machine("m1").last_error) == (S.FAILED, DISAGREEMENT_CAUSE)


@pytest.mark.rule("shard 9.4/3")
async def test_a_refused_delete_of_a_machine_that_is_not_idle_any_more_proves_nothing() -> None:
    """What Get shows is followed: the machine may be deleted later."""

    class Moves(ScriptedProvider):
        async def delete(self, *arguments: Any) -> TransitionAck:
            self.add(replace(self.records["m1"], state=S.DELETING))
            return await super().delete(*arguments)

    world = await released(Moves())

    assert world.outcomes() == [("Delete", "m1", "provider_error")]
    assert (world.state("m1"), len(world.shard.machine_backoff)) == (S.DELETING, 0)


@pytest.mark.rule("shard 9.4/3")
async def test_an_exhausted_delete_is_tried_again() -> None:
    """No room for the call now says nothing about the machine."""
    provider = ScriptedProvider()
    provider.refusals["delete", "m1"] = [RefusalKind.EXHAUSTED]
    world = await released(provider)
    await world.shard._clock.sleep(600)
    await world.settle()

    assert [outcome for _kind, _machine, outcome in world.outcomes()] == ["exhausted", "success"]
    assert world.state("m1") is S.SPECULATIVE


@pytest.mark.rule("shard 9.6/4")
async def test_the_hold_of_a_machine_that_is_gone_goes_with_it() -> None:
    """NOT_FOUND forgets strikes as well."""
    provider = ScriptedProvider()
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED, RefusalKind.REFUSED, RefusalKind.NOT_FOUND]
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    for _ in range(3):
        await world.cycle()
    assert "m1" not in world.shard.inventory

    assert world.shard.machine_backoff._refusals == {}


@pytest.mark.rule("shard 8/9", "shard 14/9")
async def test_only_actions_that_hold_a_slot_are_counted_in_flight() -> None:
    """One that waits for its operator has given its slot back."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider, settings=ShardSettings(execute_concurrency_max=1))
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.step()
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.shard._clock.sleep(1)
    assert (world.metric("execute_inflight"), world.metric("execute_waiting", **{"for": "blob"})) == (0, 1)

    await world.shard._clock.sleep(60)
    assert (world.metric("execute_inflight"), world.metric("execute_waiting", **{"for": "blob"})) == (0, 0)
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


@pytest.mark.rule("shard 14/8")
async def test_a_scrape_never_builds_a_snapshot() -> None:
    """It runs in another thread: what it shows is the last cycle's, and the next cycle's view is not its doing."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    await world.cycle()
    world.shard.ingest.fail(world.machine("m1"), "something happened")
    await asyncio.to_thread(generate_latest, world.registry)

    labels = {"capacity_type": "BareMetal", "interruption_penalty_bucket": "unspecified"}
    assert world.metric("inventory_machines", state="Idle", **labels) == 1
    assert world.shard.inventory.snapshot().columns.state.tolist() == [S.FAILED]
    assert world.metric("inventory_machines", state="Failed", **labels) == 1
