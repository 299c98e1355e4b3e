"""Simulates a cluster: it asks for capacity, boots machines, sees nodes join, and drains them on request.

The roll-up builder and the session flow are the operator's own (`bigfleet.operator`); only the content of a Kubernetes
API server is simulated: the requests, the nodes, and the duration of a drain. Demand comes from
`bigfleet.demo.workload` or `bigfleet.demo.trace`. A cluster never drains a machine unasked, and always reports its
whole demand.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bigfleet.model import frames
from bigfleet.model.clock import Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, DrainOutcome, DrainResult, NodeStatus, RollUp
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.model.states import UNBOUND_STATES, MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.ports import SessionDialer, SessionEnded
from bigfleet.operator.requests import CapacityRequest
from bigfleet.operator.rollup import RollUpBuilder
from bigfleet.operator.session import SessionClient, SessionSettings

#: Median time that pods take to leave a node, before the time scale.
DRAIN_DWELL_SECONDS = 20.0
BOOTSTRAP_TTL_SECONDS = 600


class RollUpRejected(Exception):
    """The shard refused the cluster's roll-up; the message is the shard's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatistics:
    """What can be counted in a cluster, at one moment."""

    connected: bool
    requests: int
    #: Machines by state, as the shard last sent them.
    machines: Mapping[MachineState, int]
    drains_running: int
    drains_done_total: int
    drains_withdrawn_total: int
    bootstraps_total: int
    rollups_acked_total: int
    rollups_held_total: int
    sessions_lost_total: int
    hints_total: int
    #: Needs that the shard's last verdict listed, by why they are unmet.
    unmet: Mapping[frames.UnmetReason, int]


