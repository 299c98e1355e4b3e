"""What waits for one operator: bounded, coalescing, and nobody who puts one in waits (docs/spec/shard.md §10.4)."""

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.frames import (
    ECHO_RESYNC,
    Acknowledgement,
    BootstrapRequest,
    NodeStateUpdate,
    ReclaimInstruction,
    ShardFrame,
)
from bigfleet.model.states import MachineState
from bigfleet.shard.sessions.outbox import CloseReason, Outbox, SessionClosed
from tests.engine.proof import in_proportion

pytestmark = pytest.mark.virtual_time

S = MachineState


def node(machine_id: str, state: MachineState = S.CONFIGURED) -> NodeStateUpdate:
    """Return a frame that coalesces by machine."""
    return NodeStateUpdate(machine_id=machine_id, cluster_id="c1", state=state)


def must(number: int) -> ReclaimInstruction:
    """Return a frame that must be delivered."""
    return ReclaimInstruction(
        instruction_id=f"i{number}", nodes=("n",), machine_ids=("m",), provider_ids=("",), grace_seconds=1
    )


def read(outbox: Outbox) -> list[ShardFrame]:
    """Take everything that is there."""
    frames = []
    while (frame := outbox._take()) is not None:
        frames.append(frame)
    return frames


def put(outbox: Outbox, frames: Iterable[ShardFrame]) -> None:
    """Put the frames in, in order."""
    for frame in frames:
        outbox.put(frame)


async def test_frames_leave_in_the_order_in_which_they_came() -> None:
    """Whatever their kind."""
    outbox = Outbox(8)
    request = BootstrapRequest(request_id="r", cluster_id="c1")
    frames: list[ShardFrame] = [Acknowledgement(echo="hello"), node("a"), must(1), node("b"), request]
    put(outbox, frames)

    assert read(outbox) == frames


@pytest.mark.rule("shard 10.4/2")
async def test_a_newer_frame_takes_the_place_of_the_older_at_the_tail() -> None:
    """So it is never delivered ahead of a frame that was queued before it arose."""
    outbox = Outbox(8)
    put(outbox, [node("a", S.CONFIGURED), node("b"), must(1), node("a", S.DRAINING)])

    assert read(outbox) == [node("b"), must(1), node("a", S.DRAINING)]


async def test_a_frame_that_was_taken_is_not_replaced() -> None:
    """What has left stays told; the newer one is one more frame."""
    outbox = Outbox(8)
    outbox.put(node("a", S.CONFIGURING))
    assert await outbox.next() == node("a", S.CONFIGURING)
    outbox.put(node("a", S.CONFIGURED))

    assert read(outbox) == [node("a", S.CONFIGURED)]


@pytest.mark.rule("shard 10.4/2")
async def test_frames_that_must_be_delivered_are_never_replaced() -> None:
    """Equal ones are delivered twice."""
    outbox = Outbox(8)
    put(outbox, [must(1), must(1), Acknowledgement(echo="rollup"), Acknowledgement(echo="rollup")])

    assert len(read(outbox)) == 4


@pytest.mark.rule("shard 10.4/3")
async def test_a_full_outbox_drops_what_coalesces_and_asks_for_a_resync() -> None:
    """The resync follows when half of the room is free again."""
    outbox = Outbox(4)
    put(outbox, [must(1), must(2), node("a"), node("b"), node("c")])
    assert (len(outbox), outbox.dropped) == (4, 1)

    wanted = [outbox.overflowed]
    for _ in range(2):
        await outbox.next()
        wanted.append(outbox.overflowed)
    outbox.start_resync([])
    wanted.append(outbox.overflowed)
    assert wanted == [False, False, True, False]


async def test_a_newer_state_finds_room_in_a_full_outbox() -> None:
    """It replaces its own older frame, which costs nobody anything."""
    outbox = Outbox(2)
    put(outbox, [node("a"), must(1), node("a", S.FAILED)])

    assert (outbox.dropped, read(outbox)) == (0, [must(1), node("a", S.FAILED)])


@pytest.mark.rule("shard 10.4/4")
async def test_a_frame_that_must_be_delivered_pushes_out_the_oldest_that_coalesces() -> None:
    """What is pushed out marks the session for a resync."""
    outbox = Outbox(3)
    put(outbox, [node("a"), node("b"), must(1), must(2)])

    assert (outbox.dropped, read(outbox), outbox.overflowed) == (1, [node("b"), must(1), must(2)], True)


