"""Records the last calls of one behaviour with their answers, for the report of a failure.

Metadata and blobs are shown by size. This module must not change a call.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from bigfleet.conformance.expecting import how, shown
from bigfleet.conformance.ports import (
    Answer,
    CallToken,
    Configure,
    Drain,
    Get,
    List,
    MachineSeen,
    ProviderClient,
    Request,
    Status,
)
from bigfleet.model.clock import Clock

CALLS_RETAINED_MAX = 50
#: A client has deadlines of its own; this one ends a call that no client ends.
CALL_SECONDS_MAX = 30.0
LIST_SECONDS_MAX = 120.0


class CallLog:
    """Carries calls over the connections of a site and keeps the last of them."""

    def __init__(self, connections: Sequence[ProviderClient], clock: Clock) -> None:
        self._connections = connections
        self._clock = clock
        self._started_seconds = clock.monotonic_seconds()
        self._lines: deque[str] = deque(maxlen=CALLS_RETAINED_MAX)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each of the last calls, in the order in which they ended."""
        return tuple(self._lines)

    async def call(self, request: Request, via: int = 0) -> Answer:
        """Carry a request over connection `via` and return its answer."""
        started_seconds = self._clock.monotonic_seconds()
        seconds_max = LIST_SECONDS_MAX if isinstance(request, List) else CALL_SECONDS_MAX
        try:
            async with asyncio.timeout(seconds_max):
                answer = await self._connections[via % len(self._connections)].call(request)
        except TimeoutError:
            answer = Answer(status=Status.DEADLINE_EXCEEDED, details=f"no answer in {seconds_max:g} s")
        ended_seconds = self._clock.monotonic_seconds()
        self._lines.append(
            f"{started_seconds - self._started_seconds:9.3f} s +{(ended_seconds - started_seconds) * 1000:.1f} ms "
            f"#{via} {_request_text(request)} → {_answer_text(answer)}"
        )
        return answer


def _request_text(request: Request) -> str:
    name = type(request).__name__
    if isinstance(request, List):
        states = "|".join(state.name for state in request.states) or "any"
        since = request.since[:32].hex() or "-"
        return f"List(states={states}, max={request.results_max}, since={since})"
    if isinstance(request, Get):
        return f"Get({shown(request.machine_id)})"
    text = f"{name}({shown(request.machine_id)}"
    if isinstance(request, Configure):
        size_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in request.metadata.items())
        text += f", cluster={shown(request.cluster)}, metadata={len(request.metadata)} keys {size_bytes} B"
        text += f", blob={len(request.blob)} B"
    elif isinstance(request, Drain):
        text += f", grace={request.grace_seconds} s"
    return f"{text}, token={_token_text(request.token)})"


def _token_text(token: CallToken) -> str:
    return f"{token.shard_id}:{token.epoch}:{token.sequence}" if token != CallToken() else "absent"


def _answer_text(answer: Answer) -> str:
    if not answer.is_ok:
        return shown(how(answer))
    if answer.listing is not None:
        return f"OK {len(answer.listing.machines)} machines, {len(answer.listing.removed_ids)} removed"
    text = f"OK {answer.operation_id}".rstrip()
    return f"{text} {machine_text(answer.machine)}" if answer.machine is not None else text


def machine_text(machine: MachineSeen) -> str:
    """Return a machine in some words."""
    text = f"{machine.id} {machine.state.name}"
    if machine.host is not None:
        text += f" host={shown('/'.join(machine.host))}"
    if machine.cluster or machine.metadata:
        text += f" cluster={shown(machine.cluster)} metadata={len(machine.metadata)} keys"
    if machine.last_error:
        text += f" last_error={shown(machine.last_error)}"
    return text
