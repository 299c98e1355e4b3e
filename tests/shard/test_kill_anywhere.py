"""A shard that dies at any await of any action: the next one brings everything to the same end.

docs/spec/shard.md §15, "process killed anywhere". The provider is far away: a call that was sent arrives, whoever sent
it. Killed is a process that never runs another line, stopped one whose action is cancelled where it stands.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bigfleet.model import labels
from bigfleet.model.frames import CAPABILITY_DRAIN_RESULT, CAPABILITY_NODE_STATUS
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.audit.verification import check
from bigfleet.shard.ports import FenceToken, ListedMachine, ProviderRefusal, ShardSettings, TransitionAck
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
#: From the shard to the provider, and back.
WAY_SECONDS = 0.05
CYCLE_SECONDS = 30.0
#: Long enough for the longest bound below, and for the hold of an idle spot machine.
SECOND_LIFE_CYCLES = 30
SETTINGS = ShardSettings(
    stuck_creating_seconds=60,
    stuck_configuring_seconds=60,
    stuck_deleting_seconds=60,
    stuck_draining_margin_seconds=60,
)
ROW = need("c1", "4", priority=700)
URGENT = need("high", "4", priority=1_000_000)


@dataclass
class FarProvider(ScriptedProvider):
    """Works on whatever becomes of the caller, and takes the same call again as a repeat, as the kit does."""

    #: Transitions that were forgotten: they end only after somebody asked for them again.
    lost: set[str] = field(default_factory=set)
    #: Every mutating call that was sent: (epoch, sequence).
    sent: list[tuple[int, int]] = field(default_factory=list)
    _at_work: set["asyncio.Task[TransitionAck]"] = field(default_factory=set)

    async def create(self, *arguments: Any) -> TransitionAck:
        return await self._far(super().create, *arguments)

    async def configure(self, *arguments: Any) -> TransitionAck:
        return await self._far(super().configure, *arguments)

    async def drain(self, *arguments: Any) -> TransitionAck:
        return await self._far(super().drain, *arguments)

    async def delete(self, *arguments: Any) -> TransitionAck:
        return await self._far(super().delete, *arguments)

    async def _far(self, call: Callable[..., Awaitable[TransitionAck]], *arguments: Any) -> TransitionAck:
        token: FenceToken = arguments[-1]
        self.sent.append((token.epoch, token.sequence))

        async def there() -> TransitionAck:
            await LoopClock().sleep(WAY_SECONDS)
            try:
                return await call(*arguments)
            finally:
                await LoopClock().sleep(WAY_SECONDS)

        task = asyncio.create_task(there())
        self._at_work.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: "asyncio.Task[TransitionAck]") -> None:
        self._at_work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            assert isinstance(task.exception(), ProviderRefusal), task.exception()

    def settle(self, *machine_ids: str) -> None:
        """End transitions, but for those that were forgotten."""
        super().settle(*(each for each in machine_ids or tuple(self.records) if each not in self.lost))

    def _transition(self, method: str, machine_id: Any, token: FenceToken, *rest: Any) -> TransitionAck:
        target = rest[1]
        mark = self.marks.get((token.shard_id, machine_id), (-1, -1))
        if self.records[machine_id].state is target and (token.epoch, token.sequence) > mark:
            self.marks[(token.shard_id, machine_id)] = (token.epoch, token.sequence)
            self.calls.append((method, machine_id, token.sequence))
            self.lost.discard(machine_id)
            if self.synchronous:
                self.settle(machine_id)
            shown = ListedMachine(self.records[machine_id], self.metadata.get(machine_id, {}))
            return TransitionAck(operation_id="op-again", record=shown)
        return super()._transition(method, machine_id, token, *rest)

    def _become(self, machine_id: str, state: MachineState) -> None:
        super()._become(machine_id, state)
        bound = Counter(each.cluster for each in self.records.values() if each.cluster)
        assert all(count == 1 for count in bound.values()), f"bound twice: {bound}"


def stamped(machine_id: str, state: MachineState, row: Need) -> tuple[Machine, Mapping[str, str]]:
    """Return a machine that serves the row, and the metadata that its provider holds."""
    bound = machine(
        machine_id,
        state,
        cluster=row.cluster,
        assigned_priority=row.profile.priority,
        assigned_interruption_penalty_dollars=bucket_upper_dollars(row.profile.interruption_bucket),
        assigned_reclamation_penalty_dollars=bucket_upper_dollars(row.profile.reclamation_bucket),
        assigned_need_fingerprint=row.fingerprint,
    )
    facts = replace(bound.without_binding(), cluster=ClusterId(row.cluster))
    return facts, encode_metadata(bound) | {labels.ASSIGNED_SHARD: "shard-0"}


@dataclass(frozen=True)
class Flow:
    """One action to die in: what there is before, who wants what, and how everything must end."""

    name: str
    machines: tuple[tuple[Machine, Mapping[str, str]], ...]
    #: By cluster, the rows that its operator reports, in both lives.
    demand: Mapping[str, tuple[Need, ...]]
    #: State and cluster by machine.
    end: Mapping[str, tuple[MachineState, str]]
    #: How long the first process lives before the cycle in which it dies.
    before_seconds: float = 0.0
    capability: str = CAPABILITY_DRAIN_RESULT
    #: Machines whose transition was forgotten.
    lost: frozenset[str] = frozenset()


def free(machine_id: str, state: MachineState, **facts: Any) -> tuple[Machine, Mapping[str, str]]:
    """Return a machine that serves nobody."""
    return machine(machine_id, state, **facts), {}


#: A dearer machine that would do as well: whoever forgets that the first one is on its way takes it.
SPARE = free("spare", S.IDLE, price_usd_per_hour=9.0)
SPOT: dict[str, Any] = {"capacity_type": CapacityType.SPOT}
SPARE_SLOT = free("spare", S.SPECULATIVE, price_usd_per_hour=9.0, **SPOT)
FLOWS = [
    Flow(
        "provision",
        (free("m1", S.SPECULATIVE, **SPOT), SPARE_SLOT),
        {"c1": (ROW,)},
        {"m1": (S.CONFIGURED, "c1"), "spare": (S.SPECULATIVE, "")},
    ),
    Flow(
        "bootstrap",
        (free("m1", S.IDLE), SPARE),
        {"c1": (ROW,)},
        {"m1": (S.CONFIGURED, "c1"), "spare": (S.IDLE, "")},
    ),
    Flow("drain with its operator", (stamped("m1", S.CONFIGURED, ROW),), {"c1": ()}, {"m1": (S.IDLE, "")}),
    Flow(
        "drain without",
        (stamped("m1", S.CONFIGURED, ROW),),
        {"c1": ()},
        {"m1": (S.IDLE, "")},
        capability=CAPABILITY_NODE_STATUS,
    ),
    Flow(
        "preempt",
        (stamped("m1", S.CONFIGURED, ROW),),
        {"c1": (ROW,), "high": (URGENT,)},
        {"m1": (S.CONFIGURED, "high")},
    ),
    Flow("delete", (free("m1", S.IDLE, **SPOT),), {}, {"m1": (S.SPECULATIVE, "")}, before_seconds=61),
    Flow(
        "create again",
        (free("m1", S.CREATING, **SPOT), SPARE_SLOT),
        {},
        {"m1": (S.SPECULATIVE, ""), "spare": (S.SPECULATIVE, "")},
        before_seconds=61,
        lost=frozenset({"m1"}),
    ),
    Flow(
        "configure again",
        (stamped("m1", S.CONFIGURING, ROW), SPARE),
        {"c1": (ROW,)},
        {"m1": (S.CONFIGURED, "c1"), "spare": (S.IDLE, "")},
        before_seconds=61,
        lost=frozenset({"m1"}),
    ),
    Flow(
        "drain again",
        (stamped("m1", S.DRAINING, ROW),),
        {"c1": ()},
        {"m1": (S.IDLE, "")},
        before_seconds=661,
        lost=frozenset({"m1"}),
    ),
    Flow(
        "delete again",
        (free("m1", S.DELETING, **SPOT),),
        {},
        {"m1": (S.SPECULATIVE, "")},
        before_seconds=61,
        lost=frozenset({"m1"}),
    ),
]
#: What happens at the await, and how long it takes until the next process starts.
DEATHS = {"killed": 0.0, "killed, and started later": 1.0, "stopped": 0.0}


class Dying:
    """Runs a coroutine up to its n-th point, and there ends it in one of the two ways.

    Each await has two points: when it begins, as a call that was sent and has not arrived, and when it is over, as a
    call whose answer is here and was not looked at.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], at: int | None, *, is_killed: bool) -> None:
        self._coroutine = coroutine
        self._at = at
        self._is_killed = is_killed
        self.points = 0
        self.is_dead = asyncio.Event()

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._coroutine.__await__()
        given: Any = None
        while True:
            try:
                awaited = steps.send(given)
                if self._dies_here():
                    yield from self._death()
                given = yield awaited
                if self._dies_here():
                    yield from self._death()
                    # Where the cancellation arrives.
                    yield from asyncio.sleep(0).__await__()
            except StopIteration:
                return
            except asyncio.CancelledError as cancelled:
                yield from self._wind_up(steps, cancelled)

    def _dies_here(self) -> bool:
        self.points += 1
        if self.points == self._at:
            self.is_dead.set()
        return self.points == self._at

    def _death(self) -> Generator[Any, Any, None]:
        if self._is_killed:
            # Nobody ever goes on from here; what was awaited comes to nobody.
            yield from asyncio.get_running_loop().create_future().__await__()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @staticmethod
    def _wind_up(steps: Generator[Any, Any, Any], cancelled: asyncio.CancelledError) -> Generator[Any, Any, None]:
        """Let a cancelled action run its last lines, which may wait for a slot."""
        awaited = steps.throw(cancelled)
        while True:
            awaited = steps.send((yield awaited))


