"""Provision, bootstrap, drain and delete, with synchronous and asynchronous providers (docs/spec/shard.md §9)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bigfleet.engine.decision import ActionKind
from bigfleet.model import labels
from bigfleet.model.frames import BootstrapResponse, DrainOutcome, ReclaimInstruction
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.outcomes import ActionOutcome
from bigfleet.shard.ports import RefusalKind, ShardSettings
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time
S = MachineState


@pytest.fixture(params=[False, True], ids=["asynchronous", "synchronous"])
def provider(request: pytest.FixtureRequest) -> ScriptedProvider:
    """A provider of either kind."""
    return ScriptedProvider(synchronous=request.param)


@pytest.mark.rule("shard 9.2/11", "shard 16/1")
async def test_an_idle_machine_is_bound_and_stamped(provider: ScriptedProvider) -> None:
    """A row's machine ends Configured for its cluster, and the provider holds the row's identity."""
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    row = need("c1", "4", priority=700, interruption_bucket=27, reclamation_bucket=4)
    assert operator.report(row) == "accepted"
    await world.settle()

    bound = world.machine("m1")
    assert (S.CONFIGURED, "c1", 700, float("inf"), 2.0, row.fingerprint) == (
        bound.state,
        bound.cluster,
        bound.assigned_priority,
        bound.assigned_interruption_penalty_dollars,
        bound.assigned_reclamation_penalty_dollars,
        bound.assigned_need_fingerprint,
    )
    assert provider.metadata["m1"][labels.ASSIGNED_PRIORITY] == "700"
    assert provider.metadata["m1"][labels.ASSIGNED_SHARD] == "shard-0"
    assert operator.states("m1")[-1] is S.CONFIGURED
    assert world.outcomes() == [("Bootstrap", "m1", "success")]


@pytest.mark.rule("shard 9.2/3", "shard 15/10")
async def test_a_speculative_machine_is_created_and_then_bound(provider: ScriptedProvider) -> None:
    """A slot becomes a machine of the cluster, whichever way the provider answers."""
    provider.add(machine("s1", S.SPECULATIVE, capacity_type=CapacityType.ON_DEMAND))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.settle()

    assert (world.machine("s1").state, world.machine("s1").cluster) == (S.CONFIGURED, "c1")


@pytest.mark.rule("shard 9.2/1")
async def test_no_second_machine_is_bought_while_the_first_is_created() -> None:
    """A machine in creation counts for the row that it is created for."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"s{n}", S.SPECULATIVE, capacity_type=CapacityType.SPOT) for n in range(4)))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    for _ in range(5):
        await world.cycle()

    assert world.outcomes() == [("Provision", "s0", "success")]


@pytest.mark.rule("shard 9.1/2", "shard 10.3/1", "shard 15/10")
async def test_a_shrunk_cluster_loses_the_excess_after_its_operator_drained_it(provider: ScriptedProvider) -> None:
    """A reclaim asks the operator, then the provider, and the binding ends with the observed Idle."""
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, price_usd_per_hour=2.0))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "8"))
    await world.settle()
    operator.report(need("c1", "4"))
    await world.settle()

    drained = world.machine("m2")
    assert (
        drained.state,
        drained.cluster,
        drained.assigned_priority,
        drained.assigned_need_fingerprint,
    ) == (S.IDLE, "", 0, "")
    assert S.CONFIGURED is world.state("m1")
    assert world.outcomes()[2:] == [("Reclaim", "m2", "success")]
    assert operator.states("m2")[-2:] == [S.DRAINING, S.IDLE]


