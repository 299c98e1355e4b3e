"""Reads a cluster from an IAllocator message: its groups, its hosts, and their instances.

docs/spec/partition.md §2, §6 and §13. Fields are read in the order in which `hail` reads them, so that of several
faults the same one is reported. This module never decides whether a cluster is sound; it reports missing fields.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from bigfleet.partition.document import (
    Body,
    WrongInput,
    as_choice,
    as_text,
    listed,
    pairs_of,
    take_bool,
    take_choice,
    take_float,
    take_int,
    take_int_maybe,
    take_list,
    take_object,
    take_objects,
    take_str,
    take_texts,
)
from bigfleet.partition.hosts import HostGroup, PartitionedHost, Role
from bigfleet.partition.instance import TEMPLATES, AdminState, Instance, total_spindles
from bigfleet.partition.metric import Room
from bigfleet.partition.policy import AllocationPolicy, Bounds, Interval, Policy

#: Owner of what stands at the top of a message.
MESSAGE: Final = "invalid iallocator message"
HYPERVISORS: Final = ("kvm", "xen-pvm", "xen-hvm", "chroot", "lxc", "fake")
#: What a KVM host keeps for itself when its own figure is not taken.
STATIC_KVM_MIB: Final = 4096
#: A host whose records claim more than this, and do not show it, is reported.
_MISSING_MEMORY_MIB: Final = 512
_MISSING_DISK_MIB: Final = 1024

_TEMPLATES: Final = {name: name for name in TEMPLATES}
_HYPERVISORS: Final = {name: name for name in HYPERVISORS}
_ALLOCATIONS: Final = {policy.value: policy for policy in AllocationPolicy}
_STATES: Final = {state.value: state for state in AdminState}
_NIC_TEXTS: Final = ("mac", "ip", "mode", "link", "bridge", "network")
_NIC_MODES: Final = (None, "bridged", "routed", "openvswitch")
_SPEC_KEYS: Final = ("memory-size", "cpu-count", "disk-size", "disk-count", "nic-count", "spindle-use")
_POLICY_KEYS: Final = ("minmax", "std", "disk-templates", "vcpu-ratio", "spindle-ratio")
_TAG_OF_EXCLUSION: Final = "htools:iextags:"


class GanetiCluster:
    """Groups and hosts in the order of the message, with everything that stands on them counted."""

    __slots__ = ("exclusion_prefixes", "groups", "hosts", "instances")

    def __init__(
        self,
        *,
        groups: list[HostGroup],
        hosts: list[PartitionedHost],
        instances: "list[Placed]",
        exclusion_prefixes: tuple[str, ...] = (),
    ) -> None:
        self.groups = groups
        self.hosts = hosts
        #: What stood there when the message was written.
        self.instances = instances
        #: A tag that begins with one of these keeps others with the same tag off its host.
        self.exclusion_prefixes = exclusion_prefixes

    def exclusion_tags(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of an instance's tags that exclude."""
        return tuple(tag for tag in tags if tag.startswith(self.exclusion_prefixes)) if self.exclusion_prefixes else ()

    def warnings(self) -> list[str]:
        """Return a line for each host whose records and whose figures differ much, the last host first."""
        return [
            f"node {host.name} is missing {host.missing_memory_mib} MB ram and {host.missing_disk_mib // 1024} GB disk"
            for host in reversed(self.hosts)
            if host.missing_memory_mib > _MISSING_MEMORY_MIB or host.missing_disk_mib > _MISSING_DISK_MIB
        ]


class Placed(NamedTuple):
    """An instance and the positions of its hosts."""

    instance: Instance
    primary: int
    secondary: int | None


class _Figures(NamedTuple):
    """A host as the message shows it, before its instances are counted."""

    name: str
    group: int
    is_exclusive: bool
    is_candidate: bool
    spindles_total: int
    spindles_free: int
    memory_total_mib: float
    memory_reserved_mib: int
    memory_free_mib: int
    disk_total_mib: float
    disk_free_mib: int
    cpus: float
    cpus_reserved: int


