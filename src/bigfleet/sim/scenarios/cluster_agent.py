"""Simulates the operator inside a cluster: its demand is its pods, its drains evict them.

Implements `bigfleet.operator.ports.ClusterAgent` over `bigfleet.sim.pods.cluster_pods.PodCluster`; the roll-up builder
and the session flow are the operator's own. It reports to the shard what the cluster sees of its nodes. It must never
drain what it was not asked to, nor a node whose pods would not fit elsewhere, unless a higher priority takes it.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from bigfleet.model import frames
from bigfleet.model.clock import Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, DrainOutcome, DrainResult, NodeStatus, RollUp
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.model.machine import Machine
from bigfleet.model.vector import format_vector
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.ports import SessionDialer, SessionEnded
from bigfleet.operator.requests import CapacityRequest
from bigfleet.operator.rollup import RollUpBuilder
from bigfleet.operator.session import SessionClient, SessionSettings
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.kernel.streams import seeded
from bigfleet.sim.pods.cluster_pods import Displaced, PodCluster
from bigfleet.sim.pods.evictions import Cause, Eviction, cause_of, is_voluntary
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.pods.waiting import WaitingPods, with_waiting

#: How long evicted pods take to leave a node.
EVICTION_SECONDS: Final = 0.5
ROLLUP_GAP_SECONDS: Final = 0.05


class ClusterOperator:
    """One cluster with its session."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        dialer: SessionDialer,
        clock: Clock,
        rng: Rng,
        rollup_interval_seconds: float,
        order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
    ) -> None:
        self.cluster = cluster
        self._clock = clock
        self._builder = RollUpBuilder(cluster)
        self.pods = PodCluster(
            cluster, self._demand_changed, clock=clock, draws=seeded(f"arrival {cluster}"), order=order
        )
        self.waiting = WaitingPods(self.pods, clock)
        #: Pods that lost their node, oldest first.
        self.evictions: list[Eviction] = []
        #: By (workload, gang).
        self.templates: dict[tuple[str, int], Template] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._stamp_nanos = 0
        settings = SessionSettings(
            rollup_interval_seconds=rollup_interval_seconds, rollup_gap_seconds=ROLLUP_GAP_SECONDS
        )
        self.client = SessionClient(cluster=cluster, agent=self, dialer=dialer, clock=clock, rng=rng, settings=settings)

    async def run(self) -> None:
        """Hold the session until cancelled; the drains end with it."""
        try:
            await self.client.run()
        finally:
            for task in self._draining.values():
                task.cancel()
            await asyncio.gather(*self._draining.values(), return_exceptions=True)

    # ---- what happens in the cluster -----------------------------------------------------------------------------

    def node_joined(self, machine: Machine) -> None:
        """A machine has become a Ready node here."""
        self.pods.join(machine)
        self.client.node_changed(self._status(machine.id))

    def node_left(self, machine_id: str, *, is_lost: bool) -> None:
        """A node is gone, whatever was on it."""
        self._note(machine_id, Cause.LOST if is_lost else Cause.UNANSWERED, self.pods.leave(machine_id))
        gone = NodeStatus(
            machine_id=machine_id, node_name="", ready=False, observed_unix_nanos=self._clock.unix_nanos()
        )
        self.client.node_changed(gone)

    def _demand_changed(self, add: list[CapacityRequest], remove: list[str]) -> None:
        for request_id in remove:
            self._builder.remove(request_id)
        for request in add:
            self._builder.put(request)
        self.client.demand_changed()

    def _note(self, machine_id: str, cause: Cause, displaced: Displaced) -> None:
        if displaced.pods:
            now_seconds = self._clock.monotonic_seconds()
            self.evictions.append(Eviction(now_seconds, self.cluster, machine_id, cause, *displaced))

    def _status(self, machine_id: str) -> NodeStatus:
        requested, pods = self.pods.requested(machine_id)
        return NodeStatus(
            machine_id=machine_id,
            node_name=f"node-{machine_id}",
            ready=True,
            observed_unix_nanos=self._clock.unix_nanos(),
            requested=format_vector(requested),
            pods=pods,
        )

    # ---- what the session asks -----------------------------------------------------------------------------------

    def roll_up(self) -> RollUp:
        """Return the complete demand: every pod, bound or not, and once more those that wait though they are met."""
        self._stamp_nanos = max(self._clock.unix_nanos(), self._stamp_nanos + 1)
        needs = with_waiting(self._builder.rows(), self.waiting.reported().values())
        return RollUp(cluster_id=self.cluster, timestamp_unix_nanos=self._stamp_nanos, needs=needs)

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return a small cloud-config."""
        text = f"#cloud-config\n# {self.cluster} {request.machine_id}\n"
        return BootstrapResponse(request_id=request.request_id, user_data=text.encode())

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Nothing hangs on it."""

    def session_closed(self, ended: SessionEnded) -> None:
        """Nothing hangs on it: the pods run on."""

    def acknowledged(self, ack: frames.Acknowledgement) -> None:
        """Nothing hangs on it."""

    def node_state(self, update: frames.NodeStateUpdate) -> None:
        """Nothing hangs on it: nodes join and leave by themselves."""

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Nothing hangs on it."""

    def node_statuses(self) -> Iterable[NodeStatus]:
        """Return the status of every node, by machine."""
        return [self._status(machine_id) for machine_id in sorted(self.pods.nodes)]

    def available(self, hint: frames.AvailableCapacity) -> None:
        """Nothing in a simulated cluster acts on a hint."""

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        """Note which rows are called met."""
        self.waiting.heard(update)

    def drain_started(self, drain: DrainRecord) -> None:
        """Cordon the node and evict its pods, unless they fit nowhere else.

        A machine without a node here is reported as not found at once.
        """
        running = self._draining.pop(drain.machine_id, None)
        if running is not None:
            running.cancel()
        if drain.machine_id not in self.pods.nodes:
            self._finish(drain, DrainOutcome.NODE_NOT_FOUND)
            return
        stranded = self.pods.do_not_fit(drain.machine_id) if is_voluntary(drain) else []
        if stranded:
            self._finish(drain, DrainOutcome.WOULD_NOT_FIT, f"{len(stranded)} pods fit on no other node")
            return
        self._note(drain.machine_id, cause_of(drain), self.pods.drain(drain.machine_id))
        self._draining[drain.machine_id] = asyncio.create_task(self._drain(drain))

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Stop draining; after a withdrawal pods may come back."""
        running = self._draining.pop(drain.machine_id, None)
        if running is not None:
            running.cancel()
        if withdrawn:
            self.pods.uncordon(drain.machine_id)

    async def _drain(self, drain: DrainRecord) -> None:
        await self._clock.sleep(EVICTION_SECONDS)
        del self._draining[drain.machine_id]
        self._finish(drain, DrainOutcome.DRAINED)

    def _finish(self, drain: DrainRecord, outcome: DrainOutcome, message: str = "") -> None:
        self.client.drain_finished(
            DrainResult(
                instruction_id=drain.instruction_id, machine_id=drain.machine_id, outcome=outcome, message=message
            )
        )