@pytest.mark.rule("shard 9.3/2")
async def test_the_instruction_leaves_before_the_draining_state() -> None:
    """An operator hears what to do before it sees the state change (docs/spec/shard.md §9.3 D2)."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.settle()
    operator.report()
    await world.settle()

    order = [
        type(frame).__name__
        for frame in operator.frames
        if isinstance(frame, ReclaimInstruction) or getattr(frame, "state", None) is S.DRAINING
    ]
    assert order == ["ReclaimInstruction", "NodeStateUpdate"]


@pytest.mark.rule("shard 9.3/5")
@pytest.mark.parametrize(
    ("result", "seconds", "expected_grace_seconds"),
    [
        (DrainOutcome.DRAINED, 5.0, 595),
        (DrainOutcome.NODE_NOT_FOUND, 0.5, 599),
        (DrainOutcome.FAILED, 100.0, 500),
        (DrainOutcome.GRACE_EXPIRED, 600.0, 0),
        (None, 0.0, 0),
    ],
)
async def test_the_provider_gets_what_the_operator_left_of_the_grace(
    result: DrainOutcome | None, seconds: float, expected_grace_seconds: int
) -> None:
    """Drained early, the rest of the grace goes on; expired or unanswered, nothing is left of it."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.settle()
    operator.drain = None if result is None else (result, seconds)
    operator.report()
    await world.cycle()

    assert expected_grace_seconds == world.provider.grace_seconds["m1"]


async def test_a_machine_whose_pods_fit_nowhere_else_stays_configured() -> None:
    """The operator has not touched the node: the provider is not asked to drain, and the cluster hears it is back."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.settle()
    before = world.machine("m1")
    operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
    operator.report()
    await world.cycle()

    assert "m1" not in world.provider.grace_seconds
    assert world.machine("m1") == before
    assert operator.states("m1")[-2:] == [S.DRAINING, S.CONFIGURED]
    (record,) = [one for one in world.shard.ledger.history if one.action.kind is ActionKind.RECLAIM]
    assert record.outcome is ActionOutcome.WOULD_NOT_FIT
    assert record.message.startswith("the operator answered WOULD_NOT_FIT")
    assert world.metric("drain_results_total", outcome="would_not_fit") == 1


async def test_a_preempted_machine_is_drained_though_its_pods_fit_nowhere_else() -> None:
    """The higher priority gets the machine."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    low, high = world.connect("c1"), world.connect("c2")
    low.report(need("c1", "4"))
    await world.settle()
    low.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
    high.report(need("c2", "4", priority=900))
    await world.cycle()

    assert "m1" in world.provider.grace_seconds


@pytest.mark.rule("shard 9.3/4", "shard 15/14")
async def test_a_drain_without_a_session_goes_on_with_the_full_grace() -> None:
    """An operator that is gone does not hold machines for ever; it is counted."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    operator = world.connect("c1")
    operator.report()
    world.shard.stop_sessions()
    await world.shard._clock.sleep(3601)
    await world.cycle()

    assert provider.grace_seconds["m1"] == 600
    assert world.metric("drains_without_session_total") == 1


@pytest.mark.rule("shard 5.3/8", "shard 9.1/4", "shard 9.3/8")
async def test_an_asynchronous_drain_keeps_the_binding_until_idle_is_observed() -> None:
    """ADR-0059: the transitional ack clears nothing."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    world.connect("c1").report()
    await world.cycle()
    assert (world.machine("m1").state, world.machine("m1").cluster) == (S.DRAINING, "c1")

    provider.settle("m1")
    await world.cycle()
    assert (world.machine("m1").state, world.machine("m1").cluster) == (S.IDLE, "")


@pytest.mark.rule("shard 9.4/1")
async def test_idle_on_demand_capacity_is_released_after_its_hold(provider: ScriptedProvider) -> None:
    """Ten idle minutes after the last use the machine is deleted and its slot offered again; bare metal stays."""
    provider.add(machine("od", S.IDLE, capacity_type=CapacityType.ON_DEMAND), machine("bm", S.IDLE))
    world = World(provider)
    await world.cycle()
    await world.shard._clock.sleep(599)
    await world.cycle()
    assert world.outcomes() == []

    await world.shard._clock.sleep(1)
    await world.settle()
    assert world.outcomes() == [("Delete", "od", "success")]
    assert (world.state("od"), world.state("bm")) == (S.SPECULATIVE, S.IDLE)


