"""Decides which Nodes of the cluster BigFleet did not provide: pods that run there need no capacity from it.

docs/spec/operator.md §11. A machine without claims is reclaimed, and its pods are evicted. Therefore a Node counts as
BigFleet's in case of doubt. It is unmanaged only if nothing ties it to a machine and it cannot be a machine that has
not joined yet. A Node that was tied once stays BigFleet's until it is deleted or this process ends. Each change of the
result names the Node, so that its pods are handled again.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import (
    NodeObject,
    NodeSpec,
    ObjectMeta,
    UpcomingNode,
    UpcomingNodeSpec,
    UpcomingNodeStatus,
)
from bigfleet.operator.kubernetes.resources import MACHINE_ID, NODES
from bigfleet.operator.kubernetes.timestamps import unix_seconds
from bigfleet.operator.nodes.provider_ids import comparable_part, last_part

#: What the API server said of a Node is taken for so long, so that it is not asked again for each pod of the Node.
CONFIRMED_SECONDS: Final = 5.0
#: Phases of machines that are in service for no need: no Node is awaited for them.
_PHASES_OUT_OF_SERVICE: Final = ("Failed", "Drained")


@dataclass(slots=True)
class _KnownNode:
    """What is read of a Node."""

    uid: str
    created: str
    provider_id: str
    #: Whether it carries the machine-id label or annotation.
    is_marked: bool
    is_cordoned: bool
    #: Whether it has been tied to a machine at any time.
    was_managed: bool = False
    #: When the API server last confirmed all of it.
    confirmed_seconds: float | None = None

    def says_the_same_as(self, other: "_KnownNode") -> bool:
        return (
            self.uid == other.uid
            and self.provider_id == other.provider_id
            and self.is_marked == other.is_marked
            and self.is_cordoned == other.is_cordoned
        )


@dataclass(frozen=True, slots=True)
class _Machine:
    """What is read of an UpcomingNode."""

    provider_id: str
    node_name: str
    created: str

    @property
    def is_awaited(self) -> bool:
        return not self.node_name


class UnmanagedNodes:
    """The Nodes that BigFleet did not provide; calls `on_change` with each Node for which the answer changes."""

    def __init__(self, on_change: Callable[[str], None], *, api: KubernetesApi, clock: Clock) -> None:
        self._on_change = on_change
        self._api = api
        self._clock = clock
        self._nodes: dict[str, _KnownNode] = {}
        self._nodes_by_last_part: dict[str, set[str]] = {}
        self._machines: dict[str, _Machine] = {}
        #: When each machine without a Node was announced, as the API server writes it.
        self._awaited: dict[str, str] = {}
        #: The earliest of `_awaited`; None when no machine is awaited.
        self._awaited_since: str | None = None
        #: How many machines have this provider id, end like this one, or name this Node as theirs.
        self._provider_ids: Counter[str] = Counter()
        self._last_parts: Counter[str] = Counter()
        self._named: Counter[str] = Counter()
        #: All and only the Nodes that are unmanaged and not cordoned.
        self._unmanaged: set[str] = set()
        self.nodes_listener = NodeListener(self)
        self.machines_listener = UpcomingNodeListener(self)

    def __len__(self) -> int:
        """Return how many Nodes are unmanaged and not cordoned."""
        return len(self._unmanaged)

    def __contains__(self, node_name: str) -> bool:
        """Return whether a Node is known, unmanaged and not cordoned.

        A cordoned Node is about to be emptied, and its pods need room elsewhere.
        """
        return node_name in self._unmanaged

    def age_seconds(self, node_name: str) -> float:
        """Return how long ago a Node was created, by the API server's clock; 0 for one that is not known."""
        known = self._nodes.get(node_name)
        created = unix_seconds(known.created) if known is not None else None
        return 0.0 if created is None else self._clock.unix_nanos() / NANOS_PER_SECOND - created

    async def confirm(self, node_name: str) -> bool:
        """Ask the API server whether a Node is still as it is known; the cache may be behind. Raises ApiError."""
        known = self._nodes.get(node_name)
        if known is None or node_name not in self._unmanaged:
            return False
        now_seconds = self._clock.monotonic_seconds()
        if known.confirmed_seconds is not None and now_seconds - known.confirmed_seconds < CONFIRMED_SECONDS:
            return True
        try:
            stored = await self._api.get(NODES, node_name)
        except ApiError as error:
            if error.is_not_found:
                return False
            raise
        if not known.says_the_same_as(_known_of(stored)):
            return False
        known.confirmed_seconds = now_seconds
        # Its watch may have said something else meanwhile.
        return self._nodes.get(node_name) is known and node_name in self._unmanaged

    # ---- changes ------------------------------------------------------------------------------------------------

    def put_node(self, stored: NodeObject) -> None:
        """Take a Node in."""
        name = stored.metadata.name
        new, known = _known_of(stored), self._nodes.get(name)
        if known is not None and known.says_the_same_as(new):
            return
        if known is not None:
            new.was_managed = known.was_managed and known.uid == new.uid
            _discard(self._nodes_by_last_part, last_part(known.provider_id), name)
        self._nodes[name] = new
        if new.provider_id:
            self._nodes_by_last_part.setdefault(last_part(new.provider_id), set()).add(name)
        self._judge((name,))

    def remove_node(self, name: str) -> None:
        """Drop a Node: its pods count until their cluster has removed them."""
        known = self._nodes.pop(name, None)
        if known is not None:
            _discard(self._nodes_by_last_part, last_part(known.provider_id), name)
            self._judge((name,))

    def put_machine(self, stored: UpcomingNode) -> None:
        """Take an UpcomingNode in."""
        name, reference = stored.metadata.name, stored.status.node_ref
        new = _Machine(
            provider_id=stored.status.provider_id,
            node_name=reference.name if reference is not None else "",
            created=stored.metadata.creation_timestamp or "",
        )
        known = self._machines.get(name)
        if known != new:
            self._count(known, -1)
            self._machines[name] = new
            self._count(new, 1)
        is_awaited = new.is_awaited and stored.status.phase not in _PHASES_OUT_OF_SERVICE
        self._await(name, new.created if is_awaited else None)
        self._judge(self._nodes_of(known) | self._nodes_of(new))

    def remove_machine(self, name: str) -> None:
        """Drop an UpcomingNode."""
        known = self._machines.pop(name, None)
        self._count(known, -1)
        self._await(name, None)
        self._judge(self._nodes_of(known))

    def _count(self, machine: _Machine | None, step: int) -> None:
        if machine is None:
            return
        for counter, key in (
            (self._provider_ids, machine.provider_id),
            (self._last_parts, comparable_part(machine.provider_id)),
            (self._named, machine.node_name),
        ):
            if key:
                counter[key] += step
                if not counter[key]:
                    del counter[key]

    def _nodes_of(self, machine: _Machine | None) -> set[str]:
        """Return the Nodes that a machine may be tied to."""
        if machine is None:
            return set()
        found = self._nodes_by_last_part.get(last_part(machine.provider_id), set())
        return found | {machine.node_name} if machine.node_name else set(found)

    def _await(self, name: str, created: str | None) -> None:
        """Note since when a machine is awaited, None when it is not."""
        if created == self._awaited.get(name):
            return
        if created is None:
            del self._awaited[name]
        else:
            self._awaited[name] = created
        since = min(self._awaited.values(), default=None)
        if since != self._awaited_since:
            self._awaited_since = since
            self._judge([name for name, node in self._nodes.items() if not node.was_managed])

    # ---- the answer ---------------------------------------------------------------------------------------------

    def _judge(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            node = self._nodes.get(name)
            if node is not None and not node.was_managed:
                node.was_managed = self._is_managed(name, node)
            is_unmanaged = (
                node is not None and not node.was_managed and not node.is_cordoned and not self._may_be_awaited(node)
            )
            if is_unmanaged != (name in self._unmanaged):
                (self._unmanaged.add if is_unmanaged else self._unmanaged.discard)(name)
                self._on_change(name)

    def _is_managed(self, name: str, node: _KnownNode) -> bool:
        """Return whether something ties the Node to a machine, by the rules by which the operator ties them."""
        part = last_part(node.provider_id) if "/" in node.provider_id else ""
        return (
            node.is_marked or name in self._named or node.provider_id in self._provider_ids or part in self._last_parts
        )

    def _may_be_awaited(self, node: _KnownNode) -> bool:
        """Return whether the Node could be that of a machine without one: no machine joins before it is announced."""
        return self._awaited_since is not None and (not node.created or node.created >= self._awaited_since)


class NodeListener:
    """Hears Nodes for `UnmanagedNodes`."""

    def __init__(self, nodes: UnmanagedNodes) -> None:
        self._nodes = nodes

    def put(self, stored: NodeObject, former: NodeObject | None) -> None:
        """Take a Node in."""
        self._nodes.put_node(stored)

    def remove(self, former: NodeObject) -> None:
        """Drop a Node."""
        self._nodes.remove_node(former.metadata.name)


class UpcomingNodeListener:
    """Hears UpcomingNodes for `UnmanagedNodes`."""

    def __init__(self, nodes: UnmanagedNodes) -> None:
        self._nodes = nodes

    def put(self, stored: UpcomingNode, former: UpcomingNode | None) -> None:
        """Take an UpcomingNode in."""
        self._nodes.put_machine(stored)

    def remove(self, former: UpcomingNode) -> None:
        """Drop an UpcomingNode."""
        self._nodes.remove_machine(former.metadata.name)


def reduced_node(node: NodeObject) -> NodeObject:
    """Return a Node with what is read here alone; a transform of a Reflector."""
    return NodeObject(
        metadata=_reduced_metadata(node.metadata),
        spec=NodeSpec(provider_id=node.spec.provider_id, unschedulable=node.spec.unschedulable),
    )


def reduced_upcoming_node(stored: UpcomingNode) -> UpcomingNode:
    """Return an UpcomingNode with what is read here alone; a transform of a Reflector."""
    status = stored.status
    return UpcomingNode(
        metadata=_reduced_metadata(stored.metadata),
        spec=UpcomingNodeSpec(),
        status=UpcomingNodeStatus(phase=status.phase, node_ref=status.node_ref, provider_id=status.provider_id),
    )


def _reduced_metadata(metadata: ObjectMeta) -> ObjectMeta:
    def only_machine_id(found: dict[str, str] | None) -> dict[str, str] | None:
        return {MACHINE_ID: found[MACHINE_ID]} if found and MACHINE_ID in found else None

    return ObjectMeta(
        name=metadata.name,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        creation_timestamp=metadata.creation_timestamp,
        labels=only_machine_id(metadata.labels),
        annotations=only_machine_id(metadata.annotations),
    )


def _known_of(node: NodeObject) -> _KnownNode:
    metadata = node.metadata
    return _KnownNode(
        uid=metadata.uid,
        created=metadata.creation_timestamp or "",
        provider_id=node.spec.provider_id,
        is_marked=MACHINE_ID in (metadata.labels or {}) or MACHINE_ID in (metadata.annotations or {}),
        is_cordoned=node.spec.unschedulable,
    )


def _discard(sets: dict[str, set[str]], key: str, name: str) -> None:
    found = sets.get(key)
    if found is not None:
        found.discard(name)
        if not found:
            del sets[key]
