"""Finds hosts that an inventory names under a second machine id (docs/spec/provider.md §9).

A host belongs to the machine that has it in the state. If none has, and the inventory names it under several ids, it
belongs to none of them. This module must not change a record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bigfleet.provider.backend import Slot
from bigfleet.provider.records.validate import Fault, Reason
from bigfleet.provider.storage.machines_by_host import MachinesByHost, shared_text


@dataclass(slots=True)
class NamedHosts:
    """The hosts that one inventory names, those of refused entries too."""

    hosts: MachinesByHost
    #: Ids by name space and host_ref.
    _ids: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def take(self, machine_id: str, fact: Slot) -> None:
        """Take an entry; one that names no host is passed over."""
        ref = getattr(fact, "host_ref", None)
        if isinstance(ref, str) and ref:
            ids = self._ids.setdefault((self.hosts.scope_of(machine_id), ref), [])
            if machine_id not in ids:
                ids.append(machine_id)

    def faults(self) -> Iterable[tuple[str, Fault]]:
        """Return each id that names a host of another one, with the reason."""
        for (_scope, ref), ids in self._ids.items():
            for machine_id in ids:
                owners = self.hosts.others(machine_id, ref)
                if owners:
                    yield machine_id, Fault(Reason.SHARED_HOST, shared_text(ref, owners))
                elif len(ids) > 1 and not self._is_owner(machine_id, ref, ids):
                    others = ", ".join(each for each in ids if each != machine_id)
                    text = f"the inventory names host_ref {ref[:260]!r} for {machine_id} and for {others}"
                    yield machine_id, Fault(Reason.SHARED_HOST, text[:2000])

    def _is_owner(self, machine_id: str, ref: str, ids: list[str]) -> bool:
        """Return whether the state shows the host for this id: the other ids then see it as another machine's."""
        other = next(each for each in ids if each != machine_id)
        return self.hosts.others(other, ref) == (machine_id,)