@pytest.mark.rule("shard 9.3/9")
async def test_a_preempted_machine_moves_to_the_higher_priority(provider: ScriptedProvider) -> None:
    """The lower row's machine is drained with the grace of the gap and then serves the higher row."""
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    low, high = world.connect("low"), world.connect("high")
    low.report(need("low", "4", priority=10))
    await world.settle()
    high.report(need("high", "4", priority=1_000_000))
    await world.settle(6)

    assert world.machine("m1").cluster == "high"
    instruction = next(frame for frame in low.frames if isinstance(frame, ReclaimInstruction))
    assert (
        instruction.reason,
        instruction.grace_seconds,
        instruction.preemptor_priority,
    ) == ("preempt", 10, 1_000_000)


@pytest.mark.rule("shard 9.3/3")
async def test_a_starving_row_drains_one_machine_however_long_the_drain_takes() -> None:
    """Victims on their way count, so that cycles during a drain pick no more of them."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{n}", S.IDLE) for n in range(4)))
    world = World(provider)
    low, high = world.connect("low"), world.connect("high")
    low.report(need("low", "16", priority=10))
    await world.settle()
    high.report(need("high", "4", priority=1000))
    for _ in range(5):
        await world.cycle()

    assert sum(1 for kind, _machine, _outcome in world.outcomes() if kind == "Preempt") == 1


@pytest.mark.rule("shard 9.2/5")
async def test_without_a_session_nothing_is_touched() -> None:
    """A bootstrap for a cluster that is not connected leaves the machine Idle and calls nobody."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    world.shard.stop_sessions()
    await world.cycle()

    assert world.outcomes() == [("Bootstrap", "m1", "no_session")]
    assert (world.state("m1"), provider.calls) == (S.IDLE, [])


@pytest.mark.rule("shard 9.2/8", "shard 9.2/13")
async def test_an_operator_that_sends_no_blob_gets_its_machine_rolled_back() -> None:
    """After the timeout the machine is Idle again and the provider was never called."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.cycle()

    assert world.outcomes() == [("Bootstrap", "m1", "blob_timeout")]
    assert (world.state("m1"), world.machine("m1").cluster, provider.calls) == (S.IDLE, "", [])


@pytest.mark.rule("shard 9.2/6", "shard 15/15")
async def test_a_silent_operator_parks_one_machine_at_a_time() -> None:
    """After three unanswered requests only one probe at a time goes out (docs/spec/shard.md §9.2)."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{n}", S.IDLE) for n in range(6)))
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "24"))
    async with running(world):
        for _ in range(2):
            await world.step()
            await world.shard._clock.sleep(31)

    outcomes = [outcome for _kind, _machine, outcome in world.outcomes()]
    assert outcomes[:6] == ["blob_timeout"] * 6
    assert outcomes[6:] == ["blob_timeout"] + ["operator_unresponsive"] * 5


@pytest.mark.rule("shard 8/5", "shard 15/17")
async def test_a_row_that_cannot_be_bootstrapped_backs_off_with_the_operators_text() -> None:
    """An error answer puts the machine back, and the row is left alone for 30 s, then tried again."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = lambda request: BootstrapResponse(request_id=request.request_id, error="no template for arm64")
    operator.report(need("c1", "4"))
    await world.cycle()
    await world.cycle()
    assert world.outcomes() == [("Bootstrap", "m1", "blob_error")]
    assert (world.state("m1"), world.metric("actions_refused_total")) == (S.IDLE, 1)

    await world.shard._clock.sleep(30)
    await world.cycle()
    assert len(world.outcomes()) == 2


@pytest.mark.parametrize(
    ("refusal", "outcome", "state"),
    [
        (RefusalKind.FENCED, "fenced", S.FAILED),
        (RefusalKind.NOT_SUPPORTED, "not_supported", S.FAILED),
        (RefusalKind.EXHAUSTED, "exhausted", S.IDLE),
        (RefusalKind.REFUSED, "configure_error", S.IDLE),
        (RefusalKind.UNKNOWN_OUTCOME, "unknown_outcome", S.CONFIGURING),
    ],
)
async def test_each_refusal_of_configure(refusal: RefusalKind, outcome: str, state: MachineState) -> None:
    """What a refusal leaves behind follows the table of docs/spec/shard.md §9.6."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [refusal]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()

    assert [("Bootstrap", "m1", outcome)] == world.outcomes()
    assert state is world.state("m1")


