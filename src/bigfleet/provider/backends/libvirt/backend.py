"""Implements the backend over hosts that run libvirt: slots that share room, guests that are watched.

docs/spec/libvirt-provider.md. Slots and rooms are those of partitioned hosts (docs/spec/provider.md §22) with one host
in each group. It also restarts guests that stopped, reports domains that others removed, and removes bootstrap data
that no Configure needs any more. It must never act on a machine with an operation in flight.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import (
    Admission,
    Feed,
    Found,
    Host,
    LateResult,
    MachineView,
    Op,
    PartialFacts,
    Refusal,
)
from bigfleet.provider.backends.libvirt.domain_steps import DomainGone, NotOurs
from bigfleet.provider.backends.libvirt.driver import HostLook, LibvirtDriver
from bigfleet.provider.backends.libvirt.fleet import ForeignUse, fleet_of, host_of
from bigfleet.provider.backends.libvirt.hosts_file import KvmHosts
from bigfleet.provider.backends.libvirt.hypervisor import HostError
from bigfleet.provider.backends.libvirt.names import domain_name
from bigfleet.provider.backends.partitioned.backend import PartitionedBackend
from bigfleet.provider.backends.partitioned.book import InstanceBook
from bigfleet.provider.backends.partitioned.restoring import restored
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import Record

_log = structlog.get_logger("bigfleet.provider.backends.libvirt.backend")

#: A guest that stops more often than this within the window is reported as lost.
RESTARTS_MAX: Final = 3
RESTART_WINDOW_SECONDS: Final = 600.0
_RESTING: Final = (MachineState.IDLE, MachineState.CONFIGURED)


class LibvirtBackend:
    """Implements every optional Protocol. Used on one event loop."""

    def __init__(
        self,
        driver: LibvirtDriver,
        *,
        provider: str,
        book: InstanceBook,
        records: Iterable[Record],
        clock: Clock,
    ) -> None:
        """`records` are what the provider's state holds, in revision order. Raises KvmHostsFault, StartRefused."""
        records = tuple(records)
        self.provider = provider
        self._driver = driver
        self._clock = clock
        #: By host, as they were last read.
        self._foreign: dict[str, ForeignUse] = {}
        self.slots = PartitionedBackend(
            fleet_of(driver.hosts, provider, self._foreign),
            driver,
            provider=provider,
            book=book,
            records=records,
            leases=restored(records, book.load()),
        )
        self.limits = self.slots.limits
        #: All and only the machines with a host and no operation in flight, and where they rest.
        self._resting = {each.id: each.state for each in records if each.state in _RESTING}
        #: Machines that rest or rested, by the names of their domains.
        self._machines = {domain_name(machine_id): machine_id for machine_id in self._resting}
        #: All and only the machines whose Configure is in flight.
        self._binding = {each.id for each in records if each.state is MachineState.CONFIGURING}
        #: All and only the machines whose Create is in flight.
        self._creating = {each.id for each in records if each.state is MachineState.CREATING}
        #: Machines whose seed holds bootstrap data, or may.
        self._seeded: set[str] = set()
        #: Resting machines whose domain changed, or was seen to be off.
        self._changed: set[str] = set()
        #: Slots whose host is gone and may have left volumes behind.
        self._vacated: set[str] = set()
        #: All and only the machines that are no slots.
        self._used = {each.id for each in records if each.state is not MachineState.SPECULATIVE}
        #: Hosts with a round that runs, and whether there was a wake for them since it began.
        self._rounds: dict[str, bool] = {}
        self._restarts: dict[str, deque[float]] = {}
        #: Set by `feed` while the provider serves.
        self._wake: Callable[[], None] = lambda: None

    def replace_hosts(self, hosts: KvmHosts) -> None:
        """Replace the hosts file; machines keep their room. Raises KvmHostsFault, and then nothing has changed."""
        fleet = fleet_of(hosts, self.provider, self._foreign)
        self._driver.hosts = hosts
        self.slots.replace_fleet(fleet)

    def status(self) -> Mapping[str, str]:
        """Return, for `admin status`, each host that does not answer, and why."""
        return {f"host {name}": f"does not answer: {error}" for name, error in sorted(self._driver.unread.items())}

    def domain_changed(self, name: str) -> None:
        """Look at a domain soon, because libvirt reported a change of it."""
        machine_id = self._machines.get(name)
        if machine_id in self._resting:
            self._changed.add(machine_id)
            self._wake()

    # ---- the kit's turns ---------------------------------------------------------------------------------------------

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        """Take the room of a Create; an operation is in flight from here on."""
        answer = self.slots.admit(machine, kind)
        if not isinstance(answer, Refusal):
            self._resting.pop(machine.id, None)
            self._used.add(machine.id)
            if kind is Kind.CONFIGURE:
                self._binding.add(machine.id)
            if kind is Kind.CREATE:
                self._creating.add(machine.id)
        return answer

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        """Note where a machine rests, and have what it left behind removed."""
        self._resting.pop(machine.id, None)
        if reached in _RESTING:
            self._resting[machine.id] = reached
            self._machines[domain_name(machine.id)] = machine.id
        self._binding.discard(machine.id)
        self._creating.discard(machine.id)
        if reached is not MachineState.CONFIGURED:
            self._restarts.pop(machine.id, None)
        if reached not in (MachineState.SPECULATIVE, MachineState.UNSPECIFIED):
            self._used.add(machine.id)
        elif machine.id in self._used:
            self._used.discard(machine.id)
            self._vacated.add(machine.id)
        self._wake()
        return self.slots.settle(machine, reached)

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Define and start the machine's domain."""
        return await self.slots.create(machine, op)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Boot the machine into a cluster."""
        self._seeded.add(machine.id)
        return await self.slots.configure(machine, cluster, blob, op)

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Shut the machine down and remove its disk."""
        await self.slots.drain(machine, grace_seconds, op)

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Remove domain, disk and seed."""
        await self.slots.delete(machine, op)

    async def adopt(self, machine: MachineView) -> Found:
        """Return what is there."""
        return await self.slots.adopt(machine)

    async def compensate(self, machine: MachineView, late: LateResult) -> None:
        """Remove a domain that came too late, unless the machine has it."""
        await self.slots.compensate(machine, late)

    # ---- facts -------------------------------------------------------------------------------------------------------

    async def inventory(self) -> PartialFacts:
        """Return every slot, and every domain of the hosts that answer.

        Nothing follows for the other hosts, nor for those that left the file while machines are on them.
        """
        looks = await self._driver.look()
        self._take_looks(looks)
        facts = self.slots.facts_of(self._driver.standing(looks))
        hosts = self._driver.hosts.hosts
        unread = [prefix for prefix, line in self.slots.fleet.lines.items() if line.group in self._driver.unread]
        unread += {each[: each.rfind("/") + 1] for each in self._resting if host_of(each) not in hosts}
        return PartialFacts(facts=tuple(facts), unread_host_prefixes=tuple(unread))

    def _take_looks(self, looks: Mapping[str, HostLook]) -> None:
        """Take the room of foreign domains, and note machines that need a look."""
        foreign = {**self._foreign, **{name: look.foreign for name, look in looks.items()}}
        if foreign != self._foreign:
            self._foreign = foreign
            self.slots.replace_fleet(fleet_of(self._driver.hosts, self.provider, foreign))
        for look in looks.values():
            for machine_id, facts in look.ours.items():
                if facts.record is not None and facts.record.seeded_by:
                    self._seeded.add(machine_id)
                if not facts.is_active and self._resting.get(machine_id) is MachineState.CONFIGURED:
                    self._changed.add(machine_id)
        self._wake()

    async def feed(self, feed: Feed) -> None:
        """Withdraw slots without room, and look after machines, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.slots.feed(feed))
                tasks.create_task(self._look_after(feed, tasks))
        finally:
            await self._driver.close_clusters()

    async def _look_after(self, feed: Feed, tasks: asyncio.TaskGroup) -> None:
        """Have a round on each host with something to do. What failed on a host waits for the next wake."""
        woken = asyncio.Event()
        self._wake = woken.set
        while True:
            due = self._changed | (self._seeded - self._binding) | self._vacated
            for host in sorted({host_of(machine_id) for machine_id in due}):
                if host in self._rounds:
                    self._rounds[host] = True
                else:
                    self._rounds[host] = False
                    tasks.create_task(self._round(host, feed))
            await woken.wait()
            woken.clear()

    async def _round(self, host: str, feed: Feed) -> None:
        """Look after the machines of one host. A host that hangs holds up only its own round."""
        try:
            for machine_id in [each for each in self._changed if host_of(each) == host]:
                self._changed.discard(machine_id)
                await self._look_at(machine_id, feed)
            for machine_id in [each for each in self._seeded - self._binding if host_of(each) == host]:
                await self._remove_secret(machine_id)
            for machine_id in [each for each in self._vacated if host_of(each) == host]:
                await self._discard_leftovers(machine_id)
        finally:
            if self._rounds.pop(host):
                self._wake()

    async def _look_at(self, machine_id: str, feed: Feed) -> None:
        """Restart a guest that stopped, and report a domain that does not exist any more."""
        state = self._resting.get(machine_id)
        try:
            if state is MachineState.CONFIGURED:
                await self._start_again(machine_id, feed)
            elif state is MachineState.IDLE:
                await self._driver.is_off(machine_id)
        except (DomainGone, NotOurs) as error:
            if self._resting.get(machine_id) is state:
                await feed.report_lost(machine_id, str(error))
        except (HostError, LookupError) as error:
            _log.warning("domain.look_failed", machine=machine_id, error=str(error))

    async def _start_again(self, machine_id: str, feed: Feed) -> None:
        now_seconds = self._clock.monotonic_seconds()
        restarts = self._restarts.setdefault(machine_id, deque())
        while restarts and now_seconds - restarts[0] > RESTART_WINDOW_SECONDS:
            restarts.popleft()
        if not await self._driver.is_off(machine_id) or self._resting.get(machine_id) is not MachineState.CONFIGURED:
            return
        if len(restarts) >= RESTARTS_MAX:
            minutes = RESTART_WINDOW_SECONDS / 60
            await feed.report_lost(machine_id, f"the guest stopped {len(restarts) + 1} times in {minutes:.0f} minutes")
            return
        restarts.append(now_seconds)
        _log.warning("domain.started_again", machine=machine_id, restarts=len(restarts))
        await self._driver.start_again(machine_id)

    async def _remove_secret(self, machine_id: str) -> None:
        try:
            if await self._driver.remove_secret(machine_id):
                _log.info("domain.seed_cleared", machine=machine_id)
            if machine_id not in self._binding:
                self._seeded.discard(machine_id)
        except (HostError, NotOurs, LookupError) as error:
            _log.warning("domain.seed_kept", machine=machine_id, error=str(error))

    async def _discard_leftovers(self, machine_id: str) -> None:
        try:
            await self._driver.discard_leftovers(machine_id, lambda: machine_id in self._creating)
        except (HostError, LookupError) as error:
            _log.warning("host.volumes_kept", machine=machine_id, error=str(error))
            if host_of(machine_id) in self._driver.hosts.hosts:
                return
        self._vacated.discard(machine_id)


class LibvirtReadiness:
    """The readiness checker: asks the cluster for the node."""

    def __init__(self, backend: LibvirtBackend, driver: LibvirtDriver) -> None:
        self.interval_seconds = driver.ready_interval_seconds
        self._backend = backend
        self._driver = driver

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Return whether the node is Ready."""
        return await self._driver.ready(machine, self._backend.slots.carved(machine), cluster, op)
