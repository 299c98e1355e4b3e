"""Follows an exchange that is carried out: what comes is acquired, then what goes drains, or it is abandoned.

docs/spec/exchange.md §7. A course is a value; a step is a pure function of it and of what is seen of its machines. It
reads no clock and calls nothing outside. An exchange that ended stays as it ended.
"""

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.engine.targets import ClassKey
from bigfleet.exchange.values import ExchangeProposal, ExchangeSettings, total_usd

#: From the beginning until everything that comes serves.
ACQUIRING_SECONDS_MAX: Final = 1800.0
#: An exchange whose saving at present prices falls below this share of what was promised is abandoned.
SAVING_SHARE_MIN: Final = 0.5


class ExchangePhase(Enum):
    """How far an exchange is."""

    #: Machines that come are acquired; no machine leaves.
    ACQUIRING = "acquiring"
    #: Everything that comes serves; machines that go drain.
    DRAINING = "draining"
    ENDED = "ended"


class ExchangeEnd(Enum):
    """Why an exchange ended; all but the first are reasons to abandon it."""

    DONE = "done"
    #: A machine that came failed to boot, to bootstrap or to join, or was taken.
    MACHINE_FAILED = "arrival-failed"
    #: A machine that goes left without the exchange: it failed, was preempted or handed over.
    MACHINE_LEFT = "left-early"
    #: At present prices it saves less than half of what was promised.
    PRICE_MOVED = "price-moved"
    SHORTFALL = "shortfall"
    WAITING_PODS = "waiting-pods"
    #: The cluster acquires machines for its pods.
    NEEDS_MACHINES = "needs-machines"
    #: The demand differs by more than 5 % from that at the beginning, or has other kinds of pods.
    DEMAND_CHANGED = "demand-changed"
    QUARANTINED = "quarantined"
    OPERATOR_AWAY = "operator-away"
    #: The operator refused to drain a machine: its pods fit on no other node.
    WOULD_NOT_FIT = "would-not-fit"
    #: The planner finds no place for all pods without the machines that go.
    DOES_NOT_PACK = "does-not-pack"
    #: The time for the phase was over.
    ACQUIRED_TOO_LATE = "acquired-too-late"
    DRAINED_TOO_LATE = "drained-too-late"
    #: The mode of the cluster is no longer `on`.
    SWITCHED_OFF = "switched-off"
    #: The shard was restarted.
    RESTARTED = "restarted"


class Sighting(Enum):
    """What is seen of a machine, from the exchange's cluster."""

    #: It is being created for the cluster.
    CREATING = "creating"
    #: It is bound to the cluster, and has not joined yet.
    BINDING = "binding"
    #: It is Configured and has joined.
    SERVING = "serving"
    #: It drains.
    DRAINING = "draining"
    #: It is Idle, and bound to no cluster.
    IDLE = "idle"
    #: It is not there, or no longer.
    SPECULATIVE = "speculative"
    #: It has not joined in time, failed, serves another cluster, or is not known.
    AWAY = "away"


