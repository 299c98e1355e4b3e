"""Combines several backends: each machine belongs to the one whose prefix its id begins with.

docs/spec/provider.md §16. If a part cannot read its inventory, the other parts are unaffected and its machines stay as
they are. A fact outside its part's prefix is never accepted.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import structlog

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import (
    Admission,
    Admits,
    Adopts,
    Backend,
    Compensates,
    Consults,
    ConsultsHosts,
    Deletes,
    Feed,
    Feeds,
    Found,
    Host,
    HostsLookup,
    Identifies,
    KindLimits,
    LateResult,
    Limits,
    MachineLookup,
    MachineView,
    MarksOutOfService,
    Op,
    PartialFacts,
    Refusal,
    Result,
    Slot,
)
from bigfleet.provider.operations.invoke import lane_of, read_facts
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.reset import with_label
from bigfleet.provider.records.validate import entry_id, type_fault

_log = structlog.get_logger("bigfleet.provider.backends.multiplex")


class Multiplex:
    """A backend made of backends. It has an optional method when one of its parts has it.

    `limits` None drives every part as carefully as the most careful one wants, and waits as long as the slowest.
    """

    #: There when a part has it; machines of other parts are `fixed`.
    delete: Callable[[MachineView, Op], Any]
    #: There when a part has it; for machines of other parts it raises, and they wait for a person.
    adopt: Callable[[MachineView], Any]
    #: There when a part has it; nothing is done for machines of other parts.
    mark_out_of_service: Callable[[MachineView], Any]
    compensate: Callable[[MachineView, LateResult], Any]
    admit: Callable[[MachineView, Kind], Admission | Refusal]
    settle: Callable[[MachineView, MachineState], Admission]
    feed: Callable[[Feed], Any]
    consult: Callable[[MachineLookup], None]
    consult_hosts: Callable[[HostsLookup], None]
    identify: Callable[[Mapping[str, str]], Mapping[str, str]]

    def __init__(
        self, parts: Mapping[str, Backend], *, provider: str = "multiplex", limits: Limits | None = None
    ) -> None:
        """Raises ValueError for no parts, an empty prefix, or one that begins with another."""
        if not parts:
            raise ValueError("a Multiplex needs at least one part")
        for prefix in parts:
            others = [other for other in parts if other != prefix and prefix.startswith(other)]
            if not prefix or others:
                raise ValueError(f"prefix {prefix!r} must not be empty, nor begin with another one: {others}")
        self._parts = dict(parts)
        self.provider = provider
        self.limits = limits or _common_limits(list(parts.values()))
        members = list(parts.values())
        if any(isinstance(part, Deletes) for part in members):
            self.delete = self._delete
        if any(isinstance(part, Adopts) for part in members):
            self.adopt = self._adopt
        if any(isinstance(part, MarksOutOfService) for part in members):
            self.mark_out_of_service = self._mark_out_of_service
        if any(isinstance(part, Compensates) for part in members):
            self.compensate = self._compensate
        if any(isinstance(part, Admits) for part in members):
            self.admit, self.settle = self._admit, self._settle
        if any(isinstance(part, Feeds) for part in members):
            self.feed = self._feed
        if any(isinstance(part, Consults) for part in members):
            self.consult = self._consult
        if any(isinstance(part, ConsultsHosts) for part in members):
            self.consult_hosts = self._consult_hosts
        if any(isinstance(part, Identifies) for part in members):
            self.identify = self._identify

    def _consult(self, lookup: MachineLookup) -> None:
        # A part that has several prefixes is one part.
        for part in {id(part): part for part in self._parts.values()}.values():
            if isinstance(part, Consults):
                part.consult(lookup)

    def _consult_hosts(self, hosts: HostsLookup) -> None:
        for part in {id(part): part for part in self._parts.values()}.values():
            if isinstance(part, ConsultsHosts):
                part.consult_hosts(functools.partial(self._hosts_of, part, hosts))

    def _hosts_of(self, part: Backend, hosts: HostsLookup) -> list[MachineView]:
        prefixes = tuple(prefix for prefix, each in self._parts.items() if each is part)
        return [machine for machine in hosts() if machine.id.startswith(prefixes)]

    def _identify(self, stored: Mapping[str, str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        seen: set[int] = set()
        for prefix, part in self._parts.items():
            # Keys begin with the first prefix of their part.
            if isinstance(part, Identifies) and id(part) not in seen:
                seen.add(id(part))
                own = {key.removeprefix(prefix): each for key, each in stored.items() if key.startswith(prefix)}
                found |= {prefix + key: each for key, each in part.identify(own).items()}
        return found

    def _part(self, machine_id: str) -> Backend:
        for prefix, part in self._parts.items():
            if machine_id.startswith(prefix):
                return part
        raise LookupError(f"no part has machines like {machine_id!r}; the prefixes are {', '.join(self._parts)}")

    def host_scope(self, machine_id: str) -> str:
        """Return the first prefix of a machine's part: each part names its hosts by itself."""
        own = next((part for prefix, part in self._parts.items() if machine_id.startswith(prefix)), None)
        return next((prefix for prefix, part in self._parts.items() if part is own), "")

    # ---- facts ---------------------------------------------------------------------------------------------------

    async def inventory(self) -> PartialFacts:
        """Return what the parts have. Raises what the first part raised when none could be read."""
        parts = list(self._parts.items())
        read = await asyncio.gather(*(_read(part) for _prefix, part in parts), return_exceptions=True)
        facts: list[Slot] = []
        unread: list[str] = []
        unread_hosts: list[str] = []
        refused: list[tuple[str, str]] = []
        for (prefix, part), found in zip(parts, read, strict=True):
            if isinstance(found, BaseException):
                unread.append(prefix)
                _log.error("multiplex.part_read_failed", prefix=prefix, error=f"{type(found).__name__}: {found}")
                continue
            unread.extend(_within(prefix, found.unread_prefixes))
            unread_hosts.extend(_within(prefix, found.unread_host_prefixes))
            refused.extend(found.refused)
            refused.extend(
                (fact.id, f"the part of {prefix!r} must not speak of it") for fact in _outside(found.facts, prefix)
            )
            owned = _owned(found.facts, prefix, is_fixed=not isinstance(part, Deletes))
            # What has a value of a wrong type is passed on as it is: the kit quarantines it.
            facts.extend(with_label(fact, part.limits.reset) if type_fault(fact) is None else fact for fact in owned)
        if len(unread) >= len(parts) and not facts and isinstance(read[0], BaseException):
            raise read[0]
        return PartialFacts(
            facts=tuple(facts),
            unread_prefixes=tuple(unread),
            unread_host_prefixes=tuple(unread_hosts),
            refused=tuple(refused),
        )

    # ---- calls: plain functions, so that a part's plain function runs in a thread and its coroutine on the loop ----

    def create(self, machine: MachineView, op: Op) -> Result[Host]:
        """Make the host in its part."""
        return self._part(machine.id).create(machine, op)

    def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> Result[str | None]:
        """Boot the host in its part."""
        return self._part(machine.id).configure(machine, cluster, blob, op)

    def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> Result[None]:
        """Drain the host in its part."""
        return self._part(machine.id).drain(machine, grace_seconds, op)

    def _delete(self, machine: MachineView, op: Op) -> Result[None]:
        part = self._part(machine.id)
        if not isinstance(part, Deletes):
            raise LookupError(f"the part of {machine.id} deletes no hosts")
        return part.delete(machine, op)

    def _adopt(self, machine: MachineView) -> Result[Found]:
        part = self._part(machine.id)
        if not isinstance(part, Adopts):
            raise LookupError(f"the part of {machine.id} cannot say what became of it")
        return part.adopt(machine)

    def _mark_out_of_service(self, machine: MachineView) -> Result[None]:
        part = self._part(machine.id)
        return part.mark_out_of_service(machine) if isinstance(part, MarksOutOfService) else None

    def _compensate(self, machine: MachineView, late: LateResult) -> Result[None]:
        part = self._part(machine.id)
        if isinstance(part, Compensates):
            return part.compensate(machine, late)
        if late.host is not None and isinstance(part, Deletes) and machine.host.ref != late.host.ref:
            return part.delete(machine, late.op)
        return None

    def _admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        part = self._part(machine.id)
        return part.admit(machine, kind) if isinstance(part, Admits) else Admission()

    def _settle(self, machine: MachineView, reached: MachineState) -> Admission:
        part = self._part(machine.id)
        return part.settle(machine, reached) if isinstance(part, Admits) else Admission()

    async def _feed(self, feed: Feed) -> None:
        async with asyncio.TaskGroup() as group:
            for prefix, part in self._parts.items():
                if isinstance(part, Feeds):
                    group.create_task(_fed(part, _OwnFeed(feed, prefix), prefix))


