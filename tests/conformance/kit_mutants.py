"""Mutants of the kit itself: its fence, its turns, its lifecycle, its memory of operations, each bent in one point."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from types import MappingProxyType
from typing import Any
from unicodedata import normalize

from bigfleet.conformance.ports import ProviderClient
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.states import TRANSITIONAL_STATES
from bigfleet.provider.backend import Limits, Reset
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records import lifecycle, reset
from bigfleet.provider.records.fence import Fence, Mark, Token
from bigfleet.provider.records.kinds import EDGES, Kind
from bigfleet.provider.records.record import NO_METADATA, Operation, Record
from bigfleet.provider.records.refusal import Code, Refused
from tests.conformance.bench import Clients, Making, Mutant, StagedBackend, plain, replaced

Order = tuple[int, int]
Bend = Callable[[CapacityCore], None]


def kit(bend: Bend) -> Clients:
    """Return sound clients in front of a core that is bent after its start."""

    def clients(core: CapacityCore) -> Sequence[ProviderClient]:
        bend(core)
        return plain(core)

    return clients


# ---- the fence -----------------------------------------------------------------------------------------------------


def fence(passes: Callable[[Fence, str, Token], bool]) -> Clients:
    """Return clients of a core whose fence decides so."""

    class Mutated(Fence):
        def passes(self, machine_id: str, token: Token) -> bool:
            return token.is_absent or passes(self, machine_id, token)

        def put(self, mark: Mark, *, is_known: bool) -> None:
            # A mark that a mutant lets move back must not end the core by the assertion that guards it.
            before = self.mark(mark.machine_id, mark.shard_id)
            if before is None or (mark.epoch, mark.sequence) >= (before.epoch, before.sequence):
                super().put(mark, is_known=is_known)

    def bend(core: CapacityCore) -> None:
        core._ledger.fence = Mutated()

    return kit(bend)


def against(compare: Callable[[Order, Order], bool]) -> Clients:
    """Return clients of a core whose fence compares a token with its mark so."""

    def passes(marks: Fence, machine_id: str, token: Token) -> bool:
        mark = marks.mark(machine_id, token.shard_id)
        return mark is None or compare(token.order, (mark.epoch, mark.sequence))

    return fence(passes)


def _unsigned(order: Order) -> Order:
    return order[0] % 2**64, order[1] % 2**64


def _in_32_bits(order: Order) -> Order:
    return (order[0] + 2**31) % 2**32 - 2**31, order[1]


def _no_mark_passes_only_from_zero(marks: Fence, machine_id: str, token: Token) -> bool:
    mark = marks.mark(machine_id, token.shard_id)
    return token.order > ((0, 0) if mark is None else (mark.epoch, mark.sequence))


def _passes_in_flight(core: CapacityCore) -> None:
    sound = core._ledger.fence.passes

    def passes(machine_id: str, token: Token) -> bool:
        record = core._ledger.view.get(machine_id)
        return sound(machine_id, token) or (record is not None and record.state in TRANSITIONAL_STATES)

    _keep_marks_rising(core)
    core._ledger.fence.passes = passes  # type: ignore[method-assign]


def _keep_marks_rising(core: CapacityCore) -> None:
    put, find = core._ledger.fence.put, core._ledger.fence.mark

    def rising(mark: Mark, *, is_known: bool) -> None:
        before = find(mark.machine_id, mark.shard_id)
        if before is None or (mark.epoch, mark.sequence) >= (before.epoch, before.sequence):
            put(mark, is_known=is_known)

    core._ledger.fence.put = rising  # type: ignore[method-assign]


def marks_under(key: Callable[[str, str], tuple[str, str]]) -> Bend:
    """Return a bend that keeps marks under another key than (machine, shard)."""

    def bend(core: CapacityCore) -> None:
        newest: dict[tuple[str, str], Order] = {}

        def passes(machine_id: str, token: Token) -> bool:
            if token.is_absent:
                return True
            at = key(machine_id, token.shard_id)
            if at in newest and token.order <= newest[at]:
                return False
            newest[at] = token.order
            return True

        core._ledger.fence.passes = passes  # type: ignore[method-assign]
        _keep_marks_rising(core)

    return bend


def _unknown_ids_leave_no_mark(core: CapacityCore) -> None:
    sound = core._ledger.mark_of
    core._ledger.mark_of = (  # type: ignore[method-assign]
        lambda machine_id, token: sound(machine_id, token) if machine_id in core._ledger.view else None
    )


def _absent_token_is_a_mark(core: CapacityCore) -> None:
    sound = core._ledger.fence.passes
    met: set[str] = set()

    def passes(machine_id: str, token: Token) -> bool:
        if not token.is_absent:
            return sound(machine_id, token)
        is_first = machine_id not in met
        met.add(machine_id)
        return is_first

    core._ledger.fence.passes = passes  # type: ignore[method-assign]


def _marks_move_with_acceptance_only(core: CapacityCore) -> None:
    sound = core._ledger.commit

    async def commit(change: Any) -> Record | None:
        return None if change.record is None and change.mark is not None else await sound(change)

    core._ledger.commit = commit  # type: ignore[method-assign]


def forgets_marks_after(kind: Kind) -> Bend:
    """Return a bend that forgets a machine's marks when such a call was accepted."""

    def bend(core: CapacityCore) -> None:
        sound = core._in_turn

        async def in_turn(call: Any) -> AcceptedCall:
            ack = await sound(call)
            if call.kind is kind:
                core._ledger.fence._known.pop(call.machine_id, None)
            return ack

        core._in_turn = in_turn  # type: ignore[method-assign]

    return bend


