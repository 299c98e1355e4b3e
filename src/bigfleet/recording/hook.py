"""Passes the input and the answer of each decision to a recorder (docs/adr/0134).

It passes references to immutable values, so the cost to a cycle is negligible. This module must not read them.
"""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options
from bigfleet.model.need import Need


class CycleInput(NamedTuple):
    """What one cycle asks the engine, held by reference; none of it changes."""

    cycle: int
    at_unix_nanos: int
    is_timer: bool
    snapshot: ColumnSnapshot
    #: In list order.
    demand: Sequence[Need]
    options: Options


class CycleTaker(Protocol):
    """Where a shard hands over its cycles; it must return at once and raise nothing. None: the engine failed."""

    def take(self, asked: CycleInput, decision: Decision | None, /) -> None: ...


async def recorded(
    taker: CycleTaker | None, asked: CycleInput, deciding: Awaitable[tuple[CycleInput, Decision]]
) -> tuple[CycleInput, Decision]:
    """Return what was asked at last and its decision, having handed both over; raises what deciding raises."""
    if taker is None:
        return await deciding
    try:
        last, decision = await deciding
    except Exception:
        taker.take(asked, None)
        raise
    taker.take(last, decision)
    return last, decision
