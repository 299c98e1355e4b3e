"""Explains why a row or a machine was decided on as it was, by replaying the last finished cycle with a listener.

docs/spec/shard.md §12, docs/adr/0121-explain-one-row.md. The shard stores the input and the decision of its last
finished cycle. A call replays one row or one machine of it, off the loop. If the replay differs from the decision, the
reference engine decides the whole cycle again. One call runs at a time and few wait, so that readers cannot starve the
cycle. An answer must never change a shard, and never describe any other cycle.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import grpc
import structlog

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.explain.decided_fleet import DecidedFleet
from bigfleet.engine.explain.explanation import rows_to_ask
from bigfleet.engine.explain.records import (
    Acquired,
    Credited,
    DomainsRanked,
    Earmarked,
    MachineHeld,
    MachineReclaimed,
    MachineReleased,
    MachineSpared,
    Record,
    RowFinished,
    RowFolded,
    RowNotFolded,
    RowRef,
    RowStarted,
    RowUnresolved,
    VictimComing,
    VictimPicked,
    VictimsRanked,
)
from bigfleet.engine.explain.replay import ExplainMismatch, replay_machine, replay_row
from bigfleet.engine.explain.sentences import default_row_name
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.shapes.decide import decide_with_fleet, says_pods
from bigfleet.engine.shapes.explain import Explained
from bigfleet.model.compute import Compute
from bigfleet.model.ids import MachineId, identifier_fault
from bigfleet.model.machine import Machine
from bigfleet.rpc.wire.convert_explain import LISTED_MAX, explanation_to_wire
from bigfleet.rpc.wire.gen import shardread_pb2
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.inventory.fleet_queries import row_of
from bigfleet.shard.status.views import CycleView, DecidedOn, NeedView

#: Events of one answer.
EVENTS_MAX = 1_000
#: Questions that wait while another is answered.
WAITING_MAX = 8

_log = structlog.get_logger("bigfleet.rpc.explain")

T = TypeVar("T")
Events = tuple[list[shardread_pb2.Explanation], bool]

#: Records that say what became of a row.
_OF_ROWS = (RowFolded, RowNotFolded, RowStarted, DomainsRanked, RowFinished, VictimsRanked, RowUnresolved)
#: Records of the machines that count for a row.
_OF_TAKING = (Credited, Earmarked, Acquired, VictimComing, VictimPicked)
#: Records that name no row.
_OF_MACHINES = (MachineReclaimed, MachineSpared, MachineReleased, MachineHeld)


class ExplanationRefusal(Exception):
    """A call that cannot be answered; the text gives the reason and the remedy."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedSubject(Generic[T]):
    """What the last finished cycle has to say about one subject."""

    cycle: int
    computed_at_unix_nanos: int
    #: The row as it was reported, or the machine as it was decided on.
    subject: T
    #: In decision order.
    events: list[shardread_pb2.Explanation]
    #: Whether there were more than `EVENTS_MAX`.
    truncated: bool


