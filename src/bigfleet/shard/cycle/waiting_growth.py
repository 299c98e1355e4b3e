"""Limits growth for waiting pods: a shape gets a second machine only after the first has joined.

docs/spec/shard.md §9.9. Waiting pods fit on no Configured machine, so each cycle acquires machines for them unless one
that boots has room. Pods do not run at once on a machine that has become Configured: its node must join, and the
scheduler needs time. Until then, the pods that it was acquired for count as pods that any machine may host, and the
machine is not reclaimed. Rows without waiting pods cost nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from bigfleet.engine.decision import RowResult
from bigfleet.model import vector
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState

#: How long the scheduler may take to place pods on a node that has joined.
SETTLE_SECONDS = 60.0

_BOOTING = frozenset({MachineState.SPECULATIVE, MachineState.CREATING, MachineState.IDLE, MachineState.CONFIGURING})

#: A row, and what one of its waiting pods requests.
_ShapeKey = tuple[RowKey, tuple[tuple[str, int], ...], int]


@dataclass(slots=True)
class _Given:
    """One machine that was acquired for waiting pods of a shape."""

    count: int
    is_configured: bool = False
    #: None before its node was seen Ready.
    joined_seconds: float | None = None


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
        if not self._given and not self.awaited:
            return
        wanted = {_key(row, shape) for rows in self._reported.values() for row in rows for shape in row.waiting}
        now_seconds = self.clock.monotonic_seconds()
        for key, machines in list(self._given.items()):
            for machine_id, given in list(machines.items()):
                if key not in wanted or not self._waits(key, machine_id, given, now_seconds):
                    del machines[machine_id]
            if not machines:
                del self._given[key]
        self.awaited = {each for given in self._given.values() for each in given if given[each].is_configured}
        for cluster, rows in self._reported.items():
            bounded = [self._bounded(row) for row in rows]
            if bounded != self._bounded_rows[cluster]:
                self._bounded_rows[cluster] = bounded
                yield cluster, bounded

    def _waits(self, key: _ShapeKey, machine_id: MachineId, given: _Given, now_seconds: float) -> bool:
        """Return whether the machine may still be of use to the pods that it was acquired for."""
        machine = self.machine_of(machine_id)
        if machine is None or self.has_failed(machine_id):
            return False
        given.is_configured = machine.state is MachineState.CONFIGURED
        if not given.is_configured:
            return machine.state in _BOOTING
        if given.joined_seconds is None and self.has_joined(machine):
            given.joined_seconds = now_seconds
        is_over = given.joined_seconds is not None and now_seconds - given.joined_seconds >= SETTLE_SECONDS
        return machine.cluster == key[0][0] and not is_over

    def decided(self, results: Iterable[RowResult]) -> None:
        """Remember the machines that a decision gave to waiting pods, in place of all that are not Configured."""
        if not self._reported:
            return
        self._given = {
            key: {each: given for each, given in machines.items() if given.is_configured}
            for key, machines in self._given.items()
        }
        for result in results:
            need = result.need
            for placement in result.placements if need.waiting else ():
                if placement.shape >= len(need.shapes):
                    key = _key(need, need.waiting[placement.shape - len(need.shapes)])
                    self._given.setdefault(key, {})[placement.machine_id] = _Given(placement.count)

    def _bounded(self, row: Need) -> Need:
        if not row.waiting:
            return row
        waiting, shapes, aggregate, min_unit = [], list(row.shapes), row.aggregate, row.min_unit
        for shape in row.waiting:
            given = self._given.get(_key(row, shape), {}).values()
            count = min(shape.count, sum(each.count for each in given if each.is_configured))
            if count:
                shapes.append(replace(shape, count=count))
                aggregate = vector.add(aggregate, vector.scale(shape.resources, count))
                min_unit = vector.maximum(min_unit, shape.resources)
            if count < shape.count:
                waiting.append(replace(shape, count=shape.count - count))
        if tuple(waiting) == row.waiting:
            return row
        return replace(row, waiting=tuple(waiting), shapes=tuple(shapes), aggregate=aggregate, min_unit=min_unit)


def _key(row: Need, shape: DemandShape) -> _ShapeKey:
    return row.key, vector.vector_key(shape.resources), shape.max_per_machine
