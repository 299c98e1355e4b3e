"""Implements the backend over partitioned hosts: reserves capacity at acceptance, and adds and removes slots.

docs/spec/provider.md §16, §22. Only `admit` and `settle` change state; the kit calls them one at a time. The kit's
state is mirrored here by number: a slot that the kit offers is `offered` here. A machine in use must never lose its
room before the kit says that its host is gone.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import structlog

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import (
    Admission,
    ExistingHost,
    Feed,
    Found,
    FoundKind,
    Host,
    LateResult,
    Limits,
    MachineView,
    Op,
    Refusal,
    Slot,
    Stockout,
)
from bigfleet.provider.backends.partitioned.book import InstanceBook, StoredChoice
from bigfleet.provider.backends.partitioned.hosts_file import HOST_LABEL, HostsFile, Line
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize, Driver, HostPlacement, NoRoom, Standing
from bigfleet.provider.backends.partitioned.restoring import Lease, instances_of, size_offered
from bigfleet.provider.backends.partitioned.rooms import RoomCounts
from bigfleet.provider.backends.partitioned.slots import SlotNumbers, split_id
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import Record

_log = structlog.get_logger("bigfleet.provider.backends.partitioned.backend")

_NOTHING = Admission()
_NO_SIZE = CarveSize(0, 0, 0, 0, 0)
_NO_LEASES: Mapping[str, Lease] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Announced:
    """The last admission of a machine that the kit was sent; sent again when the commit of it failed."""

    #: None: it was an acceptance.
    reached: MachineState | None
    add: tuple[str, ...]
    remove: tuple[str, ...]


class PartitionedBackend:
    """Implements every optional Protocol. Used on one event loop."""

    def __init__(
        self,
        fleet: HostsFile,
        driver: Driver,
        *,
        provider: str,
        book: InstanceBook,
        records: Iterable[Record] = (),
        leases: Mapping[str, Lease] = _NO_LEASES,
    ) -> None:
        """`records` are what the provider's state holds, in revision order, `leases` what follows from them."""
        self.provider = provider
        self.limits = Limits(resumable=frozenset(Kind))
        self._driver = driver
        self._book = book
        #: Losses of the metric so far, by group and interval.
        self.lost_allocations: Counter[tuple[str, str]] = Counter()
        self._numbers: dict[str, SlotNumbers] = {}
        #: All and only the machines whose host is there, or may be.
        self._leases = dict(leases)
        #: Hosts that stand for slots, as the last inventory saw them, by machine.
        self._strays: dict[str, Carved] = {}
        #: Slots without room that wait for their removal; their numbers are withheld.
        self._withdrawn: dict[str, None] = {}
        #: Slots on offer that were not announced to the kit yet.
        self._untold: dict[str, None] = {}
        self._announced: dict[str, _Announced] = {}
        #: Of an empty state: the kit knows no slot yet.
        self._is_first_inventory = False
        #: Set by `feed` while the provider serves.
        self._wake: Callable[[], None] = lambda: None
        records = tuple(records)
        for record in records:
            self._number(record)
        self._rooms = RoomCounts(fleet, self._standing())
        self._place_unplaced(records)
        self._is_first_inventory = not records
        self._match_all(is_first=not records)

    # ---- what the kit knows --------------------------------------------------------------------------------------

    def _number(self, record: Record) -> None:
        parts = split_id(record.id)
        if parts is None:
            return
        numbers = self._numbers_of(parts[0])
        if record.state is MachineState.SPECULATIVE:
            numbers.offer(parts[1])
        else:
            numbers.use(parts[1])

    def _numbers_of(self, prefix: str) -> SlotNumbers:
        return self._numbers.setdefault(prefix, SlotNumbers())

    def _standing(self) -> list[Carved]:
        return [lease.carved for lease in self._leases.values() if lease.carved is not None]

    def _place_unplaced(self, records: Iterable[Record]) -> None:
        """Choose again, in the order of acceptance, for Creates whose driver was never called."""
        for record in records:
            lease = self._leases.get(record.id)
            if record.state is MachineState.CREATING and lease is not None and lease.carved is None:
                self._place(record.id)

    @property
    def ours(self) -> Mapping[str, Carved]:
        """Every instance that we carved, by name."""
        return instances_of(self._leases)

    @property
    def fleet(self) -> HostsFile:
        """The hosts as they were read last."""
        return self._rooms.fleet

    def slots_by_line(self) -> list[tuple[Line, int]]:
        """Return how many slots each line has on offer."""
        return [(line, len(self._numbers_of(prefix).offered)) for prefix, line in self.fleet.lines.items()]

    def free_disk_mib(self) -> dict[str, int]:
        """Return the free disk of each group."""
        return self._rooms.free_disk_mib()

    def status(self) -> Mapping[str, str]:
        """Return, for `admin status`, each group by name: its hosts, slots, instances and free disk."""
        slots: Counter[str] = Counter()
        for line, count in self.slots_by_line():
            slots[line.group] += count
        free_mib = self.free_disk_mib()
        hosts = Counter(place.group for place in self.fleet.hosts.values())
        instances = Counter(
            self.fleet.hosts[carved.host].group for carved in self._standing() if carved.host in self.fleet.hosts
        )
        return {
            f"group {facts.name}": f"{hosts[facts.name]} hosts, {slots[facts.name]} slots, "
            f"{instances[facts.name]} instances, {free_mib.get(facts.name, 0)} MiB of disk free"
            for facts in self.fleet.allocator.groups
        }

    # ---- slots follow rooms --------------------------------------------------------------------------------------

    def _match(self, zones: Iterable[str]) -> tuple[list[str], list[str]]:
        """Bring the slots of zones in line with their rooms; return the ids that come and that go."""
        add, remove = [], []
        for zone in dict.fromkeys(zones):
            for line, count in self._rooms.wanted(zone):
                numbers = self._numbers_of(line.prefix)
                while len(numbers.offered) < count:
                    add.append(f"{line.prefix}{numbers.offer_lowest():03d}")
                while len(numbers.offered) > count:
                    remove.append(f"{line.prefix}{numbers.drop_highest():03d}")
        return add, remove

    def _match_all(self, *, is_first: bool = False) -> None:
        """Bring all slots in line outside of a step: what is in excess is withheld until its removal was committed."""
        wanted = {line.prefix: count for zone in self._rooms.zones for line, count in self._rooms.wanted(zone)}
        for prefix in self._numbers.keys() | wanted.keys():
            numbers, count = self._numbers_of(prefix), wanted.get(prefix, 0)
            while len(numbers.offered) > count:
                self._withdrawn[f"{prefix}{numbers.withhold_highest():03d}"] = None
            while len(numbers.offered) < count:
                machine_id = f"{prefix}{numbers.offer_lowest():03d}"
                # A first inventory announces everything there is.
                if not is_first:
                    self._untold[machine_id] = None
        if self._withdrawn:
            self._wake()

    def replace_fleet(self, fleet: HostsFile) -> None:
        """Take other hosts: what stands keeps its room, and slots follow."""
        self._rooms = RoomCounts(fleet, self._standing())
        for lease in self._leases.values():
            if lease.carved is not None and lease.carved.host not in fleet.hosts:
                _log.warning("hosts.host_missing", host=lease.carved.host, instance=lease.carved.instance)
        self._match_all()

    def _admission(
        self, machine_id: str, reached: MachineState | None, add: list[str], remove: list[str], note: str = ""
    ) -> Admission:
        """Return the admission, with what waits to be announced, and with what was announced in vain."""
        added = dict.fromkeys([*add, *self._untold])
        removed = dict.fromkeys([*remove, *self._withdrawn])
        self._untold.clear()
        before = self._announced.pop(machine_id, None)
        is_again = before is not None and (
            before.reached is reached or (before.reached is None and reached is MachineState.SPECULATIVE)
        )
        if is_again and before is not None:
            added.update(dict.fromkeys(before.add))
            removed.update(dict.fromkeys(before.remove))
        announced = _Announced(
            reached,
            tuple(each for each in added if self._is_offered(each)),
            tuple(each for each in removed if not self._is_known(each)),
        )
        if announced.add or announced.remove:
            self._announced[machine_id] = announced
        slots = tuple(slot for each in announced.add if (slot := self._slot(each)) is not None)
        return Admission(add=slots, remove=announced.remove, note=note)

    def _is_offered(self, machine_id: str) -> bool:
        parts = split_id(machine_id)
        return parts is not None and self._numbers_of(parts[0]).is_offered(parts[1])

    def _is_known(self, machine_id: str) -> bool:
        parts = split_id(machine_id)
        return self._is_offered(machine_id) or (parts is not None and self._numbers_of(parts[0]).is_used(parts[1]))

    def _slot(self, machine_id: str) -> Slot | None:
        parts = split_id(machine_id)
        line = None if parts is None else self.fleet.lines.get(parts[0])
        return None if parts is None or line is None else line.slot(parts[1])

    # ---- the kit's turns -----------------------------------------------------------------------------------------

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        """Choose a host for a Create and take its room."""
        if kind is not Kind.CREATE:
            self._announced.pop(machine.id, None)
            return _NOTHING
        if not self._is_offered(machine.id):
            return Refusal("there is no room for it any more; take another slot")
        answer = self._place(machine.id)
        if isinstance(answer, NoRoom):
            return Refusal(answer.text)
        self._announced.pop(machine.id, None)
        add, remove = self._match([machine.zone])
        return self._admission(machine.id, None, add, remove, answer.note)

    def _place(self, machine_id: str) -> HostPlacement | NoRoom:
        """Take the room that the metric chooses for a slot."""
        parts = split_id(machine_id)
        line = None if parts is None else self.fleet.lines.get(parts[0])
        if parts is None or line is None:
            return NoRoom("no group of hosts offers such machines any more")
        answer = self._rooms.place(line, line.instance(parts[1]))
        if isinstance(answer, HostPlacement):
            self._numbers_of(parts[0]).use(parts[1])
            carved = Carved(answer.host, line.instance(parts[1]), line.size)
            self._leases[machine_id] = Lease(slot=line.slot(parts[1]), carved=carved)
            for interval, lost in zip(self.fleet.intervals[line.group], answer.lost, strict=True):
                self.lost_allocations[line.group, interval] += max(0, lost)
        return answer

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        """Give room back with the host, and take the room of a host that was found."""
        parts = split_id(machine.id)
        if parts is None:
            return _NOTHING
        zones = [machine.zone]
        add: list[str] = []
        remove: list[str] = []
        if reached in (MachineState.SPECULATIVE, MachineState.UNSPECIFIED):
            lease = self._leases.pop(machine.id, None)
            if lease is not None and lease.carved is not None:
                zones += filter(None, [self._rooms.release(lease.carved.instance)])
            self._strays.pop(machine.id, None)
            self._vacate(parts, reached, machine.id, remove)
        elif machine.id not in self._leases:
            self._take_found(machine, parts)
        more, less = self._match(zones)
        return self._admission(machine.id, reached, add + more, remove + less)

    def _vacate(self, parts: tuple[str, int], reached: MachineState, machine_id: str, remove: list[str]) -> None:
        """Put a number on offer again, or give it up."""
        prefix, number = parts
        if reached is MachineState.UNSPECIFIED:
            # One that is withdrawn is forgotten when the feed has heard that it is gone.
            if machine_id not in self._withdrawn:
                self._numbers_of(prefix).forget(number)
        elif prefix in self.fleet.lines:
            self._numbers_of(prefix).offer(number)
        else:
            self._numbers_of(prefix).forget(number)
            remove.append(machine_id)

    def _take_found(self, machine: MachineView, parts: tuple[str, int]) -> None:
        """Take the room of a machine that has a host although none was chosen for it."""
        carved = self._strays.pop(machine.id, None) or self._carved_of(machine)
        slot = self._slot(machine.id) or _slot_of(machine)
        self._withdrawn.pop(machine.id, None)
        self._numbers_of(parts[0]).use(parts[1])
        self._leases[machine.id] = Lease(slot=slot, carved=carved)
        if carved is not None:
            self._rooms.put(carved)

    def _carved_of(self, machine: MachineView) -> Carved | None:
        """Return what a machine's host says of itself."""
        host, slash, instance = machine.host.ref.partition("/")
        return Carved(host, instance, size_offered(_slot_of(machine))) if slash else None

    # ---- facts ---------------------------------------------------------------------------------------------------

    async def inventory(self) -> Sequence[Slot]:
        """Return every slot, and every instance of ours that stands on a host which is not offline."""
        return self.facts_of(await self._driver.inventory())

    def facts_of(self, standing: Sequence[Standing]) -> Sequence[Slot]:
        """Return every slot, and those of the instances that stand, as a driver found them."""
        self._strays.clear()
        machine_by_instance = {
            lease.carved.instance: machine_id for machine_id, lease in self._leases.items() if lease.carved is not None
        }
        # First, because an unknown instance takes the room of slots.
        hosts = [self._existing(seen, machine_by_instance.get(seen.instance)) for seen in standing]
        self._is_first_inventory = False
        facts: list[Slot] = [fact for fact in hosts if fact is not None]
        for prefix, numbers in self._numbers.items():
            line = self.fleet.lines.get(prefix)
            if line is not None:
                facts += [line.slot(number) for number in (*numbers.offered, *numbers.used)]
                continue
            for number in numbers.used:
                lease = self._leases.get(f"{prefix}{number:03d}")
                if lease is not None:
                    facts.append(lease.slot)
        return facts

    def _existing(self, seen: Standing, machine_id: str | None) -> ExistingHost | None:
        """Return the fact that an instance is; None for those of others, and for those on hosts that are offline."""
        if seen.host in self.fleet.offline or seen.host not in self.fleet.hosts:
            return None
        lease = None if machine_id is None else self._leases[machine_id]
        if machine_id is None or lease is None:
            stray = self._stray(seen)
            if stray is None:
                return None
            machine_id, slot = stray
        else:
            line = self.fleet.lines.get(machine_id[: machine_id.rfind("/") + 1])
            template = lease.slot if line is None else line.template
            slot = replace(lease.slot, price_usd_per_hour=template.price_usd_per_hour, labels=template.labels)
        slot = replace(slot, id=machine_id, labels=self._labels(slot, seen.host))
        return ExistingHost.of(slot, host_ref=f"{seen.host}/{seen.instance}", node_name=seen.node_name)

    def _stray(self, seen: Standing) -> tuple[str, Slot] | None:
        """Return machine and slot of an instance that has one of our names and no machine in use."""
        for prefix, line in self.fleet.lines.items():
            name, start = (seen.machine_id, prefix) if seen.machine_id else (seen.instance, line.instance_prefix)
            tail = name.removeprefix(start)
            parts = split_id(f"{prefix}{tail}") if tail != name else None
            # A prefix may begin with another one.
            if parts is not None and parts[0] == prefix and self.fleet.hosts[seen.host].group == line.group:
                machine_id = f"{prefix}{tail}"
                if machine_id in self._leases:
                    return None
                carved = Carved(seen.host, seen.instance, line.size)
                if self._is_known(machine_id) and not self._is_first_inventory:
                    self._strays[machine_id] = carved
                else:
                    # The kit takes a machine that it hears of for the first time as it is, and settles nothing.
                    self._withdrawn.pop(machine_id, None)
                    self._numbers_of(prefix).use(parts[1])
                    self._leases[machine_id] = Lease(slot=line.slot(parts[1]), carved=carved)
                    self._rooms.put(carved)
                    self._match_all()
                return machine_id, line.slot(parts[1])
        return None

    def _labels(self, slot: Slot, host: str) -> Mapping[str, str]:
        place = self.fleet.hosts.get(host)
        return {**slot.labels, **({} if place is None else place.labels), HOST_LABEL: host}

    async def feed(self, feed: Feed) -> None:
        """Withdraw slots that lost their room outside of a step; the first removal brings all others with it."""
        changed = asyncio.Event()
        self._wake = changed.set
        while True:
            for machine_id in list(self._withdrawn):
                if machine_id not in self._withdrawn:
                    # Meanwhile a host was found for it.
                    continue
                # Its number is withheld and its Create refused, so it is a slot or nothing at all.
                await feed.report_lost(machine_id, "there is no room for it any more")
                self._withdrawn.pop(machine_id, None)
                parts = split_id(machine_id)
                if parts is not None:
                    self._numbers_of(parts[0]).forget(parts[1])
            await changed.wait()
            changed.clear()

    # ---- calls ---------------------------------------------------------------------------------------------------

    def carved(self, machine: MachineView) -> Carved:
        """Return where a machine stands. Raises LookupError when it is unknown."""
        lease = self._leases.get(machine.id)
        carved = lease.carved if lease is not None else None
        carved = carved or self._carved_of(machine)
        if carved is None:
            raise LookupError(f"{machine.id} is on no host")
        return carved

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Carve the instance on the host that was chosen for it."""
        lease = self._leases.get(machine.id)
        if lease is None or lease.carved is None:
            answer = self._place(machine.id)
            if isinstance(answer, NoRoom):
                raise Stockout(answer.text)
            self._match_all()
            lease = self._leases[machine.id]
        assert lease.carved is not None, "it was placed"
        carved = lease.carved
        await self._book.put(machine.id, StoredChoice(operation_id=op.id, carved=carved))
        node_name = await self._driver.create(machine, carved, op)
        return Host(ref=carved.ref, node_name=node_name, labels=self._labels(lease.slot, carved.host))

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Boot the instance into a cluster."""
        return await self._driver.configure(machine, self.carved(machine), cluster, blob, op) or None

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Take the instance out of its cluster."""
        await self._driver.drain(machine, self.carved(machine), grace_seconds, op)

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Remove the instance; its room comes back when that is settled."""
        await self._driver.delete(machine, self.carved(machine), op)

    async def adopt(self, machine: MachineView) -> Found:
        """Say what the driver sees; a machine that was put nowhere has no host."""
        try:
            carved = self.carved(machine)
        except LookupError:
            return Found(kind=FoundKind.NO_HOST)
        kind = await self._driver.adopt(machine, carved)
        if kind is FoundKind.NO_HOST:
            return Found(kind=kind)
        lease = self._leases.get(machine.id)
        labels = None if lease is None else self._labels(lease.slot, carved.host)
        return Found(kind=kind, host=Host(ref=carved.ref, labels=labels))

    async def compensate(self, machine: MachineView, late: LateResult) -> None:
        """Remove an instance that came too late, unless the machine has it; `adopt` sees all other late effects."""
        if late.op.kind is not Kind.CREATE or late.host is None:
            return
        if machine.host.ref == late.host.ref or machine.state is MachineState.CREATING:
            return
        host, _slash, instance = late.host.ref.partition("/")
        await self._driver.delete(machine, Carved(host, instance, _NO_SIZE), late.op)


class PartitionedReadiness:
    """The readiness checker: asks the driver."""

    def __init__(self, backend: PartitionedBackend, driver: Driver) -> None:
        self.interval_seconds = driver.ready_interval_seconds
        self._backend = backend
        self._driver = driver

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Return whether the node is Ready."""
        return await self._driver.ready(machine, self._backend.carved(machine), cluster, op)


def _slot_of(machine: MachineView) -> Slot:
    return Slot(
        id=machine.id,
        instance_type=machine.instance_type,
        zone=machine.zone,
        capacity_type=machine.capacity_type,
        resources=machine.resources,
        allocatable=machine.allocatable,
        price_usd_per_hour=machine.price_usd_per_hour,
    )
