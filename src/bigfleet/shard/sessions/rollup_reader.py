"""Reads a large roll-up off the loop, so that the loop stays responsive (docs/spec/shard.md §4).

The result is offered like any other roll-up. A fault is stored and raised when the rows are requested. This module does
not accept or reject a roll-up.
"""

from dataclasses import dataclass

from bigfleet.model.frames import MalformedMessage
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead
from bigfleet.shard.sessions.registry import RollUpOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOffer:
    """A roll-up whose rows are read already."""

    cluster_id: str
    timestamp_unix_nanos: int
    rows: int
    size_bytes: int
    digest: bytes
    outcome: tuple[Need, ...] | MalformedMessage
    read_overheads: tuple[Overhead, ...] = ()
    has_digest: bool = True

    def needs(self) -> tuple[Need, ...]:
        """Return the rows. Raises MalformedMessage naming row and field."""
        if isinstance(self.outcome, MalformedMessage):
            raise self.outcome
        return self.outcome

    def overheads(self) -> tuple[Overhead, ...]:
        """Return the overheads. Raises MalformedMessage naming row and field."""
        if isinstance(self.outcome, MalformedMessage):
            raise self.outcome
        return self.read_overheads


def read_offer(offer: RollUpOffer) -> ReadOffer:
    """Read and check every row of a roll-up; it may run in any thread that has the roll-up for itself."""
    overheads: tuple[Overhead, ...] = ()
    try:
        outcome: tuple[Need, ...] | MalformedMessage = offer.needs()
        overheads = offer.overheads()
    except MalformedMessage as fault:
        outcome = fault
    return ReadOffer(
        cluster_id=offer.cluster_id,
        timestamp_unix_nanos=offer.timestamp_unix_nanos,
        rows=offer.rows,
        size_bytes=offer.size_bytes,
        digest=offer.digest,
        outcome=outcome,
        read_overheads=overheads,
    )
