"""Checks a run's fleet against its pods: which pods have no place, and what a packer would pay for all of them.

The pods are those of the simulated clusters, the machines those that the shards list; a shard's claims are not used.
The check takes seconds for thousands of pods, so it runs in a thread, at most every `CHECK_SECONDS` and for at most a
fifth of the time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bigfleet.cli.up.observer import FleetFigures, Watcher
from bigfleet.demo.cluster import SimulatedCluster
from bigfleet.model.clock import Clock
from bigfleet.model.machine import Machine
from bigfleet.model.states import BOUND_STATES, MachineState
from bigfleet.operator.requests import CapacityRequest
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.rpc.wire.convert_machine import machine_from_wire
from bigfleet.sim.packing.comparison import PackedCost, packed_cost
from bigfleet.sim.pods.placement import PodCounts, count_unplaced

CHECK_SECONDS: Final = 2.0
#: The live view waits this many times as long as the last check took.
_REST: Final = 4.0
#: What costs nothing.
_UNPAID: Final = (MachineState.SPECULATIVE, MachineState.FAILED)
#: The first check follows the first answer of the shards this soon.
_WAIT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCheck:
    """The pods of all clusters against the machines of one moment."""

    by_cluster: Mapping[str, PodCounts] = field(default_factory=dict)
    #: Bound to the clusters, in any state.
    machines: int = 0
    #: The price of all machines that exist, idle ones included.
    usd_per_hour: float = 0.0
    #: What a packer takes; None when no machine of the fleet has a price.
    packed: PackedCost | None = None

    @property
    def pods(self) -> int:
        """Of all clusters."""
        return sum(counts.pods for counts in self.by_cluster.values())

    @property
    def unplaced(self) -> int:
        """Without a place on Configured machines, of all clusters."""
        return sum(counts.unplaced for counts in self.by_cluster.values())

    @property
    def booting(self) -> int:
        """Those of `unplaced` that have a place on machines that boot, of all clusters."""
        return sum(counts.booting for counts in self.by_cluster.values())

    @property
    def ratio(self) -> float | None:
        """What the fleet costs as a multiple of what the packer pays; None when the two do not host the same pods."""
        if self.packed is None or self.unplaced or self.packed.unhosted or not self.packed.usd_per_hour:
            return None
        return self.usd_per_hour / self.packed.usd_per_hour


def check_fleet(
    pods: Mapping[str, Sequence[CapacityRequest]],
    figures: FleetFigures,
    order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
) -> FleetCheck:
    """Place each cluster's pods on its machines, and let a packer pack them on the machines of the whole fleet."""
    machines = [machine_from_wire(message)[0] for message in figures.inventory]
    configured: defaultdict[str, list[Machine]] = defaultdict(list)
    booting: defaultdict[str, list[Machine]] = defaultdict(list)
    for machine in machines:
        if machine.state is MachineState.CONFIGURED and machine.id not in figures.unjoined_ids:
            configured[machine.cluster].append(machine)
        elif machine.state is MachineState.CONFIGURING:
            booting[machine.cluster].append(machine)
        elif machine.state is MachineState.CREATING and machine.id in figures.provisioning:
            booting[figures.provisioning[machine.id]].append(machine)
    bound = [machine for machine in machines if machine.state in BOUND_STATES and machine.cluster in pods]
    return FleetCheck(
        by_cluster={
            cluster: count_unplaced(wanted, machines=configured[cluster], booting=booting[cluster], order=order)
            for cluster, wanted in pods.items()
        },
        machines=len(bound),
        usd_per_hour=sum(m.price_usd_per_hour for m in machines if m.state not in _UNPAID),
        packed=packed_cost(pods, machines) if any(machine.price_usd_per_hour for machine in machines) else None,
    )


class FleetChecker:
    """Checks the fleet again and again, and keeps the last result."""

    def __init__(self, clusters: Mapping[str, SimulatedCluster], observer: Watcher, clock: Clock) -> None:
        self._clusters = clusters
        self._observer = observer
        self._clock = clock
        #: None before the first check.
        self.last: FleetCheck | None = None
        self._last_at_seconds = 0.0

    @property
    def age_seconds(self) -> float:
        """How long ago the last check looked at pods and machines."""
        return self._clock.monotonic_seconds() - self._last_at_seconds

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            started_seconds = self._clock.monotonic_seconds()
            if not self._observer.answers:
                await self._clock.sleep(_WAIT_SECONDS)
                continue
            await self.check()
            took_seconds = self._clock.monotonic_seconds() - started_seconds
            await self._clock.sleep(max(CHECK_SECONDS, took_seconds * _REST))

    async def check(self) -> FleetCheck:
        """Check once, off the loop."""
        at_seconds = self._clock.monotonic_seconds()
        pods = {name: cluster.requests() for name, cluster in self._clusters.items()}
        self.last = await asyncio.to_thread(check_fleet, pods, self._observer.figures)
        self._last_at_seconds = at_seconds
        return self.last