class Explainer:
    """Answers questions about one shard, one at a time."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._line = _Line()

    async def need(self, cluster: str, fingerprint: str, group: str) -> ExplainedSubject[NeedView]:
        """Return why the row got what it got; of equal rows the first in list order. Raises ExplanationRefusal."""
        _refuse_malformed("cluster_id", cluster, "InspectNeeds lists the rows")
        if not fingerprint:
            raise ExplanationRefusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                "profile_fingerprint is empty; InspectNeeds lists the rows with their fingerprints",
            )
        _decided_on(self._shard.view)
        # The rows are made off the loop, unless somebody has looked at them before.
        view = await self._shard.inspect()
        decided_on = _decided_on(view)
        row = next((row for row in view.needs if row.need.key == (cluster, fingerprint, group)), None)
        if row is None:
            gang = f" and group {group!r}" if group else " and no group"
            raise ExplanationRefusal(
                grpc.StatusCode.NOT_FOUND,
                f"cycle {view.cycle} had no row of cluster {cluster!r} with fingerprint {fingerprint!r}{gang}; "
                "InspectNeeds lists the rows",
            )
        events, truncated = await self._line.run(self._shard.compute, lambda: _need_events(decided_on, row))
        return _explained_subject(view, row, events, truncated)

    async def machine(self, machine_id: str) -> ExplainedSubject[Machine]:
        """Return why the machine serves whom it serves and what becomes of it. Raises ExplanationRefusal.

        The subject is the machine as far as decisions look at it: without host, node name and cause of a failure.
        """
        _refuse_malformed("machine_id", machine_id, "ListMachines lists the machines")
        view = self._shard.view
        decided_on = _decided_on(view)
        if row_of(decided_on.snapshot, machine_id) is None:
            is_new = self._shard.inventory.get(MachineId(machine_id)) is not None
            hint = "it came after that, so ask again after the next one" if is_new else "ListMachines lists them"
            raise ExplanationRefusal(
                grpc.StatusCode.NOT_FOUND, f"cycle {view.cycle} had no machine with the id {machine_id!r}; {hint}"
            )
        machine, (events, truncated) = await self._line.run(
            self._shard.compute, lambda: _machine_events(decided_on, MachineId(machine_id))
        )
        return _explained_subject(view, machine, events, truncated)


def _decided_on(view: CycleView) -> DecidedOn:
    if view.decided_on is None:
        raise ExplanationRefusal(
            grpc.StatusCode.UNAVAILABLE,
            "no cycle has finished yet, so there is nothing to explain; the first one needs the provider's list "
            "of machines",
        )
    return view.decided_on


def _explained_subject(
    view: CycleView, subject: T, events: list[shardread_pb2.Explanation], truncated: bool
) -> ExplainedSubject[T]:
    return ExplainedSubject(
        cycle=view.cycle,
        computed_at_unix_nanos=view.computed_at_unix_nanos,
        subject=subject,
        events=events,
        truncated=truncated,
    )


class _Line:
    """Lets one piece of work run at a time and few wait."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def run(self, compute: Compute, work: Callable[[], T]) -> T:
        """Return the work's result when its turn has come. Raises ExplanationRefusal when too many wait already."""
        if self._turn.locked() and self._waiting >= WAITING_MAX:
            raise ExplanationRefusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"one explanation is being made and {WAITING_MAX} more wait, which is as many as this shard takes at "
                "a time; ask again in a few seconds",
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        # Work in a thread goes on when its reader has gone, so the turn ends with the work and not with the reader.
        return await asyncio.shield(asyncio.create_task(self._take_turn(compute, work)))

    async def _take_turn(self, compute: Compute, work: Callable[[], T]) -> T:
        try:
            return await compute(work)
        finally:
            self._turn.release()


def _refuse_malformed(name: str, value: str, hint: str) -> None:
    fault = identifier_fault(value)
    if fault is not None:
        raise ExplanationRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"{name} {fault}; {hint}")


# ---- off the loop ------------------------------------------------------------------------------------------------


def _explain_over_pods(decided_on: DecidedOn) -> Explained:
    """Decide over pods once more, so that what it left can be read."""
    snapshot = snapshot_of(decided_on.snapshot)
    decision, fleet = decide_with_fleet(snapshot, decided_on.demand, decided_on.options)
    names = [default_row_name(RowRef(*need.key, position)) for position, need in enumerate(decided_on.demand)]
    return Explained(decision, fleet, names)


def _sentences(texts: Sequence[str]) -> Events:
    messages = [shardread_pb2.Explanation(kind="sentence", text=text) for text in texts[:EVENTS_MAX]]
    return messages, len(texts) > EVENTS_MAX


def _need_events(decided_on: DecidedOn, asked: NeedView) -> Events:
    if says_pods(decided_on.demand):
        position = next(place for place, need in enumerate(decided_on.demand) if need.key == asked.need.key)
        return _sentences(_explain_over_pods(decided_on).row(position))
    # A folded row is found through its members; equal rows may stand twice, so it is the object that is looked for.
    position = next(
        position
        for position, result in enumerate(decided_on.rows)
        if any(member is asked.need for member in result.members)
    )
    heard = _RowEar(position)
    fleet = DecidedFleet(decided_on.snapshot, decided_on.options, decided_on.rows)
    # What a scan passes over behind so many machines would find no room among the events.
    heads = EVENTS_MAX + 1
    try:
        victims = replay_row(fleet, decided_on.demand, position, heard, heads=heads, listed=LISTED_MAX + 1)
    except ExplainMismatch as fault:
        _log_mismatch(fault)
        return row_events_in_full(decided_on, position)
    return heard.events.messages(possible_victims=victims)


