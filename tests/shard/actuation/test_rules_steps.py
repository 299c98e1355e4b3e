"""Single steps from a decision to a call, and of the four flows (docs/spec/shard.md §3, §8, §9.2 to §9.4)."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.engine.decision import Action, ActionKind, Decision
from bigfleet.model import labels
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, ReclaimInstruction
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ports import RefusalKind, ShardSettings, TransitionAck
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def action(kind: ActionKind, machine_id: str = "m1", cluster: str = "c1", **changes: Any) -> Action:
    """Return an action for the row that `need` makes."""
    profile = need(cluster, "4").profile if kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION) else None
    return Action(
        kind=kind,
        machine_id=MachineId(machine_id),
        cluster=ClusterId(cluster),
        reason="test",
        profile=profile,
        **changes,
    )


async def world_of(*machines: Any, settings: ShardSettings | None = None, synchronous: bool = False) -> World:
    """Return a world whose shard knows these machines and has decided nothing about them."""
    provider = ScriptedProvider(synchronous=synchronous)
    provider.add(*machines)
    world = World(provider, settings=settings)
    await world.step()
    return world


@asynccontextmanager
async def working(world: World) -> AsyncIterator[None]:
    """Let the workers run while the context lasts."""
    workers = asyncio.create_task(world.shard.actuator.run())
    await asyncio.sleep(0)
    yield
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


# ---- §8: into the queue -----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 8/3")
async def test_of_two_actions_of_one_machine_the_first_is_queued() -> None:
    """Preempts precede reclaims in a decision, so the Preempt it is; the other one is counted."""
    world = await world_of(machine("m1", S.CONFIGURED, cluster="c1"))
    counts = world.shard.actuator.enqueue((action(ActionKind.PREEMPT), action(ActionKind.RECLAIM)), 1)

    assert (counts.enqueued, counts.deduped) == (1, 1)
    pending = world.shard.ledger.pending("m1")
    assert pending is not None
    assert pending.action.kind is ActionKind.PREEMPT


@pytest.mark.rule("shard 8/4")
@pytest.mark.parametrize("kind", ActionKind)
@pytest.mark.parametrize("state", [S.SPECULATIVE, S.IDLE, S.CONFIGURING, S.CONFIGURED, S.DRAINING])
async def test_an_action_is_queued_only_for_a_machine_in_its_state(kind: ActionKind, state: MachineState) -> None:
    """Of the live inventory: what has changed since the snapshot counts."""
    bound = {"cluster": "c1"} if state in (S.CONFIGURING, S.CONFIGURED, S.DRAINING) else {}
    world = await world_of(machine("m1", state, **bound))
    starts = {ActionKind.PROVISION: S.SPECULATIVE, ActionKind.BOOTSTRAP: S.IDLE, ActionKind.DELETE: S.IDLE}
    counts = world.shard.actuator.enqueue((action(kind),), 1)

    assert counts.enqueued == (state is starts.get(kind, S.CONFIGURED))
    assert counts.enqueued + counts.deduped == 1


@pytest.mark.rule("shard 8/4")
async def test_an_unknown_machine_passes_and_its_worker_decides() -> None:
    """It is not the queue that knows what a machine is."""
    world = await world_of()
    counts = world.shard.actuator.enqueue((action(ActionKind.BOOTSTRAP, "nobody"),), 1)
    await world.shard.actuator.run_inline()

    assert (counts.enqueued, world.outcomes(), world.provider.calls) == (1, [("Bootstrap", "nobody", "stale")], [])


@pytest.mark.rule("shard 8/1")
async def test_an_action_is_told_apart_by_id_cycle_and_time() -> None:
    """Of its decision; the executing cycle is noted when its worker begins."""
    world = await world_of(machine("m1", S.IDLE), machine("m2", S.IDLE))
    world.connect("c1").report(need("c1", "8"))
    await world.shard._clock.sleep(3)
    await world.step()
    one, two = world.shard.ledger.history
    assert (one.decided_cycle, one.executed_cycle, one.decided_unix_nanos) == (2, 0, world.shard._clock.unix_nanos())
    assert one.action_id != two.action_id

    await world.step()
    await world.shard.actuator.run_inline()
    assert (one.decided_cycle, one.executed_cycle) == (2, 3)


@pytest.mark.rule("shard 8/7")
async def test_what_is_looked_at_is_four_times_the_queue_and_the_rest_spends_nothing() -> None:
    """Of 100 reclaims eight are looked at, two queued; the others count as dropped, and no cap was spent on them."""
    world = await world_of(
        *(machine(f"m{number:03d}", S.CONFIGURED, cluster="c1") for number in range(100)),
        settings=ShardSettings(execute_concurrency_max=1, reclaim_cap_fraction=0.5),
    )
    world.connect("c1").report()
    report = await world.step()

    assert (report.enqueued, report.capped, world.metric("actions_dropped_total")) == (2, 0, 98)
    assert world.shard.guardrails._reclaims_spent == {"c1": 8}


@pytest.mark.rule("shard 8/9")
async def test_who_finds_no_room_to_wait_waits_in_its_slot() -> None:
    """At --execute-waiting-max the slots themselves are the bound."""
    settings = ShardSettings(execute_concurrency_max=2, execute_waiting_max=1)
    world = await world_of(*(machine(f"m{number}", S.IDLE) for number in range(3)), settings=settings)
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "12"))
    await world.step()
    async with working(world):
        await world.shard._clock.sleep(1)

        # One waits without a slot, two in theirs.
        assert world.metric("execute_waiting", **{"for": "blob"}) == 3
        assert world.metric("execute_inflight") == 2
        await world.shard._clock.sleep(60)
        assert world.metric("execute_inflight") == 0


@pytest.mark.rule("shard 8/9")
async def test_slow_drains_of_one_cluster_leave_slots_and_places_to_the_others() -> None:
    """Half of the places are red's; its other drains begin later, nothing holds a slot, and blue gets its machine."""
    few = ShardSettings(execute_concurrency_max=2, execute_waiting_max=4)
    settings = replace(few, reclaim_cap_fraction=0.0, removal_brake=False)
    bound = (machine(f"m{number}", S.CONFIGURED, cluster="red") for number in range(8))
    world = await world_of(*bound, machine("idle", S.IDLE), settings=settings)
    red, blue = world.connect("red"), world.connect("blue")
    red.drain = None
    red.report()
    async with working(world):
        for _ in range(3):
            await world.step()
            await world.shard._clock.sleep(10)
        blue.report(need("blue", "4"))
        for _ in range(2):
            await world.step()
            await world.shard._clock.sleep(10)

        assert world.metric("execute_waiting", **{"for": "drain"}) == 2
        assert world.metric("execute_inflight") == 0
        assert world.state("idle") is S.CONFIGURING
    begun = [record for record in world.shard.ledger.history if not record.is_counted_only]
    assert sorted(record.action.kind for record in begun) == [ActionKind.BOOTSTRAP, *2 * [ActionKind.RECLAIM]]


