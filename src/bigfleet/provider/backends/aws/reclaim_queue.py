"""Reads EC2's events about spot instances from a queue, and pushes their effects on machines.

docs/spec/aws-provider.md §7. A message is deleted after its push was committed, so that none is lost; a repeated event
has no further effect. An event about an instance that is not a machine's host is ignored.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

import msgspec
import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.provider.backend import Feed
from bigfleet.provider.backends.aws.api import AwsError, Ec2Instance, Message, Queue

_log = structlog.get_logger("bigfleet.provider.backends.aws.reclaim_queue")

REBALANCE: Final = "EC2 Instance Rebalance Recommendation"
WARNING: Final = "EC2 Spot Instance Interruption Warning"
STATE_CHANGE: Final = "EC2 Instance State-change Notification"
REBALANCE_PROBABILITY: Final = 0.5
WARNING_PROBABILITY: Final = 0.99
#: How long after its warning a spot instance is reclaimed.
NOTICE_SECONDS: Final = 120
#: A message that was received more often is given up.
RECEIPTS_MAX: Final = 5
RETRY_SECONDS: Final = 10.0
_SOURCE: Final = "aws.ec2"
_LOST_STATES: Final = frozenset({"stopped", "shutting-down", "terminated"})


class _Detail(msgspec.Struct, rename="kebab"):
    instance_id: str
    state: str = ""


class _Event(msgspec.Struct, rename="kebab"):
    source: str
    detail_type: str
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    detail: msgspec.Raw


@dataclass(frozen=True, slots=True)
class HostOfMachine:
    """An instance, and the machine whose host it is now."""

    machine_id: str
    instance: Ec2Instance


class ReclaimQueue:
    """One queue, read by one task."""

    def __init__(
        self,
        queue: Queue,
        clock: Clock,
        *,
        host: Callable[[str], HostOfMachine | None],
        note_reclaim: Callable[[Ec2Instance], None],
        counts: Counter[str],
        begin: Callable[[], Awaitable[object]],
    ) -> None:
        """`host` finds the machine of an instance id, None when it is not a machine's host, or one that we end.

        `begin` returns once `host` knows every instance: until then an event would be taken for one of others.
        """
        self._queue = queue
        self._clock = clock
        self._host = host
        self._note_reclaim = note_reclaim
        #: Messages by what became of them: pushed, unknown, foreign, no news, poison.
        self._counts = counts
        self._begin = begin

    async def run(self, feed: Feed) -> None:
        """Push what comes until cancelled. A queue that cannot be read is asked again after 10 s."""
        await self._begin()
        while True:
            try:
                messages = await self._queue.receive()
            except AwsError as error:
                _log.error("aws.unread", error=str(error), again_in_seconds=RETRY_SECONDS)
                await self._clock.sleep(RETRY_SECONDS)
                continue
            for message in messages:
                await self._take(message, feed)

    async def _take(self, message: Message, feed: Feed) -> None:
        try:
            outcome = await self._push(message.body, feed)
        except Exception as error:  # one message is not understood or cannot be committed; the queue brings it again
            if message.receipts <= RECEIPTS_MAX:
                _log.warning("aws.message_refused", error=str(error), receipts=message.receipts)
                return
            _log.error("aws.message_given_up", error=str(error), receipts=message.receipts)
            outcome = "poison"
        self._counts[outcome] += 1
        try:
            await self._queue.delete(message.receipt)
        except AwsError as error:
            _log.warning("aws.message_not_deleted", error=str(error))

    async def _push(self, body: str, feed: Feed) -> str:
        """Push one event and return what became of it."""
        event = msgspec.json.decode(body, type=_Event)
        if event.source != _SOURCE or event.detail_type not in (REBALANCE, WARNING, STATE_CHANGE):
            return "foreign"
        detail = msgspec.json.decode(event.detail, type=_Detail)
        found = self._host(detail.instance_id)
        if found is None:
            return "unknown"
        if event.detail_type == REBALANCE:
            await feed.report_interruption(found.machine_id, REBALANCE_PROBABILITY)
        elif event.detail_type == WARNING:
            self._note_reclaim(found.instance)
            at_nanos = round((event.time.timestamp() + NOTICE_SECONDS) * NANOS_PER_SECOND)
            await feed.report_interruption(found.machine_id, WARNING_PROBABILITY, at_nanos)
        elif detail.state in _LOST_STATES:
            await feed.report_lost(found.machine_id, f"{detail.instance_id} is {detail.state}")
        else:
            return "no news"
        return "pushed"