@pytest.mark.rule("shard 9.6/3")
async def test_a_fenced_shard_never_retries_and_raises_the_alarm() -> None:
    """Another process is newer: the machine stays Failed here, whatever the provider shows."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.FENCED]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.settle(6)

    assert len([call for call in provider.calls if call[0] == "configure"]) == 1
    assert (world.state("m1"), world.metric("fenced_total")) == (S.FAILED, 1)


@pytest.mark.rule("shard 9.6/4")
async def test_a_machine_that_is_gone_is_forgotten() -> None:
    """NOT_FOUND removes the machine like a reported removal."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.NOT_FOUND]
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()

    assert world.outcomes() == [("Bootstrap", "m1", "not_found")]
    assert "m1" not in world.shard.inventory


@pytest.mark.rule("shard 9.6/5", "shard 15/8")
async def test_a_lost_answer_is_settled_by_the_next_reconcile() -> None:
    """The call was applied although its answer was lost: the machine ends Configured, with one call."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.lost_answers.add(("configure", "m1"))
    world = World(provider)
    world.connect("c1").report(need("c1", "4", priority=7))
    await world.settle()

    assert (world.state("m1"), world.machine("m1").assigned_priority) == (S.CONFIGURED, 7)
    assert len(provider.calls) == 1


@pytest.mark.rule("shard 9.6/7")
async def test_three_refusals_in_a_row_hold_the_machine_for_half_an_hour() -> None:
    """A machine that its provider keeps refusing is left alone for a while, then taken as the provider shows it."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED] * 3
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    for _ in range(6):
        await world.cycle()
    assert (world.state("m1"), len(provider.calls)) == (S.FAILED, 3)

    await world.shard._clock.sleep(1800)
    await world.settle()
    assert S.CONFIGURED is world.state("m1")


@pytest.mark.rule("shard 15/11")
async def test_a_failed_operation_is_followed_and_its_row_is_served_elsewhere() -> None:
    """FAILED reported by the provider keeps its text, and the row takes another machine."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, price_usd_per_hour=2.0))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    provider.fail("m1", "NOT_READY: the node never joined")
    await world.settle()

    assert world.machine("m1").last_error == "NOT_READY: the node never joined"
    assert (world.machine("m2").state, world.machine("m2").cluster) == (S.CONFIGURED, "c1")


@pytest.mark.rule("shard 9.1/3")
async def test_every_attempt_carries_a_greater_sequence_number() -> None:
    """Tokens rise over machines and methods."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{n}", S.IDLE) for n in range(5)))
    world = World(provider)
    world.connect("c1").report(need("c1", "20"))
    await world.settle()
    sequences = [sequence for _method, _machine, sequence in provider.calls]

    assert sequences == sorted(set(sequences))


@pytest.mark.rule("shard 8/9")
async def test_slow_operators_do_not_hold_worker_slots() -> None:
    """While many bootstraps wait for their blob, a single slot carries on with the others."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{n}", S.IDLE) for n in range(2)))
    world = World(provider, settings=ShardSettings(execute_concurrency_max=1))
    silent, answering = world.connect("silent"), world.connect("answering")
    silent.answer = None
    silent.report(need("silent", "4", priority=900))
    answering.report(need("answering", "4"))
    await world.step()
    async with running(world):
        await world.shard._clock.sleep(10)

        assert ("Bootstrap", "m1", "success") in world.outcomes()
        assert world.metric("execute_waiting", **{"for": "blob"}) == 1


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    """Let the workers run while the context lasts."""
    workers = asyncio.create_task(world.shard.actuator.run())
    yield
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)