def of_type(name: str, row: Need) -> Need:
    """Return the row for machines of another type."""
    wanted = (Requirement("node.kubernetes.io/instance-type", Operator.IN, (name,)),)
    return replace(row, profile=replace(row.profile, requirements=wanted))


@pytest.mark.rule("shard 8/9")
async def test_a_preemption_does_not_wait_for_the_reclaims_that_took_its_clusters_places() -> None:
    """Two reclaims of red wait for its operator, which does not answer; the third machine is preempted all the same."""
    few = ShardSettings(execute_concurrency_max=2, execute_waiting_max=4)
    settings = replace(few, reclaim_cap_fraction=0.0, removal_brake=False)
    large = {"instance_type": "t16", "allocatable": {"cpu": "16", "memory": "64Gi"}, "assigned_priority": 10}
    excess = (machine(f"m{number}", S.CONFIGURED, cluster="red") for number in range(3))
    world = await world_of(*excess, machine("large", S.CONFIGURED, cluster="red", **large), settings=settings)
    red, blue = world.connect("red"), world.connect("blue")
    red.drain = None
    red.report(of_type("t16", need("red", "16", priority=10)))
    async with working(world):
        for _ in range(3):
            await world.step()
            await world.shard._clock.sleep(10)
        assert world.metric("execute_waiting", **{"for": "drain"}) == 2
        blue.report(of_type("t16", need("blue", "16", priority=1000)))
        for _ in range(2):
            await world.step()
            await world.shard._clock.sleep(10)

        assert world.state("large") is S.DRAINING


