"""Drives a backend under the kit at random: calls, legal or not, repeats, stale tokens, restarts.

docs/spec/provider.md §2 to §5, §8, §12, §16, on virtual time. After each step Get, a full List and a reader that
follows cursors must show what a small model says. It is for substrates on which calls succeed. Import it through
`bigfleet.provider.testing` only, because it needs Hypothesis.
"""

import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.kinds import EDGES, KIND_IN_FLIGHT, Kind
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.testing.cores import SeededIds, settled, started_core
from bigfleet.sim.kernel.virtual_time import VirtualTimeLoop

T = TypeVar("T")

#: Few, so that their lives get long.
MACHINES_MAX = 3
_OPTIONS = CoreOptions(is_inline=True, failed_hold_seconds=0)
_NOBODY = "nobody"
_SHARDS = ("", "s-1", "s-2")
_CLUSTERS = ("c-1", "c-2")


@dataclass(frozen=True)
class _Known:
    """What the model knows of a machine at rest."""

    state: MachineState = MachineState.SPECULATIVE
    #: The latest operation; none after a failure that no call made.
    kind: Kind | None = None
    operation_id: str = ""
    cluster: str = ""


class FourEdges(RuleBasedStateMachine):
    """One provider in one file, driven by calls and started again. Subclasses say what is driven."""

    make_provider: "ClassVar[Callable[[], tuple[Backend, Ready | ConfigureWaits]]]"

    def __init__(self) -> None:
        super().__init__()
        self._loop = VirtualTimeLoop()
        self._folder = tempfile.TemporaryDirectory()
        self._backend, self._readiness = type(self).make_provider()
        self._ids = SeededIds()
        self._core: CapacityCore = self._run(self._start())
        listing = self._run(self._core.list([MachineState.SPECULATIVE]))
        free = sorted(record.id for record in listing.records)[:MACHINES_MAX]
        if not free:
            self.teardown()
            raise AssertionError("the inventory offers no slot that a Create could take")
        self._known = {machine_id: _Known() for machine_id in free}
        self._fixed = {record.id for record in listing.records if record.slot.fixed}
        self._marks: dict[tuple[str, str], tuple[int, int]] = {}
        self._operation_ids: set[str] = set()
        self._cursor = b""
        #: By id, as a reader that threads cursors puts it together.
        self._read: dict[str, Record] = {}

    def teardown(self) -> None:
        """Stop the provider and remove its file."""
        self._run(self._core.stop())
        self._loop.close()
        self._folder.cleanup()

    def _run(self, flow: Awaitable[T]) -> T:
        return self._loop.run_until_complete(flow)

    async def _start(self) -> CapacityCore:
        store = SqliteProviderStore(Path(self._folder.name) / "state.db", is_power_safe=False)
        return await started_core(
            self._backend, readiness=self._readiness, store=store, ids=self._ids, options=_OPTIONS
        )

    async def _start_again(self) -> None:
        await self._core.stop()
        self._core = await self._start()

    # ---- steps ---------------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(Kind),
        place=st.integers(0, MACHINES_MAX),
        cluster=st.sampled_from(_CLUSTERS),
        shard=st.sampled_from(_SHARDS),
        order=st.tuples(st.integers(-1, 2), st.integers(-2, 9)),
    )
    def call(self, kind: Kind, place: int, cluster: str, shard: str, order: tuple[int, int]) -> None:
        """Any call on any machine, with any token; one place stands for a machine that is not there."""
        names = (*self._known, _NOBODY)
        self._call(kind, names[place % len(names)], cluster, Token(shard, *order) if shard else Token())

    @rule(place=st.integers(0, MACHINES_MAX - 1), is_delete=st.booleans(), is_interrupted=st.booleans())
    def go_on(self, place: int, is_delete: bool, is_interrupted: bool) -> None:
        """Take a machine one step further, so that lives get long; perhaps with a restart in the middle."""
        machine_id = list(self._known)[place % len(self._known)]
        kinds = [kind for kind, edge in EDGES.items() if edge.source is self._known[machine_id].state]
        if kinds:
            kind = kinds[-1] if is_delete and self._can_delete(machine_id) else kinds[0]
            self._call(kind, machine_id, _CLUSTERS[0], Token(), is_interrupted=is_interrupted)

    @rule()
    def restart(self) -> None:
        """Stop the provider at rest and start it again: nothing may differ."""
        self._run(self._start_again())

    def _can_delete(self, machine_id: str) -> bool:
        return hasattr(self._backend, "delete") and machine_id not in self._fixed

    def _call(self, kind: Kind, machine_id: str, cluster: str, token: Token, *, is_interrupted: bool = False) -> None:
        expected = self._expected(kind, machine_id, cluster, token)
        code, operation_id, shown = self._run(self._answer(kind, machine_id, cluster, token))
        assert code == ("OK" if expected in ("ACCEPT", "REPEAT") else expected), f"{kind.method} {machine_id}: {code}"
        if code != "OK":
            return
        known = self._known[machine_id]
        if expected == "REPEAT":
            assert operation_id == known.operation_id, "a repeat was a new operation"
            return
        edge = EDGES[kind]
        assert shown is edge.transitional, f"the ack of {kind.method} shows {shown.label}"
        assert operation_id not in self._operation_ids, "an operation id came twice"
        self._operation_ids.add(operation_id)
        record = self._run(self._arrived(kind, machine_id, cluster, operation_id, is_interrupted=is_interrupted))
        is_given_up = is_interrupted and record.machine.last_error.startswith("RESTARTED: ")
        expected_state = MachineState.FAILED if is_given_up else edge.target
        assert record.state is expected_state, f"{kind.method} ended so: {_description(record)}"
        bound = cluster if kind is Kind.CONFIGURE else known.cluster
        is_freed = kind is Kind.DRAIN and record.state is edge.target
        self._known[machine_id] = _Known(record.state, kind, operation_id, "" if is_freed else bound)

    def _expected(self, kind: Kind, machine_id: str, cluster: str, token: Token) -> str:
        """Return the code of the answer, ACCEPT or REPEAT; a token that passes moves its mark."""
        if kind is Kind.DELETE and not hasattr(self._backend, "delete"):
            return "UNIMPLEMENTED"
        mark = self._marks.get((machine_id, token.shard_id))
        if not token.is_absent:
            if mark is not None and token.order <= mark:
                return "FAILED_PRECONDITION"
            self._marks[machine_id, token.shard_id] = token.order
        known = self._known.get(machine_id)
        if known is None:
            return "NOT_FOUND"
        edge = EDGES[kind]
        if known.kind is kind and known.state is edge.target:
            is_conflict = kind is Kind.CONFIGURE and known.cluster != cluster
            return "ALREADY_EXISTS" if is_conflict else "REPEAT"
        if known.state is not edge.source:
            return "ABORTED"
        return "UNIMPLEMENTED" if kind is Kind.DELETE and not self._can_delete(machine_id) else "ACCEPT"

    async def _answer(self, kind: Kind, machine_id: str, cluster: str, token: Token) -> tuple[str, str, MachineState]:
        core = self._core
        try:
            match kind:
                case Kind.CREATE:
                    ack = await core.create(machine_id, token=token)
                case Kind.CONFIGURE:
                    ack = await core.configure(machine_id, cluster, b"blob", {"for": cluster}, token=token)
                case Kind.DRAIN:
                    ack = await core.drain(machine_id, 0, token=token)
                case Kind.DELETE:
                    ack = await core.delete(machine_id, token=token)
        except Refused as refused:
            return refused.code.name, "", MachineState.UNSPECIFIED
        return "OK", ack.operation_id, ack.record.state

    async def _arrived(
        self, kind: Kind, machine_id: str, cluster: str, operation_id: str, *, is_interrupted: bool
    ) -> Record:
        """Return the record at rest; on the way the call is repeated, or the provider started again."""
        if is_interrupted:
            await self._start_again()
            return await settled(self._core, machine_id)
        repeated = await self._answer(kind, machine_id, cluster, Token())
        record = await settled(self._core, machine_id)
        # What failed at once refuses the repeat already, and the failure says more than the refusal.
        if record.state is not MachineState.FAILED:
            assert repeated[:2] == ("OK", operation_id), f"a repeat of {kind.method} was answered {repeated[:2]}"
            assert repeated[2] in EDGES[kind][1:], f"on its way a machine was {repeated[2].label}"
        return record

    # ---- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def every_reader_sees_the_model(self) -> None:
        """Get, a full List and the deltas agree, and it is what the calls made of the machines."""
        full = {record.id: record for record in self._run(self._core.list()).records}
        for machine_id, known in self._known.items():
            record = self._run(self._core.get(machine_id))
            assert full[machine_id].wire == record.wire, f"List and Get differ about {machine_id}"
            _check(record, known)
        self._read_on()
        assert {i: r.wire for i, r in self._read.items()} == {i: r.wire for i, r in full.items()}, "deltas lose changes"

    def _read_on(self) -> None:
        listing = self._run(self._core.list(since=self._cursor))
        assert listing.tombstones or not self._cursor, "a cursor was not taken"
        self._cursor = listing.revision
        self._read.update({record.id: record for record in listing.records})
        for machine_id in listing.removed_ids:
            self._read.pop(machine_id, None)


def _description(record: Record) -> str:
    return f"{record.state.label} {record.machine.last_error}".strip()


def _check(record: Record, known: _Known) -> None:
    machine = record.machine
    assert record.state is known.state, f"{record.id} is {record.state.label} in place of {known.state.label}"
    assert machine.cluster == known.cluster, f"{record.id} is bound to {machine.cluster!r}, not {known.cluster!r}"
    assert dict(record.metadata) == ({"for": known.cluster} if known.cluster else {})
    assert bool(machine.last_error) == (record.state is MachineState.FAILED)
    if record.state is not MachineState.FAILED:
        assert machine.host.is_present == (record.state is not MachineState.SPECULATIVE)
        assert record.state not in KIND_IN_FLIGHT
