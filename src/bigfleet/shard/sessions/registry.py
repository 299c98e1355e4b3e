"""Registers the sessions of operators, at most one per cluster, and routes their answers to pending calls.

docs/spec/shard.md §10. A new session replaces the old one at once, and no further frame of the old stream is processed;
a late removal of the old session never removes its successor. The receive path only routes: a slow roll-up never delays
a bootstrap answer.
"""

import asyncio
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from bigfleet.model.frames import (
    CAPABILITY_DRAIN_FORECAST,
    CAPABILITY_DRAIN_RESULT,
    CAPABILITY_NEED_STATUS,
    CAPABILITY_NODE_STATUS,
    ECHO_HELLO,
    ECHO_ROLLUP,
    ECHO_ROLLUP_DEFERRED,
    ECHO_ROLLUP_REJECTED,
    Acknowledgement,
    BootstrapResponse,
    DrainForecast,
    DrainResult,
    Hello,
    NodeStateUpdate,
    NodeStatus,
    ReclaimAck,
)
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead
from bigfleet.shard.sessions.outbox import CloseReason, Outbox

SHARD_CAPABILITIES = frozenset(
    {CAPABILITY_NODE_STATUS, CAPABILITY_DRAIN_RESULT, CAPABILITY_NEED_STATUS, CAPABILITY_DRAIN_FORECAST}
)

_log = structlog.get_logger("bigfleet.shard.sessions.registry")


class RollUpOffer(Protocol):
    """A roll-up as it came off the wire: its rows are read only when its bytes are new."""

    @property
    def cluster_id(self) -> str: ...

    @property
    def timestamp_unix_nanos(self) -> int: ...

    @property
    def rows(self) -> int:
        """How many rows it has as received, before anybody has read them."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes it has as received; at hand before it is parsed."""
        ...

    @property
    def digest(self) -> bytes:
        """Over the message without its timestamp."""
        ...

    @property
    def has_digest(self) -> bool:
        """Whether the digest is at hand; making it takes its time with the rows."""
        ...

    def needs(self) -> tuple[Need, ...]:
        """Read and check every row. Raises MalformedMessage naming row and field."""
        ...

    def overheads(self) -> tuple[Overhead, ...]:
        """Return what DaemonSets take, in canonical order. Raises MalformedMessage as `needs` does."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """One operator's stream."""

    cluster: str
    capabilities: frozenset[str]
    outbox: Outbox
    #: The newest roll-up that was not taken yet.
    pending_rollup: RollUpOffer | None = None
    #: When it was opened, on the shard's monotonic clock.
    opened_seconds: float = 0.0
    #: Whether it was logged that its roll-ups are refused, because its cluster is retired.
    has_logged_refusal: bool = False
    #: Whether its roll-up waits because the cluster has used up its allowance.
    is_deferred: bool = False
    #: Roll-ups that newer ones replaced unread and that were not counted yet.
    superseded: int = 0
    rollup_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    #: Request ids of bootstrap requests that this session has to answer.
    bootstrap_requests: set[str] = field(default_factory=set)

    def can(self, capability: str) -> bool:
        """Return whether the operator named the capability."""
        return capability in self.capabilities


class SessionLost(Exception):
    """The session that had to answer has ended."""


