"""Limits growth for waiting pods: a shape gets a second machine only after the first has joined.

docs/spec/shard.md §9.9. Waiting pods fit on no Configured machine, so each cycle acquires machines for them unless one
that boots has room. Pods do not run at once on a machine that has become Configured: its node must join, and the
scheduler needs time. Until then, the pods that it was acquired for count as pods that any machine may host, and the
machine is not reclaimed. A machine that joins and after which no fewer pods of the shape wait was of no use: each such
attempt doubles the time before the next one, because the pods may be unable to run on any machine. Rows without waiting
pods cost nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from bigfleet.engine.decision import RowResult
from bigfleet.model import vector
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState

log = structlog.get_logger(__name__)

#: How long the scheduler may take to place pods on a node that has joined.
SETTLE_SECONDS: Final = 60.0
#: The longest time between the join of a machine that was of no use and the next acquisition for the same shape; and
#: how long failed attempts are remembered for a shape that is no longer reported.
BACKOFF_SECONDS_MAX: Final = 3600.0

_BOOTING = frozenset({MachineState.SPECULATIVE, MachineState.CREATING, MachineState.IDLE, MachineState.CONFIGURING})

#: A row, and what one of its waiting pods requests.
_ShapeKey = tuple[RowKey, tuple[tuple[str, int], ...], int]


@dataclass(slots=True)
class _Given:
    """One machine that was acquired for waiting pods of a shape."""

    count: int
    #: How many attempts in succession had failed when it was acquired.
    failures_before: int
    #: The most pods of the shape that were reported as waiting from its last decision to its join.
    waiting_count: int
    is_configured: bool = False
    #: None before its node was seen Ready.
    joined_seconds: float | None = None


@dataclass(slots=True)
class _Backoff:
    """The attempts for one shape that had no effect, since the last one that had."""

    failures: int = 0
    #: So many of the shape's waiting pods get no machine before `until_seconds`.
    count: int = 0
    until_seconds: float = float("-inf")
    #: When the shape was last reported.
    reported_seconds: float = float("-inf")

    def failed(self, given: _Given, joined_seconds: float) -> None:
        """Count an attempt. Machines that were acquired at the same time are one."""
        self.failures = max(self.failures, given.failures_before + 1)
        wait_seconds = min(BACKOFF_SECONDS_MAX, SETTLE_SECONDS * 2.0 ** min(self.failures - 1, 16))
        self.until_seconds = max(self.until_seconds, joined_seconds + wait_seconds)
        self.count = max(self.count, given.waiting_count)


@dataclass(slots=True)
class WaitingGrowth:
    """The machines that waiting pods were given. Touched by the shard's loop alone.

    `has_joined` says whether a Configured machine's node was seen Ready, or can never be; `has_failed` whether its
    time for that is over.
    """

    clock: Clock
    machine_of: Callable[[MachineId], Machine | None]
    has_joined: Callable[[Machine], bool]
    has_failed: Callable[[MachineId], bool]
    #: Clusters with waiting pods: their rows as reported.
    _reported: dict[str, Sequence[Need]] = field(default_factory=dict)
    #: The same rows as they were last decided on.
    _bounded_rows: dict[str, Sequence[Need]] = field(default_factory=dict)
    _given: dict[_ShapeKey, dict[MachineId, _Given]] = field(default_factory=dict)
    #: Shapes for which the last attempt failed.
    _backoffs: dict[_ShapeKey, _Backoff] = field(default_factory=dict)
    #: Configured machines that wait for their pods.
    awaited: Set[MachineId] = frozenset()

    def reported(self, cluster: str, rows: Sequence[Need]) -> Sequence[Need]:
        """Take a cluster's rows as reported and return them as they are to be decided on."""
        if not any(row.waiting for row in rows):
            self._reported.pop(cluster, None)
            self._bounded_rows.pop(cluster, None)
            return rows
        self._reported[cluster] = rows
        self._bounded_rows[cluster] = bounded = [self._bounded(row) for row in rows]
        return bounded

    def rows_in_force(self, in_force: Mapping[str, Sequence[Need]]) -> dict[str, Sequence[Need]]:
        """Return the rows of every cluster as they were before growth was bounded."""
        return {**in_force, **self._reported}

    def moved(self) -> Iterator[tuple[str, Sequence[Need]]]:
        """Follow the machines; yield each cluster that is to be decided on otherwise than before, with its rows."""
        if not self._given and not self.awaited and not self._backoffs:
            return
        counts = self._counts()
        now_seconds = self.clock.monotonic_seconds()
        for key, machines in list(self._given.items()):
            for machine_id, given in list(machines.items()):
                if key not in counts or not self._waits(key, machine_id, given, counts[key], now_seconds):
                    del machines[machine_id]
            if not machines:
                del self._given[key]
        self.awaited = {each for given in self._given.values() for each in given if given[each].is_configured}
        self._follow_backoffs(counts, now_seconds)
        for cluster, rows in self._reported.items():
            bounded = [self._bounded(row) for row in rows]
            if bounded != self._bounded_rows[cluster]:
                self._bounded_rows[cluster] = bounded
                yield cluster, bounded

    def _counts(self) -> Counter[_ShapeKey]:
        """Return how many pods of each shape are reported as waiting."""
        counts: Counter[_ShapeKey] = Counter()
        for rows in self._reported.values():
            for row in rows:
                for shape in row.waiting:
                    counts[_key(row, shape)] += shape.count
        return counts

    def _waits(
        self, key: _ShapeKey, machine_id: MachineId, given: _Given, waiting_count: int, now_seconds: float
    ) -> bool:
        """Return whether the machine may still be of use to the pods that it was acquired for."""
        machine = self.machine_of(machine_id)
        if machine is None or self.has_failed(machine_id):
            return False
        given.is_configured = machine.state is MachineState.CONFIGURED
        if not given.is_configured:
            return machine.state in _BOOTING
        if machine.cluster != key[0][0]:
            return False
        if given.joined_seconds is None:
            given.waiting_count = max(given.waiting_count, waiting_count)
            if self.has_joined(machine):
                given.joined_seconds = now_seconds
        if given.joined_seconds is None or now_seconds - given.joined_seconds < SETTLE_SECONDS:
            return True
        self._end_attempt(key, given, given.joined_seconds, waiting_count)
        return False

    def _end_attempt(self, key: _ShapeKey, given: _Given, joined_seconds: float, waiting_count: int) -> None:
        """Judge a machine whose node has been Ready for `SETTLE_SECONDS`."""
        if waiting_count < given.waiting_count:
            self._backoffs.pop(key, None)
            return
        backoff = self._backoffs.setdefault(key, _Backoff())
        before = backoff.failures
        backoff.failed(given, joined_seconds)
        if backoff.failures > max(before, 1):
            log.info(
                "cycle.growth_backed_off",
                cluster=key[0][0],
                fingerprint=key[0][1],
                group=key[0][2],
                pods=waiting_count,
                failures=backoff.failures,
                wait_seconds=backoff.until_seconds - joined_seconds,
            )

    def _follow_backoffs(self, counts: Counter[_ShapeKey], now_seconds: float) -> None:
        for key, backoff in list(self._backoffs.items()):
            if key in counts:
                backoff.reported_seconds = now_seconds
            elif now_seconds - backoff.reported_seconds >= BACKOFF_SECONDS_MAX:
                del self._backoffs[key]
            if now_seconds >= backoff.until_seconds:
                backoff.count = 0

    def decided(self, results: Iterable[RowResult]) -> None:
        """Remember the machines that a decision gave to waiting pods, in place of all that are not Configured."""
        if not self._reported:
            return
        former, counts = self._given, self._counts()
        self._given = {
            key: {each: given for each, given in machines.items() if given.is_configured}
            for key, machines in former.items()
        }
        for result in results:
            need = result.need
            for placement in result.placements if need.waiting else ():
                if placement.shape >= len(need.shapes):
                    key = _key(need, need.waiting[placement.shape - len(need.shapes)])
                    known = former.get(key, {}).get(placement.machine_id)
                    backoff = self._backoffs.get(key)
                    failures = backoff.failures if backoff is not None else 0
                    self._given.setdefault(key, {})[placement.machine_id] = _Given(
                        placement.count,
                        failures_before=failures if known is None else known.failures_before,
                        waiting_count=counts[key],
                    )

    def _bounded(self, row: Need) -> Need:
        if not row.waiting:
            return row
        waiting, shapes, aggregate, min_unit = [], list(row.shapes), row.aggregate, row.min_unit
        for shape in row.waiting:
            key = _key(row, shape)
            given = self._given.get(key, {}).values()
            count = min(shape.count, sum(each.count for each in given if each.is_configured))
            if count:
                shapes.append(replace(shape, count=count))
                aggregate = vector.add(aggregate, vector.scale(shape.resources, count))
                min_unit = vector.maximum(min_unit, shape.resources)
            left = shape.count - count
            backoff = self._backoffs.get(key)
            if backoff is not None and backoff.count:
                # Machines that boot stay acquired, and pods beyond those that were tried get theirs.
                booting = sum(each.count for each in given if not each.is_configured)
                left = min(left, max(booting, shape.count - backoff.count - count))
            if left > 0:
                waiting.append(replace(shape, count=left))
        if tuple(waiting) == row.waiting:
            return row
        return replace(row, waiting=tuple(waiting), shapes=tuple(shapes), aggregate=aggregate, min_unit=min_unit)


def _key(row: Need, shape: DemandShape) -> _ShapeKey:
    return row.key, vector.vector_key(shape.resources), shape.max_per_machine
