"""Simulates a cluster: the real operator session over a cluster that can misreport demand, go silent or die.

The pods are Kubernetes' and outlive the operator; their nodes are the machines that the provider has bound to the
cluster. During a fault, `LIES` names what a roll-up reports; the real demand is in `pods`. A cluster must never report
wrongly outside of its faults.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from bigfleet.model.clock import Clock
from bigfleet.model.frames import (
    BootstrapRequest,
    BootstrapResponse,
    NodeStateUpdate,
    RollUp,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.requests import CapacityRequest
from bigfleet.operator.rollup import recount
from bigfleet.operator.session import SessionSettings
from bigfleet.provider.records.record import Record
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.observations import Event, Evicted, Observations, Stranded
from bigfleet.sim.pods.cluster_pods import PodCluster
from bigfleet.sim.pods.evictions import Cause
from bigfleet.sim.pods.pod_operator import PodOperator
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.pods.waiting import with_waiting
from bigfleet.sim.sites.session_dialer import SimulatedDialer
from bigfleet.sim.sites.shard import ShardSite

#: What a roll-up may say instead of the truth.
FAULTY_RESPONSES: Final = ("rollup-empty", "rollup-truncated", "rollup-stale", "rollup-replayed", "rollup-flapping")
SESSION = SessionSettings(rollup_interval_seconds=10.0, rollup_gap_seconds=0.5)
#: States of a machine whose node is in its cluster.
_NODE_STATES: Final = (MachineState.CONFIGURED, MachineState.DRAINING)
#: Earlier roll-ups that a stale or replayed one repeats.
_STORED_MAX = 5


class LyingCluster(PodOperator):
    """The operator's view of the cluster, true or not."""

    def __init__(self, site: "ClusterSite", **given: Any) -> None:
        super().__init__(site.pods, **given)
        self.site = site

    def roll_up(self) -> RollUp:
        """Return the demand with the pods that wait, or what the fault of the moment makes of it."""
        true = super().roll_up()
        if any(self.waiting.is_given_up(pod) for pod in self.site.pods.waiting):
            self.site.observations.mark("a pod given up")
        return self.site.reported(true)

    def configured(self) -> set[str]:
        """Return the machines that the cluster believes to be its own and in service."""
        return {machine_id for machine_id, state in self._machines.items() if state is MachineState.CONFIGURED}

    def node_state(self, update: NodeStateUpdate) -> None:
        """Follow the machine; pods may come onto the node of one that is in service."""
        super().node_state(update)
        if update.state is MachineState.CONFIGURED:
            self.site.pods.uncordon(update.machine_id)

    def _evict(self, drain: DrainRecord) -> int:
        stranded = super()._evict(drain)
        if stranded:
            self.site.stranded(drain, stranded)
        return stranded

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Answer, refuse or keep silent."""
        if "bootstrap-refused" in self.site.faulty_responses:
            return BootstrapResponse(request_id=request.request_id, error="the join token could not be made")
        if "bootstrap-silent" in self.site.faulty_responses:
            await asyncio.Event().wait()
        return await super().bootstrap(request)


class ClusterSite:
    """One cluster: its pods, and its operator's process of the moment."""

    def __init__(
        self,
        *,
        name: str,
        network: Network,
        shard: ShardSite,
        clock: Clock,
        make_rng: Callable[[str], Random],
        observations: Observations,
        on_event: Callable[[Event], None],
        hidden_cpu_milli: int = 0,
    ) -> None:
        """`hidden_cpu_milli` is what something that the operator does not report takes of every node."""
        self.name = ClusterId(name)
        self.pods = PodCluster(
            name,
            self._changed,
            on_evicted=lambda eviction: on_event(Evicted(eviction)),
            clock=clock,
            draws=make_rng(f"arrival {name}"),
            overhead={"cpu": hidden_cpu_milli},
        )
        self.templates: dict[str, Template] = {}
        self.faulty_responses: set[str] = set()
        self.process = Process(f"operator-{name}")
        self.process.kill()
        self.cluster: LyingCluster | None = None
        self._twin: Process | None = None
        #: To whom it reports.
        self.shard = shard
        self._network = network
        self._clock = clock
        self._make_rng = make_rng
        self._rng = make_rng(f"cluster {name}")
        self.observations = observations
        self._on_event = on_event
        self._earlier: list[RollUp] = []

    def start(self) -> None:
        """Start an operator that reads the cluster again."""
        self.process = Process(f"operator-{self.name}")
        self.cluster = self._spawn(self.process, "")

    def start_twin(self) -> None:
        """Start a second operator with this cluster's identity, as a botched upgrade does."""
        self._twin = Process(f"operator-{self.name}")
        self._spawn(self._twin, " twin")

    @property
    def has_twin(self) -> bool:
        """Return whether a second operator is about."""
        return self._twin is not None and self._twin.is_alive

    def stop_twin(self) -> None:
        """End the second operator."""
        if self._twin is not None:
            self._twin.kill()

    def _spawn(self, process: Process, which: str) -> LyingCluster:
        rng = self._make_rng(f"operator {self.name}{which}")
        cluster = LyingCluster(
            self,
            cluster=self.name,
            dialer=SimulatedDialer(self._network, self.shard, process),
            clock=self._clock,
            rng=rng,
            settings=SESSION,
        )
        cluster.apply(add=self.pods.requests())
        self.observations.note("start", process.name, which.strip())
        process.spawn(cluster.run(), name=process.name)
        return cluster

    def truth(self) -> tuple[Need, ...]:
        """Return the rows of the real demand, with the pods that the operator of the moment calls waiting."""
        waiting = self.cluster.waiting.reported().values() if self.cluster is not None else ()
        return with_waiting(recount(self.name, self.pods.requests()), waiting)

    def believed(self) -> set[str]:
        """Return the machines that the operator of the moment believes to be in service."""
        return self.cluster.configured() if self.cluster is not None else set()

    def resize(self, kind: str, pods: int) -> None:
        """Change how many pods of a kind there are."""
        self.pods.resize(self.templates[kind], pods)

    def count(self, kind: str) -> int:
        """Return how many pods of a kind there are."""
        return self.pods.counts(kind)[1]

    def _changed(self, add: list[CapacityRequest], remove: list[str]) -> None:
        if self.cluster is not None:
            self.cluster.apply(add=add, remove=remove)

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def follow(self, before: Record | None, after: Record | None) -> None:
        """Let a machine's node join or leave with its record at the provider."""
        was, now = _is_node_of(before, self.name), _is_node_of(after, self.name)
        if after is not None and now and not was:
            self.pods.join(after.machine)
        elif before is not None and was and not now:
            is_drained = before.state is MachineState.DRAINING and after is not None
            is_broken = after is not None and after.state is MachineState.FAILED
            cause = Cause.UNANSWERED if is_drained and not is_broken else Cause.LOST
            self.pods.leave(before.machine.id, cause)

    def stranded(self, drain: DrainRecord, pods: int) -> None:
        """Report that a node stays, because so many of its pods have no other place."""
        self._on_event(Stranded(self.name, drain, pods))

    def reported(self, truth: RollUp) -> RollUp:
        """Return what is sent in the place of a true roll-up."""
        fault = next((fault for fault in FAULTY_RESPONSES if fault in self.faulty_responses), "")
        self._earlier = [*self._earlier[-_STORED_MAX:], truth]
        match fault:
            case "rollup-empty":
                return replace(truth, needs=())
            case "rollup-truncated":
                return replace(truth, needs=truth.needs[: len(truth.needs) // 12])
            case "rollup-stale":
                return replace(truth, needs=self._earlier[0].needs)
            case "rollup-replayed":
                return self._rng.choice(self._earlier)
            case "rollup-flapping" if self._rng.random() < 0.5:
                return replace(truth, needs=())
        return truth


def _is_node_of(record: Record | None, cluster: str) -> bool:
    return record is not None and record.machine.cluster == cluster and record.state in _NODE_STATES