def read_cluster(message: Body, *, static_kvm_mib: int = STATIC_KVM_MIB) -> GanetiCluster:
    """Return the cluster of a message. Raises WrongInput.

    `static_kvm_mib` is what every host keeps for itself where the first hypervisor is KVM; with 0 or less each host's
    own figure counts.
    """
    groups = [_read_group(index, uuid, body) for index, (uuid, body) in enumerate(_objects(message, "nodegroups"))]
    places = {group.uuid: group.index for group in groups}
    figures = [_read_host(name, body, places) for name, body in _objects(message, "nodes")]
    places = {each.name: index for index, each in enumerate(figures)}
    placed = [_read_placed(name, body, places) for name, body in _objects(message, "instances")]
    cluster_tags = take_texts(message, "cluster_tags", MESSAGE)
    hypervisors = [
        as_choice(word, "enabled_hypervisors", MESSAGE, _HYPERVISORS, "Hypervisor")
        for word in take_list(message, "enabled_hypervisors", MESSAGE)
    ]
    own_mib = static_kvm_mib if hypervisors[:1] == ["kvm"] and static_kvm_mib > 0 else None
    prefixes = tuple(tag.removeprefix(_TAG_OF_EXCLUSION) for tag in cluster_tags if tag.startswith(_TAG_OF_EXCLUSION))
    cluster = GanetiCluster(groups=groups, hosts=[], instances=placed, exclusion_prefixes=tuple(filter(None, prefixes)))
    if cluster.exclusion_prefixes:
        for position, (instance, primary, secondary) in enumerate(placed):
            tags = cluster.exclusion_tags(tuple(instance.tags))
            if tags:
                placed[position] = Placed(instance.with_exclusion_tags(tags), primary, secondary)
    cluster.hosts = _hosts(groups, figures, placed, own_mib)
    return cluster


def _objects(message: Body, key: str) -> Iterator[tuple[str, Body]]:
    for name, body in pairs_of(take_object(message, key, MESSAGE)):
        if not isinstance(body, dict):
            raise WrongInput(f"{MESSAGE}: key '{key}': '{name}' is not an object")
        yield name, body


# ---- groups ----------------------------------------------------------------------------------------------------------


def _read_group(index: int, uuid: str, body: Body) -> HostGroup:
    owner = f"invalid data for group '{uuid}'"
    name = take_str(body, "name", owner)
    allocation = take_choice(body, "alloc_policy", owner, _ALLOCATIONS, "AllocPolicy")
    networks = frozenset(take_texts(body, "networks", owner))
    policy = _read_policy(take_object(body, "ipolicy", owner), f"{owner}: key 'ipolicy'")
    take_texts(body, "tags", owner)
    return HostGroup(index=index, name=name, uuid=uuid, policy=policy, allocation=allocation, networks=networks)


def _read_policy(body: Body, owner: str) -> Policy:
    _refuse_others(body, _POLICY_KEYS, owner)
    inside = f"{owner}: Can't parse value for 'minmax'"
    intervals = []
    for pair in take_objects(body, "minmax", owner):
        _refuse_others(pair, ("min", "max"), inside)
        least, most = (
            _read_bounds(take_object(pair, key, inside), f"{inside}: Can't parse value for '{key}'")
            for key in ("min", "max")
        )
        intervals.append(Interval(least, most))
    _read_bounds(take_object(body, "std", owner), f"{owner}: Can't parse value for 'std'")
    templates = frozenset(
        as_choice(word, "disk-templates", owner, _TEMPLATES, "DiskTemplate")
        for word in take_list(body, "disk-templates", owner)
    )
    return Policy(
        intervals=intervals,
        templates=templates,
        vcpu_ratio=take_float(body, "vcpu-ratio", owner),
        spindle_ratio=take_float(body, "spindle-ratio", owner),
    )


def _read_bounds(body: Body, owner: str) -> Bounds:
    _refuse_others(body, _SPEC_KEYS, owner)
    memory, vcpus, disk, disks, _, spindle_use = (take_int(body, key, owner) for key in _SPEC_KEYS)
    return Bounds(memory, vcpus, disk, disks, spindle_use)


def _refuse_others(body: Body, keys: tuple[str, ...], owner: str) -> None:
    """Refuse unknown keys: within a policy they are fatal."""
    others = [key for key in body if key not in keys]
    if others:
        shown, allowed = listed(sorted(others)), listed(sorted(keys))
        raise WrongInput(f"{owner}: Superfluous dictionary keys: {shown}, but only {allowed} allowed.")


# ---- hosts -----------------------------------------------------------------------------------------------------------


