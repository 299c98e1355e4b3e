"""Reads the hosts file: the physical hosts, and the slots that could be offered on them.

docs/spec/provider.md §22. The cluster part is an IAllocator message without a request (docs/spec/partition.md §2),
which the caller's allocator reads. Every mistake names the file, the owner and the key. This module must not reserve
room.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.field_faults import field_fault
from bigfleet.files.json_loading import load_json
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.partitioned.ports import (
    Carved,
    CarveSize,
    ClusterFault,
    GroupFacts,
    HostAllocator,
    MakeAllocator,
    UnlimitedInterval,
    Willingness,
)
from bigfleet.provider.backends.simulated.world import parse_capacity_type
from bigfleet.provider.records.validate import facts_fault, labels_fault
from bigfleet.provider.storage.codec import intern_map

T = TypeVar("T", bound=msgspec.Struct)

HOST_LABEL: Final = "topology.bigfleet/physical-host"
#: Groups, zones and intervals multiply.
LINES_MAX: Final = 100_000
#: Hosts that a warning names.
_SHOWN_MAX: Final = 3


class HostsFault(ValueError):
    """The hosts file cannot be used; the text names the file and the finding."""


class _Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    price_usd_per_hour: float
    labels: dict[str, str] = {}


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    intervals: tuple[_Interval, ...]
    capacity_type: str = "bare_metal"


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    zone: str
    labels: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The slots of one group, zone and interval."""

    group: str
    zone: str
    #: Of the interval, by decreasing lower disk bound.
    position: int
    willingness: Willingness
    size: CarveSize
    #: What every id begins with, the last slash included.
    prefix: str
    #: What every instance's name begins with.
    instance_prefix: str
    #: A slot without an id.
    template: Slot

    @property
    def interval(self) -> str:
        """The interval's name, which is the instance type."""
        return self.template.instance_type

    def slot(self, number: int) -> Slot:
        """Return a slot of this line."""
        return replace(self.template, id=f"{self.prefix}{number:03d}")

    def instance(self, number: int) -> str:
        """Return the name of the instance of a slot."""
        return f"{self.instance_prefix}{number:03d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where a host is."""

    group: str
    zone: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsFile:
    """Everything that a hosts file says."""

    allocator: HostAllocator
    #: By name, in the order of the file.
    hosts: Mapping[str, HostPlace]
    offline: frozenset[str]
    #: By prefix of their ids; lines of groups that offer nothing are among them.
    lines: Mapping[str, Line]
    #: Names of each group's intervals, by decreasing lower disk bound.
    intervals: Mapping[str, tuple[str, ...]]
    #: One sentence for each size that does not even fit on an empty host.
    warnings: tuple[str, ...]


