"""A fleet on virtual time: the real replica, reporters, inboxes and handovers, over shards that are a plain model.

A shard of the model has machines and demand, binds what is idle, takes from less urgent work of its own, lets go of
what is wanted no more, and tells what it lacks; whatever moves between shards moves by the real protocol. Nothing here
decides what moves.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from bigfleet.coordinator.delivery import State
from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.replica import NotTheLeader, Replica
from bigfleet.coordinator.stores.protocol import NotLeader
from bigfleet.engine.decision import Action
from bigfleet.link.inbox import Inbox
from bigfleet.link.report_conversion import holding_of
from bigfleet.link.reporter import CoordinatorLink, ReportSnapshot
from bigfleet.model import labels, vector
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.instructions import Instruction, Reading, Selector, TransferOwnership, reading
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, Reservation, RowKind
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.shard_report import CapacityCount, ShardReport, ShardSummary, Shortfall
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ownership.donor_selection import DonorCandidate, matches
from bigfleet.shard.ownership.handover import Handover, HandoverDone
from bigfleet.shard.ports import ListedMachine
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.coordinator.handover.handover_world import PROVIDER, Backend, HeldStore

CYCLE_SECONDS = 10.0
REPORT_SECONDS = 30.0
PASS_SECONDS = 150.0
COOLDOWN_SECONDS = 240.0
DRAIN_SECONDS = 60.0
SIZE = {"cpu": "16", "memory": "64Gi"}
S = MachineState
CLOCK = LoopClock()


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """What one cluster asks of its shard: so many machines of any of some types."""

    cluster: ClusterId
    instance_types: tuple[str, ...]
    #: Machines wanted at a moment.
    count: Callable[[float], int]
    priority: int = 0
    bucket: int = 1
    is_same: bool = False

    @property
    def profile(self) -> Profile:
        requirements = [Requirement(labels.INSTANCE_TYPE, Operator.IN, self.instance_types)]
        requirements += [Requirement(labels.RACK, Operator.SAME)] * self.is_same
        return Profile(tuple(requirements), priority=self.priority, interruption_bucket=self.bucket)


def steady(number: int) -> Callable[[float], int]:
    """Return demand that never changes."""
    return lambda _at: number


class Event(NamedTuple):
    """Something that happened to a machine."""

    at: float
    #: "given", "taken" or "drained".
    what: str
    machine: MachineId
    shard: ShardId
    other: ShardId


def machines_of(zone: str, kind: str, number: int, state: MachineState = S.IDLE) -> list[Machine]:
    """Return equal machines, named by zone and type."""
    host = HostRef("p", "h") if state is S.IDLE else HostRef()
    return [
        Machine(
            id=MachineId(f"{zone}-{kind}-{state.label}-{index}"),
            state=state,
            host=host,
            zone=zone,
            instance_type=kind,
            capacity_type=CapacityType.ON_DEMAND,
            allocatable=SIZE,
        )
        for index in range(number)
    ]


class Memory:
    """What a shard has on disk; tells the fleet of every machine that changes hands."""

    def __init__(self, owned: Owned, changed: Callable[[Owned, Owned], None]) -> None:
        self.owned = owned
        self.reservations: Mapping[MachineId, Reservation] = {}
        self.accepted_term = 0
        self._changed = changed

    def accept_term(self, term: int) -> None:
        self.accepted_term = max(term, self.accepted_term)

    def commit(self, owned: Owned, reservations: Mapping[MachineId, Reservation] | None = None) -> None:
        before, self.owned = self.owned, owned
        if reservations is not None:
            self.reservations = dict(reservations)
        self._changed(before, owned)


class ModelShard:
    """One shard: its machines and demand are a model, its inbox and handover are the real ones."""

    def __init__(self, fleet: "Fleet", name: ShardId, zone: str, wants: Sequence[Want]) -> None:
        self.name = name
        self.wants = sorted(wants, key=lambda want: (-want.priority, want.cluster))
        self.machines: dict[MachineId, Machine] = {}
        self.bound: dict[MachineId, Want] = {}
        self.drains: dict[MachineId, float] = {}
        self.ages: Counter[Want] = Counter()
        self.lacks: dict[Want, int] = {}
        self._fleet = fleet
        self._has_more = True
        owned = Owned(base=Base.DOMAINS, domains=frozenset({Domain(labels.ZONE, zone)}))
        self.file = Memory(owned, self._changed)
        disk: Any = self.file
        self.handover = Handover(
            me=name, file=disk, handover_host=self, clock=CLOCK, report_interval_seconds=fleet.report_seconds
        )
        self.inbox = Inbox(self, accepted_term=0)
        client: Any = fleet
        self.reporter = CoordinatorLink(
            shard_id=name,
            epoch=1,
            advertised_address=f"{name}:7780",
            interval_seconds=fleet.report_seconds,
            source=self,
            inbox=self.inbox,
            client=client,
            clock=CLOCK,
        )

    # ---- a cycle ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self.cycle(CLOCK.monotonic_seconds())
            await CLOCK.sleep(CYCLE_SECONDS)

    def cycle(self, now_seconds: float) -> None:
        if self._has_more:
            self._read()
        for machine_id in [each for each, until in self.drains.items() if until <= now_seconds]:
            del self.drains[machine_id]
            self._put(machine_id, S.IDLE)
        self.handover.tend()
        for want in self.wants:
            self._let_go(want, want.count(now_seconds))
        self.lacks = {}
        for want in self.wants:
            missing = self._serve(want, want.count(now_seconds) - self._has(want))
            if missing:
                self.lacks[want] = missing
        self.ages = Counter({want: self.ages[want] + 1 for want in self.lacks})

    def _read(self) -> None:
        """List everything that the provider has, and keep what is ours."""
        self._has_more = False
        for machine_id, machine in self._fleet.records.items():
            by = self._fleet.bound_by.get(machine_id, "")
            is_ours = self.file.owned.owns(machine, by, me=self.name, inherits=frozenset(), stays=False)
            if is_ours:
                self.machines[machine_id] = machine
            else:
                self.machines.pop(machine_id, None)

    def _put(self, machine_id: MachineId, state: MachineState, want: Want | None = None) -> None:
        machine = replace(
            self.machines[machine_id],
            state=state,
            host=HostRef("p", "h"),
            cluster=ClusterId("") if want is None else want.cluster,
            assigned_priority=0 if want is None else want.priority,
            assigned_interruption_penalty_dollars=0.0 if want is None else bucket_upper_dollars(want.bucket),
        )
        self.machines[machine_id] = self._fleet.records[machine_id] = machine
        if want is None:
            self.bound.pop(machine_id, None)
            self._fleet.bound_by.pop(machine_id, None)
        else:
            self.bound[machine_id], self._fleet.bound_by[machine_id] = want, self.name

    def _has(self, want: Want) -> int:
        return sum(each is want for each in self.bound.values())

    def _let_go(self, want: Want, wanted: int) -> None:
        surplus = sorted(m for m, each in self.bound.items() if each is want)[wanted:]
        for machine_id in surplus:
            self._put(machine_id, S.IDLE)

    def _serve(self, want: Want, missing: int) -> int:
        """Bind what is free, then what serves less urgent work here; return what is still missing."""
        if missing <= 0:
            return 0
        free = sorted(
            (
                machine
                for machine in self.machines.values()
                if machine.state in (S.IDLE, S.SPECULATIVE)
                and machine.instance_type in want.instance_types
                and machine.id not in self.file.reservations
            ),
            key=lambda machine: (machine.state, machine.id),
        )
        less_urgent = sorted(
            (m for m, each in self.bound.items() if each.priority < want.priority and self._is_of(m, want)),
            key=lambda m: (self.bound[m].priority, m),
        )
        for machine_id in [*(machine.id for machine in free), *less_urgent][:missing]:
            self._put(machine_id, S.CONFIGURED, want)
            missing -= 1
        return missing

    def _is_of(self, machine_id: MachineId, want: Want) -> bool:
        return self.machines[machine_id].instance_type in want.instance_types

    # ---- what it says -------------------------------------------------------------------------------------------

    def snapshot(self) -> ReportSnapshot:
        return ReportSnapshot(
            summary=ShardSummary(
                provider_address=PROVIDER,
                type_counts=Counter(machine.instance_type for machine in self.machines.values()),
                idle=self._offered(S.IDLE),
                speculative=self._offered(S.SPECULATIVE),
            ),
            shortfalls=tuple(self._shortfall(want, missing) for want, missing in self.lacks.items()),
            clusters=frozenset(),
            holding=holding_of(self.file.owned, self.file.reservations),
        )

    def _shortfall(self, want: Want, missing: int) -> Shortfall:
        profile = want.profile
        supply = next(iter(self._fleet.records.values())).supply
        return Shortfall(
            fingerprint=profile.fingerprint,
            requirements=profile.requirements,
            deficit=vector.scale(supply, missing),
            min_unit={"cpu": 1_000},
            priority=want.priority,
            age_cycles=self.ages[want],
            interruption_bucket=want.bucket,
            is_topology_constrained=want.is_same,
        )

    def free(self, state: MachineState) -> list[Machine]:
        """Return what could be given away (docs/spec/shard.md §11.3)."""
        kept = self.file.reservations.keys() | self.handover.cooling
        return [machine for machine in self.machines.values() if machine.state is state and machine.id not in kept]

    def _offered(self, state: MachineState) -> tuple[CapacityCount, ...]:
        counts = Counter((machine.instance_type, machine.zone) for machine in self.free(state))
        supply = next(iter(self._fleet.records.values())).supply
        return tuple(
            CapacityCount(kind, zone, CapacityType.ON_DEMAND, number, supply)
            for (kind, zone), number in sorted(counts.items())
        )

    # ---- what it is told ----------------------------------------------------------------------------------------

    async def accept_term(self, term: int) -> None:
        await self.handover.accept_term(term)

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        await self.handover.confirm(machine_ids)

    async def carry_out(self, instruction: Instruction) -> HandoverDone:
        """Carry it out; of what a selector means, a donor keeps its margin."""
        payload = instruction.payload
        is_release = isinstance(payload, TransferOwnership) and reading(payload, self.name) is Reading.RELEASE
        selector = payload.selector if isinstance(payload, TransferOwnership) and is_release else None
        before = 0 if selector is None else self._matching(selector)
        done = await self.handover.carry_out(instruction)
        if selector is not None and done.machine_ids and self._fleet.donors_keep_a_margin:
            assert self._matching(selector) >= max(1, -(-before // 10)), f"{self.name} is below its margin"
        return done

    def _matching(self, selector: Selector) -> int:
        return sum(matches(selector, machine) for machine in self.free(S.IDLE))

    def _changed(self, before: Owned, after: Owned) -> None:
        now_seconds = CLOCK.monotonic_seconds()
        for machine_id, row in after.rows.items():
            known = before.rows.get(machine_id)
            if known is not None and known.version == row.version:
                continue
            what = {RowKind.RELEASED: "given", RowKind.ADOPTED: "taken"}.get(row.kind)
            if what is not None:
                self._fleet.events.append(Event(now_seconds, what, machine_id, self.name, row.other))
            self._fleet.check_owners(machine_id)

    # ---- the grounds of its handover ----------------------------------------------------------------------------

    @property
    def pause(self) -> str:
        return ""

    def machine(self, machine_id: MachineId) -> Machine | None:
        return self.machines.get(machine_id)

    def is_busy(self, machine_id: MachineId) -> bool:
        return machine_id in self.drains

    def giveable(self, state: MachineState, selector: Selector) -> Sequence[DonorCandidate]:
        fitting = (m for m in self.machines.values() if m.state is state and matches(selector, m))
        return [DonorCandidate(machine, 0.0) for machine in fitting]

    def drainable(self, selector: Selector) -> Sequence[Machine]:
        return [m for m in self.machines.values() if m.state is S.CONFIGURED and matches(selector, m)]

    def lying_in(self, domain: Domain) -> Sequence[MachineId]:
        return [m.id for m in self.machines.values() if m.attribute(domain.topology_key) == domain.topology_value]

    def has_none_in(self, domain: Domain) -> bool:
        return bool(self.machines) and not self.lying_in(domain)

    async def fence_machine(self, machine_id: MachineId, instruction_id: str) -> None:
        """Nothing of an older process is under way here."""

    async def get(self, machine_id: MachineId) -> ListedMachine:
        return ListedMachine(self._fleet.records[machine_id], {})

    def preempt(self, actions: Sequence[Action]) -> None:
        now_seconds = CLOCK.monotonic_seconds()
        for action in actions:
            want, kept = self.bound[action.machine_id], self.file.reservations[action.machine_id]
            machine = self.machines[action.machine_id]
            assert self._fleet.is_worth_more(kept.to_shard, action, want), f"{want} is drained for cheaper work"
            self._fleet.events.append(Event(now_seconds, "drained", machine.id, self.name, kept.to_shard))
            del self.bound[machine.id]
            self.machines[machine.id] = self._fleet.records[machine.id] = replace(machine, state=S.DRAINING)
            self.drains[machine.id] = now_seconds + self._fleet.drain_seconds

    def remove(self, machine_ids: Iterable[MachineId]) -> None:
        for machine_id in machine_ids:
            self.machines.pop(machine_id, None)

    def add(self, machines: Iterable[Machine]) -> None:
        for machine in machines:
            self.machines.setdefault(machine.id, machine)

    def widened(self) -> None:
        self._has_more = True


class MemoryStore(HeldStore):
    """One replica's way to the tables; it leads until its task ends."""

    async def lost(self) -> str:
        await asyncio.get_running_loop().create_future()
        return ""

    def revision(self) -> int:
        return 0


