"""Orders the frames that a session sends: a bounded queue per kind, in the order of docs/spec/operator.md §4.

Bootstrap answers first, then reclaim acks and drain results, then the forecast, then node statuses, then the roll-up.
Adding a frame never waits: a full queue drops frames that may be dropped and reports it; the number of all others is
bounded by the cluster.
"""

import asyncio
from collections import deque
from typing import TypeVar

from bigfleet.model.frames import (
    BootstrapResponse,
    DrainForecast,
    DrainResult,
    NodeStatus,
    OperatorFrame,
    ReclaimAck,
    RollUp,
)

K = TypeVar("K")
T = TypeVar("T")

BOOTSTRAP_ANSWERS_MAX = 256


class OperatorOutbox:
    """Frames of one operator, over its sessions."""

    def __init__(self) -> None:
        self._answers: deque[BootstrapResponse] = deque()
        #: Acks by instruction: a re-sent instruction is acked once more, not twice.
        self._acks: dict[str, ReclaimAck] = {}
        self._results: dict[tuple[str, str], DrainResult] = {}
        self._forecast: DrainForecast | None = None
        self._statuses: dict[str, NodeStatus] = {}
        self._roll_up: RollUp | None = None
        self._filled = asyncio.Event()
        self.dropped_total = 0
        #: Roll-ups that a newer one replaced before they were taken.
        self.replaced_total = 0

    def put(self, frame: BootstrapResponse | ReclaimAck | DrainResult | DrainForecast | NodeStatus | RollUp) -> bool:
        """Queue a frame; False when it was dropped because its queue is full. Newer frames replace older equals."""
        match frame:
            case BootstrapResponse():
                if len(self._answers) >= BOOTSTRAP_ANSWERS_MAX:
                    self.dropped_total += 1
                    return False
                self._answers.append(frame)
            case ReclaimAck():
                self._acks[frame.instruction_id] = frame
            case DrainResult():
                self._results[(frame.instruction_id, frame.machine_id)] = frame
            case DrainForecast():
                self._forecast = frame
            case NodeStatus():
                # Removed first, so that the newer status goes to the tail.
                self._statuses.pop(frame.machine_id, None)
                self._statuses[frame.machine_id] = frame
            case RollUp():
                self.replaced_total += self._roll_up is not None
                self._roll_up = frame
        self._filled.set()
        return True

    async def take(self) -> OperatorFrame:
        """Return the most urgent frame, oldest first within its kind; waits while there is none."""
        while True:
            if self._answers:
                return self._answers.popleft()
            if self._acks:
                return _pop_first(self._acks)
            if self._results:
                return _pop_first(self._results)
            if self._forecast is not None:
                forecast, self._forecast = self._forecast, None
                return forecast
            if self._statuses:
                return _pop_first(self._statuses)
            if self._roll_up is not None:
                roll_up, self._roll_up = self._roll_up, None
                return roll_up
            self._filled.clear()
            await self._filled.wait()

    def session_ended(self) -> None:
        """Drop what means nothing to the next session: answers to its predecessor, statuses, an old roll-up.

        Acks and results stay until they are taken; a result that a broken stream swallowed comes again from the drain
        table when the next session opens.
        """
        self._answers.clear()
        self._forecast = None
        self._statuses.clear()
        self._roll_up = None


def _pop_first(queue: dict[K, T]) -> T:
    return queue.pop(next(iter(queue)))
