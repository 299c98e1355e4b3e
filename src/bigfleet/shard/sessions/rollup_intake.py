"""Accepts roll-ups: deduplicates by digest, validates rows, applies the quarantine, acknowledges.

docs/spec/shard.md §4, steps 1 and 2, and 4 to 6. Sessions, simulation and tests all call `RollUpIntake.judge`. One
`serve` per session empties the slot of step 3. This module does not decide on demand, and a malformed roll-up must
never change it.
"""

from collections.abc import Callable
from functools import partial

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.compute import Compute
from bigfleet.model.frames import MalformedMessage
from bigfleet.model.vector import Vector
from bigfleet.shard import safety_limits
from bigfleet.shard.metrics import SUPERSEDED, ShardMetrics
from bigfleet.shard.sessions.demand import Intake, RollUpOutcome
from bigfleet.shard.sessions.registry import RollUpOffer, Session, Sessions
from bigfleet.shard.sessions.rollup_allowance import (
    TURN_SECONDS_UNANNOUNCED_MAX,
    ReadingTurns,
    RollUpAllowances,
)
from bigfleet.shard.sessions.rollup_reader import read_offer
from bigfleet.shard.status.cycle_publisher import CyclePublisher

_log = structlog.get_logger("bigfleet.shard")

#: A roll-up with more rows is read off the loop; so many rows take it some ten milliseconds.
ROWS_ON_LOOP_MAX = 256
#: So has one with more bytes: each of a hundred thousand values in few rows takes a microsecond or two.
BYTES_ON_LOOP_MAX = 256 * 1024

#: Called with a roll-up and what became of it.
OnRollUp = Callable[[Session, RollUpOffer, RollUpOutcome], None]