def _read_host(name: str, body: Body, groups: Mapping[str, int]) -> _Figures:
    owner = f"invalid data for node '{name}'"
    is_offline, is_drained = take_bool(body, "offline", owner), take_bool(body, "drained", owner)
    uuid = take_str(body, "group", owner)
    is_capable = body.get("vm_capable") is None or take_bool(body, "vm_capable", owner)
    group = groups.get(uuid)
    if group is None:
        raise WrongInput(f"Unknown group '{uuid}' for node {name}")
    parameters = take_object(body, "ndparams", owner)
    if body.get("tags") is not None:
        take_texts(body, "tags", owner)
    is_exclusive = take_bool(parameters, "exclusive_storage", owner)
    spindles_total = 0 if is_exclusive else take_int(parameters, "spindle_count", owner)
    if is_offline or not is_capable:
        return _Figures(name, group, is_exclusive, False, spindles_total, 0, 0.0, 0, 0, 0.0, 0, 0.0, 0)
    if is_exclusive:
        spindles_total = take_int(body, "total_spindles", owner)
    return _Figures(
        name,
        group,
        is_exclusive,
        not is_drained,
        spindles_total,
        take_int(body, "free_spindles", owner),
        take_float(body, "total_memory", owner),
        take_int(body, "reserved_memory", owner),
        take_int(body, "free_memory", owner),
        take_float(body, "total_disk", owner),
        take_int(body, "free_disk", owner),
        take_float(body, "total_cpus", owner),
        take_int(body, "reserved_cpus", owner),
    )


class _Standing:
    """What the instances on one host add up to."""

    __slots__ = (
        "disk_mib",
        "idle_memory_mib",
        "memory_mib",
        "planned_disk_mib",
        "planned_spindle_use",
        "planned_spindles",
        "planned_vcpus",
        "spindle_use",
        "vcpus",
    )

    def __init__(self) -> None:
        #: Of real primaries that run.
        self.memory_mib = 0
        #: Of primaries that are down, offline or forthcoming.
        self.idle_memory_mib = 0
        #: Of everything real, local or not.
        self.disk_mib = 0
        #: Of what is forthcoming and local.
        self.planned_disk_mib = 0
        #: Of what is forthcoming; None when one has not said how many it needs.
        self.planned_spindles: int | None = 0
        #: Of real primaries that are not offline, and of forthcoming ones.
        self.vcpus = self.planned_vcpus = 0
        #: Of real local instances, and of forthcoming ones.
        self.spindle_use = self.planned_spindle_use = 0

    def count(self, instance: Instance) -> None:
        """Count what any role takes."""
        if instance.is_forthcoming:
            if instance.is_local:
                self.planned_disk_mib += instance.disk_mib
                self.planned_spindle_use += instance.spindle_use
            if instance.spindles is None or self.planned_spindles is None:
                self.planned_spindles = None
            else:
                self.planned_spindles += instance.spindles
        else:
            self.disk_mib += instance.disk_mib
            if instance.is_local:
                self.spindle_use += instance.spindle_use

    def count_primary(self, instance: Instance) -> None:
        """Count what a primary takes besides."""
        if instance.uses_memory:
            self.memory_mib += instance.memory_mib
        else:
            self.idle_memory_mib += instance.memory_mib
        if instance.uses_vcpus:
            if instance.is_forthcoming:
                self.planned_vcpus += instance.vcpus
            else:
                self.vcpus += instance.vcpus


def _hosts(
    groups: list[HostGroup], figures: list[_Figures], placed: list[Placed], own_mib: int | None
) -> list[PartitionedHost]:
    standing: defaultdict[int, _Standing] = defaultdict(_Standing)
    reserves: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for instance, primary, secondary in placed:
        # One that is its own mirror counts as a mirror alone: so does `hail`.
        if primary != secondary:
            standing[primary].count(instance)
            standing[primary].count_primary(instance)
        if secondary is not None:
            standing[secondary].count(instance)
            if not instance.is_forthcoming:
                known = reserves[secondary]
                known[primary] = known.get(primary, 0) + instance.failover_mib
    nothing = _Standing()
    hosts = [
        _host(index, each, groups[each.group], standing.get(index, nothing), reserves.get(index, {}), own_mib)
        for index, each in enumerate(figures)
    ]
    for instance, primary, secondary in placed:
        if primary != secondary:
            hosts[primary].instances.append((instance, Role.PRIMARY))
            hosts[primary].exclusion_tags.update(instance.exclusion_tags)
        if secondary is not None:
            hosts[secondary].instances.append((instance, Role.SECONDARY))
    return hosts