def connected(world: World, flow: Flow) -> None:
    """Let every operator connect and report."""
    for cluster, rows in flow.demand.items():
        assert world.connect(cluster, flow.capability).report(*rows) == "accepted"


async def first_life(provider: FarProvider, flow: Flow, at: int | None, death: str) -> tuple[MemoryAuditLog, int]:
    """Live up to the n-th point of the flow's actions, or to their end; return the audit log and the points."""
    log = MemoryAuditLog()
    world = World(provider, settings=SETTINGS, audit_log=log)
    if flow.before_seconds:
        await world.cycle()
        await LoopClock().sleep(flow.before_seconds)
    connected(world, flow)
    await world.step()
    dying = Dying(world.shard.actuator.run_inline(), at, is_killed=death != "stopped")

    async def live() -> None:
        await dying

    life = asyncio.create_task(live())
    died = asyncio.create_task(dying.is_dead.wait())
    await asyncio.wait({life, died}, return_when=asyncio.FIRST_COMPLETED)
    if death == "stopped":
        await asyncio.gather(life, return_exceptions=True)
    left = MemoryAuditLog()
    left.lines = list(log.lines)
    for task in (life, died):
        task.cancel()
    return left, dying.points


async def second_life(provider: FarProvider, flow: Flow, first: MemoryAuditLog) -> tuple[World, MemoryAuditLog]:
    """Start the next process, and let it work."""
    log = MemoryAuditLog(first.end)
    world = World(provider, epoch=2, settings=SETTINGS, audit_log=log)
    connected(world, flow)
    for _ in range(SECOND_LIFE_CYCLES):
        await world.cycle()
        provider.settle()
        await LoopClock().sleep(CYCLE_SECONDS)
    await world.cycle()
    return world, log


