"""Computes the stage of a host from its stored times and the current time (docs/spec/provider.md §21).

The times are stored before the call that set them returns. So every operation ends on time, also if the caller gave up
or no provider runs. This module must not wait, and does not change a host.
"""

from enum import Enum

from bigfleet.provider.backends.simulated.book import SimulatedHost

#: A request waits for a quarter of the time before it boots, a node spends half of its time on the bootstrap.
_REQUEST_DIVISOR = 4
_BOOTSTRAP_DIVISOR = 2


class LifeStage(Enum):
    """Where a host is in its life."""

    REQUESTED = "requested"
    BOOTING = "booting"
    RUNNING = "running"
    BOOTSTRAPPING = "bootstrapping"
    JOINING = "joining"
    #: Its node will never become Ready.
    LOST_JOIN = "lost join"
    READY = "ready"
    #: In its cluster, on the way out of it.
    DRAINING = "draining"
    DELETING = "deleting"


def end_unix_nanos(host: SimulatedHost) -> int | None:
    """Return when the host ends, or ended; None is never. Whoever deletes it in time, nothing else takes it."""
    return host.gone_unix_nanos if host.deleted_by else host.dies_unix_nanos


def is_there(host: SimulatedHost, now_unix_nanos: int) -> bool:
    """Return whether the host exists, booting included."""
    end = end_unix_nanos(host)
    return end is None or now_unix_nanos < end


def cluster_of(host: SimulatedHost, now_unix_nanos: int) -> str:
    """Return the cluster that the host was booted into, or nothing."""
    is_drained = bool(host.drained_by) and host.drained_unix_nanos <= now_unix_nanos
    return "" if is_drained else host.cluster


def stage_of(host: SimulatedHost, now_unix_nanos: int) -> LifeStage:
    """Return where a host that is there is."""
    if host.deleted_by:
        return LifeStage.DELETING
    if now_unix_nanos < host.running_unix_nanos:
        waits_nanos = (host.running_unix_nanos - host.requested_unix_nanos) // _REQUEST_DIVISOR
        return LifeStage.REQUESTED if now_unix_nanos < host.requested_unix_nanos + waits_nanos else LifeStage.BOOTING
    if not cluster_of(host, now_unix_nanos) or now_unix_nanos < host.configured_unix_nanos:
        return LifeStage.RUNNING
    if host.ready_unix_nanos is None:
        return LifeStage.LOST_JOIN
    if now_unix_nanos >= host.ready_unix_nanos:
        return LifeStage.DRAINING if host.drained_by else LifeStage.READY
    bootstrap_nanos = (host.ready_unix_nanos - host.configured_unix_nanos) // _BOOTSTRAP_DIVISOR
    is_booted = now_unix_nanos >= host.configured_unix_nanos + bootstrap_nanos
    return LifeStage.JOINING if is_booted else LifeStage.BOOTSTRAPPING


def billed_nanos(host: SimulatedHost, now_unix_nanos: int) -> int:
    """Return for how long the host was billed until now: from the moment it ran until it was gone."""
    end = end_unix_nanos(host)
    until = now_unix_nanos if end is None else min(end, now_unix_nanos)
    return max(0, until - host.running_unix_nanos)
