"""Lists clusters without a session, and reports those that have had none for too long.

docs/spec/shard.md §10.7. A silent cluster's demand stays in force and its machines stay; silence never means "no
demand".
"""

from collections.abc import Mapping, Set

import structlog

from bigfleet.shard.sessions.registry import Sessions

_log = structlog.get_logger("bigfleet.shard.sessions.stale_clusters")


class StaleClusters:
    """Since when each cluster that matters has had no session. Cost: the clusters, once per cycle."""

    def __init__(self, *, alert_seconds: float, reclaim_after_seconds: float) -> None:
        """After `reclaim_after_seconds` without a session excess machines are reclaimed; infinity is never."""
        self._alert_seconds = alert_seconds
        self._reclaim_after_seconds = reclaim_after_seconds
        #: All and only clusters with demand or machines and without a session, with the second of first sight so.
        self._since_seconds: dict[str, float] = {}
        self._silent: frozenset[str] = frozenset()

    @property
    def silent(self) -> frozenset[str]:
        """The clusters that were silent when `look` last looked."""
        return self._silent

    @property
    def away_since_seconds(self) -> Mapping[str, float]:
        """Since when each cluster that matters has had no session, on the shard's monotonic clock; a live view."""
        return self._since_seconds

    def session_opened(self, cluster: str) -> None:
        """End the count; a cluster that was silent is reported as back by the next `look`."""
        self._since_seconds.pop(cluster, None)

    def session_ended(self, cluster: str, now_seconds: float) -> None:
        """Count from the moment at which the session ended, not from the next cycle."""
        self._since_seconds[cluster] = now_seconds

    def awaited(self, now_seconds: float, retired: Set[str]) -> frozenset[str]:
        """Return the clusters without a session whose excess machines wait for one.

        Those of `retired` clusters wait until the cluster counts as silent.
        """
        most_seconds = self._reclaim_after_seconds
        retired_seconds = min(self._alert_seconds, most_seconds)
        return frozenset(
            cluster
            for cluster, seconds in self._since_seconds.items()
            if now_seconds - seconds <= (retired_seconds if cluster in retired else most_seconds)
        )

    def look(self, *clusters: Set[str], sessions: Sessions, now_seconds: float) -> frozenset[str]:
        """Return the clusters, of those with demand and those with machines, that have been silent for too long."""
        # Mostly no operator is away, which is seen without making a set of thousands.
        away = [each - sessions.clusters for each in clusters if not each <= sessions.clusters]
        since = {cluster: self._since_seconds.get(cluster, now_seconds) for cluster in set().union(*away)}
        silent = frozenset(cluster for cluster, seconds in since.items() if now_seconds - seconds > self._alert_seconds)
        for cluster in sorted(silent - self._silent):
            _log.warning(
                "cluster.went_silent",
                cluster=cluster,
                seconds=round(now_seconds - since[cluster]),
                advice="its operator has no session; its last demand stays in force and its machines are kept",
            )
        for cluster in sorted(self._silent - silent):
            _log.info("cluster.returned", cluster=cluster)
        self._since_seconds, self._silent = since, silent
        return silent