def provider_for(flow: Flow, *, synchronous: bool) -> FarProvider:
    """Return a provider that has the flow's machines."""
    provider = FarProvider(synchronous=synchronous, lost=set(flow.lost))
    for each, metadata in flow.machines:
        provider.add(each)
        if metadata:
            provider.metadata[each.id] = dict(metadata)
    return provider


def assert_converged(world: World, provider: FarProvider, flow: Flow) -> None:
    """Everything is as it must end, at the provider and in the shard, and nobody is on the way."""
    assert {each.id: (each.state, each.cluster) for each in provider.records.values()} == dict(flow.end)
    assert {each.id: (each.state, each.cluster) for each in world.shard.inventory} == dict(flow.end)
    for machine_id, (_state, cluster) in flow.end.items():
        wanted = flow.demand[cluster][0].fingerprint if cluster else ""
        assert world.machine(machine_id).assigned_need_fingerprint == wanted
    shard = world.shard
    assert (shard.ledger.in_flight(), set(shard.executors.draining())) == (frozenset(), set())
    assert (shard.stuck.stuck(), len(shard.machine_backoff), world.metric("fenced_total")) == (frozenset(), 0, 0)


def owed(provider: FarProvider, logs: list[MemoryAuditLog]) -> int:
    """Return how many calls have no record; all others have exactly one, of their process.

    A killed process may owe the record of the call under way, the last one that it sent.
    """
    told = Counter(
        (record["epoch"], record["token_sequence"])
        for log in logs
        for record in log.records
        if record["token_sequence"]
    )
    assert all(count == 1 for count in told.values())
    missing = [call for call in provider.sent if call not in told]
    assert missing in ([], [call for call in provider.sent if call[0] == 1][-1:])
    assert set(told) <= set(provider.sent)
    assert check([(f"life {number}", log.lines) for number, log in enumerate(logs, 1)]).findings == ()
    return len(missing)


@pytest.mark.rule("shard 9.3/12", "shard 9.5/6", "shard 13/2", "shard 15/1")
@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
async def test_a_shard_may_die_at_any_await(
    flow: Flow, synchronous: bool, death: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing is lost, nothing is bound twice, every call has its record, and the end is the one without a death."""
    _log, points = await first_life(provider_for(flow, synchronous=synchronous), flow, None, death)
    assert points > 1
    without_record = carried_on = 0
    try:
        for at in range(1, points + 1):
            provider = provider_for(flow, synchronous=synchronous)
            first, reached = await first_life(provider, flow, at, death)
            assert reached >= at
            await LoopClock().sleep(DEATHS[death])
            world, second = await second_life(provider, flow, first)
            assert_converged(world, provider, flow)
            without_record += owed(provider, [first, second])
            carried_on += 1
    finally:
        record_property("kill points", (points, carried_on))
    # Whoever is killed under a call has nobody left to write; whoever is stopped writes its end.
    assert (without_record > 0) is (death != "stopped")


@pytest.mark.rule("shard 15/1")
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
async def test_the_end_without_a_death_is_the_same(flow: Flow, synchronous: bool) -> None:
    """What the deaths are measured against: one process that carries everything through."""
    provider = provider_for(flow, synchronous=synchronous)
    if flow.before_seconds:
        await LoopClock().sleep(flow.before_seconds)
    world, log = await second_life(provider, flow, MemoryAuditLog())

    assert_converged(world, provider, flow)
    assert owed(provider, [log]) == 0