class RollUpIntake:
    """The way of every roll-up of one shard."""

    def __init__(
        self,
        *,
        intake: Intake,
        sessions: Sessions,
        publisher: CyclePublisher,
        metrics: ShardMetrics,
        clock: Clock,
        compute: Compute,
        wake: Callable[[], None],
        on_rollup: OnRollUp,
        largest_supply: Callable[[str], Vector],
        refusal_of: Callable[[str], str],
        last_rollups: dict[str, int],
    ) -> None:
        """`wake` asks for a cycle on changed demand; `on_rollup` is called with each roll-up and what became of it.

        `largest_supply` is that of the machines bound to a cluster, per dimension; `refusal_of` returns why no roll-up
        of a cluster is taken, "" when they are. `last_rollups` is written: the wall clock of each cluster's last one.
        """
        self._intake = intake
        self._sessions = sessions
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._compute = compute
        self._wake = wake
        self._on_rollup = on_rollup
        self._largest_supply = largest_supply
        self._refusal_of = refusal_of
        self._allowances = RollUpAllowances(clock)
        self._turns = ReadingTurns(clock)
        self._last_rollups = last_rollups

    def judge(self, session: Session, offer: RollUpOffer) -> RollUpOutcome:
        """Take one roll-up, from route to table, and count what became of it."""
        outcome = self._judge(session, offer)
        if outcome is not RollUpOutcome.MISROUTED:
            self._last_rollups[session.cluster] = self._clock.unix_nanos()
        self._metrics.rollups.labels(outcome.value).inc()
        self._metrics.rollup_quarantined.labels(session.cluster).set(int(self._intake.is_quarantined(session.cluster)))
        self._on_rollup(session, offer, outcome)
        return outcome

    def _judge(self, session: Session, offer: RollUpOffer) -> RollUpOutcome:
        if offer.cluster_id != session.cluster:
            advice = "the roll-up is ignored; a session reports the demand of its own cluster only"
            _log.warning("rollup.misrouted", session=session.cluster, cluster=offer.cluster_id, advice=advice)
            return RollUpOutcome.MISROUTED
        refusal = self._refusal_of(session.cluster)
        if refusal:
            if not session.has_logged_refusal:
                session.has_logged_refusal = True
                _log.warning("rollup.refused", cluster=session.cluster, rows=offer.rows, reason=refusal)
            self._sessions.reject_rollup(session, offer, refusal)
            return RollUpOutcome.RETIRED
        if self._intake.is_unchanged(session.cluster, offer.digest):
            self._publisher.rollup_repeated(session.cluster, offer.timestamp_unix_nanos)
            self._sessions.acknowledge_rollup(session, offer, held=False)
            return RollUpOutcome.UNCHANGED
        try:
            needs, overheads = offer.needs(), offer.overheads()
        except MalformedMessage as fault:
            return self._reject(session, offer, fault)
        verdict = self._intake.offer(
            session.cluster,
            needs,
            overheads=overheads,
            digest=offer.digest,
            now_unix_nanos=self._clock.unix_nanos(),
            largest_supply=partial(self._largest_supply, session.cluster),
        )
        why = self._intake.suspicion(session.cluster)
        if not verdict.is_accepted:
            _log.warning(
                "rollup.quarantined", cluster=session.cluster, verdict=verdict.value, rows=len(needs), reason=why
            )
            self._sessions.acknowledge_rollup(session, offer, held=True)
            return RollUpOutcome.HELD
        if verdict is safety_limits.QuarantineVerdict.ACCEPT_CONFIRMED:
            _log.warning("rollup.confirmed", cluster=session.cluster, rows=len(needs), reason=why)
        rows = self._intake.table.rows_of(session.cluster)
        self._publisher.rollup_accepted(session.cluster, rows, offer.timestamp_unix_nanos)
        self._wake()
        self._sessions.acknowledge_rollup(session, offer, held=False)
        return RollUpOutcome.ACCEPTED

    async def serve(self, session: Session) -> None:
        """Take the session's roll-ups one after the other, newest first in line, until the session ends."""
        while self._sessions.is_current(session):
            await session.rollup_arrived.wait()
            session.rollup_arrived.clear()
            try:
                await self._serve_pending(session)
            except Exception:  # the next roll-up must still find its taker, and the last good demand stays
                _log.exception("rollup.failed", cluster=session.cluster)

    async def _serve_pending(self, session: Session) -> None:
        """Take the roll-up that waits; a newer one takes its place while the cluster waits for its allowance."""
        if session.pending_rollup is None or not self._sessions.is_current(session):
            return
        if not self._is_known(session, session.pending_rollup):
            await self._wait_for_allowance(session)
            if not self._sessions.is_current(session):
                return
            if self._is_large(session, session.pending_rollup):
                self._announce_turn(session, session.pending_rollup)
                async with self._turns.turn(self._allowances.owed(session.cluster)):
                    offer = self._take(session)
                    if offer is not None:
                        await self._judge_apart(session, offer)
                return
        offer = self._take(session)
        if offer is not None:
            self.judge(session, offer)

    def _is_large(self, session: Session, offer: RollUpOffer) -> bool:
        """Return whether a roll-up has to be read off the loop; one that cannot be parsed has not."""
        try:
            if self._is_known(session, offer):
                return False
            return offer.size_bytes > BYTES_ON_LOOP_MAX or offer.rows > ROWS_ON_LOOP_MAX
        except MalformedMessage:
            return False

    def _is_known(self, session: Session, offer: RollUpOffer) -> bool:
        """Return whether a roll-up is known to repeat the one in force, which costs next to nothing."""
        return offer.has_digest and self._intake.knows(session.cluster, offer.digest)

    def _take(self, session: Session) -> RollUpOffer | None:
        """Return the newest roll-up and charge its cluster; None if it is no message, which its operator is sent."""
        offer, session.pending_rollup = session.pending_rollup, None
        assert offer is not None, "only its own task empties the slot of a session"
        if session.superseded:
            self._metrics.rollups.labels(SUPERSEDED).inc(session.superseded)
            session.superseded = 0
        if not self._is_known(session, offer):
            try:
                self._allowances.charge(session.cluster, offer.rows, offer.size_bytes)
            except MalformedMessage as fault:
                self._metrics.rollups.labels(self._reject(session, offer, fault).value).inc()
                return None
        return offer

    def _reject(self, session: Session, offer: RollUpOffer, fault: MalformedMessage) -> RollUpOutcome:
        self._metrics.rollups_rejected.labels(session.cluster).inc()
        _log.warning("rollup.rejected", cluster=session.cluster, place=fault.place, error=fault.fault)
        self._sessions.reject_rollup(session, offer, str(fault))
        return RollUpOutcome.REJECTED

    def _announce_turn(self, session: Session, offer: RollUpOffer) -> None:
        """Send an operator that its large roll-up has to wait for others, if that takes long."""
        wait_seconds = self._turns.expected_seconds()
        if wait_seconds > TURN_SECONDS_UNANNOUNCED_MAX:
            self._sessions.defer_rollup(session, offer, self._turns.reason(wait_seconds))
            self._metrics.shed.labels("reading_turn").inc()

    async def _wait_for_allowance(self, session: Session) -> None:
        """Return when the cluster may have a roll-up read; the operator is sent why it has to wait."""
        wait_seconds = self._allowances.wait_seconds(session.cluster)
        if not wait_seconds:
            return
        offer = session.pending_rollup
        assert offer is not None, "nothing waits that is not there"
        self._sessions.defer_rollup(session, offer, self._allowances.reason(wait_seconds))
        self._metrics.shed.labels("rollup_rows").inc()
        session.is_deferred = True
        try:
            await self._clock.sleep(wait_seconds)
        finally:
            session.is_deferred = False

    async def _judge_apart(self, session: Session, offer: RollUpOffer) -> None:
        """Read a large roll-up off the loop, take it, and read its rows into columns off the loop too."""
        offer = await self._read_apart(session, offer)
        if not self._sessions.is_current(session):
            return
        self.judge(session, offer)
        unread = self._intake.table.unread_rows_of(session.cluster)
        if unread is not None:
            await self._compute(unread.read)

    async def _read_apart(self, session: Session, offer: RollUpOffer) -> RollUpOffer:
        """Read a large roll-up off the loop; one that would not be read at all comes back as it is."""
        digest = await self._compute(lambda: offer.digest)
        is_unread = offer.cluster_id != session.cluster or self._refusal_of(session.cluster)
        if is_unread or self._intake.knows(session.cluster, digest):
            return offer
        return await self._compute(lambda: read_offer(offer))
