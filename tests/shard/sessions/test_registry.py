"""Who speaks for a cluster, who waits for whom, and what a newcomer changes (docs/spec/shard.md §9.2, §9.3, §10)."""

import asyncio

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import (
    CAPABILITY_DRAIN_RESULT,
    ECHO_HELLO,
    ECHO_RESYNC,
    Acknowledgement,
    BootstrapRequest,
    BootstrapResponse,
    DrainOutcome,
    DrainResult,
    Hello,
    NodeStateUpdate,
    ReclaimAck,
    ReclaimInstruction,
    ShardFrame,
)
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason, Outbox
from bigfleet.shard.sessions.registry import Sessions
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def bound_world(count: int = 1, settings: ShardSettings | None = None) -> World:
    """Return a world with that many machines Configured for c1."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.CONFIGURED, cluster="c1") for number in range(count)))
    return World(provider, settings=settings)


def instructions(operator: FakeOperator) -> list[ReclaimInstruction]:
    """Return what the operator was told to drain."""
    return [frame for frame in operator.frames if isinstance(frame, ReclaimInstruction)]


async def read() -> None:
    """Let the operators read what was sent."""
    for _ in range(20):
        await asyncio.sleep(0)


async def end(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_session_that_is_replaced_is_logged_as_closed() -> None:
    """Two operators with one cluster id are found by these lines."""
    sessions = Sessions(epoch=1, outbox_frames_max=8)
    sessions.open(Hello(cluster_id="c1"))
    with capture_logs() as logs:
        sessions.open(Hello(cluster_id="c1"))

    assert [(line["event"], line["cluster"], line.get("reason")) for line in logs] == [
        ("session.closed", "c1", "replaced"),
        ("session.opened", "c1", None),
    ]


# ---- opening ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/3", "shard 10.1/6")
async def test_a_session_begins_with_hello_the_clusters_machines_and_the_ack_of_the_resync() -> None:
    """Ids ascending; machines of others and unbound ones are nobody's business."""
    world = bound_world(3)
    world.provider.add(machine("idle", S.IDLE), machine("other", S.CONFIGURED, cluster="c2"))
    await world.cycle()
    operator = world.connect("c1")
    await read()

    shown = [frame.machine_id if isinstance(frame, NodeStateUpdate) else frame.echo for frame in operator.frames]  # type: ignore[union-attr]
    assert shown == [ECHO_HELLO, "m0", "m1", "m2", ECHO_RESYNC]
    hello = operator.frames[0]
    assert isinstance(hello, Acknowledgement)
    known = {"drain-forecast", "drain-result", "need-status", "node-status"}
    assert (hello.shard_epoch, hello.capabilities) == (1, frozenset(known))


@pytest.mark.rule("shard 10.1/4")
async def test_a_newcomer_takes_over_at_once() -> None:
    """The older stream ends as replaced, and what it still says concerns nobody."""
    world = bound_world()
    await world.cycle()
    old = world.connect("c1")
    new = world.connect("c1")

    assert (old.session.outbox.closed, new.session.outbox.closed) == (CloseReason.REPLACED, None)
    assert (world.shard.sessions.is_current(old.session), world.shard.sessions.of("c1")) == (False, new.session)
    counted = [world.metric("session_lifecycle_total", event=event) for event in ("installed", "replaced", "removed")]
    assert (counted, world.metric("active_sessions")) == ([2, 1, 0], 1)


@pytest.mark.rule("shard 10.1/5")
async def test_a_late_removal_never_evicts_the_successor() -> None:
    """The old stream's end comes after the new one's beginning."""
    world = bound_world()
    old = world.connect("c1")
    new = world.connect("c1")
    world.shard.sessions.close(old.session, CloseReason.GONE)

    assert world.shard.sessions.of("c1") is new.session
    assert world.metric("session_lifecycle_total", event="removed") == 0


async def test_the_fullest_outbox_is_known_without_asking_every_session() -> None:
    """Frames that were taken, and those of a session that has ended, wait no more."""
    sessions = Sessions(epoch=1, outbox_frames_max=8)
    quiet, busy = (sessions.open(Hello(cluster_id=name)) for name in ("quiet", "busy"))
    sessions.acknowledge_hello(busy)
    both = sessions.fullest_outbox
    await busy.outbox.next()
    await busy.outbox.next()
    one = sessions.fullest_outbox
    sessions.close(quiet, CloseReason.GONE)

    assert (both, one, sessions.fullest_outbox) == (2, 1, 0)


