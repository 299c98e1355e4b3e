"""Implements a backend by a program: one process for each call, an inventory in JSON lines.

docs/spec/exec-provider.md. The kit sees only the optional methods that the program named as verbs. This
module must never decide about a machine.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import (
    Feed,
    Found,
    FoundKind,
    Host,
    LateResult,
    MachineView,
    Op,
    PartialFacts,
    Slot,
    Transient,
)
from bigfleet.provider.backends.exec.calls import (
    AdoptAnswer,
    ConfigureAnswer,
    CreateAnswer,
    EmptyAnswer,
    ProgramCalls,
    ReadyAnswer,
    node_name_without,
)
from bigfleet.provider.backends.exec.description import INVENTORY, READY, Description
from bigfleet.provider.backends.exec.inventory_lines import InventoryLines, InventoryRead
from bigfleet.provider.backends.exec.push_lines import run_feed
from bigfleet.provider.programs.runner import LOOK_SECONDS_MAX, ProgramFailed
from bigfleet.provider.storage.codec import intern_map

_log = structlog.get_logger("bigfleet.provider.backends.exec")

#: Seconds between two looks at the readiness of a machine.
READY_INTERVAL_SECONDS = 2.0
#: Of one look by the program.
READY_SECONDS_MAX = 30.0
#: At least so long between two inventories that are read for readiness.
INVENTORY_PAUSE_SECONDS = 5.0
#: From so many machines on, a look a machine every two seconds is more than one inventory.
READY_MACHINES_ADVISED_MAX = 200


@dataclass(frozen=True, slots=True)
class _Look:
    """One inventory that was read for readiness or for the kit."""

    began_seconds: float
    ended_seconds: float
    read: InventoryRead


@dataclass(slots=True)
class _Looks:
    last: _Look | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ExecBackend:
    """What the kit calls; each method runs the program once."""

    def __init__(self, calls: ProgramCalls, description: Description, *, clock: Clock, concurrency: int) -> None:
        """`concurrency` bounds the processes of verbs that are no operation's, each by itself."""
        self.provider = description.provider
        self.limits = description.limits
        self._calls = calls
        self._description = description
        self._clock = clock
        self._others = asyncio.Semaphore(concurrency)
        self._looks = _Looks()
        self._offered: dict[str, Slot] = {}
        #: When the last Configure of a machine ended: an inventory from before says nothing about it.
        self._configured_seconds: dict[str, float] = {}
        verbs = description.verbs
        # The kit detects methods; one that is not named must not be there.
        if "delete" in verbs:
            self.delete = self._delete
        if "adopt" in verbs:
            self.adopt = self._adopt
        if "compensate" in verbs:
            self.compensate = self._compensate
        if "feed" in verbs:
            self.feed = self._feed

    @property
    def configuration_fault(self) -> str:
        """What the program said of its configuration when it was last run, "" for nothing."""
        return self._calls.configuration_fault

    @property
    def fault(self) -> str:
        """Why no call can succeed now, "" for nothing known."""
        return self._calls.fault

    def take_offers(self, slots: Iterable[Slot]) -> None:
        """Take the slots that are offered beside the program's, so that its hosts may leave out what they say."""
        self._offered = {slot.id: slot for slot in slots}

    # ---- facts ---------------------------------------------------------------------------------------------------

    async def inventory(self) -> PartialFacts:
        """Run `inventory`. Without that verb nothing is known of hosts, and nothing follows from it."""
        if INVENTORY not in self._description.verbs:
            return PartialFacts(facts=(), unread_host_prefixes=("",))
        async with self._looks.lock:
            read = await self._read_inventory()
        return PartialFacts(facts=read.facts, unread_prefixes=read.unread_prefixes)

    async def _read_inventory(self) -> InventoryRead:
        """Run `inventory` and retain what it says; the lock is held."""
        began_seconds = self._clock.monotonic_seconds()
        # Not the map of now: the slots may come while the program runs.
        lines = InventoryLines(lambda machine_id: self._offered.get(machine_id))
        result = await self._calls.run(
            INVENTORY, {}, seconds=self._description.inventory_seconds_max, take_output=lines.take
        )
        self._calls.check(INVENTORY, result)
        read = lines.read()
        self._looks.last = _Look(began_seconds, self._clock.monotonic_seconds(), read)
        return read

    # ---- calls ---------------------------------------------------------------------------------------------------

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Run `create`."""
        answer = await self._calls.ask("create", self._calls.question(machine, op), CreateAnswer, op=op)
        return Host(
            ref=answer.host_ref,
            node_name=answer.node_name,
            allocatable=None if answer.allocatable is None else intern_map(answer.allocatable),
            labels=None if answer.labels is None else intern_map(answer.labels),
            price_usd_per_hour=answer.price_usd_per_hour,
        )

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Run `configure`, which alone gets the blob."""
        answer = await self._calls.ask(
            "configure", self._calls.question(machine, op), ConfigureAnswer, op=op, blob=blob
        )
        self._configured_seconds[machine.id] = self._clock.monotonic_seconds()
        return node_name_without(blob, answer.node_name) or None

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Run `drain`."""
        question = {**self._calls.question(machine, op), "grace_seconds": grace_seconds}
        await self._calls.ask("drain", question, EmptyAnswer, op=op)
        self._configured_seconds.pop(machine.id, None)

    async def _delete(self, machine: MachineView, op: Op) -> None:
        await self._calls.ask("delete", self._calls.question(machine, op), EmptyAnswer, op=op)
        self._configured_seconds.pop(machine.id, None)

    async def _adopt(self, machine: MachineView) -> Found:
        async with self._others:
            answer = await self._calls.ask(
                "adopt", self._calls.question(machine, None), AdoptAnswer, seconds=LOOK_SECONDS_MAX
            )
        if answer.found is FoundKind.NO_HOST:
            return Found(kind=answer.found)
        ref = answer.host_ref or machine.host.ref
        if not ref:
            raise ProgramFailed(f"adopt answered {answer.found.value} without host_ref, and the machine has no host")
        return Found(kind=answer.found, host=Host(ref=ref, node_name=machine.node_name))

    async def _compensate(self, machine: MachineView, late: LateResult) -> None:
        question = self._calls.question(machine, late.op)
        host_ref = "" if late.host is None else late.host.ref
        question["late"] = {"verb": late.op.kind.value, "host_ref": host_ref}
        async with self._others:
            await self._calls.ask("compensate", question, EmptyAnswer, seconds=LOOK_SECONDS_MAX)

    async def _feed(self, feed: Feed) -> None:
        await run_feed(self._calls.runner, feed, self._clock)

    # ---- readiness -----------------------------------------------------------------------------------------------

    async def is_ready_by_program(self, machine: MachineView, op: Op) -> bool:
        """Run `ready`."""
        async with self._others:
            answer = await self._calls.ask(
                READY, self._calls.question(machine, op), ReadyAnswer, seconds=READY_SECONDS_MAX
            )
        return answer.ready

    async def is_ready_by_inventory(self, machine: MachineView, cluster: str) -> bool:
        """Return what an inventory says that began after the machine's Configure; one serves all machines."""
        look = self._fresh_look(machine)
        if look is None:
            async with self._looks.lock:
                look = self._fresh_look(machine)
                if look is None:
                    try:
                        await self._read_inventory()
                    except Exception as error:
                        raise Transient(f"the inventory could not be read: {error}") from error
                    look = self._looks.last
        assert look is not None, "it was read"
        return look.read.ready_in.get(machine.id) == cluster

    def _fresh_look(self, machine: MachineView) -> _Look | None:
        last = self._looks.last
        if last is None or last.began_seconds < self._configured_seconds.get(machine.id, 0.0):
            return None
        # An inventory that takes long is read half of the time at most.
        pause_seconds = max(INVENTORY_PAUSE_SECONDS, last.ended_seconds - last.began_seconds)
        is_fresh = self._clock.monotonic_seconds() - last.ended_seconds < pause_seconds
        return last if is_fresh else None