# ---- §9.2: Provision and Bootstrap ------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.2/1")
async def test_a_machine_in_creation_is_stamped_for_its_row() -> None:
    """P1 and P4: fingerprint, group and intended cluster, kept with an asynchronous ack, cleared with Idle."""
    world = await world_of(machine("s1", S.SPECULATIVE, capacity_type=CapacityType.SPOT))
    row = need("c1", "4", group="g")
    operator = world.connect("c1")
    operator.report(row)
    await world.cycle()
    made = world.machine("s1")
    assert (made.state, made.assigned_need_fingerprint, made.assigned_group, made.intended_cluster, made.cluster) == (
        S.CREATING,
        row.fingerprint,
        "g",
        "c1",
        "",
    )

    operator.report()
    world.provider.settle()
    await world.cycle()
    made = world.machine("s1")
    assert (made.state, made.assigned_need_fingerprint, made.intended_cluster) == (S.IDLE, "", "")


@pytest.mark.rule("shard 9.2/4")
@pytest.mark.parametrize(
    ("cluster", "same_row", "outcome"),
    [("c1", True, "noop"), ("c1", False, "transition_error"), ("c2", True, "transition_error")],
)
async def test_a_bootstrap_of_a_configured_machine(cluster: str, same_row: bool, outcome: str) -> None:
    """B1: nothing to do for the same cluster and fingerprint, an error for another; nobody is called."""
    fingerprint = need("c1", "4").fingerprint if same_row else "p=other"
    bound = machine("m1", S.CONFIGURED, cluster=cluster)
    provider = ScriptedProvider()
    provider.add(bound)
    provider.metadata["m1"] = {labels.ASSIGNED_NEED_FINGERPRINT: fingerprint}
    world = World(provider)
    world.connect("c1")
    await world.step()
    record = world.shard.ledger.record(action(ActionKind.BOOTSTRAP), 1)

    assert (await world.shard.executors.execute(record)).value == outcome
    assert (provider.calls, world.state("m1")) == ([], S.CONFIGURED)


@pytest.mark.rule("shard 9.2/7")
async def test_a_machine_counts_for_its_row_while_its_blob_is_awaited() -> None:
    """B4: Configuring with cluster, fingerprint and group, shown to the cluster; no second machine is taken."""
    world = await world_of(machine("m1", S.IDLE), machine("m2", S.IDLE))
    row = need("c1", "4", group="g")
    operator = world.connect("c1")
    operator.answer = None
    operator.report(row)
    await world.step()
    async with working(world):
        await world.shard._clock.sleep(1)
        waiting = world.machine("m1")
        await world.step()

        assert (waiting.state, waiting.cluster) == (S.CONFIGURING, "c1")
        assert (waiting.assigned_need_fingerprint, waiting.assigned_group) == (row.fingerprint, "g")
        assert operator.states("m1") == [S.CONFIGURING]
        assert (len(world.shard.ledger.history), world.state("m2")) == (1, S.IDLE)


@pytest.mark.rule("shard 9.2/8")
async def test_a_late_blob_is_dropped() -> None:
    """B5: the machine has been rolled back; the answer changes nothing."""
    world = await world_of(machine("m1", S.IDLE))
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.cycle()
    (request,) = requests(operator)
    late = BootstrapResponse(request_id=request.request_id, user_data=b"late")
    world.shard.sessions.receive_bootstrap_response(operator.session, late)
    await asyncio.sleep(0)

    assert (world.outcomes(), world.state("m1")) == ([("Bootstrap", "m1", "blob_timeout")], S.IDLE)
    assert (world.provider.calls, operator.states("m1")) == ([], [S.CONFIGURING, S.IDLE])


def requests(operator: FakeOperator) -> list[BootstrapRequest]:
    """Return the bootstrap requests that an operator has read."""
    return [frame for frame in operator.frames if isinstance(frame, BootstrapRequest)]