class _OwnFeed:
    """A feed that takes pushes for one prefix alone."""

    def __init__(self, feed: Feed, prefix: str) -> None:
        self._feed = feed
        self._prefix = prefix

    def _owns(self, machine_id: str) -> bool:
        if machine_id.startswith(self._prefix):
            return True
        _log.warning("multiplex.push_rejected", prefix=self._prefix, machine=machine_id)
        return False

    async def report_price(self, ids: Iterable[str], usd_per_hour: float) -> None:
        await self._feed.report_price([machine_id for machine_id in ids if self._owns(machine_id)], usd_per_hour)

    async def report_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None = None) -> None:
        if self._owns(id):
            await self._feed.report_interruption(id, probability, reclaim_at_unix_nanos)

    async def report_lost(self, id: str, reason: str) -> None:
        if self._owns(id):
            await self._feed.report_lost(id, reason)


async def _fed(part: Feeds, feed: Feed, prefix: str) -> None:
    """Let one part push; when it breaks, the others go on."""
    try:
        await part.feed(feed)
    except Exception as error:  # the same rule as for a backend alone: slower, not wrong
        _log.error("multiplex.push_ended", prefix=prefix, exc_info=error)


async def _read(part: Backend) -> PartialFacts:
    """Read a part's inventory to its end, a plain function in a thread. Raises ValueError for a nameless entry."""
    found = await read_facts(part.inventory, lambda work: asyncio.to_thread(work))
    for number, fact in enumerate(found.facts):
        entry_id(number, fact)
    return found


