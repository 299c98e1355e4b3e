"""Reads the moves of a run from the coordinator, counts each once, and stores them.

The coordinator forgets them when its process ends. Apart from assigning a zone to each shard before a run begins,
this module does not change anything.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from grpc import StatusCode, aio

from bigfleet.cli.get.moves import Move, MoveState, moves_in
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.observer import child_channel
from bigfleet.model import labels
from bigfleet.model.clock import Clock
from bigfleet.rpc.wire.gen import coordinator_pb2, coordinator_pb2_grpc

CALL_SECONDS_MAX: Final = 5.0
#: Of a look at the moves: the shards' figures wait for it, and they must not stand still while a coordinator hangs.
LOOK_SECONDS_MAX: Final = 1.0
#: Shards register with their first report, and hear of their zone with a later one.
ASSIGN_SECONDS_MAX: Final = 60.0
#: Moves that are stored; the oldest go.
MOVES_MAX: Final = 1000
_POLL_SECONDS: Final = 0.2


class MoveTally:
    """Every move that was seen, oldest first."""

    def __init__(self, *, moved_before: int = 0) -> None:
        self._moves: dict[str, Move] = {}
        #: Over resumed runs; the moves are those of this one.
        self.machines_moved_total = moved_before

    @property
    def moves(self) -> tuple[Move, ...]:
        """The stored moves, oldest first."""
        return tuple(self._moves.values())

    def take(self, answer: coordinator_pb2.ListInstructionsResponse) -> list[Move]:
        """Store the listed moves; return those that are new or have progressed."""
        changed: list[Move] = []
        for move in moves_in(answer):
            known = self._moves.get(move.move_id)
            if known is None:
                self._moves[move.move_id] = move
            elif known.state is MoveState.ARRIVED or (known.state, known.reason) == (move.state, move.reason):
                continue
            else:
                # What a later leader knows of it is less: the half of the recipient alone.
                move = replace(known, state=move.state, machines=move.machines, reason=move.reason)
                self._moves[move.move_id] = move
            changed.append(move)
            if move.state is MoveState.ARRIVED:
                self.machines_moved_total += move.machines
        while len(self._moves) > MOVES_MAX:
            del self._moves[next(iter(self._moves))]
        return changed


class CoordinatorWatch:
    """Reads the moves of one coordinator and stores them, also while it cannot be reached."""

    def __init__(self, address: str, clock: Clock, *, moved_before: int = 0) -> None:
        """`moved_before` are the machines that former runs have seen move."""
        self._clock = clock
        self._channel = child_channel(address)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.tally = MoveTally(moved_before=moved_before)
        #: Moves that are new or have got further, for a caller that prints them one by one; at most `MOVES_MAX`.
        self.news: list[Move] = []
        #: False while the last read failed.
        self.answers = False

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def look(self) -> None:
        """Read once."""
        request = coordinator_pb2.ListInstructionsRequest(include_finished=True)
        try:
            answer = await self._stub.ListInstructions(request, timeout=LOOK_SECONDS_MAX)
        except aio.AioRpcError:
            self.answers = False
            return
        self.answers = True
        self.news = [*self.news, *self.tally.take(answer)][-MOVES_MAX:]

    def take_news(self) -> list[Move]:
        """Return the news since the last asking."""
        news, self.news = self.news, []
        return news

    async def assign_zones(self, zones: Mapping[str, str]) -> frozenset[str]:
        """Give each shard, by id, its zone; return the shards that have theirs, once that is written down.

        A zone that somebody has given to another shard stays there. Raises RunFault when a shard does not register, or
        the coordinator says no.
        """
        having: set[str] = set()
        started_seconds = self._clock.monotonic_seconds()
        for shard_id, zone in zones.items():
            request = coordinator_pb2.AssignDomainRequest(
                topology_key=labels.ZONE, topology_value=zone, shard_id=shard_id
            )
            while True:
                try:
                    await self._stub.AssignDomain(request, timeout=CALL_SECONDS_MAX)
                    having.add(shard_id)
                    break
                except aio.AioRpcError as error:
                    if error.code() is StatusCode.ALREADY_EXISTS:
                        break
                    waits = (StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION, StatusCode.UNAVAILABLE)
                    waited_seconds = self._clock.monotonic_seconds() - started_seconds
                    if error.code() not in waits or waited_seconds > ASSIGN_SECONDS_MAX:
                        raise RunFault(f"zone {zone} cannot be given to {shard_id}: {error.details()}") from error
                await self._clock.sleep(_POLL_SECONDS)
        return frozenset(having)