@pytest.mark.rule("shard 9.2/9")
@pytest.mark.parametrize(
    ("ttl_seconds", "waits", "outcome"), [(5, 1, "success"), (5, 2, "blob_expired"), (0, 2, "success")]
)
async def test_a_blob_that_expired_is_asked_for_once_more(ttl_seconds: int, waits: int, outcome: str) -> None:
    """B6: measured from its receipt to the slot; twice is enough, and 0 never expires."""
    world = await world_of(machine("m1", S.IDLE), settings=ShardSettings(execute_concurrency_max=1))
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.step()
    slots = world.shard.executors.slots
    async with working(world):
        for number in range(waits):
            await world.shard._clock.sleep(1)
            if len(requests(operator)) <= number:
                break
            # Somebody else has the slot when the answer comes, for longer than the blob lives.
            await slots.acquire()
            request = requests(operator)[number]
            answer = BootstrapResponse(request_id=request.request_id, user_data=b"#", ttl_seconds=ttl_seconds)
            world.shard.sessions.receive_bootstrap_response(operator.session, answer)
            await world.shard._clock.sleep(6)
            operator.answer = None if number + 1 < waits else _fresh(ttl_seconds)
            slots.give_back()
        await world.shard._clock.sleep(1)

        assert world.outcomes() == [("Bootstrap", "m1", outcome)]
        assert len(requests(operator)) == (2 if ttl_seconds else 1)
        is_bound = outcome == "success"
        assert (world.state("m1"), len(world.provider.calls)) == ((S.CONFIGURING, 1) if is_bound else (S.IDLE, 0))


def _fresh(ttl_seconds: int) -> Any:
    return lambda request: BootstrapResponse(request_id=request.request_id, user_data=b"!", ttl_seconds=ttl_seconds)


@pytest.mark.rule("shard 9.2/10")
async def test_configure_carries_the_six_keys() -> None:
    """B7: five stamps and the shard's id, and nothing else."""
    world = await world_of(machine("m1", S.IDLE))
    world.connect("c1").report(need("c1", "4", priority=7, group="g"))
    await world.cycle()

    assert set(world.provider.metadata["m1"]) == {
        labels.ASSIGNED_PRIORITY,
        labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS,
        labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS,
        labels.ASSIGNED_NEED_FINGERPRINT,
        labels.ASSIGNED_GROUP,
        labels.ASSIGNED_SHARD,
    }


@pytest.mark.rule("shard 9.2/11", "shard 15/10")
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("lost", [False, True], ids=["answered", "answer lost"])
async def test_a_binding_carries_its_stamps_however_it_is_finished(synchronous: bool, lost: bool) -> None:
    """B8: priority and both penalties are there when reconcile finishes what nobody acknowledged."""
    world = await world_of(machine("m1", S.IDLE), synchronous=synchronous)
    if lost:
        world.provider.lost_answers.add(("configure", "m1"))
    world.connect("c1").report(need("c1", "4", priority=7, interruption_bucket=27, reclamation_bucket=4))
    await world.cycle()
    # What the provider echoes later is not looked at: the stamps are ours.
    world.provider.metadata.clear()
    await world.settle(2)

    bound = world.machine("m1")
    stamps = (bound.assigned_interruption_penalty_dollars, bound.assigned_reclamation_penalty_dollars)
    assert (bound.state, bound.assigned_priority, stamps) == (S.CONFIGURED, 7, (float("inf"), 2.0))


# ---- §9.3: drains -----------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.3/1")
@pytest.mark.parametrize("kind", [ActionKind.RECLAIM, ActionKind.PREEMPT])
async def test_a_machine_that_serves_another_cluster_by_now_is_not_drained(kind: ActionKind) -> None:
    """D1: it was decided about another binding."""
    world = await world_of(machine("m1", S.CONFIGURED, cluster="c2"))
    record = world.shard.ledger.record(action(kind, grace_seconds=600), 1)

    assert (await world.shard.executors.execute(record)).value == "stale"
    assert (world.provider.calls, world.state("m1")) == ([], S.CONFIGURED)