class SimulatedCluster:
    """One cluster with its session; implements `bigfleet.operator.ports.ClusterAgent`."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        dialer: SessionDialer,
        clock: Clock,
        rng: Rng,
        time_scale: float = 1.0,
        settings: SessionSettings | None = None,
    ) -> None:
        self.cluster = cluster
        self._clock = clock
        self._rng = rng
        self._drain_dwell_seconds = DRAIN_DWELL_SECONDS * time_scale
        self._demand = RollUpBuilder(cluster)
        #: All and only the requests that the roll-up counts, oldest first.
        self._requests: dict[str, CapacityRequest] = {}
        #: State of each machine that the shard has named and that is still the cluster's.
        self._machines: dict[str, MachineState] = {}
        #: All and only the nodes of machines that are Configured or Draining, as the shard was sent.
        self._nodes: dict[str, NodeStatus] = {}
        #: Drains that run, by machine.
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._stamp_nanos = 0
        self._accepted_stamp_nanos = 0
        self._rejection = ""
        self._heard_ack = asyncio.Event()
        self._counts: Counter[str] = Counter()
        #: The shard's last word on the needs.
        self._verdict: frames.NeedStatusUpdate | None = None
        self.client = SessionClient(cluster=cluster, agent=self, dialer=dialer, clock=clock, rng=rng, settings=settings)

    # ---- demand -------------------------------------------------------------------------------------------------

    def apply(self, *, add: Iterable[CapacityRequest] = (), remove: Iterable[str] = ()) -> None:
        """Change the demand; the shard hears of it soon. Removals come first. Raises UnmappableRequest."""
        changed = False
        for request_id in remove:
            changed |= self._demand.remove(request_id)
            self._requests.pop(request_id, None)
        for request in add:
            self._requests.pop(request.id, None)
            changed |= self._demand.put(request)
            self._requests[request.id] = request
        if changed:
            self.client.demand_changed()

    def requests(self) -> list[CapacityRequest]:
        """Return what the pods ask for, oldest first."""
        return list(self._requests.values())

    async def report(self) -> None:
        """Return once a roll-up with the demand of this moment is in force at the shard.

        Waits out lost sessions and quarantine for as long as it takes. Raises RollUpRejected when the shard says no.
        """
        stamp_before_nanos = self._stamp_nanos
        while self._accepted_stamp_nanos <= stamp_before_nanos:
            self._heard_ack.clear()
            self._rejection = ""
            self.client.demand_changed()
            await self._heard_ack.wait()
            if self._rejection:
                raise RollUpRejected(f"cluster {self.cluster}: the shard refused the roll-up: {self._rejection}")

    async def run(self) -> None:
        """Hold the session for ever, until cancelled; the drains end with it."""
        try:
            await self.client.run()
        finally:
            for task in self._draining.values():
                task.cancel()
            await asyncio.gather(*self._draining.values(), return_exceptions=True)

    def statistics(self) -> ClusterStatistics:
        """Return the counts of this moment."""
        return ClusterStatistics(
            connected=self.client.is_connected,
            requests=len(self._demand),
            machines=Counter(self._machines.values()),
            drains_running=len(self._draining),
            drains_done_total=self._counts["drains_done"],
            drains_withdrawn_total=self._counts["drains_withdrawn"],
            bootstraps_total=self._counts["bootstraps"],
            rollups_acked_total=self._counts["acks"],
            rollups_held_total=self._counts["held"],
            sessions_lost_total=self._counts["sessions_lost"],
            hints_total=self._counts["hints"],
            unmet=Counter(row.reason for row in self._verdict.rows) if self._verdict is not None else {},
        )

    # ---- what the session asks ----------------------------------------------------------------------------------

    def roll_up(self) -> RollUp:
        """Return the complete demand; timestamps strictly rise."""
        self._stamp_nanos = max(self._clock.unix_nanos(), self._stamp_nanos + 1)
        return RollUp(cluster_id=self.cluster, timestamp_unix_nanos=self._stamp_nanos, needs=self._demand.rows())

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return a small cloud-config that names cluster and machine."""
        self._counts["bootstraps"] += 1
        text = (
            f"#cloud-config\n# simulated node of cluster {self.cluster}\nhostname: {_node_name(request.machine_id)}\n"
        )
        return BootstrapResponse(
            request_id=request.request_id, user_data=text.encode(), ttl_seconds=BOOTSTRAP_TTL_SECONDS
        )

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Count the session."""
        self._counts["sessions"] += 1

    def session_closed(self, ended: SessionEnded) -> None:
        """Count it as lost."""
        self._counts["sessions_lost"] += 1

    def acknowledged(self, ack: frames.Acknowledgement) -> None:
        """Note which roll-up is in force."""
        if ack.echo == frames.ECHO_ROLLUP_REJECTED:
            self._rejection = ack.error or "no reason given"
        elif ack.held:
            self._counts["held"] += 1
        else:
            self._counts["acks"] += 1
            self._accepted_stamp_nanos = max(self._accepted_stamp_nanos, ack.rollup_timestamp_unix_nanos)
        self._heard_ack.set()

    def node_state(self, update: frames.NodeStateUpdate) -> None:
        """Follow the machine; a Configured one has a Ready node at once, as its provider waited for that."""
        machine_id = update.machine_id
        if update.state in UNBOUND_STATES or update.state is MachineState.UNSPECIFIED:
            self._forget(machine_id)
            return
        self._machines[machine_id] = update.state
        if update.state is MachineState.CONFIGURED and machine_id not in self._nodes:
            status = self._status_of(machine_id, update.node_name or _node_name(machine_id))
            self._nodes[machine_id] = status
            self.client.node_changed(status)
        elif update.state not in (MachineState.CONFIGURED, MachineState.DRAINING):
            self._nodes.pop(machine_id, None)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Forget the machines that are not the cluster's any more."""
        for machine_id in self._machines.keys() - machine_ids:
            self._forget(machine_id)

    def node_statuses(self) -> Iterable[NodeStatus]:
        """Return the status of every node, by machine."""
        return [status for _machine_id, status in sorted(self._nodes.items())]

    def available(self, hint: frames.AvailableCapacity) -> None:
        """Count the hint; nothing in a simulated cluster acts on it."""
        self._counts["hints"] += 1

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        """Keep the verdict; nothing in a simulated cluster acts on it."""
        self._verdict = update

    def drain_forecast(self, request: frames.DrainForecastRequest) -> None:
        """Answer at once; without pods everything fits."""
        outcome = frames.ForecastOutcome.FITS
        self.client.forecast_made(frames.DrainForecast(request_id=request.request_id, outcome=outcome))

    def drain_started(self, drain: DrainRecord) -> None:
        """Begin to drain, or hasten; a machine without a node here is reported as not found at once."""
        running = self._draining.pop(drain.machine_id, None)
        if running is not None:
            running.cancel()
        if not self._has_node(drain.machine_id):
            self._finish(drain, DrainOutcome.NODE_NOT_FOUND, f"no node of machine {drain.machine_id}")
            return
        self._draining[drain.machine_id] = asyncio.create_task(self._drain(drain))

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Stop draining: the machine is gone or free, or the drain was given up."""
        self._counts["drains_withdrawn"] += withdrawn
        running = self._draining.pop(drain.machine_id, None)
        if running is not None:
            running.cancel()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _status_of(self, machine_id: str, node_name: str) -> NodeStatus:
        """Return the status of a node that is Ready."""
        return NodeStatus(
            machine_id=machine_id, node_name=node_name, ready=True, observed_unix_nanos=self._clock.unix_nanos()
        )

    def _has_node(self, machine_id: str) -> bool:
        return machine_id in self._nodes

    def _dwell_seconds(self) -> float:
        """Return how long the pods of a drained node take to leave it."""
        return self._drain_dwell_seconds * self._rng.uniform(0.5, 1.5)

    async def _drain(self, drain: DrainRecord) -> None:
        dwell_seconds = self._dwell_seconds()
        left_seconds = max(0.0, drain.deadline_seconds - self._clock.monotonic_seconds())
        await self._clock.sleep(min(dwell_seconds, left_seconds))
        del self._draining[drain.machine_id]
        if dwell_seconds <= left_seconds:
            self._finish(drain, DrainOutcome.DRAINED, "")
        else:
            self._finish(drain, DrainOutcome.GRACE_EXPIRED, "pods were left when the grace ended")

    def _finish(self, drain: DrainRecord, outcome: DrainOutcome, message: str) -> None:
        self._counts["drains_done"] += 1
        self.client.drain_finished(
            DrainResult(
                instruction_id=drain.instruction_id, machine_id=drain.machine_id, outcome=outcome, message=message
            )
        )

    def _forget(self, machine_id: str) -> None:
        self._machines.pop(machine_id, None)
        self._nodes.pop(machine_id, None)


def _node_name(machine_id: str) -> str:
    """Return a node name for a machine whose provider declares none."""
    return machine_id.replace("/", "-").replace("_", "-").lower()
