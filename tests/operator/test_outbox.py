"""The order in which an operator's frames leave, and what a full queue does."""

import asyncio

import pytest

from bigfleet.model.frames import BootstrapResponse, DrainOutcome, DrainResult, NodeStatus, ReclaimAck, RollUp
from bigfleet.operator.outbox import BOOTSTRAP_ANSWERS_MAX, OperatorOutbox

ANSWER = BootstrapResponse(request_id="r")
ACK = ReclaimAck(instruction_id="i", nodes_started=1)
RESULT = DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.DRAINED)
ROLL_UP = RollUp(cluster_id="c", timestamp_unix_nanos=1, needs=())


def status(machine: str, node: str = "n") -> NodeStatus:
    return NodeStatus(machine_id=machine, node_name=node, ready=True, observed_unix_nanos=1)


async def test_urgent_frames_leave_first() -> None:
    outbox = OperatorOutbox()
    for frame in (ROLL_UP, status("m"), RESULT, ACK, ANSWER):
        outbox.put(frame)

    assert [await outbox.take() for _ in range(5)] == [ANSWER, ACK, RESULT, status("m"), ROLL_UP]


async def test_the_newest_roll_up_and_status_win() -> None:
    outbox = OperatorOutbox()
    newer = RollUp(cluster_id="c", timestamp_unix_nanos=2, needs=())
    for frame in (ROLL_UP, status("m", "old"), status("n"), newer, status("m", "new")):
        outbox.put(frame)

    assert [await outbox.take() for _ in range(3)] == [status("n"), status("m", "new"), newer]


async def test_answers_beyond_the_bound_are_dropped_and_counted() -> None:
    outbox = OperatorOutbox()
    kept = [outbox.put(BootstrapResponse(request_id=str(number))) for number in range(BOOTSTRAP_ANSWERS_MAX + 3)]

    assert kept.count(False) == outbox.dropped_total == 3
    assert await outbox.take() == BootstrapResponse(request_id="0")


async def test_what_only_this_session_understands_ends_with_it() -> None:
    outbox = OperatorOutbox()
    for frame in (ROLL_UP, status("m"), ANSWER, RESULT, ACK):
        outbox.put(frame)
    outbox.session_ended()

    assert [await outbox.take(), await outbox.take()] == [ACK, RESULT]


@pytest.mark.virtual_time
async def test_an_empty_outbox_waits() -> None:
    outbox = OperatorOutbox()
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(5)
    assert not taker.done()
    outbox.put(ACK)

    assert await taker == ACK