@pytest.mark.rule("shard 9.3/3")
async def test_a_draining_machine_keeps_binding_and_stamps_and_says_for_whom() -> None:
    """D2: binding and Assigned* stay, the preemptor is stamped; all of it ends with the observed Idle."""
    world = await world_of(machine("m1", S.IDLE))
    low, high = world.connect("low"), world.connect("high")
    low.report(need("low", "4", priority=10))
    await world.settle()
    before = world.machine("m1")
    wanted = need("high", "4", priority=1000)
    high.report(wanted)
    await world.cycle()
    drained = world.machine("m1")
    assert (drained.state, drained.cluster) == (S.DRAINING, "low")
    assert drained.assigned_need_fingerprint == before.assigned_need_fingerprint != ""
    assert drained.assigned_priority == 10
    assert drained.preempted_for == PreemptedFor("high", wanted.fingerprint, "")

    world.provider.settle()
    await world.step()
    free = world.machine("m1")
    assert (free.state, free.cluster, free.preempted_for, free.assigned_priority) == (S.IDLE, "", None, 0)


@pytest.mark.rule("shard 9.3/2")
async def test_an_instruction_names_machine_provider_id_node_grace_and_reason() -> None:
    """D2: a reclaim is voluntary, ten minutes and priority 0; without a node name the machine's id stands for it."""
    world = await world_of(
        machine("m1", S.CONFIGURED, cluster="c1"), machine("m2", S.CONFIGURED, cluster="c1", node_name="n2")
    )
    operator = world.connect("c1")
    operator.report()
    await world.cycle()
    await world.cycle()
    sent = [frame for frame in operator.frames if isinstance(frame, ReclaimInstruction)]

    assert [(each.machine_ids, each.provider_ids, each.nodes) for each in sent] == [
        (("m1",), ("test://host-m1",), ("m1",)),
        (("m2",), ("test://host-m2",), ("n2",)),
    ]
    assert {(each.grace_seconds, each.preemptor_priority, each.reason) for each in sent} == {(600, 0, "reclaim")}
    assert [each.instruction_id for each in sent] == [each.action_id for each in world.shard.ledger.history]


@pytest.mark.rule("shard 9.3/10")
@pytest.mark.parametrize(
    ("kind", "tag", "reason"),
    [
        (ActionKind.RECLAIM, "phase3.excess", "reclaim"),
        (ActionKind.RECLAIM, "phase3.unjoined", "unjoined"),
        (ActionKind.PREEMPT, "phase2.inversion", "preempt"),
    ],
)
async def test_an_instruction_says_why(kind: ActionKind, tag: str, reason: str) -> None:
    """A machine that never joined is reclaimed under a name of its own."""
    world = await world_of(machine("m1", S.CONFIGURED, cluster="c1"))
    operator = world.connect("c1")
    decided = replace(action(kind, grace_seconds=30, preemptor_priority=7), reason=tag)
    world.shard.actuator.enqueue((decided,), 1)
    await world.shard.actuator.run_inline()

    sent = [frame for frame in operator.frames if isinstance(frame, ReclaimInstruction)]
    assert [(each.reason, each.grace_seconds, each.preemptor_priority) for each in sent] == [(reason, 30, 7)]


@pytest.mark.rule("shard 9.3/4")
async def test_a_drain_without_a_session_is_warned_of() -> None:
    """D2': nobody evicts its pods, and budgets for disruption are not honoured."""
    world = await world_of(machine("m1", S.CONFIGURED, cluster="c1"), synchronous=True)
    world.shard.actuator.enqueue((action(ActionKind.PREEMPT, grace_seconds=600),), 1)
    with capture_logs() as logs:
        await world.shard.actuator.run_inline()

    (warning,) = [line for line in logs if line["event"] == "drain.started_without_session"]
    assert (warning["log_level"], warning["machine"], warning["cluster"]) == ("warning", "m1", "c1")
    assert (world.provider.grace_seconds, world.metric("drains_without_session_total")) == ({"m1": 600}, 1)


