"""Limits how fast actions run, and how suddenly demand or supply may drop.

Pure functions (docs/spec/shard.md §6). A limit may change how fast a decision is executed, never the decision: no limit
reorders anything.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need, RowKey
from bigfleet.model.vector import ZERO, Vector
from bigfleet.shard.sessions.demand_size import DemandSize

#: Safety limits 2 and 4: the third suspicious one in a row is accepted.
CONFIRMATIONS_MIN = 3
#: Safety limit 4: more removals than this, and than the share below, are held back.
BRAKE_REMOVALS_MIN = 10
BRAKE_REMOVALS_SHARE_DIVISOR = 10


class Disposition(Enum):
    """What happens to decided actions; the values name the outcome of those that are not carried out."""

    EXECUTE = "execute"
    SUPPRESSED = "suppressed"
    DRY_RUN = "dryrun"


def disposition(*, paused: bool, dry_run: bool) -> Disposition:
    """Return the mode of the process; when both are set it is a pause (safety limit 3)."""
    if paused:
        return Disposition.SUPPRESSED
    return Disposition.DRY_RUN if dry_run else Disposition.EXECUTE


def reclaim_cap(fraction: float, configured_machines: int) -> int:
    """Return how many reclaims one cluster may see in a period: max(1, fraction × machines, truncated) (limit 1)."""
    return max(1, int(fraction * configured_machines))


@dataclass(frozen=True, slots=True)
class CapResult:
    """The reclaims that safety limit 1 admits."""

    admitted: tuple[Action, ...]
    #: Reclaims dropped; they are derived again later.
    capped: int
    #: Reclaims of this period by cluster, the admitted ones included.
    spent: Mapping[str, int]


def cap_reclaims(
    actions: Iterable[Action],
    *,
    fraction: float,
    configured_by_cluster: Mapping[str, int],
    spent: Mapping[str, int],
) -> CapResult:
    """Keep the head of each cluster's reclaims, everything else as it is (safety limit 1).

    `spent` counts reclaims already let through in this timer period. A fraction of 0 switches the limit off.
    """
    cap = _ReclaimCap(fraction, configured_by_cluster, spent)
    admitted = tuple(action for action in actions if cap.admits(action))
    return CapResult(admitted, cap.capped, cap.used)


class _ReclaimCap:
    """Applies safety limit 1 to the actions of one cycle, one after the other."""

    def __init__(self, fraction: float, configured_by_cluster: Mapping[str, int], spent: Mapping[str, int]) -> None:
        self._fraction = fraction
        self._configured_by_cluster = configured_by_cluster
        self.used = dict(spent)
        self.capped = 0

    def admits(self, action: Action) -> bool:
        """Return whether the action may go on, and count it."""
        if action.kind is not ActionKind.RECLAIM or self._fraction <= 0:
            return True
        used = self.used.get(action.cluster, 0)
        if used >= reclaim_cap(self._fraction, self._configured_by_cluster.get(action.cluster, 0)):
            self.capped += 1
            return False
        self.used[action.cluster] = used + 1
        return True


def limit_actions(actions: Sequence[Action], actions_max: int) -> tuple[tuple[Action, ...], int]:
    """Return the first `actions_max` actions and how many were put off; 0 is unlimited."""
    if actions_max <= 0 or len(actions) <= actions_max:
        return tuple(actions), 0
    return tuple(actions[:actions_max]), len(actions) - actions_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The actions of a decision that the limits admit, and counts of the others by reason."""

    #: In the order that was decided.
    actions: tuple[Action, ...]
    #: Their machine has an action in flight.
    in_flight: int
    #: Their row is backed off.
    refused: int
    #: Reclaims that are delayed (safety limit 5).
    delayed: int
    capped: int
    postponed: int
    #: Not looked at: there are more before them than can be enqueued.
    left: int
    #: Reclaims of this period by cluster.
    spent: Mapping[str, int]