class ReadyByProgram:
    """Says whether a node is Ready by running `ready`."""

    interval_seconds = READY_INTERVAL_SECONDS

    def __init__(self, backend: ExecBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        #: When each machine was last asked about, of those that were not ready.
        self._asked_seconds: dict[str, float] = {}
        self._is_advised = False

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Run the program."""
        is_ready = await self._backend.is_ready_by_program(machine, op)
        if is_ready:
            self._asked_seconds.pop(machine.id, None)
        else:
            self._count(machine.id)
        return is_ready

    def _count(self, machine_id: str) -> None:
        """Advise once against a process a machine every two seconds."""
        if self._is_advised:
            return
        now_seconds = self._clock.monotonic_seconds()
        self._asked_seconds[machine_id] = now_seconds
        if len(self._asked_seconds) <= READY_MACHINES_ADVISED_MAX:
            return
        # Those that are asked about no more have failed.
        horizon_seconds = now_seconds - READY_SECONDS_MAX - LOOK_SECONDS_MAX
        self._asked_seconds = {each: at for each, at in self._asked_seconds.items() if at >= horizon_seconds}
        if len(self._asked_seconds) > READY_MACHINES_ADVISED_MAX:
            self._is_advised = True
            _log.warning(
                "backend.readiness_polled_often",
                machines=len(self._asked_seconds),
                advice="one process a machine every 2 s asks for readiness; --ready inventory costs less",
            )


class ReadyByInventory:
    """Says whether a node is Ready by reading the inventory, for all machines at once."""

    interval_seconds = READY_INTERVAL_SECONDS

    def __init__(self, backend: ExecBackend) -> None:
        self._backend = backend

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Read it, unless it was read a moment ago."""
        return await self._backend.is_ready_by_inventory(machine, cluster)