def _two_shards_of_marks(core: CapacityCore) -> None:
    sound = core._ledger.fence.put

    def put(mark: Mark, *, is_known: bool) -> None:
        sound(mark, is_known=is_known)
        marks = core._ledger.fence._known.get(mark.machine_id, {})
        while len(marks) > 2:
            del marks[next(iter(marks))]

    core._ledger.fence.put = put  # type: ignore[method-assign]


def every(number: int) -> Bend:
    """Return a bend that lets every so-many-th stale token pass."""

    def bend(core: CapacityCore) -> None:
        sound = core._ledger.fence.passes
        stale = iter(range(1, 10**9))
        core._ledger.fence.passes = (  # type: ignore[method-assign]
            lambda machine_id, token: sound(machine_id, token) or next(stale) % number == 0
        )
        _keep_marks_rising(core)

    return bend


# ---- operations, turns ---------------------------------------------------------------------------------------------


def repeats_before_fence(kind: Kind) -> Bend:
    """Return a bend that answers repeats of a kind before it asks the fence."""

    def bend(core: CapacityCore) -> None:
        sound = core._in_turn

        async def in_turn(call: Any) -> AcceptedCall:
            record = core._ledger.view.get(call.machine_id)
            latest = None if record is None else record.operation
            if call.kind is kind and latest is not None and latest.kind is kind:
                assert record is not None, "an operation belongs to a record"
                if record.state in EDGES[kind][1:]:
                    return AcceptedCall(latest.id, record)
            return await sound(call)

        core._in_turn = in_turn  # type: ignore[method-assign]

    return bend


def no_turn_for(kind: Kind) -> Bend:
    """Return a bend whose calls of a kind do not wait for each other."""

    def bend(core: CapacityCore) -> None:
        sound_in_turn, sound_turn = core._in_turn, core._ledger.turn

        @asynccontextmanager
        async def no_turn(machine_id: str, *_more: Any, **_named: Any) -> AsyncIterator[Record | None]:
            yield core._ledger.view.get(machine_id)

        async def in_turn(call: Any) -> AcceptedCall:
            # The turn is asked for at once, before anybody else runs.
            core._ledger.turn = no_turn if call.kind is kind else sound_turn  # type: ignore[method-assign]
            return await sound_in_turn(call)

        core._in_turn = in_turn  # type: ignore[method-assign]

    return bend