def _host(
    index: int, each: _Figures, group: HostGroup, there: _Standing, reserves_mib: dict[int, int], own_mib: int | None
) -> PartitionedHost:
    reserved = each.memory_reserved_mib if own_mib is None else own_mib
    recorded = int(each.memory_total_mib) - reserved - there.memory_mib
    reserve = max(0, *reserves_mib.values()) if reserves_mib else 0
    vcpus = each.cpus_reserved + there.vcpus
    use = 0 if each.is_exclusive else there.spindle_use
    planned_use = 0 if each.is_exclusive else use + there.planned_spindle_use
    # Where storage is shared no host has spindles of its own, so there are none to count.
    spindles = each.spindles_free if each.is_exclusive else 0
    planned_spindles = there.planned_spindles if each.is_exclusive else 0
    room = Room(
        min(recorded, each.memory_free_mib),
        each.disk_free_mib,
        spindles,
        vcpus,
        use,
        each.memory_free_mib - there.idle_memory_mib,
        each.disk_free_mib - there.planned_disk_mib,
        -1 if planned_spindles is None else spindles - planned_spindles,
        vcpus + there.planned_vcpus,
        planned_use,
        reserve,
        each.memory_free_mib < reserve,
    )
    host = PartitionedHost(
        index=index,
        name=each.name,
        group=group,
        room=room,
        cpus=each.cpus,
        disk_total_mib=each.disk_total_mib,
        spindles_total=each.spindles_total,
        is_exclusive=each.is_exclusive,
        is_candidate=each.is_candidate,
    )
    host.reserves_mib = reserves_mib
    host.missing_memory_mib = recorded - each.memory_free_mib
    host.missing_disk_mib = int(each.disk_total_mib) - each.disk_free_mib - there.disk_mib
    return host


# ---- instances -------------------------------------------------------------------------------------------------------


def read_instance(name: str, body: Body) -> Instance:
    """Return an instance as it stands in a cluster or in a request, without exclusion tags. Raises WrongInput."""
    owner = f"invalid data for instance '{name}'"
    disk_mib = take_int(body, "disk_space_total", owner)
    disks = take_objects(body, "disks", owner)
    disks_mib = tuple([take_int(disk, "size", owner) for disk in disks])
    spindles = [take_int_maybe(disk, "spindles", owner) for disk in disks]
    memory_mib = take_int(body, "memory", owner)
    vcpus = take_int(body, "vcpus", owner)
    tags = take_texts(body, "tags", owner)
    template = take_choice(body, "disk_template", owner, _TEMPLATES, "DiskTemplate")
    spindle_use = take_int(body, "spindle_use", owner)
    nics = take_objects(body, "nics", owner)
    return Instance(
        name=name,
        memory_mib=memory_mib,
        vcpus=vcpus,
        disk_mib=disk_mib,
        disks_mib=disks_mib,
        spindles=total_spindles(spindles),
        spindle_use=spindle_use,
        template=template,
        tags=tags,
        networks=_networks(nics, name, owner) if nics else (),
        state=_state(body.get("admin_state")),
        is_forthcoming=body.get("forthcoming") is True,
    )


def _state(word: object) -> AdminState:
    """Return what the word stands for; everything unknown, and nothing, is up."""
    return _STATES.get(word, AdminState.UP) if isinstance(word, str) else AdminState.UP


def _networks(nics: list[Body], name: str, owner: str) -> tuple[str, ...]:
    networks = []
    for nic in nics:
        for key in _NIC_TEXTS:
            value = nic.get(key)
            text = None if value is None else as_text(value, key, owner)
            if key == "mode" and text not in _NIC_MODES:
                raise WrongInput(f"invalid NIC mode in instance {name}")
            if key == "network" and text is not None:
                networks.append(text)
    return tuple(networks)


def _read_placed(name: str, body: Body, hosts: Mapping[str, int]) -> Placed:
    instance = read_instance(name, body)
    owner = f"invalid data for instance '{name}'"
    nodes = take_list(body, "nodes", owner)
    if not nodes:
        raise WrongInput(f"empty node list for instance {name}")
    primary, *secondary = [_place(node, name, owner, hosts) for node in nodes[:2]]
    return Placed(instance, primary, secondary[0] if secondary else None)


def _place(node: object, name: str, owner: str, hosts: Mapping[str, int]) -> int:
    text = as_text(node, "nodes", owner)
    index = hosts.get(text)
    if index is None:
        raise WrongInput(f"Unknown node '{text}' for instance {name}")
    return index
