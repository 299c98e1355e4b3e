"""Carries out the steps of operations on one host: each looks before it acts, so that it may be run again.

docs/spec/libvirt-provider.md §3 to §6. Plain functions over a `Hypervisor`, each run as one job of the host's thread.
None of them waits for a guest. A domain or volume that is not ours is never changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bigfleet.provider.backends.libvirt.hypervisor import (
    DomainFacts,
    DomainPlan,
    DomainRecord,
    HostError,
    Hypervisor,
)
from bigfleet.provider.backends.libvirt.names import domain_name, overlay_name, seed_name
from bigfleet.provider.backends.libvirt.seed import seed_image


class NotOurs(Exception):
    """A domain has the name of a machine and is not the one that the operation made; nothing was changed."""


class DomainGone(Exception):
    """The domain of a machine is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A machine on its host: what the steps need to know of it."""

    machine_id: str
    provider: str
    pool: str
    image: str
    disk_mib: int

    @property
    def domain(self) -> str:
        """The name of its domain."""
        return domain_name(self.machine_id)

    @property
    def overlay(self) -> str:
        """Its disk."""
        return overlay_name(self.domain)

    @property
    def seed(self) -> str:
        """What cloud-init reads."""
        return seed_name(self.domain)


def find(hypervisor: Hypervisor, guest: Guest) -> DomainFacts | None:
    """Return the domain of a machine, None when there is none. Raises NotOurs."""
    facts = hypervisor.domain(guest.domain)
    if facts is None:
        return None
    if facts.record is None:
        raise NotOurs(f"domain {facts.name} ({facts.uuid}) was not made by BigFleet; rename or remove it")
    if (facts.record.provider, facts.record.machine_id) != (guest.provider, guest.machine_id):
        raise NotOurs(
            f"domain {facts.name} belongs to machine {facts.record.machine_id} of provider {facts.record.provider};"
            " two providers of one name must not share a host"
        )
    return facts


def find_record(hypervisor: Hypervisor, guest: Guest) -> tuple[DomainFacts, DomainRecord]:
    """Return the domain of a machine and what it says. Raises NotOurs, DomainGone."""
    facts = find(hypervisor, guest)
    if facts is None:
        raise DomainGone(f"domain {guest.domain} is gone: it was removed, or undefined by others")
    assert facts.record is not None, "it is ours"
    return facts, facts.record


# ---- steps -----------------------------------------------------------------------------------------------------------


def create(hypervisor: Hypervisor, guest: Guest, plan: DomainPlan, user_data: bytes) -> None:
    """Make disk, seed and domain of a Create and start it. Raises NotOurs for a domain of another operation."""
    facts = find(hypervisor, guest)
    if facts is not None and facts.uuid != plan.uuid:
        made_by = "" if facts.record is None else facts.record.operation_id
        raise NotOurs(f"domain {facts.name} exists already, made by operation {made_by}")
    if facts is not None and facts.is_active:
        return
    seed = seed_image(instance_id=plan.record.operation_id, host_name=guest.domain, user_data=user_data)
    renew_disk(hypervisor, guest)
    hypervisor.write_volume(guest.pool, guest.seed, seed)
    if facts is None:
        hypervisor.define(plan)
    hypervisor.start(guest.domain)


def renew_disk(hypervisor: Hypervisor, guest: Guest) -> None:
    """Replace the disk of a domain that is off by an empty one over the image."""
    discard_volume(hypervisor, guest, guest.overlay)
    hypervisor.make_overlay(guest.pool, guest.overlay, image=guest.image, disk_mib=guest.disk_mib)


def discard_volume(hypervisor: Hypervisor, guest: Guest, name: str) -> None:
    """Delete a volume of a machine, if it is there. Raises HostError rather than delete the image."""
    key = hypervisor.volume_key(guest.pool, name)
    if key is None:
        return
    if key == hypervisor.volume_key(guest.pool, guest.image):
        raise HostError(f"volume {name} of pool {guest.pool} is the image {guest.image}; it is not deleted")
    hypervisor.delete_volume(guest.pool, name)


def is_active(hypervisor: Hypervisor, guest: Guest) -> bool:
    """Return whether the domain of a machine runs. Raises NotOurs, DomainGone."""
    facts, _record = find_record(hypervisor, guest)
    return facts.is_active


def begin_binding(
    hypervisor: Hypervisor,
    guest: Guest,
    *,
    operation_id: str,
    cluster: str,
    host_name: str,
    user_data: bytes,
    by_agent: bool,
) -> None:
    """Boot a machine from an empty disk with this user data; done already for this operation, it changes nothing.

    By agent, a machine that runs unbound gets the cluster in its record and is used as it is. Else the user data is
    bootstrap data: the record says so before it is written, until `remove_secret`.
    """
    facts, record = find_record(hypervisor, guest)
    if facts.is_active and record.configured_by == operation_id:
        return
    is_unbound = not record.cluster and not record.configured_by
    record = replace(record, cluster=cluster, configured_by=operation_id)
    if by_agent and facts.is_active and is_unbound:
        hypervisor.write_record(guest.domain, record)
        return
    # First: while it runs with the record of this operation, all of this was done.
    hypervisor.destroy(guest.domain)
    hypervisor.write_record(guest.domain, record if by_agent else replace(record, seeded_by=operation_id))
    discard_volume(hypervisor, guest, guest.overlay)
    seed = seed_image(instance_id=operation_id, host_name=host_name, user_data=user_data)
    hypervisor.write_volume(guest.pool, guest.seed, seed)
    renew_disk(hypervisor, guest)
    hypervisor.start(guest.domain)


def remove_secret(hypervisor: Hypervisor, guest: Guest, host_name: Callable[[DomainRecord], str]) -> bool:
    """Overwrite the bootstrap data of a seed, and return whether there was any.

    The instance keeps its id: cloud-init takes a later boot for one of the same instance, and does nothing again.
    """
    facts = find(hypervisor, guest)
    if facts is None or facts.record is None or not facts.record.seeded_by:
        return False
    record = facts.record
    seed = seed_image(instance_id=record.configured_by, host_name=host_name(record), user_data=b"")
    hypervisor.write_volume(guest.pool, guest.seed, seed)
    hypervisor.write_record(guest.domain, replace(record, seeded_by=""))
    return True


def request_shutdown(hypervisor: Hypervisor, guest: Guest) -> None:
    """Press the power button of a machine that runs. Raises NotOurs, DomainGone."""
    if is_active(hypervisor, guest):
        hypervisor.request_shutdown(guest.domain)


def reset(hypervisor: Hypervisor, guest: Guest) -> None:
    """Switch a machine off, remove its disk, overwrite its seed, and unbind it: nothing of its cluster is left."""
    _facts, record = find_record(hypervisor, guest)
    hypervisor.destroy(guest.domain)
    discard_volume(hypervisor, guest, guest.overlay)
    seed = seed_image(instance_id=record.operation_id, host_name=guest.domain, user_data=b"")
    hypervisor.write_volume(guest.pool, guest.seed, seed)
    # Last: a domain without a cluster is clean.
    hypervisor.write_record(guest.domain, replace(record, cluster="", seeded_by="", configured_by=""))


def delete(hypervisor: Hypervisor, guest: Guest) -> None:
    """Remove a machine's domain, disk and seed; what is gone already is a success. Raises NotOurs."""
    facts = find(hypervisor, guest)
    if facts is not None:
        hypervisor.destroy(guest.domain)
    _discard_all(hypervisor, guest)
    # Last: while there is a domain, the machine has a host.
    if facts is not None:
        hypervisor.undefine(guest.domain)


def _discard_all(hypervisor: Hypervisor, guest: Guest) -> None:
    discard_volume(hypervisor, guest, guest.overlay)
    if hypervisor.volume_key(guest.pool, guest.seed) is not None:
        # What a deleted file held stays on the disk.
        hypervisor.write_volume(guest.pool, guest.seed, seed_image(instance_id="", host_name="", user_data=b""))
        discard_volume(hypervisor, guest, guest.seed)


def discard_leftovers(hypervisor: Hypervisor, guest: Guest, is_wanted: Callable[[], bool]) -> None:
    """Remove volumes without a domain, unless a Create has begun that needs them."""
    if not is_wanted() and hypervisor.domain(guest.domain) is None:
        _discard_all(hypervisor, guest)


def start_again(hypervisor: Hypervisor, guest: Guest) -> None:
    """Start a machine whose domain is off. Raises DomainGone, NotOurs."""
    if not is_active(hypervisor, guest):
        hypervisor.start(guest.domain)