class Sessions:
    """Every connected operator, by cluster."""

    def __init__(
        self,
        *,
        epoch: int,
        outbox_frames_max: int,
        accepted_term: Callable[[], int] = lambda: 0,
        on_open: Callable[[Session], None] = lambda _session: None,
        on_node_status: Callable[[Session, NodeStatus], bool] = lambda _session, _status: False,
        on_lifecycle: Callable[[str, Session], None] = lambda _event, _session: None,
        are_shown_machines: bool = True,
    ) -> None:
        """`accepted_term` returns the coordinator's term that the shard has accepted, 0 before the first.

        `on_open` is called for each session that opened, after its hello was acked. `on_node_status` takes each status
        and returns whether it names a machine of the session's cluster. `on_lifecycle` is called with (event, session):
        installed, removed, replaced, overflowed, unresponsive. `are_shown_machines` may be set later.
        """
        self._epoch = epoch
        self._outbox_frames_max = outbox_frames_max
        self._sessions: dict[str, Session] = {}
        self._bootstraps: dict[str, asyncio.Future[BootstrapResponse]] = {}
        #: By (instruction, machine): the cluster whose operator has to answer, and where its answer goes.
        self._drains: dict[tuple[str, str], tuple[str, asyncio.Future[DrainResult]]] = {}
        self._stopping = False
        #: Whether changes of machines are sent; not before the first List, after which each session is sent all.
        self.are_shown_machines = are_shown_machines
        #: Of the sessions' outboxes, those in which frames wait.
        self._waiting: set[Outbox] = set()
        #: Sessions that lost frames, by cluster, until everything is sent to them again.
        self._lossy: dict[str, Session] = {}
        self._accepted_term = accepted_term
        self._on_open = on_open
        self.on_node_status = on_node_status
        self._on_lifecycle = on_lifecycle
        self._take_forecast: Callable[[Session, DrainForecast], bool] = lambda _session, _forecast: False

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def clusters(self) -> KeysView[str]:
        """The clusters that have a session; a live view."""
        return self._sessions.keys()

    @property
    def fullest_outbox(self) -> int:
        """How many frames wait in the fullest outbox. Cost: the outboxes in which any wait."""
        return max(map(len, self._waiting), default=0)

    def overflowed(self) -> list[Session]:
        """Return the sessions that lost frames and have room for everything to be sent again."""
        self._lossy = {cluster: session for cluster, session in self._lossy.items() if session.outbox.has_lost}
        return [session for session in self._lossy.values() if session.outbox.overflowed]

    def of(self, cluster: str) -> Session | None:
        """Return the cluster's session, or None."""
        return self._sessions.get(cluster)

    def shown(self, cluster: str) -> Session | None:
        """Return the cluster's session if changes of machines are sent to it, or None."""
        return self._sessions.get(cluster) if self.are_shown_machines else None

    @property
    def is_stopping(self) -> bool:
        """Return whether new sessions are refused."""
        return self._stopping

    def open(self, hello: Hello) -> Session:
        """Install a session for the cluster; a former one ends as replaced."""
        former = self._sessions.get(hello.cluster_id)
        session = Session(
            hello.cluster_id,
            hello.capabilities,
            Outbox(
                self._outbox_frames_max,
                on_overflow=lambda: self.close(session, CloseReason.OVERFLOWED),
                on_loss=lambda: self._lossy.update({session.cluster: session}),
                waiting=self._waiting,
            ),
        )
        self._sessions[hello.cluster_id] = session
        if former is not None:
            self._end(former, CloseReason.REPLACED)
            _log.info("session.closed", cluster=former.cluster, reason=CloseReason.REPLACED.value)
            self._on_lifecycle("replaced", former)
        self._on_lifecycle("installed", session)
        known = session.capabilities & SHARD_CAPABILITIES
        unknown = len(session.capabilities - known)
        _log.info("session.opened", cluster=session.cluster, capabilities=sorted(known), unknown_capabilities=unknown)
        self.acknowledge_hello(session)
        self._on_open(session)
        return session

    def acknowledge_hello(self, session: Session) -> None:
        """Queue the ack of a Hello."""
        session.outbox.put(
            Acknowledgement(
                echo=ECHO_HELLO,
                coordinator_term=self._accepted_term(),
                shard_epoch=self._epoch,
                capabilities=SHARD_CAPABILITIES,
            )
        )

    def close(self, session: Session, reason: CloseReason) -> None:
        """End a session; a newer session of its cluster stays."""
        self._end(session, reason)
        if self._sessions.get(session.cluster) is session:
            del self._sessions[session.cluster]
            self._on_lifecycle("removed", session)
            if reason in (CloseReason.OVERFLOWED, CloseReason.UNRESPONSIVE):
                self._on_lifecycle(reason.value, session)
            _log.info("session.closed", cluster=session.cluster, reason=reason.value)

    def stop(self) -> None:
        """Refuse new sessions and end every stream."""
        self._stopping = True
        for session in list(self._sessions.values()):
            self.close(session, CloseReason.STOPPING)

    def is_current(self, session: Session) -> bool:
        """Return whether frames of this session are still processed."""
        return self._sessions.get(session.cluster) is session

    # ---- frames in ----------------------------------------------------------------------------------------------

    def receive_rollup(self, session: Session, offer: RollUpOffer) -> None:
        """Put a roll-up into the session's slot; a newer one replaces one that was not taken."""
        session.superseded += session.pending_rollup is not None
        session.pending_rollup = offer
        session.rollup_arrived.set()

    def receive_bootstrap_response(self, session: Session, response: BootstrapResponse) -> None:
        """Hand a blob to the action that waits for it; an answer without one is dropped."""
        waiter = self._bootstraps.get(response.request_id)
        if waiter is not None and response.request_id in session.bootstrap_requests and not waiter.done():
            waiter.set_result(response)

    def receive_reclaim_ack(self, session: Session, ack: ReclaimAck) -> None:
        """Record that a drain has begun."""
        _log.debug(
            "session.drain_started", cluster=session.cluster, instruction=ack.instruction_id, nodes=ack.nodes_started
        )

    def receive_drain_result(self, session: Session, result: DrainResult) -> bool:
        """Hand a drain's result to the action that waits for it; return whether one did."""
        cluster, waiter = self._drains.get((result.instruction_id, result.machine_id), ("", None))
        if waiter is None or waiter.done() or cluster != session.cluster:
            return False
        waiter.set_result(result)
        return True

    def listen_to_forecasts(self, take: Callable[[Session, DrainForecast], bool]) -> None:
        """Hand each forecast to `take`, which returns whether its question waited for it."""
        self._take_forecast = take

    def receive_drain_forecast(self, session: Session, forecast: DrainForecast) -> bool:
        """Hand a forecast to the part that asked; return whether its question waited for it."""
        return self._take_forecast(session, forecast)

    # ---- frames out ---------------------------------------------------------------------------------------------

    def send_node_state(self, update: NodeStateUpdate) -> None:
        """Queue a node's state for its cluster; without a session it is dropped and a resync repairs it."""
        session = self.shown(update.cluster_id)
        if session is not None:
            session.outbox.put(update)

    def acknowledge_rollup(self, session: Session, offer: RollUpOffer, *, held: bool) -> None:
        """Queue the ack of a roll-up that was taken or held."""
        session.outbox.put(
            Acknowledgement(
                echo=ECHO_ROLLUP,
                shard_epoch=self._epoch,
                rollup_timestamp_unix_nanos=offer.timestamp_unix_nanos,
                held=held,
            )
        )

    def reject_rollup(self, session: Session, offer: RollUpOffer, error: str) -> None:
        """Queue the refusal of a malformed roll-up, for an operator that understands it (capability need-status)."""
        self._answer_rollup(session, offer, ECHO_ROLLUP_REJECTED, error)

    def defer_rollup(self, session: Session, offer: RollUpOffer, reason: str) -> None:
        """Queue that the roll-up waits, or a newer one in its place, for an operator that understands it."""
        self._answer_rollup(session, offer, ECHO_ROLLUP_DEFERRED, reason)

    def announce_rest(self, session: Session, reason: str) -> None:
        """Queue that no frame of the session is read for a while, for an operator that understands it."""
        self._answer_rollup(session, None, ECHO_ROLLUP_DEFERRED, reason)

    def _answer_rollup(self, session: Session, offer: RollUpOffer | None, echo: str, error: str) -> None:
        if session.can(CAPABILITY_NEED_STATUS):
            session.outbox.put(
                Acknowledgement(
                    echo=echo,
                    shard_epoch=self._epoch,
                    rollup_timestamp_unix_nanos=0 if offer is None else offer.timestamp_unix_nanos,
                    error=error,
                )
            )

    # ---- waiting for operators ----------------------------------------------------------------------------------

    async def await_blob(self, session: Session, request_id: str, timeout_seconds: float) -> BootstrapResponse:
        """Return the answer to a bootstrap request. Raises TimeoutError, or SessionLost when the session ended."""
        if session.outbox.closed is not None:
            # The request itself may have been the frame that found no room.
            raise SessionLost(session.cluster)
        future: asyncio.Future[BootstrapResponse] = asyncio.get_running_loop().create_future()
        self._bootstraps[request_id] = future
        session.bootstrap_requests.add(request_id)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await future
        finally:
            del self._bootstraps[request_id]
            session.bootstrap_requests.discard(request_id)

    def drain_future(self, cluster: str, instruction_id: str, machine_id: str) -> "asyncio.Future[DrainResult]":
        """Return the future that the drain's result from this cluster sets; `forget_drain` must follow."""
        future: asyncio.Future[DrainResult] = asyncio.get_running_loop().create_future()
        self._drains[(instruction_id, machine_id)] = (cluster, future)
        return future

    def forget_drain(self, instruction_id: str, machine_id: str) -> None:
        """Drop a drain's waiter."""
        self._drains.pop((instruction_id, machine_id), None)

    def _end(self, session: Session, reason: CloseReason) -> None:
        session.outbox.close(reason)
        session.rollup_arrived.set()
        for request_id in list(session.bootstrap_requests):
            waiter = self._bootstraps.get(request_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(SessionLost(session.cluster))
