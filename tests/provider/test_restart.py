"""What a reply has shown, a kill does not take back (docs/spec/provider.md §11, §12)."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bigfleet.model.states import MachineState
from bigfleet.provider.core import CapacityCore
from bigfleet.provider.fake import FakeBackend
from bigfleet.provider.fence import Token
from bigfleet.provider.kinds import EDGES, Kind
from bigfleet.provider.refusal import Code, Refused
from bigfleet.provider.sqlite_store import SqliteStore
from bigfleet.sim.virtual_time import VirtualTimeLoop
from tests.provider.harness import SLOT, bring_to, make_core, refusal_of, settle, started, state_of, token

S = MachineState


async def kill(core: CapacityCore, store: SqliteStore) -> None:
    """End every task of the core where it stands, and let go of the file, as kill -9 does."""
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    store.close()


async def restarted(backend: FakeBackend, path: Path) -> tuple[CapacityCore, SqliteStore]:
    store = SqliteStore(path, is_power_safe=False)
    return await started(make_core(backend, store=store)), store


@pytest.mark.virtual_time
async def test_marks_operations_bindings_and_cursors_survive_a_kill(tmp_path: Path) -> None:
    backend = FakeBackend(6)
    core, store = await restarted(backend, tmp_path / "s.db")
    await bring_to(core, S.IDLE)
    ack = await core.configure(SLOT, "c-1", b"", {"k": "v\x00"}, token=token(9))
    await settle()
    before = await core.get(SLOT)
    cursor = (await core.list()).revision
    await kill(core, store)

    core, store = await restarted(backend, tmp_path / "s.db")
    after = await core.get(SLOT)
    assert (after.machine, dict(after.metadata), after.revision) == (before.machine, {"k": "v\x00"}, before.revision)
    assert (await core.list((), 0, cursor)).records == ()
    assert (await refusal_of(core.drain(SLOT, 0, token=token(9))))[0] is Code.FAILED_PRECONDITION
    assert (await core.configure(SLOT, "c-1", b"", {"k": "v\x00"})).operation_id == ack.operation_id
    await core.drain(SLOT, 0, token=token(1, shard="another"))
    await core.stop()


@pytest.mark.virtual_time
async def test_an_interrupted_create_fails_or_is_driven_again_with_the_same_id(tmp_path: Path) -> None:
    for is_resumable in (False, True):
        backend = FakeBackend(2, resumable=frozenset(Kind) if is_resumable else frozenset())
        path = tmp_path / f"{is_resumable}.db"
        core, store = await restarted(backend, path)
        backend.hold(Kind.CREATE)
        ack = await core.create(SLOT)
        await settle()
        await kill(core, store)
        core, store = await restarted(backend, path)
        await settle()
        if is_resumable:
            assert await state_of(core) is S.CREATING
            backend.release(SLOT)
            await settle()
            assert await state_of(core) is S.IDLE
            assert {op for _kind, _machine, op in backend.calls} == {ack.operation_id}
        else:
            assert (await core.get(SLOT)).machine.last_error.startswith("RESTARTED: ")
        await core.stop()


@pytest.mark.virtual_time
async def test_an_operation_is_driven_three_times_at_most(tmp_path: Path) -> None:
    backend = FakeBackend(1, resumable=frozenset(Kind))
    backend.hold(Kind.CREATE)
    core, store = await restarted(backend, tmp_path / "s.db")
    await core.create(SLOT)
    await settle()
    for _ in range(3):
        assert await state_of(core) is S.CREATING
        await kill(core, store)
        core, store = await restarted(backend, tmp_path / "s.db")
        await settle()
    assert (await core.get(SLOT)).machine.last_error.startswith("RESTARTED: ")
    assert len(backend.calls) == 3
    await core.stop()


MACHINES = ("fake-0", "fake-1", "fake-2")
KINDS = st.sampled_from(Kind)
NAMES = st.sampled_from((*MACHINES, "nobody"))


class FourEdges(RuleBasedStateMachine):
    """Random calls, held work, kills and restarts, against a model of a few dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.path = Path(tempfile.mkdtemp()) / "state.db"
        self.backend = FakeBackend(len(MACHINES), resumable=frozenset(Kind))
        self.core, self.store = self.loop.run_until_complete(restarted(self.backend, self.path))
        self.states = dict.fromkeys(MACHINES, S.SPECULATIVE)
        self.latest: dict[str, tuple[Kind, str]] = {}
        self.clusters: dict[str, str] = {}
        self.marks: dict[tuple[str, str], tuple[int, int]] = {}
        self.all_ids: set[str] = set()
        self.cursor = b""
        self.seen: dict[str, MachineState] = {}

    def teardown(self) -> None:
        self.loop.run_until_complete(self.core.stop())
        self.loop.close()

    async def _ask(self, kind: Kind, name: str, cluster: str, sent: Token) -> tuple[str, str]:
        try:
            match kind:
                case Kind.CREATE:
                    ack = await self.core.create(name, token=sent)
                case Kind.CONFIGURE:
                    ack = await self.core.configure(name, cluster, b"", {"c": cluster}, token=sent)
                case Kind.DRAIN:
                    ack = await self.core.drain(name, 0, token=sent)
                case Kind.DELETE:
                    ack = await self.core.delete(name, token=sent)
        except Refused as refused:
            return refused.code.name, ""
        finally:
            await settle()
        return "OK", ack.operation_id

    def _expected(self, kind: Kind, name: str, cluster: str) -> str:
        if name not in self.states:
            return "NOT_FOUND"
        edge, state, latest = EDGES[kind], self.states[name], self.latest.get(name)
        if latest is not None and latest[0] is kind and state in (edge.transitional, edge.target):
            is_conflict = kind is Kind.CONFIGURE and self.clusters[name] != cluster
            return "ALREADY_EXISTS" if is_conflict else "REPEAT"
        return "OK" if state is edge.source else "ABORTED"

    @rule(
        kind=KINDS,
        name=NAMES,
        cluster=st.sampled_from(["c-1", "c-2"]),
        shard=st.sampled_from(["", "s-1", "s-2"]),
        order=st.tuples(st.integers(-1, 2), st.integers(-2, 9)),
        is_held=st.booleans(),
    )
    def call(self, kind: Kind, name: str, cluster: str, shard: str, order: tuple[int, int], is_held: bool) -> None:
        sent = Token(shard, *order) if shard else Token()
        (self.backend.hold if is_held else self.backend.unhold)(kind)
        code, operation_id = self.loop.run_until_complete(self._ask(kind, name, cluster, sent))
        mark = self.marks.get((name, shard))
        if shard and mark is not None and order <= mark:
            assert code == "FAILED_PRECONDITION"
            return
        if shard:
            self.marks[name, shard] = order
        expected = self._expected(kind, name, cluster)
        if expected == "REPEAT":
            assert (code, operation_id) == ("OK", self.latest[name][1])
            return
        assert code == expected
        if code == "OK":
            assert operation_id not in self.all_ids
            self.all_ids.add(operation_id)
            self.latest[name] = (kind, operation_id)
            self._accept(kind, name, cluster, is_held)

    def _accept(self, kind: Kind, name: str, cluster: str, is_held: bool) -> None:
        if kind is Kind.CONFIGURE:
            self.clusters[name] = cluster
        self.states[name] = EDGES[kind].transitional
        if not is_held:
            self._complete(name)

    def _complete(self, name: str) -> None:
        kind = self.latest[name][0]
        self.states[name] = EDGES[kind].target
        if kind is Kind.DRAIN:
            del self.clusters[name]

    @precondition(lambda self: self.backend._gates)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.backend._gates)))
        self.backend.release(name)
        self.loop.run_until_complete(settle())
        self._complete(name)

    @rule()
    def crash_and_reopen(self) -> None:
        """Held creates, drains and deletes are driven again and held again; a configure cannot be."""
        for kind in Kind:
            self.backend.hold(kind)
        self.backend._gates.clear()
        self.loop.run_until_complete(kill(self.core, self.store))
        self.core, self.store = self.loop.run_until_complete(restarted(self.backend, self.path))
        self.loop.run_until_complete(settle())
        for name, state in self.states.items():
            if state is S.CONFIGURING:
                self.states[name] = S.FAILED
            elif state in (S.CREATING, S.DRAINING, S.DELETING) and name not in self.backend._gates:
                # Driven three times already.
                self.states[name] = S.FAILED

    @invariant()
    def the_provider_shows_the_model(self) -> None:
        listing = self.loop.run_until_complete(self.core.list((), 0, self.cursor))
        if not listing.tombstones:
            self.seen.clear()
        self.seen.update({record.id: record.state for record in listing.records})
        self.cursor = listing.revision
        assert self.seen == self.states
        for name, state in self.states.items():
            record = self.loop.run_until_complete(self.core.get(name))
            assert record.state is state
            assert bool(record.machine.last_error) == (state is S.FAILED)
            if state in (S.CONFIGURING, S.CONFIGURED, S.DRAINING):
                assert record.machine.cluster == self.clusters[name]
                assert dict(record.metadata) == {"c": self.clusters[name]}
            elif state is not S.FAILED:
                assert (record.machine.cluster, dict(record.metadata)) == ("", {})
            if state in (S.SPECULATIVE, S.CREATING):
                assert not record.machine.host.is_present
            elif state is not S.FAILED:
                assert record.machine.host.is_present


FourEdges.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestFourEdges = FourEdges.TestCase
