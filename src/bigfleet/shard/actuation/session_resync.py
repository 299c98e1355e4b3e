"""Sends a session its complete state: first its drains in progress, then its machines.

docs/spec/shard.md §10.3, §10.4. Each frame is built when the stream takes it, so its content is current. Before the
first List no session is sent any machine, because the ack of a resync confirms that all were named. `Ingest` and
`Executors` decide the content of a frame.
"""

from functools import partial

from bigfleet.model.clock import Clock
from bigfleet.shard.actuation.executors import Executors
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.sessions.registry import Session, Sessions
from bigfleet.shard.status.cycle_publisher import CyclePublisher


class SessionResync:
    """Starts resyncs of one shard's sessions."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        publisher: CyclePublisher,
        executors: Executors,
        ingest: Ingest,
        inventory: Inventory,
    ) -> None:
        self._sessions = sessions
        self._publisher = publisher
        self._executors = executors
        self._ingest = ingest
        self._inventory = inventory

    async def begin(self, clock: Clock) -> None:
        """Send every session its machines: the first List has been applied."""
        self._sessions.are_shown_machines = True
        for session in self._sessions:
            self.start(session)
            # Each takes a moment that grows with its cluster.
            await clock.sleep(0)

    def session_opened(self, session: Session) -> None:
        """Start the resync of a new session, unless `begin` will."""
        if self._sessions.are_shown_machines:
            self.start(session)

    def start(self, session: Session) -> None:
        """Queue drains and machines of the session's cluster, as they are when the stream takes them."""
        again, show, cluster = self._executors.instruction_again, self._ingest.state_for, session.cluster
        session.outbox.start_resync(
            [
                *(partial(again, machine_id) for machine_id in self._executors.drain_waits_of(cluster)),
                *(partial(show, machine_id, cluster) for machine_id in self._inventory.bound_to(cluster)),
            ]
        )

    def repair(self) -> None:
        """Start one for each session that lost frames and has room again."""
        for session in self._sessions.overflowed():
            self.start(session)
            self._publisher.frames_lost(session)
