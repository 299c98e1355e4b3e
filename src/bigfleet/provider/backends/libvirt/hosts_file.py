"""Reads the hosts file: which hosts run libvirt, and which types of machines they offer.

docs/spec/libvirt-provider.md §1. An unknown key or a bad value is rejected with its path. It connects to no host.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import yaml

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.field_faults import field_fault
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model.quantity import MILLI, QuantityError, parse_quantity
from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.libvirt.names import OBJECT_PREFIX
from bigfleet.provider.backends.simulated.world import parse_capacity_type
from bigfleet.provider.records.validate import labels_fault, shape_fault

#: What a drain does with the disk of a machine; each machine shows it in its label `bigfleet.dev/reset`.
RESET: Final = "reimage"
FIRMWARES: Final = ("bios", "uefi")
#: `kvm` is the processor's virtualisation, `qemu` emulates every instruction.
VIRTUALISATIONS: Final = ("kvm", "qemu")
#: Hosts and types multiply.
LINES_MAX: Final = 20_000
_MIB: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


class KvmHostsFault(ValueError):
    """The hosts file cannot be used; the text names the file and the path in it."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the file."""


class Defaults(_Section, frozen=True, kw_only=True):
    """What all hosts have in common."""

    #: Volume of the pool that every disk starts from.
    image: str
    pool: str = "default"
    #: A network of libvirt, or `bridge:NAME`; None is a user-mode network, into which nothing can connect.
    network: str | None = None
    firmware: str = "bios"
    reset: str = RESET
    virtualisation: str = "kvm"
    #: Directory on the hosts in which libvirt logs the serial console of each machine; None logs none.
    console_log_dir: str | None = None


class _TypeFields(_Section, frozen=True, kw_only=True):
    vcpus: int
    memory: str
    disk: str
    allocatable: dict[str, str] | None = None


class Overcommit(_Section, frozen=True, kw_only=True):
    """How often each resource of a host is given away."""

    cpu: float = 1.0
    memory: float = 1.0


class _HostFields(_Section, frozen=True, kw_only=True):
    zone: str
    name: str
    uri: str
    cpus: int
    memory: str
    disk: str
    overcommit: Overcommit = Overcommit()
    price_usd_per_vcpu_hour: float = 0.0
    price_usd_per_gib_hour: float = 0.0
    capacity_type: str = "on_demand"
    labels: dict[str, str] = {}