def read_hosts(path: Path, provider: str, make: MakeAllocator, ours: Mapping[str, Carved]) -> HostsFile:
    """Return what a file says; `ours` are the instances that we carved, by name. Raises HostsFault."""
    try:
        document = load_json(read_bounded(path, CONFIGURATION_BYTES_MAX).decode(), object_pairs_hook=_object)
    except OSError as error:
        raise HostsFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except ValueError as error:
        raise HostsFault(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise HostsFault(f"{path}: not an object, but {type(document).__name__}")
    try:
        return fleet_of(document, provider, make, ours)
    except HostsFault as fault:
        raise HostsFault(f"{path}: {fault}") from fault


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice in one object")
    return body


def fleet_of(document: Mapping[str, Any], provider: str, make: MakeAllocator, ours: Mapping[str, Carved]) -> HostsFile:
    """Return what a document says. Raises HostsFault."""
    groups, nodes = _own_part(document)
    try:
        allocator = make(_without_ours(document, ours))
        empty = make(_emptied(document))
        _check_groups(allocator, groups)
        places = _places(allocator, nodes)
        lines = _lines(allocator, provider, groups, places)
        warnings = tuple(_warnings(allocator, empty, groups))
        for host in allocator.hosts:
            allocator.vector(host.name)
    except (ClusterFault, UnlimitedInterval) as fault:
        raise HostsFault(str(fault)) from fault
    return HostsFile(
        allocator=allocator,
        hosts=places,
        offline=frozenset(name for name, node in document["nodes"].items() if node.get("offline") is True),
        lines=lines,
        intervals={name: tuple(interval.name for interval in group.intervals) for name, group in groups.items()},
        warnings=warnings,
    )


# ---- what is ours in the document ------------------------------------------------------------------------------------


def _own_part(document: Mapping[str, Any]) -> tuple[dict[str, _Group], dict[str, _Node]]:
    own = document.get("bigfleet")
    if not isinstance(own, dict):
        raise HostsFault("bigfleet: is missing; it says the zones of nodes and the names and prices of intervals")
    unknown = sorted(own.keys() - {"groups", "nodes"})
    if unknown:
        raise HostsFault(f"bigfleet.{unknown[0]}: unknown key; there are groups, nodes")
    groups = {name: _read(body, _Group, f"groups.{name}") for name, body in _bodies(own, "groups")}
    nodes = {name: _read(body, _Node, f"nodes.{name}") for name, body in _bodies(own, "nodes")}
    return groups, nodes


def _bodies(own: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    bodies = own.get(key)
    if not isinstance(bodies, dict):
        raise HostsFault(f"bigfleet.{key}: must be an object by name")
    yield from bodies.items()


def _read(body: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise HostsFault(str(field_fault(error, kind, root=f"bigfleet.{place}"))) from error


def _without_ours(document: Mapping[str, Any], ours: Mapping[str, Carved]) -> Mapping[str, Any]:
    """Return the document as if our instances were not there: we count them ourselves, whether it lists them or not."""
    instances = document.get("instances")
    if not isinstance(instances, dict) or ours.keys().isdisjoint(instances):
        return document
    changed = copy.deepcopy(dict(document))
    for name in ours.keys() & instances.keys():
        body = changed["instances"].pop(name)
        hosts = body.get("nodes") if isinstance(body, dict) else None
        if hosts != [ours[name].host]:
            raise HostsFault(f"instances.{name}: is said to be on {hosts}, but it was carved on {ours[name].host}")
        if body.get("forthcoming") is True:
            continue
        node = changed["nodes"].get(ours[name].host)
        disks = [disk.get("spindles") or 0 for disk in body.get("disks", [])]
        amounts = {"free_disk": body.get("disk_space_total"), "free_spindles": sum(disks)}
        if body.get("admin_state", "up") not in ("down", "offline"):
            amounts["free_memory"] = body.get("memory")
        for key, amount in amounts.items():
            if isinstance(node, dict) and isinstance(amount, int) and isinstance(node.get(key), int | float):
                node[key] += amount
    return changed


def _emptied(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document with nothing on any host."""
    nodes = document.get("nodes")
    if not isinstance(nodes, dict):
        return document
    emptied = {
        name: {
            **node,
            **{
                f"free_{what}": node[f"total_{what}"]
                for what in ("memory", "disk", "spindles")
                if f"total_{what}" in node
            },
        }
        if isinstance(node, dict)
        else node
        for name, node in nodes.items()
    }
    return {**document, "nodes": emptied, "instances": {}}


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_groups(allocator: HostAllocator, groups: Mapping[str, _Group]) -> None:
    names = [facts.name for facts in allocator.groups]
    for name in names:
        if names.count(name) > 1:
            raise HostsFault(f"nodegroups: two groups are named {name!r}; ids of slots need one name a group")
    for name in groups:
        if name not in names:
            raise HostsFault(f"bigfleet.groups.{name}: there is no such node group")
    known: dict[str, tuple[str, CarveSize]] = {}
    for facts in allocator.groups:
        own = groups.get(facts.name)
        intervals = () if own is None else own.intervals
        place = f"bigfleet.groups.{facts.name}.intervals"
        if len(intervals) != len(facts.sizes):
            raise HostsFault(
                f"{place}: has {len(intervals)} entries, the policy of the group {len(facts.sizes)} intervals"
            )
        if facts.unlimited:
            name = intervals[facts.unlimited[0]].name
            raise HostsFault(
                f"{place}: {name!r} fits without end: its lower bounds limit neither memory nor disk nor CPUs;"
                " give it one above zero"
            )
        _check_names(facts, intervals, place, known)


def _check_names(
    facts: GroupFacts, intervals: tuple[_Interval, ...], place: str, known: dict[str, tuple[str, CarveSize]]
) -> None:
    own = [interval.name for interval in intervals]
    for interval, size in zip(intervals, facts.sizes, strict=True):
        if own.count(interval.name) > 1:
            raise HostsFault(f"{place}: {interval.name!r} names two intervals")
        group, other = known.setdefault(interval.name, (facts.name, size))
        if other != size:
            raise HostsFault(
                f"{place}: {interval.name!r} has other lower bounds than in group {group}; name it otherwise"
            )


def _places(allocator: HostAllocator, nodes: Mapping[str, _Node]) -> Mapping[str, HostPlace]:
    names = {host.name for host in allocator.hosts}
    for name in nodes:
        if name not in names:
            raise HostsFault(f"bigfleet.nodes.{name}: there is no such node")
    places: dict[str, HostPlace] = {}
    for host in allocator.hosts:
        own = nodes.get(host.name)
        if own is None or not own.zone:
            raise HostsFault(f"bigfleet.nodes.{host.name}.zone: is missing")
        if not host.is_exclusive:
            raise HostsFault(
                f"nodes.{host.name}.ndparams.exclusive_storage: is false; instances are carved from hosts with"
                " exclusive storage only"
            )
        fault = labels_fault(own.labels)
        if fault is not None:
            raise HostsFault(f"bigfleet.nodes.{host.name}.labels: {fault.text}")
        places[host.name] = HostPlace(group=host.group, zone=own.zone, labels=MappingProxyType(dict(own.labels)))
    return MappingProxyType(places)


def _lines(
    allocator: HostAllocator, provider: str, groups: Mapping[str, _Group], places: Mapping[str, HostPlace]
) -> Mapping[str, Line]:
    zones: dict[str, dict[str, None]] = {}
    for place in places.values():
        zones.setdefault(place.group, {})[place.zone] = None
    lines: dict[str, Line] = {}
    instance_prefixes: set[str] = set()
    for facts in allocator.groups:
        for zone in zones.get(facts.name, ()):
            for position, interval in enumerate(groups[facts.name].intervals):
                line = _line(provider, facts, zone, position, groups[facts.name], interval)
                if line.instance_prefix in instance_prefixes:
                    raise HostsFault(f"instances of {line.prefix} and of another slot have the same names; rename one")
                instance_prefixes.add(line.instance_prefix)
                lines[line.prefix] = line
                if len(lines) > LINES_MAX:
                    raise HostsFault(f"more than {LINES_MAX:,} pairs of zone and interval")
    return MappingProxyType(lines)


def _line(provider: str, facts: GroupFacts, zone: str, position: int, group: _Group, interval: _Interval) -> Line:
    size = facts.sizes[position]
    place = f"bigfleet.groups.{facts.name}"
    capacity_type = parse_capacity_type(group.capacity_type)
    if capacity_type is None:
        text = f"{group.capacity_type!r} is none of on_demand, spot, reserved, bare_metal"
        raise HostsFault(f"{place}.capacity_type: {text}")
    if capacity_type is CapacityType.SPOT:
        raise HostsFault(
            f"{place}.capacity_type: spot needs a probability of interruption, which partitioned hosts do not have"
        )
    amounts = {
        "cpu": (size.vcpus, ""),
        "memory": (size.memory_mib, "Mi"),
        "ephemeral-storage": (size.disk_mib * size.disk_count, "Mi"),
    }
    shape = intern_map({name: f"{amount}{unit}" for name, (amount, unit) in amounts.items() if amount > 0})
    parts = (facts.name, zone, interval.name)
    line = Line(
        group=facts.name,
        zone=zone,
        position=position,
        willingness=facts.willingness,
        size=size,
        prefix="/".join((provider, *parts, "")),
        instance_prefix="-".join((*parts, "")).replace("/", "-"),
        template=Slot(
            id="",
            instance_type=interval.name,
            zone=zone,
            capacity_type=capacity_type,
            resources=shape,
            allocatable=shape,
            labels=intern_map(interval.labels),
            price_usd_per_hour=interval.price_usd_per_hour,
        ),
    )
    fault = facts_fault(line.slot(0))
    if fault is not None:
        raise HostsFault(f"{place}.intervals[{position}]: {fault.text}")
    return line


def _warnings(allocator: HostAllocator, empty: HostAllocator, groups: Mapping[str, _Group]) -> Iterator[str]:
    """Yield a sentence for each size that an empty host of its group has no room for."""
    sizes = {facts.name: facts.sizes for facts in allocator.groups}
    misfits: dict[tuple[str, int], list[str]] = {}
    for host in empty.hosts:
        if not host.is_candidate:
            continue
        for position, count in enumerate(empty.vector(host.name)):
            if not count or not empty.how_often(host.name, sizes[host.group][position]):
                misfits.setdefault((host.group, position), []).append(host.name)
    for (group, position), names in misfits.items():
        shown = ", ".join(names[:_SHOWN_MAX]) + (
            f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
        )
        yield (
            f"{groups[group].intervals[position].name!r} of group {group} does not fit on an empty host: {shown};"
            " memory and disk must stay above zero, so lower bounds a little below nominal make full hosts usable"
        )
