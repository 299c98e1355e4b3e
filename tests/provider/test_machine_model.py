"""The kit against a model of a few dictionaries, with a crash before or after any write of the store.

docs/spec/provider.md §2, §3, §5, §11, §12, on virtual time. A crash abandons the core where it stands; the file is what
the commits so far made of it. After each step the provider must show the model exactly: to a reader that starts again,
to one that threads cursors across every crash, and to Get.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.administration import AdminRefused
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.operations.restart import ATTEMPTS_MAX
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.kinds import EDGES, KIND_IN_FLIGHT, Kind
from bigfleet.provider.records.refusal import Refused, StoreDown
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Batch, Loaded
from bigfleet.sim.kernel.virtual_time import VirtualTimeLoop
from tests.engine.proof import in_proportion
from tests.provider.harness import make_core, settle
from tests.provider.operations.test_restart import kill

S = MachineState
NAMES = ("fake-0", "fake-1", "fake-2", "fake-3")
OPTIONS = CoreOptions(is_inline=True, failed_hold_seconds=0, intent_key=bytes(32))


class Crash(NamedTuple):
    """Where the process dies: at its n-th write from now, with that write on disk or not."""

    write: int
    is_after: bool


class CrashingStore:
    """A SQLite file of a process that dies at a write."""

    def __init__(self, path: Path) -> None:
        self._inner = SqliteProviderStore(path, is_power_safe=False)
        self.crash: Crash | None = None
        self.writes = 0
        self.is_dead = False

    def load(self, new_incarnation: bytes) -> Loaded:
        return self._inner.load(new_incarnation)

    def commit(self, batch: Batch) -> None:
        if self.is_dead:
            raise StoreDown("this process is dead")
        self.writes += 1
        if self.crash is not None and self.writes == self.crash.write:
            if self.crash.is_after:
                self._inner.commit(batch)
            self.is_dead = True
            raise StoreDown("this process just died")
        self._inner.commit(batch)

    def size_bytes(self) -> int:
        return self._inner.size_bytes()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Known:
    """What the model knows of a machine."""

    state: MachineState = S.SPECULATIVE
    kind: Kind | None = None
    #: None when the caller died before it was told.
    operation: str | None = None
    attempt: int = 1
    cluster: str = ""
    price: float = 0.4
    has_host: bool = False

    def accepted(self, kind: Kind, operation: str | None, cluster: str) -> "Known":
        bound = cluster if kind is Kind.CONFIGURE else self.cluster
        state = EDGES[kind].transitional
        return replace(self, state=state, kind=kind, operation=operation, attempt=1, cluster=bound)

    def completed(self) -> "Known":
        assert self.kind is not None
        done = replace(self, state=EDGES[self.kind].target)
        if self.kind is Kind.CREATE:
            return replace(done, has_host=True)
        if self.kind is Kind.DRAIN:
            return replace(done, cluster="")
        return replace(done, has_host=False) if self.kind is Kind.DELETE else done

    def lost(self) -> "Known":
        is_in_flight = self.state in KIND_IN_FLIGHT
        failed = replace(self, state=S.FAILED)
        return failed if is_in_flight else replace(failed, kind=None, operation=None)

    def recovered(self, state: MachineState) -> "Known":
        cluster = self.cluster if state is S.CONFIGURED else ""
        has_host = state is not S.SPECULATIVE
        return replace(self, state=state, kind=None, operation=None, cluster=cluster, has_host=has_host)


CRASHES = st.none() | st.builds(Crash, st.integers(1, 4), st.booleans())


class CrashingProvider(RuleBasedStateMachine):
    """Calls, losses, prices and recoveries, each with or without a crash in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.path = Path(tempfile.mkdtemp()) / "state.db"
        self.backend = FakeBackend(len(NAMES), resumable=frozenset(Kind))
        for slot_number, slot in enumerate(self.backend.slots):
            self.backend.slots[slot_number] = replace(slot, price_usd_per_hour=0.4)
        self.known = {name: Known() for name in NAMES}
        self.marks: dict[tuple[str, str], tuple[int, int]] = {}
        self.told_ids: dict[str, str] = {}
        self.cursor = b""
        self.seen: dict[str, MachineState] = {}
        self.core: CapacityCore
        self.store: CrashingStore
        self.run(self._start())

    def run(self, flow: Awaitable[object]) -> object:
        return self.loop.run_until_complete(flow)

    def teardown(self) -> None:
        self.run(self.core.stop())
        self.loop.close()

    async def _start(self, crash: Crash | None = None) -> None:
        self.store = CrashingStore(self.path)
        self.store.crash = crash
        self.core = make_core(self.backend, store=self.store, options=OPTIONS)
        starting = asyncio.ensure_future(self.core.start())
        for _ in range(50):
            await settle()
            if starting.done() or self.store.is_dead:
                break
        if self.store.is_dead:
            return
        await starting
        await self.core.loaded()
        await settle()

    # ---- crashes -------------------------------------------------------------------------------------------------

    def _step(self, crash: Crash | None, flow: Callable[[], Awaitable[object]], steps: list[dict[str, Known]]) -> bool:
        """Run a flow whose writes make the model `steps`, one after the other; return whether it ended alive."""
        self.store.crash = None if crash is None else crash._replace(write=self.store.writes + crash.write)
        before = self.store.writes
        self.run(flow())
        self.store.crash = None
        if not self.store.is_dead:
            assert self.store.writes - before == len(steps), "the model knows every write"
            for step in steps:
                self.known.update(step)
            return True
        assert crash is not None
        for step in steps[: crash.write if crash.is_after else crash.write - 1]:
            self.known.update(step)
        self._reopen(None)
        return False

    def _reopen(self, crash: Crash | None) -> None:
        """Start over what is on disk; every interrupted operation is driven again, or failed after three times."""
        self.run(kill(self.core, self.store))
        self.backend._gates.clear()
        self.run(self._start(crash))
        writes = self.store.writes
        if self.store.is_dead:
            assert crash is not None
            # Which machine it had come to is the kit's business: whatever was written was one step for one machine.
            written = writes if crash.is_after else writes - 1
            self.run(kill(self.core, self.store))
            self._learn_attempts(written)
            self._reopen(None)
            return
        for name, known in self.known.items():
            if known.state in KIND_IN_FLIGHT:
                self.known[name] = self._driven_again(name, known)

    def _driven_again(self, name: str, known: Known) -> Known:
        if known.attempt >= ATTEMPTS_MAX:
            return replace(known, state=S.FAILED)
        again = replace(known, attempt=known.attempt + 1)
        return again if name in self.backend._gates else again.completed()

    def _learn_attempts(self, written: int) -> None:
        store = SqliteProviderStore(self.path, is_power_safe=False)
        loaded = {record.id: record for record in store.load(b"12345678").records}
        store.close()
        moved = 0
        for name, known in list(self.known.items()):
            record = loaded[name]
            if known.state not in KIND_IN_FLIGHT:
                continue
            assert record.operation is not None
            if record.operation.attempt == known.attempt and record.state is known.state:
                continue
            moved += 1
            if record.state is S.FAILED:
                assert known.attempt == ATTEMPTS_MAX
                self.known[name] = replace(known, state=S.FAILED)
                continue
            assert record.operation.attempt == known.attempt + 1
            again = replace(known, attempt=record.operation.attempt)
            if record.state is not known.state:
                moved += 1
                again = again.completed()
            assert record.state is again.state
            self.known[name] = again
        assert moved == written, "a write that nobody knows of"

    # ---- calls ---------------------------------------------------------------------------------------------------

    async def _call(self, kind: Kind, name: str, cluster: str, sent: Token) -> tuple[str, str]:
        try:
            match kind:
                case Kind.CREATE:
                    ack = await self.core.create(name, token=sent)
                case Kind.CONFIGURE:
                    ack = await self.core.configure(name, cluster, b"blob", {"c": cluster}, token=sent)
                case Kind.DRAIN:
                    ack = await self.core.drain(name, 0, token=sent)
                case Kind.DELETE:
                    ack = await self.core.delete(name, token=sent)
        except Refused as refused:
            return refused.code.name, ""
        return "OK", ack.operation_id

    @rule(
        kind=st.sampled_from(Kind),
        name=st.sampled_from((*NAMES, "nobody")),
        cluster=st.sampled_from(["c-1", "c-2"]),
        shard=st.sampled_from(["", "s-1", "s-2"]),
        order=st.tuples(st.integers(-1, 2), st.integers(-2, 9)),
        is_held=st.booleans(),
        crash=CRASHES,
    )
    def call(
        self,
        kind: Kind,
        name: str,
        cluster: str,
        shard: str,
        order: tuple[int, int],
        is_held: bool,
        crash: Crash | None,
    ) -> None:
        self._call_once(kind, name, cluster, shard, order, is_held, crash)

    @rule(name=st.sampled_from(NAMES), is_held=st.booleans(), is_delete=st.booleans(), crash=CRASHES)
    def legal_call(self, name: str, is_held: bool, is_delete: bool, crash: Crash | None) -> None:
        """The next step of a machine's life, so that lives get long."""
        kinds = [kind for kind, edge in EDGES.items() if edge.source is self.known[name].state]
        if kinds:
            self._call_once(kinds[-1 if is_delete else 0], name, "c-1", "", (0, 0), is_held, crash)

    def _call_once(
        self,
        kind: Kind,
        name: str,
        cluster: str,
        shard: str,
        order: tuple[int, int],
        is_held: bool,
        crash: Crash | None,
    ) -> None:
        sent = Token(shard, *order) if shard else Token()
        (self.backend.hold if is_held else self.backend.unhold)(kind)
        mark = self.marks.get((name, shard))
        is_fenced = bool(shard) and mark is not None and order <= mark
        known = self.known.get(name)
        answer: list[tuple[str, str]] = []

        async def flow() -> None:
            answer.append(await self._call(kind, name, cluster, sent))
            await settle()

        expected = "FAILED_PRECONDITION" if is_fenced else self._expected(kind, known, cluster)
        steps: list[dict[str, Known]] = []
        if expected == "ACCEPT":
            assert known is not None
            accepted = known.accepted(kind, None, cluster)
            steps = [{name: accepted}, *([] if is_held else [{name: accepted.completed()}])]
        elif shard and not is_fenced:
            steps = [{}]
        writes = self.store.writes
        is_alive = self._step(crash, flow, steps)
        is_marked = is_alive or (crash is not None and (crash.write > 1 or crash.is_after))
        if shard and not is_fenced and is_marked:
            self.marks[name, shard] = order
        if not is_alive and crash is not None and crash.write == 1:
            assert answer[0][0] == "UNAVAILABLE"
            return
        assert writes <= self.store.writes or not is_alive
        self._check_answer(expected, answer[0], name, kind)

    def _check_answer(self, expected: str, answer: tuple[str, str], name: str, kind: Kind) -> None:
        code, operation = answer
        if expected == "REPEAT":
            shown = self.known[name].operation
            assert code == "OK"
            assert shown is None or operation == shown
            if self.known[name].kind is kind:
                self.known[name] = replace(self.known[name], operation=operation)
            return
        assert code == ("OK" if expected == "ACCEPT" else expected)
        if code == "OK":
            assert operation not in self.told_ids
            self.told_ids[operation] = name
            self.known[name] = replace(self.known[name], operation=operation)

    def _expected(self, kind: Kind, known: Known | None, cluster: str) -> str:
        if known is None:
            return "NOT_FOUND"
        edge = EDGES[kind]
        if known.kind is kind and known.state in (edge.transitional, edge.target):
            is_conflict = kind is Kind.CONFIGURE and known.cluster != cluster
            return "ALREADY_EXISTS" if is_conflict else "REPEAT"
        return "ACCEPT" if known.state is edge.source else "ABORTED"

    @precondition(lambda self: self.backend._gates)
    @rule(data=st.data(), crash=CRASHES)
    def release(self, data: st.DataObject, crash: Crash | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.backend._gates)))
        for kind in Kind:
            self.backend.unhold(kind)

        async def flow() -> None:
            self.backend.release(name)
            await settle()

        self._step(crash, flow, [{name: self.known[name].completed()}])

    # ---- facts and persons ---------------------------------------------------------------------------------------

    def _in(self, *states: MachineState) -> list[str]:
        return [name for name, known in self.known.items() if known.state in states]

    @precondition(lambda self: self._in(*KIND_IN_FLIGHT, S.IDLE, S.CONFIGURED))
    @rule(data=st.data(), crash=CRASHES)
    def lose(self, data: st.DataObject, crash: Crash | None) -> None:
        name = data.draw(st.sampled_from(self._in(*KIND_IN_FLIGHT, S.IDLE, S.CONFIGURED)))
        known = self.known[name]
        self.backend._gates.pop(name, None)
        self.backend.hosts.pop(name, None)
        self.backend.clusters.pop(name, None)

        async def flow() -> None:
            telling = asyncio.ensure_future(self.core.feed.report_lost(name, "gone"))
            await settle()
            assert telling.done() or self.store.is_dead

        was_in_flight = known.state in KIND_IN_FLIGHT
        for kind in Kind:
            self.backend.hold(kind)
        self._step(crash, flow, [{name: known.lost()}])
        if was_in_flight and self.known[name].state in KIND_IN_FLIGHT:
            # Nobody was told of the loss: the operation is driven again, and held.
            assert name in self.backend._gates

    @rule(name=st.sampled_from(NAMES), price=st.sampled_from([0.1, 0.2, 0.3]), crash=CRASHES)
    def push_price(self, name: str, price: float, crash: Crash | None) -> None:
        known = self.known[name]

        async def flow() -> None:
            pushing = asyncio.ensure_future(self.core.feed.report_price([name], price))
            await settle()
            assert pushing.done() or self.store.is_dead

        self._step(crash, flow, [] if known.price == price else [{name: replace(known, price=price)}])

    @precondition(lambda self: self._in(S.FAILED, S.CONFIGURED))
    @rule(data=st.data(), goal=st.sampled_from(["speculative", "idle", "configured"]), crash=CRASHES)
    def recover(self, data: st.DataObject, goal: str, crash: Crash | None) -> None:
        name = data.draw(st.sampled_from(self._in(S.FAILED, S.CONFIGURED)))
        known = self.known[name]
        state = MachineState[goal.upper()]
        may = (
            known.state is S.FAILED
            and (state is S.SPECULATIVE or known.has_host)
            and (state is not S.CONFIGURED or bool(known.cluster))
        )

        async def flow() -> None:
            try:
                await self.core.administration.recover("tester", name, goal, is_out_of_service=True)
                assert may
            except AdminRefused:
                assert not may
            except StoreDown:
                assert self.store.is_dead
            await settle()

        self._step(crash, flow, [{name: known.recovered(state)}] if may else [])

    @rule(crash=CRASHES, is_held=st.booleans())
    def crash_and_reopen(self, crash: Crash | None, is_held: bool) -> None:
        """Die between two steps, and perhaps again while starting."""
        for kind in Kind:
            (self.backend.hold if is_held else self.backend.unhold)(kind)
        self._reopen(crash)

    @rule(
        kind=st.sampled_from(Kind),
        names=st.lists(st.sampled_from(NAMES), min_size=2, unique=True),
        crash=CRASHES,
    )
    def burst(self, kind: Kind, names: list[str], crash: Crash | None) -> None:
        """Calls in parallel share a commit: what was acknowledged is there, of the rest each one is or is not."""
        self.backend.hold(kind)
        answers: dict[str, tuple[str, str]] = {}

        async def one(name: str) -> None:
            answers[name] = await self._call(kind, name, "c-1", Token())

        async def flow() -> None:
            await asyncio.gather(*(one(name) for name in names))
            await settle()

        expected = {name: self._expected(kind, self.known[name], "c-1") for name in names}
        step = {n: self.known[n].accepted(kind, None, "c-1") for n in names if expected[n] == "ACCEPT"}
        is_alive = self._step(crash, flow, [step] if step else [])
        for name in names:
            if is_alive or answers[name][0] != "UNAVAILABLE":
                self._check_answer(expected[name], answers[name], name, kind)

    # ---- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def the_provider_shows_the_model(self) -> None:
        self.run(self._check())

    async def _check(self) -> None:
        listing = await self.core.list((), 0, self.cursor)
        assert listing.tombstones or not self.cursor, "a cursor outlives every crash"
        self.seen.update({record.id: record.state for record in listing.records})
        self.cursor = listing.revision
        assert self.seen == {name: known.state for name, known in self.known.items()}
        everything = await self.core.list()
        assert len(everything.records) == len(NAMES)
        assert list(everything.records) == sorted(everything.records, key=lambda record: record.revision)
        for name, known in self.known.items():
            record = await self.core.get(name)
            machine = record.machine
            assert (record.state, machine.cluster, machine.price_usd_per_hour) == (
                known.state,
                known.cluster,
                known.price,
            )
            assert dict(record.metadata) == ({"c": known.cluster} if known.cluster else {})
            assert machine.host.is_present == known.has_host
            assert bool(machine.last_error) == (known.state is S.FAILED)
            if known.kind is None:
                assert record.operation is None
            else:
                assert record.operation is not None
                assert record.operation.kind is known.kind
                assert known.operation in (None, record.operation.id)
            if known.state in KIND_IN_FLIGHT:
                assert record.operation is not None
                assert record.operation.attempt == known.attempt


CrashingProvider.TestCase.settings = settings(
    max_examples=in_proportion(30, least=10),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCrashingProvider = CrashingProvider.TestCase
