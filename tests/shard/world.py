"""A world for one shard on virtual time: a provider that answers as it is told, and operators that answer or do not.

The provider follows the transition table, fences per (shard, machine), and can be synchronous (an ack in the resting
state) or asynchronous (an ack in the transitional one, settled by `settle`). Refusals and lost answers are scripted.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash
from prometheus_client import CollectorRegistry

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.compute import Compute, compute_inline
from bigfleet.model.frames import (
    CAPABILITY_DRAIN_RESULT,
    AvailableCapacity,
    BootstrapRequest,
    BootstrapResponse,
    DrainForecast,
    DrainForecastRequest,
    DrainOutcome,
    DrainResult,
    Hello,
    MalformedMessage,
    NeedStatusUpdate,
    NodeStateUpdate,
    NodeStatus,
    ReclaimInstruction,
    ShardFrame,
)
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import families, parse_vector
from bigfleet.shard.audit.log import AuditLog
from bigfleet.shard.cycle.composition_plans import PlanWorkers
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.cycle.engine_runner import EngineMaker, fleet_engine
from bigfleet.shard.exchange.exchange_records import ExchangeStore
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.shard.ownership.retired_clusters import RetirementStore
from bigfleet.shard.ports import (
    FenceToken,
    ListedMachine,
    Listing,
    ProviderRefusal,
    RefusalKind,
    ShardSettings,
    TransitionAck,
)
from bigfleet.shard.sessions.outbox import SessionClosed
from bigfleet.shard.sessions.registry import Session
from bigfleet.sim.kernel.virtual_time import LoopClock

S = MachineState
TARGETS = {S.CREATING: S.IDLE, S.CONFIGURING: S.CONFIGURED, S.DRAINING: S.IDLE, S.DELETING: S.SPECULATIVE}


class SequentialIds:
    """Ids in order, so that tests can name them."""

    def __init__(self) -> None:
        self._number = 0

    def new_id(self) -> str:
        """Return the next id."""
        self._number += 1
        return f"id-{self._number:06d}"


def machine(machine_id: str, state: MachineState, **changes: Any) -> Machine:
    """Return a sound machine of 4 cpu and 16Gi in the state, bare metal at $1, changed as asked."""
    facts: dict[str, Any] = {
        "id": MachineId(machine_id),
        "state": state,
        "host": HostRef("test", f"host-{machine_id}") if state not in (S.SPECULATIVE, S.CREATING) else HostRef(),
        "instance_type": "t4",
        "zone": "za",
        "capacity_type": CapacityType.BARE_METAL,
        "allocatable": {"cpu": "4", "memory": "16Gi"},
        "price_usd_per_hour": 1.0,
    }
    return Machine(**(facts | changes))


def need(cluster: str, cpu: str, *, priority: int = 100, group: str = "", **profile: Any) -> Need:
    """Return a row that wants that much cpu of machines of type t4."""
    quantities = {"cpu": cpu}
    return Need(
        cluster=ClusterId(cluster),
        profile=Profile(
            requirements=(Requirement("node.kubernetes.io/instance-type", Operator.IN, ("t4",)),),
            priority=priority,
            **profile,
        ),
        aggregate=parse_vector(quantities),
        min_unit=parse_vector({"cpu": "1"}),
        group=group,
        families=families(quantities),
    )


def at(world: "World", machine_id: str) -> Machine:
    """Return what the shard knows of a machine."""
    found = world.shard.inventory.get(machine_id)
    assert found is not None
    return found


def note_pending(shard: Shard, machine_id: str) -> None:
    """Let a shard believe that an action of the machine runs, until its ledger is emptied."""
    known = MachineId(machine_id)
    action = Action(kind=ActionKind.DELETE, machine_id=known, cluster=ClusterId(""), reason="phase3.release")
    shard.ledger._pending[known] = shard.ledger.record(action, cycle=0)


@dataclass
class ScriptedProvider:
    """Implements `bigfleet.shard.ports.Provider` in memory."""

    synchronous: bool = False
    records: dict[str, Machine] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    marks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    #: Every mutating call: (method, machine, sequence).
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    #: (method, machine) → what to raise, once each.
    refusals: dict[tuple[str, str], list[RefusalKind]] = field(default_factory=dict)
    #: (method, machine): the effect happens and the answer is lost.
    lost_answers: set[tuple[str, str]] = field(default_factory=set)
    grace_seconds: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    list_fails: bool = False
    #: Called between taking the view of a List and answering it.
    during_list: Callable[[], Any] | None = None
    #: Answers of `List` that replace the truth, once each.
    listings: list[Listing] = field(default_factory=list)
    #: What every List was asked with, and every machine that was asked for by Get.
    cursors: list[bytes] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)

    def add(self, *machines: Machine) -> None:
        """Put machines into the provider's inventory."""
        for each in machines:
            self.records[each.id] = each

    def state(self, machine_id: str) -> MachineState:
        """Return the provider's state of a machine."""
        return self.records[machine_id].state

    def settle(self, *machine_ids: str) -> None:
        """End the transitions of these machines, or of all."""
        for machine_id in machine_ids or tuple(self.records):
            record = self.records[machine_id]
            if record.state in TARGETS:
                self._become(machine_id, TARGETS[record.state])

    def fail(self, machine_id: str, text: str) -> None:
        """End a transition in FAILED."""
        self.records[machine_id] = replace(self.records[machine_id], state=S.FAILED, last_error=text)

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        return self._transition("create", machine_id, token, S.SPECULATIVE, S.CREATING)

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        self.blobs[machine_id] = blob
        return self._transition("configure", machine_id, token, S.IDLE, S.CONFIGURING, cluster, dict(metadata))

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        self.grace_seconds[machine_id] = grace_seconds
        return self._transition("drain", machine_id, token, S.CONFIGURED, S.DRAINING)

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        return self._transition("delete", machine_id, token, S.IDLE, S.DELETING)

    async def get(self, machine_id: MachineId) -> ListedMachine:
        self.gets.append(machine_id)
        if machine_id not in self.records:
            raise ProviderRefusal(RefusalKind.NOT_FOUND, "unknown machine")
        return ListedMachine(self.records[machine_id], self.metadata.get(machine_id, {}))

    async def list(self, since_revision: bytes) -> Listing:
        self.cursors.append(since_revision)
        if self.list_fails:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "connection refused")
        answer = self.listings.pop(0) if self.listings else self.view(since_revision)
        if self.during_list is not None:
            await self.during_list()
        return answer

    def view(self, _since_revision: bytes) -> Listing:
        """Return the answer to a List: everything there is."""
        return Listing(records=[ListedMachine(m, self.metadata.get(m.id, {})) for m in self.records.values()])

    def _transition(
        self,
        method: str,
        machine_id: MachineId,
        token: FenceToken,
        source: MachineState,
        target: MachineState,
        cluster: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> TransitionAck:
        self.calls.append((method, machine_id, token.sequence))
        mark = self.marks.get((token.shard_id, machine_id), (-1, -1))
        if (token.epoch, token.sequence) <= mark:
            raise ProviderRefusal(RefusalKind.FENCED, "stale token")
        self.marks[(token.shard_id, machine_id)] = (token.epoch, token.sequence)
        scripted = self.refusals.get((method, machine_id))
        if scripted:
            raise ProviderRefusal(scripted.pop(0), "as scripted")
        if machine_id not in self.records:
            raise ProviderRefusal(RefusalKind.NOT_FOUND, "unknown machine")
        if self.records[machine_id].state is not source:
            raise ProviderRefusal(RefusalKind.REFUSED, f"out of position: {method} needs {source.label}")
        if cluster is not None:
            self.records[machine_id] = replace(self.records[machine_id], cluster=ClusterId(cluster))
            self.metadata[machine_id] = metadata or {}
        self._become(machine_id, TARGETS[target] if self.synchronous else target)
        if (method, machine_id) in self.lost_answers:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "the connection broke")
        return TransitionAck(
            operation_id=f"op-{len(self.calls)}",
            record=ListedMachine(self.records[machine_id], self.metadata.get(machine_id, {})),
        )

    def _become(self, machine_id: str, state: MachineState) -> None:
        record = replace(self.records[machine_id], state=state)
        if state in (S.IDLE, S.SPECULATIVE):
            record = replace(record, cluster=ClusterId(""))
            self.metadata.pop(machine_id, None)
        host = HostRef() if state in (S.SPECULATIVE, S.CREATING) else HostRef("test", f"host-{machine_id}")
        self.records[machine_id] = replace(record, host=host)


