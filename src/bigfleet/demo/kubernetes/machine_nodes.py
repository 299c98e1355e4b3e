"""Converts the machines of a provider to the Nodes that they boot as.

A machine is a Node of its cluster from the moment its provider reports Configured until it has been drained.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.kubelet import FakeKubelet
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.node_identity import node_labels, node_taints, provider_id
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.objects import NodeTaint
from bigfleet.operator.kubernetes.resources import MACHINE_ID

_SERVING: Final = frozenset({MachineState.CONFIGURED, MachineState.DRAINING})


def node_name(machine: Machine) -> str:
    """Return the name of the machine's Node: what its provider declares, else its id as a DNS label."""
    return machine.node_name or machine.id.replace("/", "-").replace("_", "-").lower()


def nodes_of(machines: Iterable[Machine], cluster: ClusterId) -> dict[str, FakeNode]:
    """Return the Nodes of a cluster by name, as its machines boot them."""
    nodes = {}
    for machine in machines:
        if machine.cluster == cluster and machine.state in _SERVING:
            name = node_name(machine)
            nodes[name] = FakeNode(
                name=name,
                resources=machine.allocatable or machine.resources,
                labels=node_labels(machine),
                annotations={MACHINE_ID: machine.id},
                taints=tuple(NodeTaint(taint.key, taint.value, taint.effect) for taint in node_taints(machine)),
                provider_id=provider_id(machine),
            )
    return nodes


async def follow_machines(
    kubelet: FakeKubelet,
    read: Callable[[], Awaitable[Mapping[str, FakeNode]]],
    *,
    clock: Clock,
    poll_seconds: float = 0.5,
) -> None:
    """Boot and remove machines so that they are those that `read` returns, by name, until this is cancelled.

    `read` stands for the provider: what it names first has booted, what it no longer names has vanished.
    """
    while True:
        wanted = await read()
        await asyncio.gather(*(kubelet.remove_node(name) for name in kubelet.nodes if name not in wanted))
        for name, node in wanted.items():
            if name not in kubelet.nodes:
                kubelet.add_node(node)
        await clock.sleep(poll_seconds)
