"""Indexes the machines by their host, so that no host is acted on under two machine ids.

docs/spec/provider.md §9. Fed by `bigfleet.provider.storage.view` with every committed record. A host that two machines
have already, in a state file of a former version, is shown for both; this module must never choose between them.
"""

from collections import defaultdict
from collections.abc import Callable

#: Returns the name space of a machine's `host_ref`: equal refs in two of them are two hosts.
HostScope = Callable[[str], str]


def one_scope(_machine_id: str) -> str:
    """Return the name space of a backend whose refs are unique over all its machines."""
    return ""


class MachinesByHost:
    """Machine ids by name space and `host_ref`."""

    def __init__(self, scope_of: HostScope) -> None:
        self.scope_of = scope_of
        #: One machine of each host.
        self._first: defaultdict[str, dict[str, str]] = defaultdict(dict)
        #: The other machines, of hosts that have several.
        self._more: dict[tuple[str, str], set[str]] = {}

    def add(self, machine_id: str, ref: str) -> None:
        """Take a machine with a host; an empty ref is no host."""
        if not ref:
            return
        scope = self.scope_of(machine_id)
        first = self._first[scope].setdefault(ref, machine_id)
        if first != machine_id:
            self._more.setdefault((scope, ref), set()).add(machine_id)

    def remove(self, machine_id: str, ref: str) -> None:
        """Forget a machine that was added with this host."""
        if not ref:
            return
        scope = self.scope_of(machine_id)
        more = self._more.get((scope, ref))
        if self._first[scope].get(ref) == machine_id:
            del self._first[scope][ref]
            if more:
                self._first[scope][ref] = more.pop()
        elif more:
            more.discard(machine_id)
        if more is not None and not more:
            del self._more[scope, ref]

    def others(self, machine_id: str, ref: str) -> tuple[str, ...]:
        """Return the other machines that have this host, in order."""
        scope = self.scope_of(machine_id)
        first = self._first[scope].get(ref) if ref else None
        if first is None:
            return ()
        return tuple(sorted({first, *self._more.get((scope, ref), ())} - {machine_id}))


def shared_text(ref: str, others: tuple[str, ...]) -> str:
    """Return the sentence about a host that other machines have."""
    named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return f"host_ref {ref[:260]!r} is already the host of {named}"