# ---- §9.4: Delete -----------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.4/1")
@pytest.mark.parametrize("kind", CapacityType)
async def test_only_what_can_be_had_again_is_deleted(kind: CapacityType) -> None:
    """L1: on-demand and spot; anything else is never called for, whoever asks."""
    world = await world_of(machine("m1", S.IDLE, capacity_type=kind), synchronous=True)
    record = world.shard.ledger.record(action(ActionKind.DELETE, cluster=""), 1)
    outcome = await world.shard.executors.execute(record)

    deleted = kind in (CapacityType.ON_DEMAND, CapacityType.SPOT)
    assert (outcome.value, len(world.provider.calls)) == (("success", 1) if deleted else ("stale", 0))


@pytest.mark.rule("shard 9.4/2", "shard 15/10")
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
async def test_a_deleted_machine_is_a_slot_without_host_or_stamps(synchronous: bool) -> None:
    """L2 and L3: Idle → Deleting → Speculative, by ack or by reconcile, counted once."""
    world = await world_of(machine("m1", S.IDLE, capacity_type=CapacityType.SPOT), synchronous=synchronous)
    world.shard.actuator.enqueue((action(ActionKind.DELETE, cluster=""),), 1)
    await world.shard.actuator.run_inline()
    assert world.state("m1") is (S.SPECULATIVE if synchronous else S.DELETING)
    world.provider.settle()
    await world.cycle()

    slot = world.machine("m1")
    assert (slot.state, slot.host.is_present, slot.cluster, slot.assigned_need_fingerprint) == (
        S.SPECULATIVE,
        False,
        "",
        "",
    )
    assert world.metric("idle_releases_total") == 1


@pytest.mark.rule("shard 9.1/3")
async def test_an_executor_makes_one_attempt() -> None:
    """Retrying is the next cycle's business (§9.1): one call per action, with a token of its own."""

    class Counts(ScriptedProvider):
        async def configure(self, *arguments: Any) -> TransitionAck:
            tokens.append(arguments[-1])
            return await super().configure(*arguments)

    tokens: list[Any] = []
    provider = Counts()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    for cycles in (1, 2):
        await world.cycle()
        assert len(tokens) == cycles

    assert [token.sequence for token in tokens] == [1, 2]


# ---- §3: what a decision is made on -----------------------------------------------------------------------------


@pytest.mark.rule("shard 3/10")
async def test_a_decision_assigns_before_it_preempts_before_it_reclaims() -> None:
    """Machines for rows first, then those that others give up for rows, then what nobody needs."""
    fleet = [
        machine("taken", S.CONFIGURED, cluster="low", assigned_priority=1),
        machine("spare", S.CONFIGURED, cluster="gone", instance_type="other"),
        machine("idle", S.IDLE),
        machine("old", S.IDLE, capacity_type=CapacityType.ON_DEMAND, instance_type="other"),
    ]
    world = await world_of(*fleet, settings=ShardSettings(actuation_paused=True))
    world.connect("low").report(need("low", "4", priority=1))
    world.connect("gone").report()
    world.connect("high").report(need("high", "8", priority=1_000_000))
    await world.shard._clock.sleep(600)
    report = await world.step()

    assert report.decision is not None
    assert [(each.kind, each.machine_id) for each in report.decision.actions] == [
        (ActionKind.BOOTSTRAP, "idle"),
        (ActionKind.PREEMPT, "taken"),
        (ActionKind.RECLAIM, "spare"),
        (ActionKind.DELETE, "old"),
    ]


@pytest.mark.rule("shard 3/8")
async def test_a_cycle_decides_in_another_thread_on_what_it_saw_at_its_start() -> None:
    """A machine that fails meanwhile is decided on as it was, and its action finds that it no longer applies."""
    threads: list[int] = []

    async def elsewhere(work: Any) -> Any:
        def noted() -> Any:
            threads.append(threading.get_ident())
            return work()

        result = await asyncio.to_thread(noted)
        if isinstance(result, Decision):
            world.shard.ingest.fail(world.machine("m1"), "something happened")
        return result

    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider, compute=elsewhere)
    world.connect("c1").report(need("c1", "4"))
    report = await world.step()

    assert report.decision is not None
    assert [each.machine_id for each in report.decision.actions] == ["m1"]
    assert (report.enqueued, world.metric("actions_deduped_total")) == (0, 1)
    assert threading.get_ident() not in threads
