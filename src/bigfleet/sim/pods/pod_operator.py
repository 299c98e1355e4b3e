"""Simulates the operator of a cluster whose demand is its pods and whose drains evict them.

The pods are Kubernetes' and outlive the operator. It must never drain what it was not asked to, nor a node whose pods
would not fit elsewhere, unless a higher priority takes it.
"""

from dataclasses import replace
from typing import Any

from bigfleet.demo.cluster import SimulatedCluster
from bigfleet.model import labels as keys
from bigfleet.model.frames import (
    ComingNodes,
    DrainForecast,
    DrainForecastRequest,
    DrainOutcome,
    ForecastOutcome,
    NeedStatusUpdate,
    NodeStatus,
    RollUp,
)
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.model.vector import format_vector
from bigfleet.operator.drains import DrainRecord
from bigfleet.sim.pods.cluster_pods import PodCluster
from bigfleet.sim.pods.evictions import cause_of, is_voluntary
from bigfleet.sim.pods.waiting import WaitingPods, with_waiting


class PodOperator(SimulatedCluster):
    """One process of the operator, over pods that it does not own."""

    def __init__(self, pods: PodCluster, **given: Any) -> None:
        super().__init__(**given)
        self.pods = pods
        self.waiting = WaitingPods(pods, given["clock"])

    def roll_up(self) -> RollUp:
        """Return the demand: every pod, bound or not, and once more those that wait though they are met."""
        rolled_up = super().roll_up()
        return replace(rolled_up, needs=with_waiting(rolled_up.needs, self.waiting.reported().values()))

    def need_status(self, update: NeedStatusUpdate) -> None:
        """Note which rows are called met."""
        super().need_status(update)
        self.waiting.heard(update)

    def drain_forecast(self, request: DrainForecastRequest) -> None:
        """Drain the nodes on paper, and say of which the pods would fit nowhere else."""
        coming = [
            _machine_of(kind, f"coming-{position}-{number}")
            for position, kind in enumerate(request.comes)
            for number in range(kind.count)
        ]
        found = self.pods.forecast(request.machine_ids, coming)
        self.client.forecast_made(
            DrainForecast(
                request_id=request.request_id,
                outcome=ForecastOutcome.FITS if found is None else ForecastOutcome.WOULD_NOT_FIT,
                machine_id="" if found is None else found[0],
                message="" if found is None else f"{found[1]} pods fit on no other node",
            )
        )

    def drain_started(self, drain: DrainRecord) -> None:
        """Cordon the node and evict its pods, unless the reclaim is voluntary and they fit nowhere else."""
        if self._has_node(drain.machine_id):
            stranded = self._evict(drain)
            if stranded:
                self._finish(drain, DrainOutcome.WOULD_NOT_FIT, f"{stranded} pods fit on no other node")
                return
        super().drain_started(drain)

    def _evict(self, drain: DrainRecord) -> int:
        """Cordon a node and evict its pods; return how many have no other place, for which nothing is done."""
        node = self.pods.nodes.get(drain.machine_id)
        if node is None or node.is_cordoned:
            return 0
        stranded = len(self.pods.do_not_fit(drain.machine_id)) if is_voluntary(drain) else 0
        if not stranded:
            self.pods.drain(drain.machine_id, cause_of(drain))
        return stranded

    def _status_of(self, machine_id: str, node_name: str) -> NodeStatus:
        requested, pods = self.pods.requested(machine_id)
        return replace(super()._status_of(machine_id, node_name), requested=format_vector(requested), pods=pods)


def _machine_of(kind: ComingNodes, name: str) -> Machine:
    """Return a machine whose node would be of this kind; what DaemonSets take of it is left out already."""
    return Machine(
        id=MachineId(name),
        state=MachineState.CREATING,
        instance_type=kind.labels.get(keys.INSTANCE_TYPE, ""),
        zone=kind.labels.get(keys.ZONE, ""),
        labels=dict(kind.labels),
        allocatable=dict(kind.resources),
    )