async def test_a_stopping_shard_ends_every_session() -> None:
    """In one go, with the reason that tells operators to come back."""
    world = bound_world()
    operators = [world.connect(f"c{number}") for number in range(3)]
    world.shard.stop_sessions()

    assert {operator.session.outbox.closed for operator in operators} == {CloseReason.STOPPING}
    assert (world.shard.sessions.is_stopping, world.metric("active_sessions")) == (True, 0)


# ---- overflow ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.4/5", "shard 15/16")
async def test_a_session_that_reads_nothing_ends_when_an_instruction_finds_no_room() -> None:
    """Its drain waits go on; it is counted, and the next session starts clean."""
    world = bound_world(8, ShardSettings(outbox_frames_max=4, reclaim_cap_fraction=0))
    session = world.shard.sessions.open(Hello(cluster_id="c1", capabilities=frozenset({CAPABILITY_DRAIN_RESULT})))
    await world.cycle()
    world.shard.intake.reported.add("c1")
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.step()
    await world.shard._clock.sleep(1)

    assert (session.outbox.closed, world.shard.sessions.of("c1")) == (CloseReason.OVERFLOWED, None)
    assert world.metric("session_lifecycle_total", event="overflowed") == 1
    assert world.metric("outbox_dropped_total") > 0
    # The others found no session any more, and wait for the next one.
    assert [world.state(f"m{number}") for number in range(8)] == [S.DRAINING] * 4 + [S.CONFIGURED] * 4
    assert world.metric("drains_without_session_total") == 0

    operator = world.connect("c1")
    await world.shard._clock.sleep(60)
    assert len(instructions(operator)) == 4
    assert [record.message for record in world.shard.ledger.history] == ["DRAINED"] * 4 + [
        "the session of its cluster has ended; the reclaim waits for the next one"
    ] * 4
    await end(workers)


@pytest.mark.rule("shard 10.4/5")
async def test_a_bootstrap_request_that_finds_no_room_is_a_lost_session() -> None:
    """Nobody waits out the timeout for an answer that cannot come."""
    world = World(ScriptedProvider(), settings=ShardSettings(outbox_frames_max=2))
    world.provider.add(machine("m1", S.IDLE))
    session = world.shard.sessions.open(Hello(cluster_id="c1"))
    world.shard.sessions.acknowledge_hello(session)
    world.shard.intake.offer("c1", [need("c1", "4")], digest=b"1", now_unix_nanos=1)
    await world.cycle()

    assert world.outcomes() == [("Bootstrap", "m1", "blob_timeout")]
    assert (world.state("m1"), world.shard._clock.monotonic_seconds()) == (S.IDLE, 0)


@pytest.mark.rule("shard 10.1/7", "shard 10.4/3")
async def test_a_session_that_caught_up_after_an_overflow_is_resynchronised() -> None:
    """What was dropped is told again, as of now."""
    world = bound_world(6, ShardSettings(outbox_frames_max=4))
    await world.step()
    session = world.shard.sessions.open(Hello(cluster_id="c1"))
    take_all(session.outbox)
    for number in range(6):
        world.provider.add(machine(f"m{number}", S.CONFIGURED, cluster="c1", allocatable={"cpu": "2"}))
    await world.step()
    assert session.outbox.dropped == 2

    assert len(take_all(session.outbox)) == 4
    await world.step()
    repeated = take_all(session.outbox)
    assert [frame.machine_id for frame in repeated if isinstance(frame, NodeStateUpdate)] == [
        f"m{number}" for number in range(6)
    ]
    assert repeated[-1] == Acknowledgement(echo=ECHO_RESYNC)


def take_all(outbox: Outbox) -> list[ShardFrame]:
    """Take everything that is there."""
    frames = []
    while (frame := outbox._take()) is not None:
        frames.append(frame)
    return frames


