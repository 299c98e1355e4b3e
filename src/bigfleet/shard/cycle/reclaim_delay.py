"""Delays a voluntary reclaim until its machine has been excess for long enough.

docs/spec/shard.md §6, limit 5. The delay starts and ends on timer cycles; every cycle may restart it. Preemption and
`phase3.unjoined` are not delayed. Values are replaced, never changed, so they can be computed off the loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId

#: The reason of a Reclaim that is not delayed: the machine never joined its cluster and serves nothing.
UNJOINED_REASON = "phase3.unjoined"
FIT_HOLD_FIRST_SECONDS = 600.0
FIT_HOLD_MAX_SECONDS = 7_200.0


@runtime_checkable
class _KnowsExcess(Protocol):
    """Actions whose excess machines are known without making the actions."""

    def excess(self) -> Sequence[MachineId]: ...


def is_delayable(action: Action) -> bool:
    """Return whether the action reclaims an excess machine."""
    return action.kind is ActionKind.RECLAIM and action.reason != UNJOINED_REASON


def excess_machines(actions: Sequence[Action]) -> Iterable[MachineId]:
    """Return the machines that a decision reclaims because nothing claims them, in emission order."""
    if isinstance(actions, _KnowsExcess):
        return actions.excess()
    return (action.machine_id for action in actions if is_delayable(action))


@dataclass(frozen=True, slots=True)
class ExcessTimers:
    """The excess machines of the last cycle, with the time since which each has been excess without interruption.

    A machine that only woken cycles have found excess is absent: its delay starts with the next timer cycle.
    """

    #: Monotonic seconds of a timer cycle, by machine; no other machine than the excess ones of the last cycle.
    since_seconds: Mapping[MachineId, float] = field(default_factory=dict)
    #: Monotonic second of the last timer cycle.
    timer_seconds: float = float("-inf")
    #: Excess machines of the last cycle, also those that no timer cycle has seen yet.
    machines: int = 0

    def followed_by(self, excess: Iterable[MachineId], *, now_seconds: float, is_timer: bool) -> "ExcessTimers":
        """Return the state after a cycle that found these machines excess; all others are forgotten."""
        known, since, machines = self.since_seconds, {}, 0
        for machine_id in excess:
            machines += 1
            if is_timer:
                since[machine_id] = known.get(machine_id, now_seconds)
            elif machine_id in known:
                since[machine_id] = known[machine_id]
        return ExcessTimers(since, now_seconds if is_timer else self.timer_seconds, machines)

    def is_due(self, machine_id: MachineId, after_seconds: float) -> bool:
        """Return whether the machine had been excess for `after_seconds` in the last timer cycle; 0 is always due."""
        if after_seconds <= 0:
            return True
        since = self.since_seconds.get(machine_id)
        return since is not None and self.timer_seconds - since >= after_seconds

    def waiting(self, after_seconds: float) -> int:
        """Return how many excess machines are not due yet."""
        if after_seconds <= 0:
            return 0
        due_since = self.timer_seconds - after_seconds
        return self.machines - sum(since <= due_since for since in self.since_seconds.values())


class FitHold(NamedTuple):
    """How long a machine is held because the pods on it would not fit on the other nodes."""

    until_seconds: float
    next_seconds: float
    #: What the operator said.
    text: str


class FitHolds:
    """Machines whose operator answered a voluntary reclaim with WOULD_NOT_FIT, or is away (docs/spec/shard.md §9.3).

    A hold lasts 10 minutes, doubled with each further answer about the machine to 2 hours. It is remembered for as
    long again after its end, so that the next answer doubles it.
    """

    def __init__(self, clock: Clock, awaited_sessions: Callable[[], Set[str]] = frozenset) -> None:
        """`awaited_sessions` returns the clusters whose excess machines wait for a session."""
        self._clock = clock
        #: Without an operator no program evicts the pods under their budgets.
        self.awaited_sessions = awaited_sessions
        self._holds: dict[MachineId, FitHold] = {}

    def hold(self, machine_id: MachineId, text: str) -> float:
        """Keep the machine; return for how many seconds."""
        known = self._holds.get(machine_id)
        seconds = FIT_HOLD_FIRST_SECONDS if known is None else known.next_seconds
        until_seconds = self._clock.monotonic_seconds() + seconds
        self._holds[machine_id] = FitHold(until_seconds, min(2 * seconds, FIT_HOLD_MAX_SECONDS), text)
        return seconds

    def get(self, machine_id: MachineId) -> FitHold | None:
        """Return the hold of a machine while it lasts."""
        known = self._holds.get(machine_id)
        return known if known is not None and self._clock.monotonic_seconds() < known.until_seconds else None

    def forget(self, machine_id: MachineId) -> None:
        """The machine left its cluster."""
        self._holds.pop(machine_id, None)

    def held(self) -> frozenset[MachineId]:
        """Return the machines that are held; forgets holds that ended longer ago than they would last next."""
        now_seconds = self._clock.monotonic_seconds()
        for machine_id, hold in list(self._holds.items()):
            if now_seconds >= hold.until_seconds + hold.next_seconds:
                del self._holds[machine_id]
        return frozenset(each for each, hold in self._holds.items() if now_seconds < hold.until_seconds)