async def test_without_room_for_a_frame_that_must_be_delivered_the_session_ends() -> None:
    """Nothing else is left to push out; whoever asked for it hears of it."""
    told = []
    outbox = Outbox(2, lambda: told.append(True))
    put(outbox, [must(1), must(2), must(3), must(4)])

    assert (outbox.closed, told) == (CloseReason.OVERFLOWED, [True])
    with pytest.raises(SessionClosed) as closed:
        await outbox.next()
    assert closed.value.reason is CloseReason.OVERFLOWED
    assert await outbox.ended() is CloseReason.OVERFLOWED


async def test_the_first_reason_to_close_stays() -> None:
    """And nothing can be put in any more."""
    outbox = Outbox(2)
    outbox.close(CloseReason.REPLACED)
    outbox.close(CloseReason.GONE)
    outbox.put(must(1))

    assert (outbox.closed, len(outbox)) == (CloseReason.REPLACED, 0)


async def test_a_closed_outbox_says_nothing_more_of_its_resync() -> None:
    """Nothing of an old stream goes on once its successor is there."""
    outbox = Outbox(4)
    outbox.start_resync([partial(node, "a"), partial(node, "b")])
    assert await outbox.next() == node("a")
    outbox.close(CloseReason.REPLACED)

    with pytest.raises(SessionClosed):
        await outbox.next()


async def test_a_writer_that_waits_hears_of_a_frame_of_a_resync_and_of_the_end() -> None:
    """Each of the three wakes it."""
    outbox = Outbox(4)
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.put(must(1))
    assert await waiting == must(1)

    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.start_resync([])
    assert await waiting == Acknowledgement(echo=ECHO_RESYNC)

    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.close(CloseReason.STOPPING)
    with pytest.raises(SessionClosed):
        await waiting


@pytest.mark.rule("shard 10.1/6")
async def test_a_resync_shows_each_machine_as_of_sending() -> None:
    """It needs no room in the queue, leaves out what is no longer bound, and its ack comes last."""
    states = {"a": S.CONFIGURING, "b": S.CONFIGURED, "c": S.CONFIGURED}

    def shown(name: str) -> NodeStateUpdate | None:
        return node(name, states[name]) if states[name] else None

    outbox = Outbox(1)
    outbox.start_resync([partial(shown, name) for name in "abc"])
    assert await outbox.next() == node("a", S.CONFIGURING)
    states["b"], states["c"] = S.UNSPECIFIED, S.DRAINING

    assert read(outbox) == [node("c", S.DRAINING), Acknowledgement(echo=ECHO_RESYNC)]


@pytest.mark.rule("shard 10.1/6")
async def test_queued_frames_go_ahead_of_a_resync() -> None:
    """A resync tells the present, so nothing older may follow it for the same machine."""
    outbox = Outbox(4)
    outbox.put(node("a", S.CONFIGURING))
    outbox.start_resync([partial(node, "a", S.CONFIGURED)])

    assert read(outbox) == [node("a", S.CONFIGURING), node("a", S.CONFIGURED), Acknowledgement(echo=ECHO_RESYNC)]


operations = st.one_of(
    st.tuples(st.just("node"), st.sampled_from("abc"), st.sampled_from((S.CONFIGURED, S.DRAINING))),
    st.tuples(st.just("must"), st.integers(0, 99)),
    st.tuples(st.just("take")),
)


@pytest.mark.rule("shard 10.4/2")
@given(frames_max=st.integers(1, 5), story=st.lists(operations, max_size=40))
@settings(max_examples=in_proportion(200), deadline=None)
def test_the_outbox_follows_its_model(frames_max: int, story: list[tuple[object, ...]]) -> None:
    """Against a plain list: order, coalescing to the tail, what is dropped, when the session ends, who waits."""
    waiting = set[Outbox]()
    outbox, model, is_over, dropped = Outbox(frames_max, waiting=waiting), list[ShardFrame](), False, 0
    for step in story:
        match step:
            case ("node", str(name), MachineState() as state):
                frame: ShardFrame = node(name, state)
                outbox.put(frame)
                if not is_over:
                    model = [known for known in model if getattr(known, "machine_id", None) != name]
                    if len(model) < frames_max:
                        model.append(frame)
                    else:
                        dropped += 1
            case ("must", int(number)):
                frame = must(number)
                outbox.put(frame)
                if not is_over and len(model) >= frames_max:
                    oldest = next((known for known in model if isinstance(known, NodeStateUpdate)), None)
                    if oldest is None:
                        is_over, model = True, []
                    else:
                        model.remove(oldest)
                        dropped += 1
                if not is_over:
                    model.append(frame)
            case _:
                taken = outbox._take()
                assert taken == (model.pop(0) if model else None)
        assert len(outbox) <= frames_max
        assert (len(outbox), outbox.closed is not None, outbox.dropped) == (len(model), is_over, dropped)
        assert waiting == ({outbox} if model else set())
    assert read(outbox) == model
