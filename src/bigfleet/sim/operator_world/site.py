"""Simulates a cluster of Kubernetes: its API server, its components, and the processes of BigFleet in it.

The site also notes what the invariants need: the demand that was ever true, what the shard has asked for, and for how
long nothing has disturbed the cluster.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from bigfleet.model.clock import Clock
from bigfleet.model.frames import DrainOutcome, DrainResult, OperatorFrame, ReclaimInstruction, RollUp, ShardFrame
from bigfleet.model.ids import ClusterId, IdSource
from bigfleet.model.machine import Machine
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, NODES, PODS, RECLAIM_ANNOTATION
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.kubernetes.kinds import Stored, kind_key
from bigfleet.sim.kubernetes.store import StoredChange
from bigfleet.sim.observations import Event, Observations, Stranded
from bigfleet.sim.operator_world.components import ClusterComponents
from bigfleet.sim.operator_world.plan import OperatorPlan
from bigfleet.sim.operator_world.replicas import ControllerReplica, OperatorReplica, PodControllerReplica
from bigfleet.sim.operator_world.watched_api import WatchedApiServer
from bigfleet.sim.sites.session_dialer import SimulatedDialer
from bigfleet.sim.sites.shard import ShardSite

#: Pods by priority: what a demand of this world is.
Demand = tuple[tuple[int, int], ...]


class KubernetesSite:
    """One cluster."""

    def __init__(
        self,
        number: int,
        plan: OperatorPlan,
        *,
        network: Network,
        shard: ShardSite,
        machines: Callable[[], Iterable[Machine]],
        clock: Clock,
        make_rng: Callable[[str], Random],
        make_ids: Callable[[str], IdSource],
        observations: Observations,
        on_event: Callable[[Event], None],
        on_change: Callable[["KubernetesSite", str, StoredChange], None],
    ) -> None:
        """`machines` returns all machines as their provider has them; `on_change` hears of changed objects."""
        self.name = ClusterId(f"c{number}")
        self.shard = shard
        self.server = WatchedApiServer(clock, history_max=plan.history_max, bookmark_seconds=20.0)
        self.components = ClusterComponents(
            self.name,
            plan.clusters[number],
            plan,
            server=self.server,
            machines=machines,
            clock=clock,
            observations=observations,
        )
        self.observations = observations
        self._network = network
        self._clock = clock
        self._on_event = on_event
        #: Machines that the shard has asked back, by instruction.
        self.asked: dict[str, set[str]] = {}
        #: Instructions that a process of the operator has answered.
        self.answered: set[str] = set()
        self._instructions: dict[str, ReclaimInstruction] = {}
        self._counts: Counter[int] = Counter()
        #: When each demand was true for the last time; that of this moment is `demand`.
        self.true_until_seconds: dict[Demand, float] = {}
        self.demand: Demand = ()
        #: Faults that disturb the cluster at this moment, and since when there are none and one process leads.
        self.disturbances: set[str] = set()
        self._quiet_since_seconds: float | None = None
        #: Since when each pod (by UID) or Node of a drain has waited for the operator.
        self.waiting_since_seconds: dict[str, float] = {}
        self._led_by: Process | None = None
        given: dict[str, Any] = {
            "cluster": self.name,
            "server": self.server,
            "clock": clock,
            "observations": observations,
        }
        self.operators: list[OperatorReplica] = []
        self.pod_controllers: list[PodControllerReplica] = []
        for place in range(plan.replicas):
            rng, ids = make_rng(f"operator {self.name} {place}"), make_ids(f"operator-{self.name}-{place}")
            self.operators.append(
                OperatorReplica(number=place, rng=rng, ids=ids, make_dialer=self._dialer, **given),
            )
            rng, ids = make_rng(f"pod controller {self.name} {place}"), make_ids(f"pods-{self.name}-{place}")
            self.pod_controllers.append(PodControllerReplica(number=place, rng=rng, ids=ids, **given))
        groups: tuple[list[ControllerReplica], ...] = ([*self.operators], [*self.pod_controllers])
        for group in groups:
            for replica in group:
                replica.others = [each for each in group if each is not replica]
        store = self.server.store
        store.subscribe(kind_key(CAPACITY_REQUESTS), self._count)
        for resource in (PODS, NODES, CAPACITY_REQUESTS):
            store.subscribe(kind_key(resource), partial(on_change, self, resource.plural))

    @property
    def replicas(self) -> list[ControllerReplica]:
        """All processes of BigFleet in the cluster."""
        return [*self.operators, *self.pod_controllers]

    def start(self) -> None:
        """Start every process."""
        for replica in self.replicas:
            replica.start()

    async def supervise(self) -> None:
        """Start dead processes again when their time has come, and note what disturbs, until cancelled."""
        while True:
            now_seconds = self._clock.monotonic_seconds()
            for replica in self.replicas:
                if not replica.process.is_alive and now_seconds >= replica.back_seconds:
                    replica.start()
            self._note_quiet(now_seconds)
            await self._clock.sleep(0.5)

    def heal(self) -> None:
        """End all faults of the cluster and start what is dead."""
        self.disturbances.clear()
        faults = self.server.faults
        faults.latency_seconds, faults.is_down, faults.is_hanging = 0.0, False, False
        faults.refuse, faults.lose_answer = lambda _call: None, lambda _call: False
        self.components.unready.clear()
        for node in self.components.nodes():
            if node.get("spec", {}).get("unschedulable") and not is_annotated(node):
                self.components.cordon(node["metadata"]["name"], is_cordoned=False)
        for replica in self.replicas:
            replica.process.dies_at_step = None
            if replica.process.is_alive:
                replica.process.resume()
                replica.resumed_seconds = self._clock.monotonic_seconds()
                if replica.api is not None:
                    replica.api.reconnect()
            replica.back_seconds = 0.0

    # ---- what is noted ----------------------------------------------------------------------------------------------

    @property
    def leader(self) -> OperatorReplica | None:
        """The operator that leads, None when none does."""
        return next((each for each in self.operators if each.is_leader), None)

    @property
    def is_connected(self) -> bool:
        """Return whether the operator that leads has a session with the shard."""
        leader = self.leader
        return leader is not None and leader.agent is not None and leader.agent.figures().is_connected

    def quiet_seconds(self) -> float:
        """Return for how long one operator has led and nothing has disturbed the cluster."""
        since_seconds = self._quiet_since_seconds
        return 0.0 if since_seconds is None else self._clock.monotonic_seconds() - since_seconds

    def _note_quiet(self, now_seconds: float) -> None:
        leader = self.leader
        led_by = leader.process if leader is not None else None
        if led_by is None or led_by is not self._led_by or self.disturbances:
            self._quiet_since_seconds = None
        elif self._quiet_since_seconds is None:
            self._quiet_since_seconds = now_seconds
        self._led_by = led_by

    def _count(self, change: StoredChange) -> None:
        for stored, weight in ((change.before, -1), (change.after, 1)):
            if stored is not None and "deletionTimestamp" not in stored["metadata"]:
                self._counts[stored["spec"]["priority"]] += weight
        demand = tuple(sorted((priority, count) for priority, count in self._counts.items() if count))
        if demand != self.demand:
            self.true_until_seconds[self.demand] = self._clock.monotonic_seconds()
            self.demand = demand

    def was_true_seconds_ago(self, demand: Demand) -> float | None:
        """Return how long ago a demand was true, 0 when it is, None when it never was."""
        if demand == self.demand:
            return 0.0
        at_seconds = self.true_until_seconds.get(demand)
        return None if at_seconds is None else self._clock.monotonic_seconds() - at_seconds

    def _dialer(self, process: Process) -> SimulatedDialer:
        return SimulatedDialer(self._network, self.shard, process, on_frame=self._note_frame)

    def _note_frame(self, frame: OperatorFrame | ShardFrame) -> None:
        if isinstance(frame, ReclaimInstruction):
            self.asked.setdefault(frame.instruction_id, set()).update(frame.machine_ids)
            self._instructions[frame.instruction_id] = frame
            self.observations.note("asked", str(self.name), f"{frame.instruction_id} {frame.machine_ids}")
        elif isinstance(frame, DrainResult):
            self._note_result(frame)
        elif isinstance(frame, RollUp):
            self.observations.note("sent", str(self.name), f"roll-up of {len(frame.needs)} rows")

    def _note_result(self, result: DrainResult) -> None:
        outcome = result.outcome
        self.observations.note("drain", result.machine_id, f"{outcome.name} {result.message}")
        self.observations.mark(f"a drain ended {outcome.name}")
        self.answered.add(result.instruction_id)
        asked = self._instructions.get(result.instruction_id)
        if outcome is DrainOutcome.WOULD_NOT_FIT and asked is not None:
            record = DrainRecord(
                instruction_id=result.instruction_id,
                machine_id=result.machine_id,
                node="",
                provider_id="",
                deadline_seconds=0.0,
                preemptor_priority=asked.preemptor_priority,
                reason=asked.reason,
            )
            self._on_event(Stranded(self.name, record, 1))


def is_annotated(node: Stored) -> bool:
    """Return whether a Node carries the annotation of a drain."""
    return RECLAIM_ANNOTATION in (node["metadata"].get("annotations") or {})
