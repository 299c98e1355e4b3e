"""Providers that are broken in how they fail, and in what they remember of the life before a kill."""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bigfleet.conformance.areas.fault import READINESS_BLOCK
from bigfleet.conformance.ports import (
    Answer,
    Configure,
    Delete,
    Drain,
    Get,
    List,
    MachineSeen,
    Request,
    Status,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.provider.backend import CONFIGURE_WAITS, MachineView, Op
from bigfleet.provider.backends.fault import FaultReadiness
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.operations.restart import Restart
from bigfleet.provider.records import lifecycle
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.kinds import EDGES, Kind
from bigfleet.provider.records.record import NO_METADATA, ErrorCode, Record
from bigfleet.provider.storage.ledger import Change
from bigfleet.provider.storage.store import Batch, Loaded
from tests.conformance.bench import (
    Bent,
    KeptStore,
    Making,
    Mutant,
    StoreLife,
    bent,
    method,
    replaced,
)
from tests.conformance.client_mutants import instead, showing, shown
from tests.conformance.kit_mutants import Bend, kit

S = MachineState


# ---- what a failure makes of a machine -------------------------------------------------------------------------------


def failure(kind: Kind, bend: Callable[[Record, Record], Record]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch of `failed` for operations of a kind: `bend` gets the record before and after."""
    sound = lifecycle.failed

    def failed(record: Record, *arguments: Any, **named: Any) -> Record:
        after = sound(record, *arguments, **named)
        is_met = record.operation is not None and record.operation.kind is kind
        return bend(record, after) if is_met else after

    return lambda: replaced(sound, failed)


def _with(record: Record, **changes: Any) -> Record:
    return dataclasses.replace(record, machine=dataclasses.replace(record.machine, **changes))


def back_at_the_start(before: Record, after: Record) -> Record:
    assert before.operation is not None
    unbound = dataclasses.replace(after, metadata=NO_METADATA, failure=None)
    return _with(unbound, state=EDGES[before.operation.kind].source, last_error="", cluster=ClusterId(""))


def bound_as_before(_before: Record, after: Record) -> Record:
    return _with(dataclasses.replace(after, failure=None), state=S.CONFIGURED, last_error="")


def idle_but_bound(_before: Record, after: Record) -> Record:
    return _with(dataclasses.replace(after, failure=None), state=S.IDLE, last_error="")


def stuck(before: Record, _after: Record) -> Record:
    return before


def without_text(_before: Record, after: Record) -> Record:
    return _with(after, last_error="")


async def late_result_counts(sound: Any, work: OperationRunner, job: Any, op: Any, result: object) -> None:
    """A result that comes after the verdict brings the machine to its target."""
    async with work._ledger.turn(job.machine.id) as record:
        assert record is not None, "the machine is still there"
        late = _with(dataclasses.replace(record, failure=None), state=EDGES[op.kind].target, last_error="")
        await work._ledger.commit(Change(record=late))


async def late_result_adds_to_the_text(sound: Any, work: OperationRunner, job: Any, op: Any, result: object) -> None:
    """A result that comes after the verdict is told in last_error."""
    async with work._ledger.turn(job.machine.id) as record:
        assert record is not None, "the machine is still there"
        await work._ledger.commit(Change(record=_with(record, last_error=f"{record.machine.last_error}; came late")))


def _repeats_what_failed(core: CapacityCore) -> None:
    sound = core._in_turn

    async def in_turn(call: Any) -> AcceptedCall:
        record = core._ledger.view.get(call.machine_id)
        latest = None if record is None else record.operation
        if record is not None and record.state is S.FAILED and latest is not None and latest.kind is call.kind:
            return AcceptedCall(latest.id, record)
        return await sound(call)

    core._in_turn = in_turn  # type: ignore[method-assign]


class TextByReading(Bent):
    """last_error says how often it was read."""

    reads = 0

    async def after(self, request: Request, answer: Answer) -> Answer:
        self.reads += isinstance(request, Get)
        return showing(answer, self.counted)

    def counted(self, machine: MachineSeen) -> MachineSeen:
        if machine.state is not S.FAILED:
            return machine
        return dataclasses.replace(machine, last_error=f"{machine.last_error} ({self.reads})")


class ListHidesFailed(Bent):
    """List shows FAILED machines without their text."""

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(request, List):
            return answer
        return showing(answer, lambda m: dataclasses.replace(m, last_error="") if m.state is S.FAILED else m)


class RefusalsAreTold(Bent):
    """A call that FAILED refuses replaces the text."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.refused: set[str] = set()

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Delete) and answer.is_refused:
            self.refused.add(request.machine_id)
        return showing(answer, self.told)

    def told(self, machine: MachineSeen) -> MachineSeen:
        if machine.state is not S.FAILED or machine.id not in self.refused:
            return machine
        return dataclasses.replace(machine, last_error="a call was refused")


def hopeful(machine: MachineSeen) -> MachineSeen:
    """A node that is not Ready yet counts as delivered."""
    is_joining = machine.state is S.CONFIGURING and machine.cluster == READINESS_BLOCK
    return dataclasses.replace(machine, state=S.CONFIGURED) if is_joining else machine


# ---- what a kill leaves ----------------------------------------------------------------------------------------------


def losing(bend: Callable[[Loaded], Loaded]) -> Making:
    """Return a making whose store gives back less than it took."""

    class Losing(KeptStore):
        def load(self, new_incarnation: bytes) -> Loaded:
            return bend(super().load(new_incarnation))

    return Making(store=Losing)


def each_record(bend: Callable[[Record], Record]) -> Making:
    """Return a making whose store gives back resting records bent."""

    def bent_all(loaded: Loaded) -> Loaded:
        records = (r if r.state in TRANSITIONAL_STATES else bend(r) for r in loaded.records)
        return dataclasses.replace(loaded, records=tuple(records))

    return losing(bent_all)


class Lazy(KeptStore):
    """A commit reaches the disk with the next one."""

    waiting: Batch | None = None

    def load(self, new_incarnation: bytes) -> Loaded:
        self.waiting = None
        return super().load(new_incarnation)

    def commit(self, batch: Batch) -> None:
        if self.waiting is not None:
            super().commit(self.waiting)
        self.waiting = batch


class MarksWithRecords(KeptStore):
    """A mark is kept only with a change of its machine."""

    def commit(self, batch: Batch) -> None:
        super().commit(batch if batch.records else dataclasses.replace(batch, marks=()))


def known_marks(loaded: Loaded) -> Loaded:
    ids = {record.id for record in loaded.records}
    return dataclasses.replace(loaded, marks=tuple(mark for mark in loaded.marks if mark.machine_id in ids))


def in_later_lives(bend: Bend) -> Bend:
    """Return a bend of every life but the first."""

    def bend_later(core: CapacityCore) -> None:
        life = core._ledger._store
        assert isinstance(life, StoreLife), "the bench made it"
        if life.kept.lives > 1:
            bend(core)

    return bend_later


class _Counting:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def new_id(self) -> str:
        return f"{next(self._numbers):026d}"


def _ids_begin_again(core: CapacityCore) -> None:
    core._ids = _Counting()


def _no_revision(core: CapacityCore) -> None:
    sound = core.list

    async def without(*arguments: Any) -> Any:
        return dataclasses.replace(await sound(*arguments), revision=b"")

    core.list = without  # type: ignore[assignment,method-assign]


def _new_shards_begin_at_the_highest_mark(core: CapacityCore) -> None:
    fence = core._ledger.fence
    sound = fence.passes

    def passes(machine_id: str, token: Token) -> bool:
        marks = fence._known.get(machine_id, {})
        if token.shard_id in marks or token.is_absent or not marks:
            return sound(machine_id, token)
        return token.order > max((mark.epoch, mark.sequence) for mark in marks.values())

    fence.passes = passes  # type: ignore[method-assign]


async def nothing_is_taken_up(sound: Any, restart: Restart) -> None:
    """What was interrupted stays as it is."""


async def taken_up_as_done(sound: Any, restart: Restart, record: Record, kind: Kind) -> None:
    """What was interrupted counts as done."""
    await restart._ledger.commit(Change(record=_with(record, state=EDGES[kind].target)))


async def taken_up_without_a_word(sound: Any, restart: Restart, record: Record, kind: Kind) -> None:
    """What was interrupted is FAILED, and nobody says why."""
    failed = lifecycle.failed(record, ErrorCode.RESTARTED, "restarted", record.state_since_unix_nanos)
    await restart._ledger.commit(Change(record=_with(failed, last_error="")))


class HungIsReady(FaultReadiness):
    """A checker that believes in a node whose Configure never ended."""

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        return cluster != READINESS_BLOCK


async def taken_up_as_never_begun(sound: Any, restart: Restart, record: Record, kind: Kind) -> None:
    """What was interrupted counts as never begun."""
    await restart._ledger.commit(Change(record=back_at_the_start(record, record)))


FAILURE_KIT_MUTANTS = (
    Mutant(name="a Configure that errs goes back", breaks="FAULT-1", patch=failure(Kind.CONFIGURE, back_at_the_start)),
    Mutant(name="a Configure that errs stays", breaks="FAULT-1", patch=failure(Kind.CONFIGURE, stuck)),
    Mutant(name="a Configure errs without a word", breaks="FAULT-1", patch=failure(Kind.CONFIGURE, without_text)),
    Mutant(name="a Create that errs goes back", breaks="FAULT-2", patch=failure(Kind.CREATE, back_at_the_start)),
    Mutant(name="a Create that errs stays", breaks="FAULT-2", patch=failure(Kind.CREATE, stuck)),
    Mutant(name="a timeout takes a minute", breaks="FAULT-3", making=Making(fault_timeout_seconds=60.0)),
    Mutant(name="a timeout comes at once", breaks="FAULT-3", making=Making(fault_timeout_seconds=0.2)),
    Mutant(
        name="a late success counts",
        breaks="FAULT-4",
        patch=lambda: method(OperationRunner, "_handle_late", late_result_counts),
    ),
    Mutant(
        name="a late success is told in the text",
        breaks="FAULT-4",
        patch=lambda: method(OperationRunner, "_handle_late", late_result_adds_to_the_text),
    ),
    Mutant(name="a repeat of what failed is taken", breaks="FAULT-5", clients=kit(_repeats_what_failed)),
    Mutant(name="a Drain that errs leaves it CONFIGURED", breaks="FAULT-6", patch=failure(Kind.DRAIN, bound_as_before)),
    Mutant(name="a Drain that errs leaves it DRAINING", breaks="FAULT-6", patch=failure(Kind.DRAIN, stuck)),
    Mutant(name="a Drain that errs ends IDLE and bound", breaks="FAULT-6", patch=failure(Kind.DRAIN, idle_but_bound)),
    Mutant(
        name="readiness is not asked for",
        breaks="FAULT-8",
        making=Making(fault_readiness=lambda: CONFIGURE_WAITS),
    ),
    Mutant(
        name="the store forgets the marks",
        breaks="DUR-1",
        making=losing(lambda loaded: dataclasses.replace(loaded, marks=())),
    ),
    Mutant(name="marks of unknown machines are forgotten", breaks="DUR-1", making=losing(known_marks)),
    Mutant(name="marks of refused calls are not stored", breaks="DUR-1", making=Making(store=MarksWithRecords)),
    Mutant(
        name="the store forgets operations",
        breaks="DUR-2",
        making=each_record(lambda record: dataclasses.replace(record, operation=None)),
    ),
    Mutant(
        name="the store forgets metadata",
        breaks="DUR-3",
        making=each_record(lambda record: dataclasses.replace(record, metadata=NO_METADATA)),
    ),
    Mutant(
        name="the store forgets clusters",
        breaks="DUR-3",
        making=each_record(lambda record: _with(record, cluster=ClusterId(""))),
    ),
    Mutant(name="a commit waits for the next one", breaks="DUR-4", making=Making(store=Lazy)),
    Mutant(
        name="a start seeds the fleet anew",
        breaks="DUR-4",
        making=losing(lambda loaded: dataclasses.replace(loaded, records=())),
    ),
    Mutant(name="ids begin again", breaks="DUR-5", clients=kit(_ids_begin_again)),
    Mutant(name="a second life gives no revisions", breaks="DUR-5", clients=kit(in_later_lives(_no_revision))),
    Mutant(
        name="what was interrupted stays",
        breaks="DUR-6",
        patch=lambda: method(Restart, "take_up_all", nothing_is_taken_up),
    ),
    Mutant(
        name="what was interrupted counts as done",
        breaks="DUR-6",
        patch=lambda: method(Restart, "_take_up", taken_up_as_done),
    ),
    Mutant(
        name="a Configure that hung is ready after a restart",
        breaks="DUR-6",
        making=Making(fault_readiness=HungIsReady),
    ),
    Mutant(
        name="what was interrupted was never begun",
        breaks="DUR-6",
        patch=lambda: method(Restart, "_take_up", taken_up_as_never_begun),
    ),
    Mutant(
        name="what was interrupted fails without a word",
        breaks="DUR-6",
        patch=lambda: method(Restart, "_take_up", taken_up_without_a_word),
    ),
    Mutant(
        name="after a start new shards begin at the highest mark",
        breaks="DUR-7",
        clients=kit(in_later_lives(_new_shards_begin_at_the_highest_mark)),
    ),
)
FAILURE_CLIENT_MUTANTS = (
    Mutant(name="Drain on FAILED is a no-op", breaks="FAULT-5", clients=instead(Drain, S.FAILED, Status.OK)),
    Mutant(
        name="Delete on FAILED is fenced",
        breaks="FAULT-5",
        clients=instead(Delete, S.FAILED, Status.FAILED_PRECONDITION),
    ),
    Mutant(
        name="Configure on FAILED is a no-op",
        breaks="FAULT-5",
        clients=instead(Configure, S.FAILED, Status.OK),
    ),
    Mutant(name="a refused call replaces the text", breaks="FAULT-5", clients=bent(RefusalsAreTold)),
    Mutant(name="the text changes by reading", breaks="FAULT-7", clients=bent(TextByReading)),
    Mutant(name="List hides the text", breaks="FAULT-7", clients=bent(ListHidesFailed)),
    Mutant(name="what joins counts as delivered", breaks="FAULT-8", clients=shown(hopeful)),
)
