"""Defects that are planted one at a time into the operator and the pod controller, each with what has to find it.

As in `tests.sim.world.planted`. None of this is reachable from the product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from bigfleet.model.frames import NodeStateUpdate
from bigfleet.model.states import MachineState
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.lease import LeaderElector
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.nodes.cordon import NodeCordon
from bigfleet.operator.nodes.drain_executor import DrainExecutor
from bigfleet.operator.nodes.evictions import EvictionAnswer, EvictionOutcome, PodEvictor
from bigfleet.operator.nodes.matching import NodeMatcher, NodeSearch
from bigfleet.operator.nodes.upcoming_nodes import UpcomingNodes
from bigfleet.operator.pods.controller import PodController
from bigfleet.shard.cycle.empty_nodes import EmptyNodes
from bigfleet.sim.operator_world.plan import OperatorPlan, WorkloadPlan
from bigfleet.sim.plan_generator import PoolPlan, WorldPlan

#: Seeds that a defect may take to be found, beginning with the one that is known to find it.
BUDGET = 6

_POOL = PoolPlan(instance_type="small", zone="a", capacity_type="bare_metal", count=6, cpu=4, price_usd_per_hour=0.04)
_C0 = (
    WorkloadPlan(name="web", count=9, cpu_milli=1000, priority=100, unavailable_max=1, ends_seconds=10.0),
    WorkloadPlan(name="batch", count=6, cpu_milli=500, priority=10),
)
#: Small pods that end slowly, one at a time: drains last.
_SLOW = (WorkloadPlan(name="web", count=16, cpu_milli=800, priority=100, unavailable_max=1, ends_seconds=25.0),)
_C1 = (
    WorkloadPlan(name="web", count=3, cpu_milli=1000, priority=500),
    WorkloadPlan(name="service", count=3, cpu_milli=2000, priority=1000, unavailable_max=1),
)


def operator_world(
    seed: int, *faults: str, machines: int = 6, fault_seconds: float = 10.0, **changes: Any
) -> OperatorPlan:
    """Return a small world with these faults; six machines are too few for both clusters."""
    world = WorldPlan(
        seed=seed,
        faults=faults,
        pools=(msgspec.structs.replace(_POOL, count=machines),),
        clusters=(),
        safety_seconds=300.0,
        fault_seconds_mean=fault_seconds,
        change_seconds_mean=15.0,
        cycle_interval_seconds=5.0,
        reclaim_cap_fraction=0.5,
    )
    plan = OperatorPlan(world=world, clusters=(_C0, _C1), ready_seconds=0.0)
    return msgspec.structs.replace(plan, **changes)


Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class OperatorDefect:
    """One planted defect."""

    name: str
    #: What has to find it.
    invariant: str
    plant: Plant
    plan: Callable[[int], OperatorPlan]
    #: The seed that is known to find it; only when it does not are the others tried.
    seed: int = 1


DEFECTS: list[OperatorDefect] = []


def defect(name: str, invariant: str, *faults: str, found_by: int = 1, **changes: Any) -> Callable[[Plant], Plant]:
    """Register a defect with its world and the seed that is known to find it."""

    def register(plant: Plant) -> Plant:
        plan = lambda seed: operator_world(seed, *faults, **changes)  # noqa: E731 - a value of the table
        DEFECTS.append(OperatorDefect(name, invariant, plant, plan, found_by))
        return plant

    return register


@defect("a list that is read page by page counts at once", "K1", "operator-killed", "watches-expired")
def _partial_view(patch: pytest.MonkeyPatch) -> None:
    """The roll-up is built before the requests have been read, and half of them are forgotten at each list."""
    replace = Reflector._replace

    async def half(self: Reflector[Any], fresh: dict[Any, Any]) -> None:
        if self.resource.plural == "capacityrequests":
            some = dict(list(fresh.items())[: len(fresh) // 2])
            await replace(self, some)
            self._synced.set()
            await self._clock.sleep(20.0)
        await replace(self, fresh)

    patch.setattr(Reflector, "_replace", half)
    patch.setattr(DemandView, "is_current", property(lambda self: True))


@defect(
    "a drain that an earlier process began is not resumed",
    "K11",
    "operator-killed",
    machines=16,
    fault_seconds=40.0,
    clusters=(_SLOW,),
)
def _not_resumed(patch: pytest.MonkeyPatch) -> None:
    """It is known in name only, also when the shard sends its instruction again."""
    resume, start = DrainExecutor.resume, DrainExecutor.start

    def in_name_only(self: DrainExecutor) -> list[DrainRecord]:
        found = resume(self)
        self._drains.clear()
        self.__dict__["_earlier"] = {record.instruction_id for record in found}
        return found

    def start_new(self: DrainExecutor, record: DrainRecord) -> None:
        if record.instruction_id not in self.__dict__["_earlier"]:
            start(self, record)

    patch.setattr(DrainExecutor, "resume", in_name_only)
    patch.setattr(DrainExecutor, "start", start_new)


@defect("an orphaned UpcomingNode is not swept", "K7", "operator-killed")
def _not_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpcomingNodes, "resynced", lambda self, machine_ids: None)


@defect("the frame that a machine is free deletes nothing", "K7")
def _not_deleted(patch: pytest.MonkeyPatch) -> None:
    node_state = UpcomingNodes.node_state

    def ignoring(self: UpcomingNodes, update: NodeStateUpdate) -> None:
        if update.state is not MachineState.IDLE:
            node_state(self, update)

    patch.setattr(UpcomingNodes, "node_state", ignoring)


@defect("an eviction that a budget refuses becomes a deletion", "K2")
def _beyond_budget(patch: pytest.MonkeyPatch) -> None:
    evict = PodEvictor.evict

    async def force(self: PodEvictor, pod: PodObject, left_seconds: float) -> EvictionOutcome:
        outcome = await evict(self, pod, left_seconds)
        return await self.delete(pod) if outcome.answer is EvictionAnswer.BUDGET else outcome

    patch.setattr(PodEvictor, "evict", force)


@defect("a drain takes the first node in place of its own", "K3")
def _another_node(patch: pytest.MonkeyPatch) -> None:
    search = NodeMatcher.search

    def first(self: NodeMatcher, drain: DrainRecord) -> NodeSearch:
        found = search(self, drain)
        nodes = sorted(self.nodes(), key=lambda node: node.metadata.name)
        return NodeSearch(nodes=(nodes[0],), rule=found.rule) if nodes and found.nodes else found

    patch.setattr(NodeMatcher, "search", first)


@defect("a candidate takes a Lease that another one holds", "K4", replicas=2)
def _lease_not_honoured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderElector, "_is_honoured", lambda self: False)


@defect("the request of a pod that is on a node is deleted", "K5")
def _request_of_a_bound_pod(patch: pytest.MonkeyPatch) -> None:
    from bigfleet.operator.pods import controller
    from bigfleet.operator.pods.mapping import PodStanding, standing_of

    def bound_is_served(pod: PodObject) -> PodStanding:
        return PodStanding.TERMINAL if pod.spec.node_name else standing_of(pod)

    patch.setattr(controller, "standing_of", bound_is_served)


@defect("a request that a person deleted does not come back", "K6", "person-meddles")
def _not_made_again(patch: pytest.MonkeyPatch) -> None:
    changed = PodController._changed

    def only_new(self: PodController, uid: str) -> None:
        seen = self.__dict__.setdefault("_seen_uids", set())
        if uid not in seen or self.index.pod(uid) is None:
            changed(self, uid)
        if self.index.requests_of(uid):
            seen.add(uid)

    patch.setattr(PodController, "_changed", only_new)
    patch.setattr("bigfleet.operator.pods.controller.RESYNC_SECONDS", 1e9)


@defect("changes of the demand after the first roll-up are lost", "K8")
def _demand_frozen(patch: pytest.MonkeyPatch) -> None:
    roll_up = DemandView.roll_up

    def first(self: DemandView, *arguments: Any, **named: Any) -> Any:
        if "_first" not in self.__dict__:
            self.__dict__["_first"] = roll_up(self, *arguments, **named)
        return self.__dict__["_first"]

    patch.setattr(DemandView, "roll_up", first)


@defect("a withdrawal leaves the node cordoned", "K10", "shard-crash", found_by=7, machines=16, clusters=(_SLOW,))
def _stays_cordoned(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: NodeCordon, name: str, uid: str, machine_id: str) -> None:
        return None

    patch.setattr(NodeCordon, "withdraw", nothing)
    # A node that stays cordoned gets empty, and its machine is reclaimed before the check (docs/spec/shard.md §4.2).
    patch.setattr(EmptyNodes, "due", lambda self: {})
