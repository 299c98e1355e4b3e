"""Provides readers with connected and missing operators, and since when.

docs/spec/shard.md §10.7 and §12. Read from the live registry at the time of the call, on the shard's loop; one entry
per cluster. This module does not open, ends or validates a session.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypedDict

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.shard.sessions.demand import Intake
from bigfleet.shard.sessions.registry import Session, Sessions
from bigfleet.shard.sessions.stale_clusters import StaleClusters


class SessionState(StrEnum):
    """The state of a cluster's session, as readers see it."""

    CONNECTED = "connected"
    #: The cluster has demand or machines, and no session.
    AWAY = "away"
    #: Away for longer than the alert allows.
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """One cluster's operator."""

    cluster: str
    state: SessionState
    #: Wall clock since which it is connected, or away.
    since_unix_nanos: int
    #: Wall clock of its last roll-up's arrival, accepted or not; 0 for none since the process started.
    last_rollup_unix_nanos: int
    #: Rows of demand in force.
    rows: int
    #: Whether the last roll-up is held.
    rollup_held: bool
    #: Frames that wait; 0 without a session.
    outbox_frames: int = 0
    #: Frames dropped since the session opened.
    outbox_dropped: int = 0
    capabilities: tuple[str, ...] = ()


class _Reported(TypedDict):
    last_rollup_unix_nanos: int
    rows: int
    rollup_held: bool


class SessionViews:
    """Makes the views of one shard's operators."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        intake: Intake,
        silence: StaleClusters,
        last_rollups: Mapping[str, int],
        clock: Clock,
    ) -> None:
        """Look at these from now on; `last_rollups` is the wall clock of each cluster's last roll-up."""
        self._sessions = sessions
        self._intake = intake
        self._silence = silence
        self._last_rollups = last_rollups
        self._clock = clock

    @cached_property
    def _zero_unix_nanos(self) -> int:
        """Wall clock at the monotonic clock's zero: one for all looks, so that each reports a moment alike."""
        return self._clock.unix_nanos() - int(self._clock.monotonic_seconds() * NANOS_PER_SECOND)

    def clusters(self, wanted: str = "") -> list[str]:
        """Return the clusters that have a view, ids ascending: those connected, and those missed."""
        names = {*(session.cluster for session in self._sessions), *self._silence.away_since_seconds}
        return sorted(name for name in names if wanted in ("", name))

    def views(self, wanted: str = "") -> Iterator[SessionView]:
        """Yield the views, cluster ids ascending; `wanted` is one cluster, or "" for all. Cost: O(1) each."""
        for cluster in self.clusters(wanted):
            view = self.of(cluster)
            if view is not None:
                yield view

    def of(self, cluster: str) -> SessionView | None:
        """Return a cluster's view as of now, None when it is neither connected nor missed."""
        session = self._sessions.of(cluster)
        if session is not None:
            return self._connected(session)
        away_since_seconds = self._silence.away_since_seconds.get(cluster)
        if away_since_seconds is None:
            return None
        is_silent = cluster in self._silence.silent
        return SessionView(
            cluster=cluster,
            state=SessionState.SILENT if is_silent else SessionState.AWAY,
            since_unix_nanos=self._unix_nanos_at(away_since_seconds),
            **self._reported(cluster),
        )

    def _connected(self, session: Session) -> SessionView:
        return SessionView(
            cluster=session.cluster,
            state=SessionState.CONNECTED,
            since_unix_nanos=self._unix_nanos_at(session.opened_seconds),
            outbox_frames=len(session.outbox),
            outbox_dropped=session.outbox.dropped,
            capabilities=tuple(sorted(session.capabilities)),
            **self._reported(session.cluster),
        )

    def _reported(self, cluster: str) -> "_Reported":
        return _Reported(
            last_rollup_unix_nanos=self._last_rollups.get(cluster, 0),
            rows=len(self._intake.table.rows_of(cluster)),
            rollup_held=self._intake.is_quarantined(cluster),
        )

    def _unix_nanos_at(self, seconds: float) -> int:
        return self._zero_unix_nanos + int(seconds * NANOS_PER_SECOND)
