"""Puts the suite before cores of the kit at virtual time: sound ones, and ones that are broken in one point."""

import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from bigfleet.conformance.in_process import CoreClient
from bigfleet.conformance.lab import FAULT_TIMEOUT_SECONDS
from bigfleet.conformance.ports import Answer, ProviderClient, Request
from bigfleet.conformance.profiles import ConformanceProfile, Lane
from bigfleet.conformance.runner import ConformanceReport, Listener, Plan, Runner, Sites
from bigfleet.provider.backend import CONFIGURE_WAITS, ConfigureWaits, Host, MachineView, Op, Ready
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.backends.fault import FaultBackend, FaultReadiness
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.store import Batch, Loaded
from bigfleet.provider.storage.view import Tombstone
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.provider.harness import SeededIds, make_core, started

SLOTS = 256
#: Of a provider that the suite starts and kills.
SLOTS_OF_RESTARTED = 64
SCALE_COUNT = 512
#: Property that a test leaves for each mutant it tried: its name, and the behaviours that failed on it.
MUTANT = "conformance mutant"
PROFILES = frozenset(ConformanceProfile)
#: How long a staged backend takes, so that every transitional state is seen.
STAGE_SECONDS = 0.04


class StagedBackend(FakeBackend):
    """A fake backend whose calls take their time."""

    async def create(self, machine: MachineView, op: Op) -> Host:
        await asyncio.sleep(STAGE_SECONDS)
        return await super().create(machine, op)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        await asyncio.sleep(STAGE_SECONDS)
        return await super().configure(machine, cluster, blob, op)

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        await asyncio.sleep(STAGE_SECONDS)
        await super().drain(machine, grace_seconds, op)

    async def delete(self, machine: MachineView, op: Op) -> None:
        await asyncio.sleep(STAGE_SECONDS)
        await super().delete(machine, op)


class KeptStore:
    """What was committed, kept over the lives of a provider."""

    def __init__(self) -> None:
        self.incarnation = b""
        self.head = self.floor = 0
        self.records: dict[str, Record] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.marks: dict[tuple[str, str], Mark] = {}
        self.sealed: dict[str, Sealed] = {}
        self.lives = 0

    def new_life(self) -> "StoreLife":
        """Return the store as one life of the provider sees it."""
        self.lives += 1
        return StoreLife(self)

    def load(self, new_incarnation: bytes) -> Loaded:
        """Return everything that was committed."""
        self.incarnation = self.incarnation or new_incarnation
        return Loaded(
            incarnation=self.incarnation,
            head=self.head,
            floor=self.floor,
            records=tuple(sorted(self.records.values(), key=lambda record: record.revision)),
            tombstones=tuple(self.tombstones.values()),
            marks=tuple(self.marks.values()),
            sealed=tuple(self.sealed.values()),
        )

    def commit(self, batch: Batch) -> None:
        """Take a batch."""
        self.head, self.floor = batch.head, batch.floor
        self.incarnation = batch.incarnation or self.incarnation
        for tombstone in batch.tombstones:
            self.records.pop(tombstone.machine_id, None)
            self.tombstones[tombstone.machine_id] = tombstone
        self.records.update({record.id: record for record in batch.records})
        for machine_id in batch.tombstones_dropped:
            self.tombstones.pop(machine_id, None)
        self.marks.update({(mark.machine_id, mark.shard_id): mark for mark in batch.marks})
        for mark in batch.marks_dropped:
            self.marks.pop((mark.machine_id, mark.shard_id), None)
        self.sealed.update({entry.machine_id: entry for entry in batch.sealed})
        for machine_id in batch.sealed_dropped:
            self.sealed.pop(machine_id, None)


class StoreLife:
    """A store until its provider is killed."""

    def __init__(self, kept: KeptStore) -> None:
        self.kept = kept
        self.is_over = False

    def load(self, new_incarnation: bytes) -> Loaded:
        """Return what earlier lives committed."""
        return self.kept.load(new_incarnation)

    def commit(self, batch: Batch) -> None:
        """Take a batch. Raises StoreDown once the provider was killed."""
        if self.is_over:
            raise StoreDown("the provider was killed")
        self.kept.commit(batch)

    def size_bytes(self) -> int:
        """Return 0: there is no disk."""
        return 0

    def close(self) -> None:
        """Do nothing: what was committed stays."""


class NoDeleteBackend:
    """A staged backend that deletes nothing."""

    def __init__(self, count: int) -> None:
        inner = StagedBackend(count)
        self.provider, self.limits = inner.provider, inner.limits
        self.inventory = inner.inventory
        self.create, self.configure, self.drain = inner.create, inner.configure, inner.drain


#: Puts clients in front of a started core; what they do beyond carrying calls is the breakage.
Clients = Callable[[CapacityCore], Sequence[ProviderClient]]


