"""Defines what the backend needs of one host's libvirt: domains, volumes, the guest agent.

docs/spec/libvirt-provider.md §2. All methods block and are called on threads. The binding implements them over a
connection, the tests in memory. It decides nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class HostError(Exception):
    """A call to a host failed; the text is libvirt's."""


class HostDown(HostError):
    """The host cannot be reached, or the connection to it broke."""


class HostFull(HostError):
    """The host has no space on its disk."""


class AgentSilent(HostError):
    """The guest agent does not answer, because it does not run yet or does not run any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainRecord:
    """What a domain of ours says about itself, in its metadata; it survives the provider."""

    machine_id: str
    #: Of the Create that defined it.
    operation_id: str
    provider: str
    #: "" while it is bound to none.
    cluster: str = ""
    #: Of the Configure whose bootstrap data is in the seed, or may be; "" after it was removed from there.
    seeded_by: str = ""
    #: Of the latest Configure.
    configured_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFacts:
    """A domain as libvirt lists it."""

    name: str
    uuid: str
    is_active: bool
    vcpus: int
    memory_mib: int
    #: None for domains that are not made by this kind of provider.
    record: DomainRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainPlan:
    """What a domain of ours is defined as."""

    name: str
    uuid: str
    record: DomainRecord
    vcpus: int
    memory_mib: int
    pool: str
    overlay: str
    seed: str
    network: str | None
    firmware: str
    virtualisation: str
    console_log_dir: str | None


class Hypervisor(Protocol):
    """One host's libvirt. Every method may raise HostDown, and HostError for any other failure."""

    def domains(self) -> Sequence[DomainFacts]:
        """Return every domain of the host, those of others included."""
        ...

    def domain(self, name: str) -> DomainFacts | None:
        """Return a domain by name, or None."""
        ...

    def define(self, plan: DomainPlan) -> None:
        """Define a domain, without autostart. One of that name and another UUID is a HostError."""
        ...

    def start(self, name: str) -> None:
        """Start a domain that is off. May raise HostFull."""
        ...

    def request_shutdown(self, name: str) -> None:
        """Press the power button; one that is off already is a success."""
        ...

    def destroy(self, name: str) -> None:
        """Switch a domain off; one that is off already, or gone, is a success."""
        ...

    def undefine(self, name: str) -> None:
        """Remove a domain with its NVRAM, saved state and snapshots; one that is gone is a success."""
        ...

    def write_record(self, name: str, record: DomainRecord) -> None:
        """Replace what a domain says about itself."""
        ...

    def volume_key(self, pool: str, name: str) -> str | None:
        """Return the key of a volume, which no other volume has, or None when there is no such volume."""
        ...

    def make_overlay(self, pool: str, name: str, *, image: str, disk_mib: int) -> None:
        """Make an empty qcow2 volume over an image of the same pool. May raise HostFull."""
        ...

    def write_volume(self, pool: str, name: str, content: bytes) -> None:
        """Write a raw volume from its beginning, in place; make it of this size when it is not there."""
        ...

    def delete_volume(self, pool: str, name: str) -> None:
        """Delete a volume; one that is gone is a success."""
        ...

    def ask_agent(self, name: str, command: str, arguments: Mapping[str, Any], *, seconds: int) -> Any:
        """Return what the guest agent answers. Raises AgentSilent when it does not within `seconds`."""
        ...

    def close(self) -> None:
        """Close the connection; it raises nothing."""
        ...


#: Connects to a URI; the second argument is called, on any thread, with the name of a domain that changed. Raises
#: HostDown.
Connect = Callable[[str, Callable[[str], None]], Hypervisor]