def _machine_events(decided_on: DecidedOn, machine_id: MachineId) -> tuple[Machine, Events]:
    fleet = DecidedFleet(decided_on.snapshot, decided_on.options, decided_on.rows)
    machine = fleet.objects(fleet.rows_of([machine_id])).machines[machine_id]
    if says_pods(decided_on.demand):
        return machine, _sentences(_explain_over_pods(decided_on).machine(machine_id))
    heard = _MachineEar(machine_id)
    try:
        replay_machine(fleet, machine_id, heard)
    except ExplainMismatch as fault:
        _log_mismatch(fault)
        return machine, machine_events_in_full(decided_on, machine)
    return machine, heard.events.messages()


def _log_mismatch(fault: ExplainMismatch) -> None:
    _log.error(
        "explain.mismatch_found",
        difference=str(fault),
        advice="the answer was computed from the whole cycle; report this line",
    )


def row_events_in_full(decided_on: DecidedOn, position: int) -> Events:
    """Return what there is to say of the row at a place of the folded list, by deciding everything once more."""
    heard = _RowEar(position)
    reference.decide(snapshot_of(decided_on.snapshot), decided_on.demand, decided_on.options, heard)
    return heard.events.messages()


def machine_events_in_full(decided_on: DecidedOn, machine: Machine) -> Events:
    """Return what there is to say of a machine, by deciding everything once more."""
    heard = _MachineEar(machine.id, positions=rows_to_ask(decided_on.rows, machine))
    reference.decide(snapshot_of(decided_on.snapshot), decided_on.demand, decided_on.options, heard)
    return heard.events.messages()


class _Heard(NamedTuple):
    """A record and its place in the decision."""

    place: int
    record: Record


class _Events:
    """Keeps the records that say most, in decision order: what became of a row before what it passed over."""

    def __init__(self) -> None:
        self._count = 0
        self._ranks: tuple[list[_Heard], ...] = ([], [], [])

    def add(self, record: Record) -> None:
        rank = self._ranks[0 if isinstance(record, _OF_ROWS) else 1 if isinstance(record, _OF_TAKING) else 2]
        if len(rank) < EVENTS_MAX:
            rank.append(_Heard(self._count, record))
        self._count += 1

    @property
    def is_full(self) -> bool:
        """Return whether no more machine finds room behind those that count for a row."""
        return len(self._ranks[1]) >= EVENTS_MAX

    def messages(self, *, possible_victims: int = 0) -> Events:
        """Return the messages, and whether there would have been more; `possible_victims` as in a message."""
        selected = sorted([heard for rank in self._ranks for heard in rank][:EVENTS_MAX], key=lambda heard: heard.place)
        messages = [explanation_to_wire(heard.record, possible_victims=possible_victims) for heard in selected]
        return messages, self._count > EVENTS_MAX


class _RowEar:
    """Hears what happens to the row at one place of the folded list."""

    def __init__(self, position: int) -> None:
        self.events = _Events()
        self._position = position

    def wants_row(self, row: RowRef) -> bool:
        """Return whether it is the row."""
        return row.position == self._position

    def wants_machine(self, machine_id: str) -> bool:
        """Return whether a machine's record would find room: if so all are of interest, the row looked at them."""
        return not self.events.is_full

    def report(self, record: Record) -> None:
        """Keep the record if it names the row."""
        if not isinstance(record, _OF_MACHINES) and record.row.position == self._position:
            self.events.add(record)


class _MachineEar:
    """Hears what happens to one machine, from itself and from some rows; None is every row that names it."""

    def __init__(self, machine_id: str, *, positions: frozenset[int] | None = None) -> None:
        self.events = _Events()
        self._machine_id = machine_id
        self._positions = positions

    def wants_row(self, row: RowRef) -> bool:
        """Return whether the row is among those that are asked."""
        return self._positions is None or row.position in self._positions

    def wants_machine(self, machine_id: str) -> bool:
        """Return whether it is the machine."""
        return machine_id == self._machine_id

    def report(self, record: Record) -> None:
        """Keep the record if it is about the machine."""
        if not isinstance(record, _OF_ROWS) and record.machine == self._machine_id:
            self.events.add(record)