def _within(prefix: str, unread: Iterable[str]) -> Iterable[str]:
    """Return what a part could not read, as far as it is the part's own."""
    for each in unread:
        if each.startswith(prefix):
            yield each
        elif prefix.startswith(each):
            yield prefix


def _outside(facts: Iterable[Slot], prefix: str) -> Iterable[Slot]:
    return (fact for fact in facts if not fact.id.startswith(prefix))


def _owned(facts: Iterable[Slot], prefix: str, *, is_fixed: bool) -> Iterable[Slot]:
    """Return a part's facts; those of a part that deletes nothing are fixed, so that Delete is UNIMPLEMENTED there."""
    for fact in facts:
        if fact.id.startswith(prefix):
            yield replace(fact, fixed=True) if is_fixed and not fact.fixed else fact


def _common_limits(parts: list[Backend]) -> Limits:
    kinds = {}
    for kind in Kind:
        lanes = [lane_of(part, kind) for part in parts]
        rates = [lane.rate_per_second for lane in lanes if lane.rate_per_second is not None]
        kinds[kind] = KindLimits(
            timeout_seconds=max(part.limits.kinds[kind].timeout_seconds for part in parts),
            concurrency_max=min(lane.concurrency_max for lane in lanes),
            queue_max=min(lane.queue_max for lane in lanes),
            rate_per_second=min(rates) if rates else None,
            burst=min(lane.burst for lane in lanes),
        )
    return Limits(
        kinds=MappingProxyType(kinds),
        resumable=frozenset.intersection(*(part.limits.resumable for part in parts)),
        # Only plain functions stay in a thread; for a coroutine's call it is a short hop.
        threads_max=max(limits.concurrency_max or 1 for limits in kinds.values()),
    )
