"""Reports to the shard the state of each machine's Node (docs/spec/operator.md §10).

A change of name or readiness is sent at once. The requests of the pods on a Node change with every pod, so they are
coalesced: for them a machine's status is sent at most every 30 seconds. Nothing is sent for a machine that the shard
has not named, nor for one that several Nodes match. A status never names more resources than the shard takes, because
the shard ends the session of a cluster that sends one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NodeStatus
from bigfleet.model.vector import format_vector
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.pod_index import PodsByNode, PodsOnNode
from bigfleet.operator.resource_names import within_bound

log = structlog.get_logger(__name__)

#: Least time between two statuses of a machine that differ in what its pods request.
LOAD_SECONDS: Final = 30.0
#: How often changed loads are looked at.
_TICK_SECONDS: Final = 5.0
#: Of the resources that a status leaves out, so many are logged.
_LOGGED_MAX: Final = 10


@dataclass(slots=True)
class _Sent:
    status: NodeStatus
    at_seconds: float
    #: Resources that pods of the Node request and that the status does not name.
    left_out: frozenset[str]


class NodeStatuses:
    """The statuses of all machines of the cluster. Hears of ties from the matcher, of loads from the pod index."""

    def __init__(
        self, *, nodes: NodeMatcher, pods: PodsByNode, clock: Clock, send: Callable[[NodeStatus], None]
    ) -> None:
        self._nodes = nodes
        self._pods = pods
        self._clock = clock
        self._send = send
        self._sent: dict[str, _Sent] = {}
        #: Machines whose load has changed since it was sent.
        self._changed: set[str] = set()
        nodes.listen(self._node_changed)

    async def run(self) -> None:
        """Send changed loads until cancelled."""
        while True:
            await self._clock.sleep(_TICK_SECONDS)
            self._send_loads()

    def all(self) -> list[NodeStatus]:
        """Return the status of every machine that has a Node or should have one, in order; they count as sent.

        A machine in service without a Node is reported with an empty name: its Node may have gone unseen.
        """
        machine_ids = {m for m in self._nodes.tied_machines() if self._nodes.is_reported(m)}
        machine_ids.update(m for m in self._nodes.machines_in_service() if not self._nodes.ambiguous(m))
        self._sent = {m: sent for m, sent in self._sent.items() if m in machine_ids}
        return [self._note(machine_id) for machine_id in sorted(machine_ids)]

    def _node_changed(self, machine_id: str) -> None:
        known = self._sent.get(machine_id)
        if not self._nodes.is_reported(machine_id):
            if known is not None and known.status.node_name and self._nodes.node_of(machine_id) is None:
                self._send(self._note(machine_id))
            if self._nodes.node_of(machine_id) is None:
                self._sent.pop(machine_id, None)
            return
        node = self._nodes.node_of(machine_id)
        if node is None and (known is None or self._nodes.ambiguous(machine_id)):
            return
        name, ready = (node.metadata.name, node.is_ready) if node is not None else ("", False)
        if known is None or (known.status.node_name, known.status.ready) != (name, ready):
            self._send(self._note(machine_id))

    def _send_loads(self) -> None:
        for name in self._pods.take_changed():
            machine_id = self._nodes.machine_of(name)
            if machine_id is not None and machine_id in self._sent:
                self._changed.add(machine_id)
        due_seconds = self._clock.monotonic_seconds() - LOAD_SECONDS
        for machine_id in sorted(self._changed):
            known = self._sent.get(machine_id)
            if known is None or self._nodes.node_of(machine_id) is None:
                self._changed.discard(machine_id)
            elif known.at_seconds <= due_seconds:
                former = known.status
                status = self._note(machine_id)
                if (status.requested, status.pods) != (former.requested, former.pods):
                    self._send(status)

    def _note(self, machine_id: str) -> NodeStatus:
        """Return the status of this moment, and remember it as sent."""
        node = self._nodes.node_of(machine_id)
        left_out: frozenset[str] = frozenset()
        if node is None:
            status = NodeStatus(
                machine_id=machine_id, node_name="", ready=False, observed_unix_nanos=self._clock.unix_nanos()
            )
        else:
            load = self._pods.on(node.metadata.name)
            requested, left_out = _requested_on(load)
            status = NodeStatus(
                machine_id=machine_id,
                node_name=node.metadata.name,
                ready=node.is_ready,
                observed_unix_nanos=self._clock.unix_nanos(),
                requested=format_vector(requested),
                pods=len(load.pods),
            )
        known = self._sent.get(machine_id)
        if left_out and (known is None or known.left_out != left_out):
            log.warning(
                "operator.status_resources_left_out",
                machine=machine_id,
                node=status.node_name,
                count=len(left_out),
                resources=sorted(left_out)[:_LOGGED_MAX],
                advice="the shard takes 32 resources of a Node: remove some from the requests of its pods",
            )
        self._changed.discard(machine_id)
        self._sent[machine_id] = _Sent(status, self._clock.monotonic_seconds(), left_out)
        return status


def _requested_on(load: PodsOnNode) -> tuple[Mapping[str, int], frozenset[str]]:
    """Return what the pods request in sum, of as many resources as a status may name, and the other resources."""
    everything = {name: milli for name, milli in load.requested.items() if milli}
    requested = within_bound(everything, load.requests.values())
    return requested, frozenset(everything.keys() - requested.keys())