def choose(
    actions: Sequence[Action],
    *,
    in_flight: Set[MachineId],
    backed_off: Set[RowKey],
    without_session: Set[str] = frozenset(),
    in_vain: Set[RowKey] = frozenset(),
    is_delayed: Callable[[Action], bool] = lambda _action: False,
    fraction: float,
    configured_by_cluster: Mapping[str, int],
    spent: Mapping[str, int],
    actions_max: int,
    room: int,
) -> Chosen:
    """Return what may be enqueued: free machines, no back-off of row or cluster, no delay, the cap, the limit.

    The checks apply in this order. Rows that are `in_vain` preempt nothing. `is_delayed` is asked about Reclaims alone.
    Each action is made at most once, and none after `room` have been found, unless there is a limit to report. It may
    take as long as there are actions: it is no work for a loop.
    """
    cap = _ReclaimCap(fraction, configured_by_cluster, spent)
    admitted: list[Action] = []
    seen = busy = refused = delayed = 0
    for action in actions:
        if actions_max <= 0 and len(admitted) >= room:
            break
        seen += 1
        if action.machine_id in in_flight:
            busy += 1
        elif (
            row_served_by(action) in backed_off
            or (action.kind is ActionKind.BOOTSTRAP and action.cluster in without_session)
            or (action.preemptor is not None and action.preemptor in in_vain)
        ):
            refused += 1
        elif action.kind is ActionKind.RECLAIM and is_delayed(action):
            delayed += 1
        elif cap.admits(action):
            admitted.append(action)
    limited, postponed = limit_actions(admitted, actions_max)
    return Chosen(
        actions=limited,
        in_flight=busy,
        refused=refused,
        delayed=delayed,
        capped=cap.capped,
        postponed=postponed,
        left=len(actions) - seen,
        spent=cap.used,
    )


def row_served_by(action: Action) -> RowKey | None:
    """Return the row that the action binds or buys a machine for; None for other kinds."""
    if action.profile is None or action.kind not in (ActionKind.BOOTSTRAP, ActionKind.PROVISION):
        return None
    return (action.cluster, action.profile.fingerprint, action.group)


class QuarantineVerdict(Enum):
    """The result of the quarantine for one roll-up."""

    ACCEPT = "accept"
    HOLD_1 = "hold-1"
    HOLD_2 = "hold-2"
    ACCEPT_CONFIRMED = "accept-confirmed"

    @property
    def is_accepted(self) -> bool:
        """Return whether the roll-up comes into force."""
        return self in (QuarantineVerdict.ACCEPT, QuarantineVerdict.ACCEPT_CONFIRMED)


@dataclass(frozen=True, slots=True)
class DemandQuarantine:
    """Safety limit 2 for one cluster: size of the last accepted roll-up, and suspicious ones seen in a row."""

    #: None until the first roll-up of this process, which is always accepted.
    baseline: DemandSize | None = None
    suspicious_in_a_row: int = 0
    #: What was suspicious in the last roll-up, "" for nothing.
    suspicion: str = ""

    def admit(
        self, needs: Sequence[Need], largest_supply: Callable[[], Vector] = lambda: ZERO
    ) -> tuple[QuarantineVerdict, "DemandQuarantine"]:
        """Judge a roll-up by its rows as received; return the verdict and the state after it.

        `largest_supply` is that of `DemandSize.loss`.
        """
        size = DemandSize.of(needs)
        suspicion = "" if self.baseline is None else self.baseline.loss(size, needs, largest_supply)
        if not suspicion:
            return QuarantineVerdict.ACCEPT, DemandQuarantine(size)
        seen = self.suspicious_in_a_row + 1
        if seen >= CONFIRMATIONS_MIN:
            return QuarantineVerdict.ACCEPT_CONFIRMED, DemandQuarantine(size, suspicion=suspicion)
        verdict = QuarantineVerdict.HOLD_1 if seen == 1 else QuarantineVerdict.HOLD_2
        return verdict, replace(self, suspicious_in_a_row=seen, suspicion=suspicion)

    def unchanged(self) -> "DemandQuarantine":
        """Return the state after a roll-up that equals the last accepted one: it ends a streak."""
        return replace(self, suspicious_in_a_row=0, suspicion="")


@dataclass(frozen=True, slots=True)
class RemovalBrake:
    """Safety limit 4: a sudden loss of machines is held back twice and accepted the third time."""

    braked_in_a_row: int = 0

    def admit(self, removals: int, known_machines: int) -> tuple[bool, "RemovalBrake"]:
        """Return whether a reconcile may remove that many of the known machines; return the state after it."""
        if not self.is_suspicious(removals, known_machines):
            return True, RemovalBrake()
        if self.braked_in_a_row + 1 >= CONFIRMATIONS_MIN:
            return True, RemovalBrake()
        return False, RemovalBrake(self.braked_in_a_row + 1)

    @staticmethod
    def is_suspicious(removals: int, known_machines: int) -> bool:
        """Return whether that many at once are more than a fleet loses by itself: over 10, and over a tenth."""
        return removals > max(BRAKE_REMOVALS_MIN, known_machines // BRAKE_REMOVALS_SHARE_DIVISOR)