@dataclass
class RevisionedProvider(ScriptedProvider):
    """Answers a List with a cursor by what changed since: as a delta with tombstones, or without."""

    tombstones: bool = True
    #: Cursors that have become too old are answered in full.
    forgets: bool = False
    _views: dict[bytes, dict[str, ListedMachine]] = field(default_factory=dict)

    def view(self, since_revision: bytes) -> Listing:
        """Return a delta to the view of that cursor, or everything where there is none."""
        now: dict[str, ListedMachine] = {
            m.id: ListedMachine(m, dict(self.metadata.get(m.id, {}))) for m in self.records.values()
        }
        revision = str(len(self._views)).encode()
        then = None if self.forgets else self._views.get(since_revision)
        self._views[revision] = now
        if then is None:
            return Listing(records=list(now.values()), revision=revision)
        # Every change makes a new object, so one that went there and back again between two Lists is told as well.
        changed = [
            record
            for machine_id, record in now.items()
            if machine_id not in then or then[machine_id].machine is not record.machine
        ]
        removed = tuple(machine_id for machine_id in then if machine_id not in now) if self.tombstones else ()
        return Listing(records=changed, revision=revision, removed_ids=removed, tombstones=self.tombstones)


@dataclass(frozen=True)
class Offer:
    """A roll-up offer made of values."""

    cluster_id: str
    content: tuple[Need, ...]
    timestamp_unix_nanos: int = 1
    fault: MalformedMessage | None = None
    has_digest: bool = True
    said_overheads: tuple[Overhead, ...] = ()
    size_bytes: int = 0

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.content)

    @property
    def digest(self) -> bytes:
        """Over the rows alone."""
        return xxhash.xxh3_128_digest(repr((self.cluster_id, self.content, self.fault, self.said_overheads)).encode())

    def needs(self) -> tuple[Need, ...]:
        """Return the rows, or raise the fault."""
        if self.fault is not None:
            raise self.fault
        return self.content

    def overheads(self) -> tuple[Overhead, ...]:
        """Return the overheads, or raise the fault."""
        if self.fault is not None:
            raise self.fault
        return self.said_overheads