def _repeats_are_out_of_position(core: CapacityCore) -> None:
    sound = core._in_turn

    async def in_turn(call: Any) -> AcceptedCall:
        record = core._ledger.view.get(call.machine_id)
        latest = None if record is None else record.operation
        is_latest = latest is not None and latest.kind is call.kind
        if is_latest and record is not None and record.state is EDGES[call.kind].target:
            raise Refused(Code.ABORTED, "out of position")
        return await sound(call)

    core._in_turn = in_turn  # type: ignore[method-assign]


def answers_otherwise(code: Code, other: Code) -> Bend:
    """Return a bend that answers with another code."""

    def bend(core: CapacityCore) -> None:
        sound = core._mutate

        async def mutate(call: Any) -> AcceptedCall:
            try:
                return await sound(call)
            except Refused as refused:
                raise Refused(other if refused.code is code else refused.code, refused.message) from refused

        core._mutate = mutate  # type: ignore[method-assign]

    return bend


class _OneId:
    def new_id(self) -> str:
        return "0" * 26


def _ids_repeat(core: CapacityCore) -> None:
    core._ids = _OneId()


def _repeats_get_new_ids(core: CapacityCore) -> None:
    sound = core._in_turn
    seen: set[str] = set()

    async def in_turn(call: Any) -> AcceptedCall:
        ack = await sound(call)
        if ack.operation_id in seen:
            return AcceptedCall(f"op-{core._ids.new_id()}", ack.record)
        seen.add(ack.operation_id)
        return ack

    core._in_turn = in_turn  # type: ignore[method-assign]


# ---- lifecycle -----------------------------------------------------------------------------------------------------