_FREE: Final = (Sighting.IDLE, Sighting.SPECULATIVE)


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine at the moment of a step."""

    sighting: Sighting
    price_usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCourse:
    """An exchange under way, or ended. Times are monotonic seconds.

    Invariants: machines leave in DRAINING only, in the order of `goes`, at most `budget` at a time; DRAINING begins
    when every machine that comes serves; no more machines have come than were wanted of their class.
    """

    id: str
    cluster: str
    #: Machines that go, in the order in which they drain.
    goes: tuple[str, ...]
    #: (class, machines) that come.
    comes: tuple[tuple[ClassKey, int], ...]
    #: Most machines that drain at a time.
    budget: int
    #: What its cluster saves by the hour; below 0 where another cluster saves.
    promised_usd_per_hour: float
    #: The part of the promise that is expected interruptions, and no price.
    interruptions_usd_per_hour: float
    #: What the machines that come cost by the hour, as proposed.
    comes_usd_per_hour: float
    draining_seconds_max: float
    since_seconds: float
    #: The cluster that the machines go to, and what it is to save with them; "" for an exchange within a cluster.
    taker: str = ""
    taker_saves_usd_per_hour: float = 0.0
    #: Classes that come although they are paid for anyway: the price of such a machine is no cost of the exchange.
    paid_for: frozenset[ClassKey] = frozenset()
    phase: ExchangePhase = ExchangePhase.ACQUIRING
    #: Machines that came, with their class and how each was last seen.
    came: Mapping[str, tuple[ClassKey, Seen]] = field(default_factory=dict)
    #: Machines that left, with their last price.
    gone: Mapping[str, float] = field(default_factory=dict)
    #: How each machine that goes was last seen.
    staying: Mapping[str, Seen] = field(default_factory=dict)
    end: ExchangeEnd | None = None

    @property
    def remaining(self) -> tuple[str, ...]:
        """The machines that go and have not left, in the order in which they drain."""
        return tuple(machine_id for machine_id in self.goes if machine_id not in self.gone)

    @property
    def leaving(self) -> frozenset[str]:
        """The machines that host nothing that has another place; empty before DRAINING and after the end."""
        return frozenset(self.remaining) if self.phase is ExchangePhase.DRAINING else frozenset()

    @property
    def wave(self) -> frozenset[str]:
        """The machines that may drain now: at most `budget`."""
        return frozenset(self.remaining[: self.budget]) if self.phase is ExchangePhase.DRAINING else frozenset()

    @property
    def retained(self) -> frozenset[str]:
        """The machines that may not be reclaimed now: what came, and what goes later."""
        if self.phase is ExchangePhase.ENDED:
            return frozenset()
        return (frozenset(self.remaining) - self.wave) | self.came.keys()

    @property
    def missing(self) -> Counter[ClassKey]:
        """How many machines of each class are still to come."""
        left = Counter(dict(self.comes))
        left.subtract(Counter(machine_class for machine_class, _ in self.came.values()))
        return +left

    @property
    def has_all(self) -> bool:
        """Whether everything that comes serves."""
        return not self.missing and all(seen.sighting is Sighting.SERVING for _, seen in self.came.values())

    @property
    def expected_usd_per_hour(self) -> float:
        """What the exchange saves by the hour when it is done, at present prices; with what the taker is to save."""
        goes = total_usd((*self.gone.values(), *(self.staying[each].price_usd_per_hour for each in self._seen)))
        if self.taker:
            goes = self.taker_saves_usd_per_hour
        count = sum(machines for _, machines in self.comes)
        waits = count - len(self.came)
        comes = total_usd(self._price(machine_class, seen) for machine_class, seen in self.came.values())
        return goes - comes - waits * self.comes_usd_per_hour / max(1, count) + self.interruptions_usd_per_hour

    @property
    def _seen(self) -> tuple[str, ...]:
        return tuple(machine_id for machine_id in self.remaining if machine_id in self.staying)

    @property
    def realised_usd_per_hour(self) -> float:
        """What it saves by the hour: prices of what left, less those of what came and is still there.

        Expected interruptions count when everything has left. Machines that go to another cluster are paid for anyway.
        """
        there = [each for each in self.came.values() if _is_there(each[1])]
        came = total_usd(self._price(machine_class, seen) for machine_class, seen in there)
        interruptions = self.interruptions_usd_per_hour if self.end is ExchangeEnd.DONE else 0.0
        left = 0.0 if self.taker else total_usd(self.gone.values())
        return left - came + interruptions

    def _price(self, machine_class: ClassKey, seen: Seen) -> float:
        return 0.0 if machine_class in self.paid_for else seen.price_usd_per_hour


def begun(
    proposal: ExchangeProposal,
    *,
    exchange_id: str,
    cluster: str,
    machines: int,
    settings: ExchangeSettings,
    now_seconds: float,
) -> ExchangeCourse:
    """Return the course of a proposal that is ready, in a cluster of so many machines."""
    assert proposal.waits_for is None, "a proposal that waits is not carried out"
    budget, part = settings.budget(machines), proposal.taker_part
    waves = math.ceil(len(proposal.machine_ids) / budget)
    return ExchangeCourse(
        id=exchange_id,
        cluster=cluster,
        goes=proposal.machine_ids,
        comes=tuple(proposal.comes_by_class.items()),
        budget=budget,
        promised_usd_per_hour=proposal.own_saving_usd_per_hour,
        interruptions_usd_per_hour=proposal.own_interruptions_usd_per_hour,
        comes_usd_per_hour=proposal.gate.comes_usd_per_hour - (part.gate.comes_usd_per_hour if part else 0.0),
        taker=proposal.taker,
        taker_saves_usd_per_hour=part.gate.saving_usd_per_hour if part else 0.0,
        paid_for=frozenset(
            kind.key for kind, _ in proposal.comes if kind.is_idle and kind.key.capacity_type not in RELEASABLE
        ),
        draining_seconds_max=settings.excess_seconds + 2 * settings.drain_seconds * waves,
        since_seconds=now_seconds,
    )


def joined_by(course: ExchangeCourse, found: Mapping[str, tuple[ClassKey, Seen]]) -> ExchangeCourse:
    """Return the course with machines that were acquired for it, as far as their class still misses some."""
    missing, came = course.missing, dict(course.came)
    for machine_id, (machine_class, seen) in found.items():
        if machine_id not in came and machine_id not in course.goes and missing[machine_class] > 0:
            missing[machine_class] -= 1
            came[machine_id] = (machine_class, seen)
    return replace(course, came=came) if course.phase is ExchangePhase.ACQUIRING else course


def abandoned(course: ExchangeCourse, reason: ExchangeEnd) -> ExchangeCourse:
    """Return the course ended for a reason; one that ended stays as it is."""
    if course.phase is ExchangePhase.ENDED:
        return course
    return replace(course, phase=ExchangePhase.ENDED, end=reason)


def drains(course: ExchangeCourse, now_seconds: float) -> ExchangeCourse:
    """Return the course with its machines leaving; everything that comes must serve."""
    assert course.phase is ExchangePhase.ACQUIRING, f"exchange {course.id} is {course.phase.value}"
    assert course.has_all, f"exchange {course.id} drains before everything that comes serves"
    return replace(course, phase=ExchangePhase.DRAINING, since_seconds=now_seconds)


def followed(
    course: ExchangeCourse, seen: Mapping[str, Seen], *, now_seconds: float, refused: Set[str] = frozenset()
) -> ExchangeCourse:
    """Return the course after a look at its machines; `refused` are those of which WOULD_NOT_FIT was said.

    A machine that `seen` does not have is away.
    """
    if course.phase is ExchangePhase.ENDED:
        return course
    course = _with_sightings(course, seen)
    if course.end is not None:
        return course
    if course.phase is ExchangePhase.DRAINING and not course.remaining:
        return replace(course, phase=ExchangePhase.ENDED, end=ExchangeEnd.DONE)
    if refused & course.leaving:
        return abandoned(course, ExchangeEnd.WOULD_NOT_FIT)
    promised_usd_per_hour = course.promised_usd_per_hour + course.taker_saves_usd_per_hour
    if course.expected_usd_per_hour < SAVING_SHARE_MIN * promised_usd_per_hour:
        return abandoned(course, ExchangeEnd.PRICE_MOVED)
    took_seconds = now_seconds - course.since_seconds
    if course.phase is ExchangePhase.ACQUIRING and took_seconds > ACQUIRING_SECONDS_MAX:
        return abandoned(course, ExchangeEnd.ACQUIRED_TOO_LATE)
    if course.phase is ExchangePhase.DRAINING and took_seconds > course.draining_seconds_max:
        return abandoned(course, ExchangeEnd.DRAINED_TOO_LATE)
    return course


def _with_sightings(course: ExchangeCourse, seen: Mapping[str, Seen]) -> ExchangeCourse:
    away = Seen(Sighting.AWAY)
    came: dict[str, tuple[ClassKey, Seen]] = {}
    end: ExchangeEnd | None = None
    for machine_id, (machine_class, before) in course.came.items():
        now = seen.get(machine_id, away)
        if before.sighting is Sighting.CREATING and now.sighting is Sighting.IDLE:
            # Created, and bound to no cluster: the next decision binds it, or another one of its class.
            continue
        came[machine_id] = (machine_class, now)
        is_needed = course.phase is ExchangePhase.DRAINING
        if not (now.sighting is Sighting.SERVING if is_needed else _is_there(now)):
            end = ExchangeEnd.MACHINE_FAILED
    gone, staying = dict(course.gone), dict(course.staying)
    for machine_id in course.remaining:
        now, before = seen.get(machine_id, away), staying.get(machine_id, away)
        if now.sighting is Sighting.SERVING:
            staying[machine_id] = now
        elif course.phase is not ExchangePhase.DRAINING:
            end = end or ExchangeEnd.MACHINE_LEFT
        elif now.sighting is Sighting.DRAINING:
            staying[machine_id] = now
        elif before.sighting is Sighting.DRAINING or now.sighting in _FREE:
            # A drain may begin and end between two looks.
            gone[machine_id] = staying.pop(machine_id, now).price_usd_per_hour
        else:
            end = end or ExchangeEnd.MACHINE_LEFT
    course = replace(course, came=came, gone=gone, staying=staying)
    return course if end is None else abandoned(course, end)


def _is_there(seen: Seen) -> bool:
    return seen.sighting in (Sighting.CREATING, Sighting.BINDING, Sighting.SERVING)