class FakeOperator:
    """An operator at the other end of a session: collects frames and answers what it is told to."""

    def __init__(self, world: "World", cluster: str, capabilities: frozenset[str]) -> None:
        self.world = world
        self.session: Session = world.shard.sessions.open(Hello(cluster_id=cluster, capabilities=capabilities))
        self.frames: list[ShardFrame] = []
        #: What to answer to bootstrap requests; None answers nothing.
        self.answer: Callable[[BootstrapRequest], BootstrapResponse] | None = lambda request: BootstrapResponse(
            request_id=request.request_id, user_data=b"#cloud-config"
        )
        #: How a drain ends, after how many seconds; None does not answer.
        self.drain: tuple[DrainOutcome, float] | None = (DrainOutcome.DRAINED, 5.0)
        #: Machines whose drains end as WOULD_NOT_FIT.
        self.refuses: Set[str] = frozenset()
        #: What to answer to questions about drains; None answers nothing.
        self.forecast: Callable[[DrainForecastRequest], DrainForecast | None] = lambda _request: None
        self._tasks = {asyncio.create_task(self._read())}

    async def _read(self) -> None:
        while True:
            try:
                frame = await self.session.outbox.next()
            except SessionClosed:
                return
            self.frames.append(frame)
            if isinstance(frame, BootstrapRequest) and self.answer is not None:
                self.world.shard.sessions.receive_bootstrap_response(self.session, self.answer(frame))
            if isinstance(frame, DrainForecastRequest) and (answer := self.forecast(frame)) is not None:
                self.world.shard.sessions.receive_drain_forecast(self.session, answer)
            if isinstance(frame, ReclaimInstruction) and self.drain is not None:
                self._tasks.add(asyncio.create_task(self._drained(frame, *self.drain)))

    async def _drained(self, instruction: ReclaimInstruction, outcome: DrainOutcome, seconds: float) -> None:
        await LoopClock().sleep(seconds)
        for machine_id in instruction.machine_ids:
            ending = DrainOutcome.WOULD_NOT_FIT if machine_id in self.refuses else outcome
            self.world.shard.sessions.receive_drain_result(
                self.session,
                DrainResult(instruction_id=instruction.instruction_id, machine_id=machine_id, outcome=ending),
            )

    def report(self, *rows: Need, fault: MalformedMessage | None = None, at_unix_nanos: int = 1) -> str:
        """Send a roll-up and return what became of it."""
        offer = Offer(self.session.cluster, tuple(rows), at_unix_nanos, fault=fault)
        return self.world.shard.take_rollup(self.session, offer).value

    def states(self, machine_id: str) -> list[MachineState]:
        """Return the states that this operator was shown of a machine, in order."""
        return [f.state for f in self.frames if isinstance(f, NodeStateUpdate) and f.machine_id == machine_id]

    def hints(self) -> Sequence[AvailableCapacity]:
        """Return the capacity hints received."""
        return [frame for frame in self.frames if isinstance(frame, AvailableCapacity)]

    def verdicts(self) -> Sequence[NeedStatusUpdate]:
        """Return the verdicts received."""
        return [frame for frame in self.frames if isinstance(frame, NeedStatusUpdate)]

    def saw(self, machine_id: str, *, ready: bool = True, at_unix_nanos: int = 1, **requested: str) -> bool:
        """Report what the cluster sees of a machine's node and its pods; return whether the shard took it."""
        status = NodeStatus(
            machine_id=machine_id,
            node_name=f"node-{machine_id}",
            ready=ready,
            observed_unix_nanos=at_unix_nanos,
            requested=requested,
        )
        return self.world.shard.sessions.on_node_status(self.session, status)

    def lost(self, machine_id: str, *, at_unix_nanos: int = 2) -> bool:
        """Report that a machine's node is gone; return whether the shard took it."""
        status = NodeStatus(machine_id=machine_id, node_name="", ready=False, observed_unix_nanos=at_unix_nanos)
        return self.world.shard.sessions.on_node_status(self.session, status)