def completion(bend: Callable[[Record, Record], Record]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch of `completed`: `bend` gets the record before and after."""
    sound = lifecycle.completed

    def completed(record: Record, *arguments: Any, **named: Any) -> Record:
        return bend(record, sound(record, *arguments, **named))

    return lambda: replaced(sound, completed)


def acceptance(bend: Callable[[Record, Record], Record]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch of `accepted`: `bend` gets the record before and after."""
    sound = lifecycle.accepted

    def accepted(record: Record, operation: Operation, **named: Any) -> Record:
        return bend(record, sound(record, operation, **named))

    return lambda: replaced(sound, accepted)


def _is(record: Record, kind: Kind) -> bool:
    return record.operation is not None and record.operation.kind is kind


def _with_machine(record: Record, **changes: Any) -> Record:
    machine: Machine = dataclasses.replace(record.machine, **changes)
    return dataclasses.replace(record, machine=machine)


def drain_keeps_metadata(before: Record, after: Record) -> Record:
    return dataclasses.replace(after, metadata=before.metadata) if _is(before, Kind.DRAIN) else after


def drain_keeps_cluster(before: Record, after: Record) -> Record:
    return _with_machine(after, cluster=before.machine.cluster) if _is(before, Kind.DRAIN) else after


def delete_keeps_host(before: Record, after: Record) -> Record:
    return _with_machine(after, host=before.machine.host) if _is(before, Kind.DELETE) else after


def drain_drops_host(before: Record, after: Record) -> Record:
    return _with_machine(after, host=type(after.machine.host)()) if _is(before, Kind.DRAIN) else after


def cluster_at_completion(_before: Record, after: Record) -> Record:
    return _with_machine(after, cluster=ClusterId("")) if _is(after, Kind.CONFIGURE) else after


def metadata_at_completion(_before: Record, after: Record) -> Record:
    return dataclasses.replace(after, metadata=NO_METADATA) if _is(after, Kind.CONFIGURE) else after


def stored(bend: Callable[[Mapping[str, str]], Mapping[str, str]]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch that changes the map which a Configure stores."""

    def bound(_before: Record, after: Record) -> Record:
        if not _is(after, Kind.CONFIGURE):
            return after
        return dataclasses.replace(after, metadata=MappingProxyType(dict(bend(after.metadata))))

    return acceptance(bound)


def merged() -> AbstractContextManager[None]:
    """Return a patch under which a Configure adds to what the machine had before."""
    known: dict[str, dict[str, str]] = {}

    def bound(_before: Record, after: Record) -> Record:
        if not _is(after, Kind.CONFIGURE):
            return after
        known.setdefault(after.id, {}).update(after.metadata)
        return dataclasses.replace(after, metadata=MappingProxyType(dict(known[after.id])))

    return acceptance(bound)()


def _first(metadata: Mapping[str, str], count: int) -> Mapping[str, str]:
    return dict(list(metadata.items())[:count])


KIT_MUTANTS = (
    Mutant(name="the mark is kept per shard", breaks="FENCE-2", clients=kit(marks_under(lambda _m, s: ("", s)))),
    Mutant(name="the mark is kept per machine", breaks="FENCE-2", clients=kit(marks_under(lambda m, _s: (m, "")))),
    Mutant(name="the mark is global", breaks="FENCE-7", clients=kit(marks_under(lambda _m, _s: ("", "")))),
    Mutant(name="an equal token passes", breaks="EDGE-12", clients=against(lambda t, m: t >= m)),
    Mutant(name="only epochs are compared", breaks="FENCE-3", clients=against(lambda t, m: t[0] > m[0])),
    Mutant(name="only sequences are compared", breaks="FENCE-9", clients=against(lambda t, m: t[1] > m[1])),
    Mutant(name="both must rise", breaks="FENCE-8", clients=against(lambda t, m: t[0] > m[0] and t[1] > m[1])),
    Mutant(name="one of both must rise", breaks="FENCE-3", clients=against(lambda t, m: t[0] > m[0] or t[1] > m[1])),
    Mutant(name="numbers must not be skipped", breaks="FENCE-3", clients=against(lambda t, m: t == (m[0], m[1] + 1))),
    Mutant(
        name="a new epoch begins at 1",
        breaks="FUZZ-1",
        clients=against(lambda t, m: t > m and (t[0] == m[0] or t[1] == 1)),
    ),
    Mutant(
        name="numbers are compared unsigned",
        breaks="FUZZ-1",
        clients=against(lambda t, m: _unsigned(t) > _unsigned(m)),
    ),
    Mutant(
        name="epochs are kept in 32 bits",
        breaks="FENCE-3",
        clients=against(lambda t, m: _in_32_bits(t) > _in_32_bits(m)),
    ),
    Mutant(name="no mark counts as (0, 0)", breaks="EDGE-11", clients=fence(_no_mark_passes_only_from_zero)),
    Mutant(
        name="the largest number is never stored",
        breaks="EDGE-12",
        clients=against(lambda t, m: t > m or m[1] == 2**63 - 1),
    ),
    Mutant(name="a machine in flight is not fenced", breaks="RACE-5", clients=kit(_passes_in_flight)),
    Mutant(name="unknown ids leave no mark", breaks="FENCE-1", clients=kit(_unknown_ids_leave_no_mark)),
    Mutant(name="an absent token leaves a mark", breaks="FENCE-7", clients=kit(_absent_token_is_a_mark)),
    Mutant(name="marks move with an acceptance only", breaks="FENCE-10", clients=kit(_marks_move_with_acceptance_only)),
    Mutant(name="a drain forgets the marks", breaks="FENCE-8", clients=kit(forgets_marks_after(Kind.DRAIN))),
    Mutant(name="a delete forgets the marks", breaks="FENCE-9", clients=kit(forgets_marks_after(Kind.DELETE))),
    Mutant(name="a machine keeps marks of two shards", breaks="FUZZ-4", clients=kit(_two_shards_of_marks)),
    Mutant(name="every 40th stale token passes", breaks="FENCE-11", clients=kit(every(40))),
    Mutant(
        name="the fence comes after the repeat of Configure",
        breaks="FENCE-5",
        clients=kit(repeats_before_fence(Kind.CONFIGURE)),
    ),
    Mutant(
        name="the fence comes after the repeat of Drain",
        breaks="FENCE-6",
        clients=kit(repeats_before_fence(Kind.DRAIN)),
    ),
    Mutant(
        name="the fence comes after the repeat of Create",
        breaks="FUZZ-4",
        clients=kit(repeats_before_fence(Kind.CREATE)),
    ),
    Mutant(name="Create takes no turn", breaks="RACE-1", clients=kit(no_turn_for(Kind.CREATE))),
    Mutant(name="Configure takes no turn", breaks="RACE-2", clients=kit(no_turn_for(Kind.CONFIGURE))),
    Mutant(name="Drain takes no turn", breaks="RACE-3", clients=kit(no_turn_for(Kind.DRAIN))),
    Mutant(name="Delete takes no turn", breaks="RACE-9", clients=kit(no_turn_for(Kind.DELETE))),
    Mutant(name="a repeat at rest is out of position", breaks="EDGE-5", clients=kit(_repeats_are_out_of_position)),
    Mutant(name="a repeat gets a new id", breaks="EDGE-6", clients=kit(_repeats_get_new_ids)),
    Mutant(name="operation ids repeat", breaks="EDGE-14", clients=kit(_ids_repeat)),
    Mutant(
        name="out of position is FAILED_PRECONDITION",
        breaks="EDGE-3",
        clients=kit(answers_otherwise(Code.ABORTED, Code.FAILED_PRECONDITION)),
    ),
    Mutant(
        name="an unknown id is INVALID_ARGUMENT",
        breaks="EDGE-7",
        clients=kit(answers_otherwise(Code.NOT_FOUND, Code.INVALID_ARGUMENT)),
    ),
    Mutant(
        name="a bad argument is FAILED_PRECONDITION",
        breaks="FUZZ-5",
        clients=kit(answers_otherwise(Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)),
    ),
    Mutant(
        name="the fence answers ABORTED",
        breaks="FENCE-4",
        clients=kit(answers_otherwise(Code.FAILED_PRECONDITION, Code.ABORTED)),
    ),
    Mutant(name="a drain keeps the metadata", breaks="META-2", patch=completion(drain_keeps_metadata)),
    Mutant(name="a drain keeps the cluster", breaks="LIFE-1", patch=completion(drain_keeps_cluster)),
    Mutant(name="a delete keeps the host", breaks="LIFE-8", patch=completion(delete_keeps_host)),
    Mutant(
        name="a machine that was not reset goes to another cluster",
        breaks="LIFE-9",
        patch=lambda: replaced(reset.reuse_fault, lambda _record, _cluster: ""),
        making=Making(backend=lambda count: StagedBackend(count, limits=Limits(reset=Reset.NONE))),
    ),
    Mutant(
        name="a drain without a reset forgets the cluster",
        breaks="LIFE-9",
        patch=lambda: replaced(reset.drained, lambda _before, after, _reset: after),
        making=Making(backend=lambda count: StagedBackend(count, limits=Limits(reset=Reset.NONE))),
    ),
    Mutant(name="a drain drops the host", breaks="LIFE-6", patch=completion(drain_drops_host)),
    Mutant(name="the cluster shows at completion only", breaks="LIFE-5", patch=acceptance(cluster_at_completion)),
    Mutant(name="the metadata shows at completion only", breaks="META-4", patch=acceptance(metadata_at_completion)),
    Mutant(name="Configure adds to the stored map", breaks="META-2", patch=merged),
    Mutant(name="keys are trimmed", breaks="META-1", patch=stored(lambda m: {k.strip(): v for k, v in m.items()})),
    Mutant(name="empty values are dropped", breaks="META-1", patch=stored(lambda m: {k: v for k, v in m.items() if v})),
    Mutant(
        name="text ends at NUL",
        breaks="META-1",
        patch=stored(lambda m: {k.split("\0")[0]: v.split("\0")[0] for k, v in m.items()}),
    ),
    Mutant(name="keys are case-blind", breaks="META-1", patch=stored(lambda m: {k.lower(): v for k, v in m.items()})),
    Mutant(
        name="text is normalised",
        breaks="META-1",
        patch=stored(lambda m: {normalize("NFC", k): normalize("NFC", v) for k, v in m.items()}),
    ),
    Mutant(name="a map holds 16 keys", breaks="FUZZ-2", patch=stored(lambda m: _first(m, 16))),
)
