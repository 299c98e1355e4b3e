"""Shards, leaders and machines for the proofs of handover: the real leader, inbox and rows, and a network that fails.

Everything runs in one thread, step by step; a step is a coroutine that never waits. What a crash takes away is what a
process has in memory: a shard keeps its rows, its term and its epoch, a leader keeps nothing.
"""

import random
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bigfleet.coordinator.commands import (
    AddShard,
    Command,
    CommandRefused,
    ReleaseDomain,
    RemoveShard,
    SetDomainOwner,
    apply,
)
from bigfleet.coordinator.ephemeral_state import ReceivedReport, ReportAnswer
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.stores.protocol import TERM_STEP, Leadership, NotLeader, StoreUnavailable
from bigfleet.coordinator.stores.protocol import LeaderInfo as LeaderName
from bigfleet.coordinator.tables import DomainState, Tables
from bigfleet.link.inbox import DoesNotApply, Inbox
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import Ack, Instruction, Reading, TransferOwnership, ids_of, owned_after, reading
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, RowKind
from bigfleet.model.states import CapacityType, MachineState

T = TypeVar("T")
ZONE = "topology.kubernetes.io/zone"
REPORT_CYCLE_SECONDS = 30.0
PROVIDER = "provider:9100"


def run(step: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a step waited for something")


#: How often each thing happens, of a hundred or so.
USUAL = {
    "report": 55,
    "leave": 8,
    "move": 15,
    "late": 6,
    "take": 3,
    "give": 6,
    "crash": 3,
    "elect": 2,
    "lose disk": 1,
}
#: Leaders change, files are lost, and old reports arrive, more than anything moves.
UNQUIET = {
    "report": 55,
    "leave": 6,
    "move": 10,
    "late": 10,
    "take": 6,
    "give": 9,
    "crash": 2,
    "elect": 5,
    "lose disk": 4,
}


class Crash(Exception):
    """The process dies here."""


@dataclass
class HandClock:
    seconds: float = 0.0

    def monotonic_seconds(self) -> float:
        return self.seconds

    def unix_nanos(self) -> int:
        return int(self.seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


@dataclass
class Backend:
    """What a store holds; its holder alone may write."""

    tables: Tables = field(default_factory=Tables)
    term: int = 0
    holder: int = 0


class HeldStore:
    """One leader's way to the backend."""

    def __init__(self, backend: Backend, me: int) -> None:
        self._backend = backend
        self._me = me

    async def campaign(self) -> Leadership:
        self._backend.holder = self._me
        self._backend.term += 1
        return Leadership(self._backend.term, self._backend.tables)

    async def lost(self) -> str:
        raise StoreUnavailable("not asked here")

    async def load(self) -> Tables:
        return self._backend.tables

    async def is_leader(self) -> bool:
        return self._backend.holder == self._me

    async def commit(self, command: Command) -> Tables:
        if self._backend.holder != self._me:
            raise NotLeader("another replica leads")
        self._backend.tables = apply(self._backend.tables, command)
        return self._backend.tables

    async def raise_term(self, above: int) -> int:
        if self._backend.holder != self._me:
            raise NotLeader("another replica leads")
        self._backend.term = max(above, self._backend.term) + TERM_STEP
        return self._backend.term

    def leader(self) -> LeaderName | None:
        return None

    async def resign(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Disk:
    """What a shard keeps."""

    owned: Owned
    accepted_term: int = 0
    epoch: int = 1


def _ignore(_instruction: Instruction, _ack: Ack) -> None:
    """Nobody counts here; a state is copied, and a function with a name can be."""


class ShardSide:
    """A shard as far as handover goes; its disk outlives its process."""

    def __init__(self, name: ShardId, disk: Disk, machines: dict[MachineId, Machine]) -> None:
        self.name = name
        self.disk = disk
        self.machines = machines
        #: Handlings left before the process dies; None is never.
        self.dies_after: int | None = None
        self.start()

    def start(self) -> None:
        self.cycle = 0
        self.dies_after = None
        self.inbox = Inbox(self, accepted_term=self.disk.accepted_term, on_answer=_ignore)

    def crash(self) -> None:
        self.disk.epoch += 1
        self.start()

    def lose_disk(self) -> None:
        self.disk = Disk(Owned(base=Base.DOMAINS), epoch=self.disk.epoch + 1)
        self.start()

    def owns(self, machine_id: MachineId) -> bool:
        machine = self.machines[machine_id]
        return self.disk.owned.owns(machine, "", me=self.name, inherits=frozenset(), stays=False)

    def empty_leaving(self) -> None:
        """Nothing of this world is ever bound, so a leaving domain is empty at the next reconcile."""
        for domain in sorted(self.disk.owned.leaving):
            self.disk.owned = self.disk.owned.left(domain)

    def report(self) -> ReceivedReport:
        self.cycle += 1
        return ReceivedReport(
            shard_id=self.name,
            epoch=self.disk.epoch,
            cycle=self.cycle,
            echoed_term=self.disk.accepted_term,
            provider_address=PROVIDER,
            owned=self.disk.owned,
            acks=self.inbox.waiting(),
        )

    def _live(self) -> None:
        if self.dies_after is not None:
            if not self.dies_after:
                raise Crash
            self.dies_after -= 1

    async def accept_term(self, term: int) -> None:
        self._live()
        self.disk.accepted_term = term

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        self._live()
        self.disk.owned = self.disk.owned.confirmed(machine_ids)

    async def carry_out(self, instruction: Instruction) -> None:
        self._live()
        payload = instruction.payload
        if isinstance(payload, TransferOwnership) and reading(payload, self.name) is Reading.RELEASE:
            self._release(payload, instruction)
        else:
            self.disk.owned = owned_after(self.disk.owned, instruction, me=self.name)
        # Done and on disk; the answer may still be lost with the process.
        self._live()

    def _release(self, payload: TransferOwnership, instruction: Instruction) -> None:
        owned = self.disk.owned
        for machine_id in ids_of(payload):
            row = owned.rows.get(machine_id)
            if row is not None and row.version >= instruction.row_version:
                continue
            if not self.owns(machine_id):
                raise DoesNotApply(f"{machine_id} is not ours")
            owned = owned.released(self.machines[machine_id], instruction.row_version, to=payload.to_shard)
        self.disk.owned = owned


def machine(name: str, zone: str) -> Machine:
    return Machine(
        id=MachineId(name),
        state=MachineState.IDLE,
        host=HostRef("p", name),
        zone=zone,
        instance_type="t",
        capacity_type=CapacityType.ON_DEMAND,
    )


class World:
    """Shards, machines in zones, one leader that stands and at most one that believes that it does."""

    def __init__(
        self,
        rng: random.Random,
        weights: Mapping[str, int] = USUAL,
        *,
        shards: int = 3,
        machines: int = 3,
        zones: int = 2,
    ) -> None:
        self.rng = rng
        self.weights = weights
        self.clock = HandClock()
        self.backend = Backend()
        self.zones = [Domain(ZONE, f"z{number}") for number in range(zones)]
        made = [machine(f"m{number}", f"z{number % zones}") for number in range(machines)]
        self.machines = {each.id: each for each in made}
        self.shards = {
            name: ShardSide(name, Disk(Owned(base=Base.DOMAINS)), self.machines)
            for name in (ShardId(f"s{number}") for number in range(shards))
        }
        self.leaders: list[Leader] = []
        self.late: list[tuple[Leader, ReceivedReport]] = []
        self.told: list[str] = []
        self.elect()
        for name in self.shards:
            run(self.leader._commit(AddShard(name, "", 1, 0)))
        for number, zone in enumerate(self.zones):
            run(self.leader._commit(SetDomainOwner(zone, list(self.shards)[number % shards])))

    @property
    def leader(self) -> Leader:
        return self.leaders[-1]

    # ---- steps --------------------------------------------------------------------------------------------------

    def elect(self) -> None:
        store = HeldStore(self.backend, len(self.told) + 1_000_000 * len(self.leaders) + self.backend.term)
        won = run(store.campaign())
        fresh = Leader(store, won, clock=self.clock, report_cycle_seconds=REPORT_CYCLE_SECONDS)
        self.leaders = [*self.leaders[-1:], fresh]

    def ask(self, leader: Leader, report: ReceivedReport) -> ReportAnswer | None:
        """Let a leader take a report; None when it steps down or cannot write."""
        try:
            return run(leader.report(report))
        except NotLeader:
            if leader is not self.leader:
                self.leaders = [self.leader]
            return None
        except (StoreUnavailable, CommandRefused):
            return None

    def exchange(self, name: ShardId, leader: Leader, *, is_lost: bool = False, dies_after: int | None = None) -> None:
        """A report and its answer; the answer is lost, or the shard dies while it handles it."""
        shard = self.shards[name]
        report = shard.report()
        self.late = [*self.late[-3:], (leader, report)]
        answer = self.ask(leader, report)
        if answer is None or is_lost:
            return
        if not answer.acknowledged:
            return
        shard.inbox.carried(report.acks)
        shard.dies_after = dies_after
        try:
            run(shard.inbox.take(answer.term, answer.confirmed, answer.instructions))
            shard.dies_after = None
        except Crash:
            shard.crash()

    def repeat_late(self) -> None:
        """A report that was sent before arrives once more, or only now; whoever sent it waits no longer."""
        leader, report = self.rng.choice(self.late)
        if leader in self.leaders:
            self.ask(leader, report)

    def move(self, leader: Leader, machine_id: MachineId, donor: ShardId, to: ShardId, *others: MachineId) -> None:
        payload = TransferOwnership(from_shard=donor, to_shard=to, machine_ids=(machine_id, *others))
        ledger = leader.ephemeral.ledger.enqueued(donor, payload, term=leader.term, now_seconds=self.clock.seconds)
        leader.ephemeral = _with_ledger(leader, ledger)

    def take_domain(self, leader: Leader, domain: Domain) -> None:
        self._try(leader, ReleaseDomain(domain))

    def give_domain(self, leader: Leader, domain: Domain, to: ShardId) -> None:
        self._try(leader, SetDomainOwner(domain, to))

    def remove(self, name: ShardId) -> None:
        """Remove a shard by force: somebody promises that it is gone."""
        self._try(self.leader, RemoveShard(name))
        self.leader.ephemeral = self.leader.ephemeral.without_shard(name, self.clock.seconds)

    def _try(self, leader: Leader, command: Command) -> None:
        try:
            run(leader._commit(command))
        except NotLeader:
            self.leaders = [self.leader]
        except CommandRefused:
            pass

    # ---- what must hold -----------------------------------------------------------------------------------------

    def owners(self, machine_id: MachineId) -> list[ShardId]:
        return [name for name, shard in self.shards.items() if shard.owns(machine_id)]

    def check(self) -> None:
        for machine_id in self.machines:
            owners = self.owners(machine_id)
            assert len(owners) <= 1, f"{machine_id} belongs to {owners} after {self.told[-30:]}"

    def heal(self) -> None:
        """Everything works from now on: each machine has exactly one owner in the end."""
        self.leaders = [self.leader]
        self.late = []
        quiet_rounds = 0
        for _ in range(60):
            before = [shard.disk.owned for shard in self.shards.values()]
            self.clock.seconds += REPORT_CYCLE_SECONDS
            for name, shard in self.shards.items():
                shard.empty_leaving()
                self.exchange(name, self.leader)
                self.check()
            for zone in self.zones:
                row = self.leader.tables.domains.get(zone)
                if row is None:
                    self.give_domain(self.leader, zone, next(iter(self.shards)))
            is_quiet = before == [shard.disk.owned for shard in self.shards.values()] and self.is_settled()
            quiet_rounds = quiet_rounds + 1 if is_quiet else 0
            if quiet_rounds == 3 and not any(self.leader.ephemeral.ledger.live()):
                break
        for machine_id in self.machines:
            owners = self.owners(machine_id)
            rows = {name: shard.disk.owned.rows.get(machine_id) for name, shard in self.shards.items()}
            assert len(owners) == 1, f"{machine_id} belongs to {owners}: {rows} {self.leader.tables.domains}"

    def is_settled(self) -> bool:
        """Return whether nothing is on its way any more."""
        return not any(
            row.kind is RowKind.RELEASED for shard in self.shards.values() for row in shard.disk.owned.rows.values()
        ) and not any(row.state is DomainState.RELEASING for row in self.leader.tables.domains.values())

    # ---- chance -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing at random, as often as the world's weights say."""
        rng = self.rng
        name, leader = rng.choice(list(self.shards)), rng.choice(self.leaders)
        domain = rng.choice(self.zones)
        self.clock.seconds += rng.choice((0.0, 1.0, REPORT_CYCLE_SECONDS))
        (kind,) = rng.choices(list(self.weights), weights=list(self.weights.values()))
        self._note(f"{kind} {name} {domain.topology_value} term {leader.term}")
        match kind:
            case "report":
                self._report(name, leader)
            case "leave":
                self.shards[name].empty_leaving()
            case "move":
                self._move(name, leader)
            case "late" if self.late:
                self.repeat_late()
            case "take":
                self.take_domain(leader, domain)
            case "give":
                self.give_domain(leader, domain, name)
            case "crash":
                self.shards[name].crash()
            case "elect":
                self.elect()
            case "lose disk":
                self.shards[name].lose_disk()

    def _report(self, name: ShardId, leader: Leader) -> None:
        fate = self.rng.random()
        if fate < 0.7:
            self.exchange(name, leader)
        elif fate < 0.85:
            self._note("its answer is lost")
            self.exchange(name, leader, is_lost=True)
        else:
            self._note("it dies over it")
            self.exchange(name, leader, dies_after=self.rng.randrange(6))

    def _move(self, name: ShardId, leader: Leader) -> None:
        machine_id = self.rng.choice(list(self.machines))
        donor = self.rng.choice(self.owners(machine_id) or [name])
        to = self.rng.choice(list(self.shards))
        self._note(f"{machine_id} from {donor} to {to}")
        if to != donor:
            self.move(leader, machine_id, donor, to)

    def _note(self, text: str) -> None:
        self.told.append(text)


def _with_ledger(leader: Leader, ledger: Any) -> Any:
    from dataclasses import replace

    return replace(leader.ephemeral, ledger=ledger)