@dataclass
class Fleet:
    """Shards, what their one provider has, and the replica that leads at the moment."""

    settings: CoordinatorSettings
    report_seconds: float = REPORT_SECONDS
    drain_seconds: float = DRAIN_SECONDS
    #: False where a test takes the margin away.
    donors_keep_a_margin: bool = True
    records: dict[MachineId, Machine] = field(default_factory=dict)
    bound_by: dict[MachineId, ShardId] = field(default_factory=dict)
    shards: dict[ShardId, ModelShard] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    backend: Backend = field(default_factory=Backend)
    replica: Replica | None = None
    _leading: "asyncio.Task[None] | None" = None
    _replicas: int = 0

    def add(self, name: str, machines: Sequence[Machine], *wants: Want) -> ModelShard:
        """Add a shard with the zone that its machines lie in, named after it."""
        self.records.update({machine.id: machine for machine in machines})
        shard = self.shards[ShardId(name)] = ModelShard(self, ShardId(name), name, wants)
        return shard

    async def send(self, report: ShardReport) -> ReportAnswer | None:
        """Bring a report to whoever leads, for the reporters."""
        if self.replica is None:
            return None
        try:
            return await self.replica.change(lambda term: term.report(report))
        except (NotTheLeader, NotLeader):
            return None

    def check_owners(self, machine_id: MachineId) -> None:
        owners = self.owners(machine_id)
        assert len(owners) <= 1, f"{machine_id} belongs to {owners}: {self.events[-10:]}"

    def owners(self, machine_id: MachineId) -> list[ShardId]:
        record, by = self.records[machine_id], self.bound_by.get(machine_id, "")
        return [
            name
            for name, shard in self.shards.items()
            if shard.file.owned.owns(record, by, me=name, inherits=frozenset(), stays=False)
        ]

    def is_worth_more(self, requester: ShardId, action: Action, victim: Want) -> bool:
        """Return whether a drain is for work of its shard that is both more urgent and costlier to interrupt."""
        return any(
            each.priority == action.preemptor_priority
            and each.priority > victim.priority
            and each.bucket > victim.bucket
            and not each.is_same
            for each in self.shards[requester].wants
        )

    # ---- time ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> Any:
        """Run everything while the context lasts; reports come spread over the interval."""
        work: list[Awaitable[None]] = []
        for number, shard in enumerate(self.shards.values()):
            offset_seconds = self.report_seconds * number / len(self.shards)
            work += [shard.run(), _later(offset_seconds, shard.reporter.run)]
        tasks = [asyncio.ensure_future(each) for each in work]
        self.lead()
        try:
            yield
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            self.crash()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def lead(self) -> None:
        """Let another replica lead, which knows nothing but the tables."""
        self._replicas += 1
        self.replica = Replica(
            MemoryStore(self.backend, self._replicas),
            clock=CLOCK,
            settings=self.settings,
            metrics=CoordinatorMetrics(CollectorRegistry()),
        )
        self._leading = asyncio.create_task(self.replica.run())

    def crash(self) -> None:
        """The leader is gone; nobody answers."""
        if self._leading is not None:
            self._leading.cancel()
        self.replica = self._leading = None

    # ---- what happened ------------------------------------------------------------------------------------------

    def moved(self, since: float = 0.0) -> list[Event]:
        """Return every machine that changed hands or was drained for others, in order."""
        return [event for event in self.events if event.at >= since and event.what in ("given", "drained")]

    def too_soon(self) -> list[Event]:
        """Return the machines that were given on or drained before their cooldown was over."""
        arrived: dict[MachineId, float] = {}
        found = []
        for event in self.events:
            if event.what == "taken" and event.shard != event.other:
                arrived[event.machine] = event.at
            elif event.what != "taken" and event.at - arrived.get(event.machine, -COOLDOWN_SECONDS) < COOLDOWN_SECONDS:
                found.append(event)
        return found

    def returns(self) -> int:
        """Return how often a machine came back to a shard that had given it away."""
        gone: set[tuple[MachineId, ShardId]] = set()
        number = 0
        for event in self.events:
            if event.what == "given":
                gone.add((event.machine, event.shard))
            elif event.what == "taken" and event.shard != event.other and (event.machine, event.shard) in gone:
                number += 1
        return number

    def crowded(self) -> list[tuple[Any, float]]:
        """Return the flows of the present term that were used again before their rest was over."""
        assert self.replica is not None
        last: dict[Any, float] = {}
        found = []
        for entry in self.replica.leading().ephemeral.ledger.entries:
            if entry.move is None or entry.state is State.CANCELLED or entry.move.machine_ids:
                continue
            flow, at = entry.move.flow, entry.enqueued_seconds
            if at - last.get(flow, -COOLDOWN_SECONDS) < self.settings.cooldown_seconds:
                found.append((flow, at))
            last[flow] = at
        return found


async def _later(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    await CLOCK.sleep(seconds)
    await work()
