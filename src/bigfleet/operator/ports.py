"""Defines what an operator's session needs, as Protocols: a shard to talk to, and a cluster to report for.

Production implements them with gRPC and the Kubernetes API; tests and the simulation use plain values. This module
does no I/O.
"""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Protocol

from bigfleet.model.frames import (
    Acknowledgement,
    AvailableCapacity,
    BootstrapRequest,
    BootstrapResponse,
    DrainForecastRequest,
    NeedStatusUpdate,
    NodeStateUpdate,
    NodeStatus,
    OperatorFrame,
    RollUp,
    ShardFrame,
)
from bigfleet.operator.drains import DrainRecord


class EndKind(Enum):
    """The reason why a session ended, as far as it changes what the operator does next."""

    #: Another operator with this cluster id took over (ABORTED).
    REPLACED = "replaced"
    #: The shard refuses this identity (PERMISSION_DENIED).
    DENIED = "denied"
    #: Everything else: the network, a restart, an overflow, a timeout.
    LOST = "lost"


class SessionEnded(Exception):
    """The stream has ended; the message gives the reason, for a log."""

    def __init__(self, kind: EndKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SessionStream(Protocol):
    """One open stream. Each method raises SessionEnded once it is over; both may run at the same time."""

    async def send(self, frame: OperatorFrame) -> None:
        """Hand a frame to the transport; waits only for its flow control."""
        ...

    async def receive(self) -> ShardFrame | None:
        """Return the next frame, None for one of an unknown kind."""
        ...


class SessionDialer(Protocol):
    """Opens streams to the shard that this cluster is bound to."""

    def dial(self) -> AbstractAsyncContextManager[SessionStream]:
        """Open a stream with credentials read again; entering or using it raises SessionEnded when that fails."""
        ...


class ClusterAgent(Protocol):
    """The cluster behind a session.

    Every method but `bootstrap` notes what it is sent and returns: it is called by the receive loop, which never waits.
    Work that takes time belongs into a task of the agent's own.
    """

    def roll_up(self) -> RollUp | None:
        """Return the complete demand, or None while the view may be partial: an unread cluster is not an empty one."""
        ...

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return what boots the machine, or an answer with an error that names the cause for a person."""
        ...

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Hear that the shard has answered the Hello."""
        ...

    def session_closed(self, ended: SessionEnded) -> None:
        """Hear that the session is over, whether or not it was ever opened."""
        ...

    def acknowledged(self, ack: Acknowledgement) -> None:
        """Hear of a roll-up that was acked, held or rejected."""
        ...

    def node_state(self, update: NodeStateUpdate) -> None:
        """Hear the state of a machine that is or was bound to the cluster."""
        ...

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Hear that every bound machine has been sent since the session opened, and which were named."""
        ...

    def node_statuses(self) -> Iterable[NodeStatus]:
        """Return the status of every node that is tied to a machine."""
        ...

    def available(self, hint: AvailableCapacity) -> None:
        """Hear a hint of what could serve a need."""
        ...

    def need_status(self, update: NeedStatusUpdate) -> None:
        """Hear the shard's verdict on the needs of one roll-up; a later one takes its place."""
        ...

    def drain_forecast(self, request: DrainForecastRequest) -> None:
        """Hear a question about drains; its answer goes to `SessionClient.forecast_made`, a newer one replaces it."""
        ...

    def drain_started(self, drain: DrainRecord) -> None:
        """Hear of a drain to begin, or of an earlier deadline for one that runs.

        Its result is reported to `SessionClient.drain_finished`, a node that cannot be found at once.
        """
        ...

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Hear that a drain is moot: its machine is gone or free, or the drain was given up (`withdrawn`)."""
        ...