class _Document(_Section, frozen=True, kw_only=True):
    defaults: Defaults
    types: dict[str, _TypeFields]
    hosts: tuple[_HostFields, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestType:
    """A size of machines."""

    name: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    #: None is everything.
    allocatable: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmHost:
    """A host, and the room that it gives to machines."""

    name: str
    zone: str
    uri: str
    #: After overcommitment, as are the MiB of memory.
    milli_cpus: int
    memory_mib: int
    disk_mib: int
    price_usd_per_vcpu_hour: float
    price_usd_per_gib_hour: float
    capacity_type: CapacityType
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmHosts:
    """Everything that a hosts file says; both maps are by name, in the order of the file."""

    defaults: Defaults
    types: Mapping[str, GuestType]
    hosts: Mapping[str, KvmHost]


def read_kvm_hosts(path: Path) -> KvmHosts:
    """Return what a file says. Raises KvmHostsFault naming the file and the path in it."""
    try:
        body = load_yaml(read_bounded(path, CONFIGURATION_BYTES_MAX).decode())
    except OSError as error:
        raise KvmHostsFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except (ValueError, yaml.YAMLError) as error:
        raise KvmHostsFault(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        return parse_kvm_hosts(body)
    except KvmHostsFault as fault:
        raise KvmHostsFault(f"{path}: {fault}") from fault


def parse_kvm_hosts(body: Any) -> KvmHosts:
    """Return what a parsed file says. Raises KvmHostsFault naming the path."""
    try:
        document = msgspec.convert(body, _Document)
    except msgspec.ValidationError as error:
        raise KvmHostsFault(str(field_fault(error, _Document))) from error
    fault = next(_faults(document), None)
    if fault is not None:
        raise KvmHostsFault(fault)
    types = {name: _guest_type(name, fields) for name, fields in document.types.items()}
    hosts = {fields.name: _host(fields) for fields in document.hosts}
    return KvmHosts(defaults=document.defaults, types=MappingProxyType(types), hosts=MappingProxyType(hosts))


# ---- values ----------------------------------------------------------------------------------------------------------


def _faults(document: _Document) -> Iterator[str]:
    """Yield each bad value with its path."""
    yield from _default_faults(document.defaults)
    if not document.types:
        yield "types: is empty; name at least one type"
    if not document.hosts:
        yield "hosts: is empty; name at least one host"
    if len(document.types) * len(document.hosts) > LINES_MAX:
        yield f"hosts: more than {LINES_MAX:,} pairs of host and type"
    for name, fields in document.types.items():
        yield from _type_faults(f"types.{name}", name, fields)
    names: set[str] = set()
    for number, host in enumerate(document.hosts):
        place = f"hosts[{number}]"
        yield from _host_faults(place, host)
        if host.name in names:
            yield f"{place}.name: {host.name!r} names two hosts"
        names.add(host.name)


def _default_faults(defaults: Defaults) -> Iterator[str]:
    if not defaults.image:
        yield "defaults.image: is empty; name the volume that every disk starts from"
    if defaults.image.startswith(OBJECT_PREFIX):
        yield f"defaults.image: {defaults.image!r} begins with {OBJECT_PREFIX}, as the disks of machines do; rename it"
    for name in ("image", "pool"):
        if "/" in getattr(defaults, name):
            yield f"defaults.{name}: {getattr(defaults, name)!r} is a path; give the name that libvirt lists"
    if not defaults.pool:
        yield "defaults.pool: is empty"
    if defaults.network is not None and not defaults.network.removeprefix("bridge:"):
        yield "defaults.network: names no network"
    if defaults.firmware not in FIRMWARES:
        yield f"defaults.firmware: {defaults.firmware!r} is unknown; choose bios or uefi"
    if defaults.virtualisation not in VIRTUALISATIONS:
        yield f"defaults.virtualisation: {defaults.virtualisation!r} is unknown; choose kvm or qemu"
    if defaults.reset != RESET:
        yield f"defaults.reset: {defaults.reset!r} is unknown; a drained machine gets a new disk: {RESET}"
    if defaults.console_log_dir is not None and not defaults.console_log_dir.startswith("/"):
        yield f"defaults.console_log_dir: {defaults.console_log_dir!r} is not an absolute path"


def _type_faults(place: str, name: str, fields: _TypeFields) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield f"{place}: the name is not 1 to 63 characters of A-Za-z0-9._-"
    if fields.vcpus < 1:
        yield f"{place}.vcpus: {fields.vcpus} must be at least 1"
    yield from _size_faults(place, fields)
    fault = shape_fault({}, fields.allocatable or {})
    if fault is not None:
        yield f"{place}.{fault.text}"


def _host_faults(place: str, host: _HostFields) -> Iterator[str]:
    for name in ("name", "zone"):
        if not _NAME.fullmatch(getattr(host, name)):
            yield f"{place}.{name}: {getattr(host, name)!r} is not 1 to 63 characters of A-Za-z0-9._-"
    if "://" not in host.uri:
        yield f"{place}.uri: {host.uri!r} is no URI of libvirt, such as qemu+ssh://root@kvm-1/system"
    if host.cpus < 1:
        yield f"{place}.cpus: {host.cpus} must be at least 1"
    yield from _size_faults(place, host)
    for name, factor in (("cpu", host.overcommit.cpu), ("memory", host.overcommit.memory)):
        if not math.isfinite(factor) or factor <= 0:
            yield f"{place}.overcommit.{name}: {factor} must be above 0"
    capacity_type = parse_capacity_type(host.capacity_type)
    if capacity_type is None or capacity_type is CapacityType.SPOT:
        choice = "hosts of your own are on_demand, reserved or bare_metal"
        yield f"{place}.capacity_type: {host.capacity_type!r} is not possible; {choice}"
    prices = {name: getattr(host, name) for name in ("price_usd_per_vcpu_hour", "price_usd_per_gib_hour")}
    for name, price in prices.items():
        if not math.isfinite(price) or price < 0:
            yield f"{place}.{name}: {price} must be finite and not negative"
    if not any(prices.values()) and capacity_type is not CapacityType.BARE_METAL:
        yield f"{place}.price_usd_per_vcpu_hour: is 0, as is the price per GiB; only bare_metal may be free of charge"
    fault = labels_fault(host.labels)
    if fault is not None:
        yield f"{place}.labels: {fault.text}"


def _size_faults(place: str, fields: _TypeFields | _HostFields) -> Iterator[str]:
    for name in ("memory", "disk"):
        text = getattr(fields, name)
        try:
            if parse_quantity(text) < MILLI * _MIB:
                yield f"{place}.{name}: {text!r} is less than 1Mi"
        except QuantityError as error:
            yield f"{place}.{name}: {error}"


def _mib(text: str) -> int:
    return parse_quantity(text) // (MILLI * _MIB)


def _guest_type(name: str, fields: _TypeFields) -> GuestType:
    return GuestType(
        name=name,
        vcpus=fields.vcpus,
        memory_mib=_mib(fields.memory),
        disk_mib=_mib(fields.disk),
        allocatable=None if fields.allocatable is None else MappingProxyType(fields.allocatable),
    )


def _host(fields: _HostFields) -> KvmHost:
    capacity_type = parse_capacity_type(fields.capacity_type)
    assert capacity_type is not None, "it was checked"
    return KvmHost(
        name=fields.name,
        zone=fields.zone,
        uri=fields.uri,
        milli_cpus=math.floor(fields.cpus * fields.overcommit.cpu * 1000),
        memory_mib=math.floor(_mib(fields.memory) * fields.overcommit.memory),
        disk_mib=_mib(fields.disk),
        price_usd_per_vcpu_hour=fields.price_usd_per_vcpu_hour,
        price_usd_per_gib_hour=fields.price_usd_per_gib_hour,
        capacity_type=capacity_type,
        labels=MappingProxyType(fields.labels),
    )