class World:
    """One shard, its provider and its operators."""

    def __init__(
        self,
        provider: ScriptedProvider | None = None,
        *,
        epoch: int = 1,
        settings: ShardSettings | None = None,
        compute: Compute = compute_inline,
        make_engine: EngineMaker = fleet_engine,
        audit_log: AuditLog | None = None,
        shard_id: str = "shard-0",
        ownership_file: OwnershipFile | None = None,
        retirements: RetirementStore | None = None,
        exchange_store: ExchangeStore | None = None,
        reclaim_after_seconds: float = 0.0,
        plan_workers: PlanWorkers | None = None,
    ) -> None:
        """Excess is reclaimed at once unless the test says otherwise."""
        self.provider = provider or ScriptedProvider()
        self.registry = CollectorRegistry()
        self.shard = Shard(
            shard_id=ShardId(shard_id),
            epoch=epoch,
            settings=replace(settings or ShardSettings(), reclaim_after_seconds=reclaim_after_seconds),
            provider=self.provider,
            clock=LoopClock(),
            ids=SequentialIds(),
            compute=compute,
            registry=self.registry,
            make_engine=make_engine,
            audit_log=audit_log,
            ownership_file=ownership_file,
            retirements=retirements,
            exchange_store=exchange_store,
            plan_workers=plan_workers,
        )

    def connect(self, cluster: str, *capabilities: str) -> FakeOperator:
        """Open a session; capabilities default to drain-result."""
        return FakeOperator(self, cluster, frozenset(capabilities or (CAPABILITY_DRAIN_RESULT,)))

    async def step(self, *, is_timer: bool = True) -> CycleReport:
        """Run one cycle, with the engine ready, and carry out nothing."""
        await self.shard.make_ready()
        return await self.shard.step(is_timer=is_timer)

    async def cycle(self, *, is_timer: bool = True) -> CycleReport:
        """Run one cycle and carry out everything that it queued."""
        report = await self.step(is_timer=is_timer)
        await self.shard.actuator.run_inline()
        # Let the operators read what was sent.
        for _ in range(8):
            await asyncio.sleep(0)
        return report

    async def settle(self, cycles: int = 4) -> None:
        """Cycle, with the provider ending its transitions in between."""
        for _ in range(cycles):
            await self.cycle()
            self.provider.settle()
        await self.cycle()

    def state(self, machine_id: str) -> MachineState:
        """Return the shard's state of a machine."""
        known = self.shard.inventory.get(machine_id)
        assert known is not None, f"{machine_id} is not known"
        return known.state

    def machine(self, machine_id: str) -> Machine:
        """Return the shard's record of a machine."""
        known = self.shard.inventory.get(machine_id)
        assert known is not None, f"{machine_id} is not known"
        return known

    def outcomes(self) -> list[tuple[str, str, str]]:
        """Return (kind, machine, outcome) of every action so far, oldest first."""
        return [
            (record.action.kind.label, record.action.machine_id, record.outcome_label)
            for record in self.shard.ledger.history
        ]

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value, 0 when it does not exist."""
        return self.registry.get_sample_value(f"bigfleet_shard_{name}", labels) or 0.0
