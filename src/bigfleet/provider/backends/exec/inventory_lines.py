"""Reads an inventory as JSON lines while a program writes it: slots, hosts, and the line that ends it.

docs/spec/exec-provider.md §4. Without its last line, or with a line that is not understood, there is no inventory at
all: a truncated one must never look like a small fleet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from bigfleet.files.field_faults import field_fault
from bigfleet.provider.backend import ExistingHost, Slot
from bigfleet.provider.inventory.offerings import capacity_type_of
from bigfleet.provider.operations.invoke import FACTS_MAX
from bigfleet.provider.storage.codec import intern_map

T = TypeVar("T")
LINE_BYTES_MAX: Final = 64 << 10
_UNREAD_PREFIXES_MAX: Final = 1000


class InventoryRefused(Exception):
    """The inventory is not whole or not understood; the text names the line."""


class _SlotLine(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    instance_type: str
    zone: str
    capacity_type: str = "on_demand"
    resources: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    labels: dict[str, str] = {}
    price_usd_per_hour: float = 0.0
    #: Within one hour.
    interruption_probability: float = 0.0
    fixed: bool = False


class _HostLine(msgspec.Struct, forbid_unknown_fields=True):
    """A host; what it leaves out is as the slot of its id says."""

    id: str
    host_ref: str
    node_name: str = ""
    #: The cluster in which its node is Ready.
    ready_in: str = ""
    instance_type: str | None = None
    zone: str | None = None
    capacity_type: str | None = None
    resources: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    price_usd_per_hour: float | None = None
    interruption_probability: float | None = None
    fixed: bool | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    slot: _SlotLine | None = None
    host: _HostLine | None = None
    end: bool = False
    unread_prefixes: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryRead:
    """One whole inventory."""

    facts: tuple[Slot, ...]
    unread_prefixes: tuple[str, ...]
    #: Cluster in which the node of a machine is Ready, by machine id; absent for none.
    ready_in: Mapping[str, str]


class InventoryLines:
    """Takes bytes as they come, then gives the inventory."""

    def __init__(self, offered: Callable[[str], Slot | None] = lambda _id: None) -> None:
        """`offered` returns the slot of an id that is offered from elsewhere."""
        self._offered = offered
        self._rest = b""
        self._number = 0
        self._slots: dict[str, Slot] = {}
        #: What the kit refuses by itself, such as an id that is named twice.
        self._others: list[Slot] = []
        self._hosts: list[tuple[int, _HostLine]] = []
        self._unread_prefixes: tuple[str, ...] = ()
        self._is_ended = False
        self._decoder = msgspec.json.Decoder(_Line)

    def take(self, data: bytes) -> None:
        """Take the next bytes. Raises InventoryRefused."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_line(line)
        if len(self._rest) > LINE_BYTES_MAX:
            raise InventoryRefused(f"inventory line {self._number + 1} is longer than {LINE_BYTES_MAX >> 10} KiB")

    def read(self) -> InventoryRead:
        """Return the inventory. Raises InventoryRefused when its last line did not come."""
        if self._rest.strip():
            self._take_line(self._rest)
        if not self._is_ended:
            raise InventoryRefused(f'inventory ended after {self._number} lines without {{"end": true}}')
        return InventoryRead(
            facts=(*self._slots.values(), *self._others, *(self._host(*each) for each in self._hosts)),
            unread_prefixes=self._unread_prefixes,
            ready_in={line.id: line.ready_in for _number, line in self._hosts if line.ready_in},
        )

    def _take_line(self, content: bytes) -> None:
        self._number += 1
        if not content.strip():
            return
        if self._is_ended:
            raise InventoryRefused(f"inventory line {self._number} comes after the end")
        if self._number > FACTS_MAX:
            raise InventoryRefused(f"inventory has more than {FACTS_MAX:,} lines")
        try:
            line = self._decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InventoryRefused(
                f"inventory line {self._number} is not understood: {field_fault(error, _Line)}"
            ) from error
        if (line.slot is not None) + (line.host is not None) + line.end != 1:
            raise InventoryRefused(f"inventory line {self._number} must have one of slot, host and end")
        if line.unread_prefixes is not None and not line.end:
            raise InventoryRefused(f"inventory line {self._number}: unread_prefixes belongs to the line of the end")
        if line.slot is not None:
            self._take_slot(line.slot)
        elif line.host is not None:
            self._hosts.append((self._number, line.host))
        else:
            self._is_ended = True
            self._unread_prefixes = tuple(line.unread_prefixes or ())
            if len(self._unread_prefixes) > _UNREAD_PREFIXES_MAX:
                raise InventoryRefused(f"unread_prefixes has more than {_UNREAD_PREFIXES_MAX} entries")

    def _take_slot(self, line: _SlotLine) -> None:
        resources, allocatable = _shapes(line.resources, line.allocatable)
        slot = Slot(
            id=line.id,
            instance_type=line.instance_type,
            zone=line.zone,
            capacity_type=capacity_type_of(line.capacity_type),
            resources=resources,
            allocatable=allocatable,
            labels=intern_map(line.labels),
            price_usd_per_hour=line.price_usd_per_hour,
            interruption_probability=line.interruption_probability,
            fixed=line.fixed,
        )
        if line.id in self._slots:
            self._others.append(slot)
        else:
            self._slots[line.id] = slot

    def _host(self, number: int, line: _HostLine) -> ExistingHost:
        slot = self._slots.get(line.id) or self._offered(line.id)
        if slot is None:
            slot = self._whole(number, line)
        has_shape = line.resources is not None or line.allocatable is not None
        resources, allocatable = _shapes(line.resources, line.allocatable) if has_shape else (None, None)
        return ExistingHost(
            id=line.id,
            host_ref=line.host_ref,
            node_name=line.node_name,
            in_cluster=line.ready_in,
            instance_type=_first(line.instance_type, slot.instance_type),
            zone=_first(line.zone, slot.zone),
            capacity_type=slot.capacity_type if line.capacity_type is None else capacity_type_of(line.capacity_type),
            resources=_first(resources, slot.resources),
            allocatable=_first(allocatable, slot.allocatable),
            labels=slot.labels if line.labels is None else intern_map(line.labels),
            price_usd_per_hour=_first(line.price_usd_per_hour, slot.price_usd_per_hour),
            interruption_probability=_first(line.interruption_probability, slot.interruption_probability),
            fixed=_first(line.fixed, slot.fixed),
        )

    def _whole(self, number: int, line: _HostLine) -> Slot:
        """Return what a host without a slot must say by itself."""
        missing = [name for name in ("instance_type", "zone") if getattr(line, name) is None]
        if missing:
            text = f"{line.id[:253]!r} has no {missing[0]}, and no slot of that id is offered"
            raise InventoryRefused(f"inventory line {number}: host {text}")
        assert line.instance_type is not None, "checked above"
        assert line.zone is not None, "checked above"
        return Slot(
            id=line.id,
            instance_type=line.instance_type,
            zone=line.zone,
            capacity_type=capacity_type_of(line.capacity_type or "on_demand"),
        )


def _shapes(
    resources: dict[str, str] | None, allocatable: dict[str, str] | None
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return both; one of the two says both, unless both are given."""
    return (
        intern_map(resources if resources is not None else allocatable or {}),
        intern_map(allocatable if allocatable is not None else resources or {}),
    )


def _first(own: T | None, other: T) -> T:
    return other if own is None else own