def plain(core: CapacityCore) -> Sequence[ProviderClient]:
    """Return two sound clients."""
    return CoreClient(core), CoreClient(core)


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What the providers of all lanes are made of."""

    clients: Clients = plain
    #: Of the lanes that need no fault selectors, for so many slots.
    backend: Callable[[int], Any] = StagedBackend
    fault_backend: Callable[[int], Any] = lambda count: FaultBackend(count, clock=LoopClock())
    store: Callable[[], KeptStore] = KeptStore
    fault_readiness: Callable[[], Ready | ConfigureWaits] = FaultReadiness
    fault_timeout_seconds: float = FAULT_TIMEOUT_SECONDS


class Via:
    """A connection that finds the core of now."""

    def __init__(self, site: "RestartedSite", place: int) -> None:
        self._site = site
        self._place = place

    async def call(self, request: Request) -> Answer:
        """Carry a request."""
        return await self._site.clients[self._place].call(request)


class RestartedSite:
    """A provider in this process that is killed by taking its store away, and made again over what was committed."""

    address = "in process"

    def __init__(self, making: Making, lane: Lane, scale_count: int) -> None:
        self._making = making
        self._is_faulty = lane is Lane.FAULT
        count = {Lane.MAIN: SLOTS, Lane.SCALE: scale_count}.get(lane, SLOTS_OF_RESTARTED)
        self._backend = (making.fault_backend if self._is_faulty else making.backend)(count)
        self._store = making.store()
        self.connections: Sequence[ProviderClient] = (Via(self, 0), Via(self, 1))

    async def start(self) -> None:
        """Begin a life."""
        seconds = self._making.fault_timeout_seconds if self._is_faulty else None
        self._life = self._store.new_life()
        self._core = make_core(
            self._backend,
            store=self._life,
            readiness=self._making.fault_readiness() if self._is_faulty else CONFIGURE_WAITS,
            options=CoreOptions(is_inline=True, transition_timeout_seconds=seconds),
        )
        await started(self._core)
        self.clients = self._making.clients(self._core)

    async def restart(self) -> None:
        """End a life without warning and begin another."""
        self._life.is_over = True
        await self._core.stop()
        await self.start()

    async def close(self) -> None:
        """End the last life."""
        await self._core.stop()


class LaneSites:
    """A provider of its own for each lane."""

    def __init__(self, making: Making, scale_count: int) -> None:
        self._making = making
        self._scale_count = scale_count

    async def open(self, lane: Lane) -> RestartedSite:
        """Return the started provider of a lane."""
        site = RestartedSite(self._making, lane, self._scale_count)
        await site.start()
        return site


def plan_of(profiles: frozenset[ConformanceProfile] = PROFILES, **more: Any) -> Plan:
    """Return a plan with a fleet and a soak that suit a test."""
    return Plan(profiles=profiles, scale_count=SCALE_COUNT, soak_seconds=0.25, **more)


def certified(
    plan: Plan | None = None,
    making: Making | None = None,
    *,
    listener: Listener | None = None,
    sites: Sites | None = None,
) -> ConformanceReport:
    """Run the suite once on fresh cores and a fresh virtual loop, and return the report."""
    plan = plan or plan_of()

    async def main() -> ConformanceReport:
        return await Runner(
            plan,
            sites or LaneSites(making or Making(), plan.scale_count),
            clock=LoopClock(),
            ids=SeededIds(),
            make_rng=random.Random,
            listener=listener,
        ).run()

    with structlog.testing.capture_logs():
        return run_virtual(main)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A provider that is broken in one point, and a behaviour that must fail on it."""

    name: str
    breaks: str
    clients: Clients = plain
    #: Bends the kit's own code while the suite runs.
    patch: Callable[[], AbstractContextManager[None]] = nullcontext
    #: Of anything but the clients; they are put in.
    making: Making = field(default_factory=Making)

    def tried(self, plan: Plan) -> ConformanceReport:
        """Run the suite on this provider."""
        with self.patch():
            return certified(plan, replace(self.making, clients=self.clients))


class Bent:
    """A client that may change requests on their way in, and answers on their way out."""

    def __init__(self, core: CapacityCore) -> None:
        self.core = core
        self.inner = CoreClient(core)

    async def call(self, request: Request) -> Answer:
        """Carry a request through both hooks."""
        went_in = await self.before(request)
        if isinstance(went_in, Answer):
            return went_in
        return await self.after(request, await self.inner.call(went_in))

    async def before(self, request: Request) -> Request | Answer:
        """Return what the provider hears, or the answer that it gives at once."""
        return request

    async def after(self, request: Request, answer: Answer) -> Answer:
        """Return what the provider answers."""
        return answer


def bent(kind: type[Bent]) -> Clients:
    """Return clients that share one bent client."""

    def clients(core: CapacityCore) -> Sequence[ProviderClient]:
        client = kind(core)
        return client, client

    return clients


@contextmanager
def replaced(original: object, mutant: object) -> Iterator[None]:
    """Put a mutant in the place of a function wherever the kit's modules hold it."""
    places = [
        (module, name)
        for key, module in sorted(sys.modules.items())
        if key.startswith("bigfleet.provider.")
        for name, value in vars(module).items()
        if value is original
    ]
    assert places, f"{original} is held nowhere"
    for module, name in places:
        setattr(module, name, mutant)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, original)


@contextmanager
def replaced_in(owner: Any, name: str, mutant: object) -> Iterator[None]:
    """Put a mutant in the place of what a module or class holds under a name."""
    sound = getattr(owner, name)
    setattr(owner, name, mutant)
    try:
        yield
    finally:
        setattr(owner, name, sound)


def method(owner: type, name: str, mutant: Callable[..., Any]) -> AbstractContextManager[None]:
    """Put a mutant in the place of a method; it gets the sound one before its own arguments."""
    sound = getattr(owner, name)
    return replaced_in(owner, name, lambda *arguments, **named: mutant(sound, *arguments, **named))