# ---- waiting for operators --------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.2/8", "shard 10.2/2")
async def test_a_blob_is_taken_from_the_session_that_was_asked_only() -> None:
    """An answer with a foreign or an old id is dropped."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    asked, other = world.connect("c1"), world.connect("c2")
    asked.answer = None
    asked.report(need("c1", "4"))
    await world.step()
    action = asyncio.create_task(world.shard.actuator.run_inline())
    await read()
    request = next(frame for frame in asked.frames if isinstance(frame, BootstrapRequest))
    sessions = world.shard.sessions
    sessions.receive_bootstrap_response(asked.session, BootstrapResponse(request_id="id-000000", user_data=b"?"))
    sessions.receive_bootstrap_response(other.session, BootstrapResponse(request_id=request.request_id, user_data=b"?"))
    await read()
    assert not action.done()

    sessions.receive_bootstrap_response(asked.session, BootstrapResponse(request_id=request.request_id, user_data=b"!"))
    sessions.receive_bootstrap_response(asked.session, BootstrapResponse(request_id=request.request_id, user_data=b"2"))
    await action
    assert world.outcomes() == [("Bootstrap", "m1", "success")]


@pytest.mark.rule("shard 9.2/8")
async def test_a_lost_session_ends_the_wait_for_its_blobs() -> None:
    """The machine is rolled back at once, not after the timeout."""
    world = World(ScriptedProvider())
    world.provider.add(machine("m1", S.IDLE))
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.step()
    action = asyncio.create_task(world.shard.actuator.run_inline())
    await read()
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    await action

    assert world.outcomes() == [("Bootstrap", "m1", "blob_timeout")]
    assert (world.state("m1"), world.shard._clock.monotonic_seconds()) == (S.IDLE, 0)


@pytest.mark.rule("shard 9.3/6", "shard 10.1/7")
async def test_a_new_session_gets_the_instruction_of_a_running_drain_again() -> None:
    """The same id, with what is left of the grace, ahead of the machine's state; its answer ends the wait."""
    world = bound_world()
    await world.cycle()
    first = world.connect("c1")
    first.drain = None
    first.report()
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.step()
    await world.shard._clock.sleep(100)
    world.shard.sessions.close(first.session, CloseReason.GONE)
    await world.shard._clock.sleep(20)
    assert world.state("m0") is S.DRAINING
    second = world.connect("c1")
    await world.shard._clock.sleep(50)

    told, again = instructions(first)[0], instructions(second)[0]
    assert (told.instruction_id, told.grace_seconds) == (again.instruction_id, 600)
    assert again.grace_seconds == 480
    kinds = [type(frame).__name__ for frame in second.frames]
    assert kinds[:3] == ["Acknowledgement", "ReclaimInstruction", "NodeStateUpdate"]
    assert (world.outcomes(), world.provider.grace_seconds["m0"]) == ([("Reclaim", "m0", "success")], 475)
    await end(workers)


@pytest.mark.rule("shard 10.2/3")
async def test_only_the_bound_clusters_operator_can_end_a_drain() -> None:
    """A result from elsewhere, for another instruction or another machine is nobody's."""
    world = bound_world()
    await world.cycle()
    owner, stranger = world.connect("c1"), world.connect("c2")
    owner.drain = None
    owner.report()
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.step()
    await world.shard._clock.sleep(1)
    instruction = instructions(owner)[0].instruction_id

    def result(instruction_id: str, machine_id: str) -> DrainResult:
        return DrainResult(instruction_id=instruction_id, machine_id=machine_id, outcome=DrainOutcome.DRAINED)

    receive = world.shard.sessions.receive_drain_result
    assert not receive(stranger.session, result(instruction, "m0"))
    assert not receive(owner.session, result("id-999999", "m0"))
    assert not receive(owner.session, result(instruction, "m1"))
    assert receive(owner.session, result(instruction, "m0"))
    assert not receive(owner.session, result(instruction, "m0"))
    world.shard.sessions.receive_reclaim_ack(owner.session, ReclaimAck(instruction_id=instruction, nodes_started=1))
    await end(workers)


@pytest.mark.rule("shard 9.3/7")
async def test_an_operator_that_cannot_tell_results_is_not_waited_for() -> None:
    """The provider drains at once with the whole grace (docs/spec/shard.md §9.3 D3')."""
    world = bound_world()
    operator = world.connect("c1", "something-unknown")
    operator.report()
    await world.cycle()

    assert (len(instructions(operator)), world.provider.grace_seconds) == (1, {"m0": 600})
    assert world.shard._clock.monotonic_seconds() == 0
