"""Defects that are planted one at a time into real code, each with the invariant that has to find it.

A defect is a change of one function for the time of a test, as a bad commit would make it. Each comes with the world in
which it shows; the seeds that may be needed are in `BUDGET`. None of this is reachable from the product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec
import pytest

from bigfleet.engine.decision import Action, ActionKind, Decision, Preemptor
from bigfleet.engine.shapes import fleet as shapes_fleet
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import Found, FoundKind
from bigfleet.provider.backend import Host as BackendHost
from bigfleet.provider.backends.simulated.backend import SimulatedBackend
from bigfleet.provider.operations import operation_runner as provider_work
from bigfleet.provider.records import lifecycle
from bigfleet.provider.records.fence import Fence
from bigfleet.provider.records.kinds import Kind
from bigfleet.shard import safety_limits
from bigfleet.shard.actuation import backoff, executors
from bigfleet.shard.actuation.action_queue import Actuator
from bigfleet.shard.actuation.executors import Executors
from bigfleet.shard.actuation.stuck_transitions import StuckTransitions
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.cycle import controller, reclaim_delay
from bigfleet.shard.cycle.engine_runner import EngineRunner
from bigfleet.shard.cycle.reclaim_delay import UNJOINED_REASON
from bigfleet.shard.inventory import inventory
from bigfleet.shard.ports import FenceToken, TokenSource
from bigfleet.shard.safety_limits import DemandQuarantine, Disposition, QuarantineVerdict
from bigfleet.shard.sessions.demand import Intake, NeedsTable
from bigfleet.shard.sessions.demand_size import DemandSize
from bigfleet.shard.sessions.registry import Sessions
from bigfleet.shard.status.cycle_publisher import CyclePublisher
from bigfleet.sim.plan_generator import KindPlan, PoolPlan, WorldPlan
from bigfleet.sim.pods.cluster_pods import PodCluster

S = MachineState
#: Seeds that a defect may take to be found, beginning with the one that is known to find it.
BUDGET = 8

_POOLS = (
    PoolPlan(instance_type="small", zone="a", capacity_type="bare_metal", count=6, cpu=4, price_usd_per_hour=0.04),
    PoolPlan(instance_type="small", zone="b", capacity_type="on_demand", count=4, cpu=4, price_usd_per_hour=0.2),
    PoolPlan(
        instance_type="small", zone="b", capacity_type="spot", count=3, cpu=4, price_usd_per_hour=0.06, probability=0.3
    ),
    PoolPlan(instance_type="large", zone="a", capacity_type="reserved", count=2, cpu=16, price_usd_per_hour=0.4),
)
_C0 = (
    KindPlan(name="web", count=10, cpu_milli=1000, priority=100),
    KindPlan(name="service", count=4, cpu_milli=2000, priority=1000, penalty_dollars=8),
    KindPlan(name="gang", count=3, cpu_milli=3000, priority=5000, is_gang=True),
)
_C1 = (
    KindPlan(name="web", count=8, cpu_milli=1000, priority=101),
    *(KindPlan(name=f"row-{number:02d}", count=1, cpu_milli=100, priority=200 + number) for number in range(14)),
)


def world(seed: int, *faults: str, **changes: Any) -> WorldPlan:
    """Return a small world with these faults."""
    plan = WorldPlan(
        seed=seed,
        faults=faults,
        pools=_POOLS,
        clusters=(_C0, _C1),
        safety_seconds=400.0,
        fault_seconds_mean=10.0,
        change_seconds_mean=15.0,
        reclaim_cap_fraction=0.05,
    )
    return msgspec.structs.replace(plan, **changes)


Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Defect:
    """One planted defect."""

    name: str
    #: What has to find it.
    invariant: str
    plant: Plant
    plan: Callable[[int], WorldPlan]
    #: The seed that is known to find it; only when it does not are the others tried.
    seed: int = 1


DEFECTS: list[Defect] = []


def defect(name: str, invariant: str, *faults: str, found_by: int = 1, **changes: Any) -> Callable[[Plant], Plant]:
    """Register a defect with its world and the seed that is known to find it."""

    def register(plant: Plant) -> Plant:
        DEFECTS.append(Defect(name, invariant, plant, lambda seed: world(seed, *faults, **changes), found_by))
        return plant

    return register


def every(number: int) -> Callable[[], bool]:
    """Return a function that says True each so many-th time."""
    calls = count(1)

    def turn() -> bool:
        return next(calls) % number == 0

    return turn


# ---- provider ---------------------------------------------------------------------------------------------------


@defect(
    "the provider's fence is off",
    "S2",
    "shard-zombie",
    found_by=3,
    change_seconds_mean=2.0,
    fault_seconds_mean=3.0,
    reclaim_cap_fraction=0.5,
)
def _fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fence, "passes", lambda _self, _machine, _token: True)


@defect("a drain ends where it began", "S3")
def _drain_back(patch: pytest.MonkeyPatch) -> None:
    before = lifecycle.completed

    def completed(record: Any, *rest: Any) -> Any:
        if record.operation.kind is Kind.DRAIN:
            return replace(record, machine=replace(record.machine, state=S.CONFIGURED))
        return before(record, *rest)

    patch.setattr("bigfleet.provider.operations.operation_runner.completed", completed)


@defect("a drained machine keeps its cluster", "S4")
def _drain_keeps(patch: pytest.MonkeyPatch) -> None:
    before = lifecycle.completed

    def completed(record: Any, *rest: Any) -> Any:
        after = before(record, *rest)
        if record.operation.kind is Kind.DRAIN:
            after = replace(after, machine=replace(after.machine, cluster=record.machine.cluster))
        return after

    patch.setattr("bigfleet.provider.operations.operation_runner.completed", completed)


@defect("a host that serves is taken for clean", "S1", "error-after-effect", "effect-after-timeout", found_by=3)
def _clean(patch: pytest.MonkeyPatch) -> None:
    async def adopt(self: Any, machine: Any) -> Found:
        host = self._cloud.host(machine.id)
        if host is None:
            return Found(kind=FoundKind.NO_HOST)
        return Found(kind=FoundKind.CLEAN, host=BackendHost(ref=host.ref, node_name=""))

    patch.setattr(SimulatedBackend, "adopt", adopt)


@defect("a verdict on a drain is lost, and the machine is not checked", "L6")
def _lost_verdict(patch: pytest.MonkeyPatch) -> None:
    before = provider_work.OperationRunner._settle

    async def settle(self: Any, job: Any, verdict: Any) -> None:
        if job.operation.kind is not Kind.DRAIN:
            await before(self, job, verdict)

    patch.setattr(provider_work.OperationRunner, "_settle", settle)
    patch.setattr(StuckTransitions, "look", lambda *_arguments, **_may_call: None)


@defect("fixed capacity is deleted when asked", "S16", posture="execute")
def _fixed(patch: pytest.MonkeyPatch) -> None:
    async def delete(self: Any, record: Any, machine: Any) -> Any:
        self._ingest.drive(replace(machine, state=S.DELETING))
        return await self._delete_call(record, machine)

    patch.setattr(Executors, "_delete", delete)

    def with_deletes(decision: Decision, snapshot: Any) -> Decision:
        idle = [
            machine
            for machine in snapshot.machines.values()
            if machine.state is S.IDLE and machine.capacity_type is CapacityType.BARE_METAL
        ]
        taken = {action.machine_id for action in decision.actions}
        extra = [
            Action(kind=ActionKind.DELETE, machine_id=machine.id, cluster=ClusterId(""), reason="phase3.release")
            for machine in idle
            if machine.id not in taken
        ]
        return replace(decision, actions=(*decision.actions, *extra))

    _decides(patch, with_deletes)


# ---- decisions --------------------------------------------------------------------------------------------------


def _decides(patch: pytest.MonkeyPatch, change: Callable[[Decision, Any], Decision]) -> None:
    before: Callable[..., Any] = EngineRunner.decide

    async def decide(self: Any, *given: Any, **named: Any) -> Decision:
        decision: Decision = await before(self, *given, **named)
        assert decision.basis is not None
        return change(decision, decision.basis.snapshot())

    patch.setattr(EngineRunner, "decide", decide)


@defect("the incremental engine forgets an action", "S18")
def _forgets(patch: pytest.MonkeyPatch) -> None:
    _decides(patch, lambda decision, _snapshot: replace(decision, actions=tuple(decision.actions)[:-1]))


@defect("a gang takes a machine of another rack", "S6", found_by=2, rack_size=2)
def _scatter(patch: pytest.MonkeyPatch) -> None:
    def scattered(decision: Decision, snapshot: Any) -> Decision:
        rows = []
        for row in decision.rows:
            if row.need.profile.same_key is not None and row.claimed:
                row = replace(row, claimed=(*row.claimed, min(snapshot.machines), max(snapshot.machines)))
            rows.append(row)
        return replace(decision, rows=tuple(rows))

    _decides(patch, scattered)


@defect("a machine is taken from an equal", "S7")
def _equal(patch: pytest.MonkeyPatch) -> None:
    def taken(decision: Decision, snapshot: Any) -> Decision:
        acted = {action.machine_id for action in decision.actions}
        by_priority = sorted(decision.rows, key=lambda row: row.need.profile.priority)
        claims = {machine_id: row.need.profile.priority for row in by_priority for machine_id in row.claimed}
        extra = [
            Action(
                kind=ActionKind.PREEMPT,
                machine_id=machine.id,
                cluster=machine.cluster,
                reason="phase2.inversion",
                grace_seconds=5,
                preemptor_priority=priority,
                preemptor=Preemptor("c0", "", ""),
            )
            for machine, priority in ((snapshot.machines[each], priority) for each, priority in claims.items())
            if machine.state is S.CONFIGURED and machine.id not in acted
        ]
        return replace(decision, actions=(*decision.actions, *extra[:1]))

    _decides(patch, taken)


#: Now and then a pod that no machine can host joins the row that has everything else of its cluster.
_POISONED = (
    KindPlan(name="web", count=10, cpu_milli=1000, priority=100),
    KindPlan(name="huge", count=1, cpu_milli=20_000, priority=100),
)


def _all_set_aside(patch: pytest.MonkeyPatch) -> None:
    before: Any = shapes_fleet._set_aside

    def set_aside(fleet: Any, row: Any) -> None:
        before(fleet, row)
        if row.impossible:
            row.groups = []

    patch.setattr(shapes_fleet, "_set_aside", set_aside)
    # Columns leave such groups out by themselves.
    patch.setattr("bigfleet.engine.shapes.columns.demand.PODS_MAX", 0)


@defect("one impossible pod has its whole row evicted", "S20", clusters=(_POISONED, _C1))
def _evicted(patch: pytest.MonkeyPatch) -> None:
    _all_set_aside(patch)
    for machines in (SnapshotMachines, ColumnMachines):
        before = machines.excess_in
        patch.setattr(machines, "excess_in", lambda self, *of, before=before: before(self, *of[:2], frozenset()))


@defect("one impossible pod keeps its whole row waiting", "L8", clusters=(_POISONED,), change_seconds_mean=1e6)
def _held_back(patch: pytest.MonkeyPatch) -> None:
    _all_set_aside(patch)


# ---- pods -------------------------------------------------------------------------------------------------------

_SMALL_POOLS = (
    PoolPlan(instance_type="small", zone="a", capacity_type="on_demand", count=24, cpu=4, price_usd_per_hour=0.2),
)
#: Pods that are spread over more machines than they need leave no room for those that need nearly a whole one.
_UNLIKE = (
    KindPlan(name="middle", count=8, cpu_milli=1500, priority=120),
    KindPlan(name="large", count=6, cpu_milli=3000, priority=110),
)
#: In sum they need three quarters of the machines on which they fit.
_LARGE = (KindPlan(name="large", count=8, cpu_milli=3000, priority=110),)
#: Four of them fill a machine, unless something else takes a little of it.
_QUARTERS = (KindPlan(name="web", count=13, cpu_milli=1000, priority=110),)


def _unlike(kinds: tuple[KindPlan, ...] = _UNLIKE) -> dict[str, Any]:
    return {"pools": _SMALL_POOLS, "clusters": (kinds,), "reclaim_cap_fraction": 0.5}


@defect("an operator's WOULD_NOT_FIT is ignored", "S21", **_unlike())
def _ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executors, "is_delayable", lambda _action: False)


@defect("an operator does not look before it evicts", "S22", found_by=2, **_unlike())
def _blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PodCluster, "do_not_fit", lambda _self, _machine_id: [])


@defect("pods that wait are not reported", "L7", found_by=2, hidden_cpu_milli=500, **_unlike(_QUARTERS))
def _unreported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bigfleet.sim.pods.pod_operator.with_waiting", lambda rows, _waiting: tuple(rows))


@defect("machines are counted by sums", "L7", found_by=3, **_unlike(_LARGE))
def _sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bigfleet.engine.fleet_engine.says_pods", lambda _demand: False)
    patch.setattr("bigfleet.engine.shapes.decide.says_pods", lambda _demand: False)


# ---- rails ------------------------------------------------------------------------------------------------------


@defect("the reclaim cap is off", "S8", "rollup-empty")
def _cap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safety_limits._ReclaimCap, "admits", lambda _self, _action: True)


@defect("each woken cycle has a reclaim cap of its own", "S8", "rollup-empty", found_by=2, change_seconds_mean=3.0)
def _spent(patch: pytest.MonkeyPatch) -> None:
    before = safety_limits.choose
    patch.setattr(safety_limits, "choose", lambda actions, **given: before(actions, **(given | {"spent": {}})))


@defect("the reclaim delay is off", "S8", reclaim_after_seconds=60.0)
def _delay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reclaim_delay.ExcessTimers, "is_due", lambda _self, _machine_id, _after_seconds: True)


@defect("a pause is ignored", "S11", posture="paused")
def _paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safety_limits, "disposition", lambda **_posture: Disposition.EXECUTE)


@defect("a dry run acts", "S11", posture="dry-run")
def _dry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safety_limits, "disposition", lambda **_posture: Disposition.EXECUTE)


@defect("the quarantine is off", "S10", "rollup-empty", "rollup-truncated")
def _quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DemandQuarantine,
        "admit",
        lambda _self, needs, _supply: (QuarantineVerdict.ACCEPT, DemandQuarantine(DemandSize.of(needs))),
    )


@defect("the second suspicious roll-up is believed", "S10", "rollup-empty", "rollup-truncated")
def _second(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safety_limits, "CONFIRMATIONS_MIN", 2)


@defect("a held roll-up comes into force", "S10", "rollup-empty", "rollup-truncated")
def _held(patch: pytest.MonkeyPatch) -> None:
    before = Intake.offer

    def offer(self: Any, cluster: str, needs: Any, **given: Any) -> Any:
        verdict = before(self, cluster, needs, **given)
        if not verdict.is_accepted:
            self.table.replace(cluster, needs, now_unix_nanos=given["now_unix_nanos"])
        return verdict

    patch.setattr(Intake, "offer", offer)


# ---- demand -----------------------------------------------------------------------------------------------------


@defect("a lost session clears the demand", "S9", "reconnect-storm", "net-reset", "operator-crash")
def _cleared(patch: pytest.MonkeyPatch) -> None:
    before = controller.Shard._session_lifecycle

    def lifecycle(self: Any, event: str, session: Any) -> None:
        before(self, event, session)
        if event == "removed":
            self.intake.table.replace(session.cluster, (), now_unix_nanos=1)

    patch.setattr(controller.Shard, "_session_lifecycle", lifecycle)


@defect("an empty roll-up leaves the demand as it was", "S9", "rollup-empty")
def _never_empty(patch: pytest.MonkeyPatch) -> None:
    before = NeedsTable.replace

    def keep(self: Any, cluster: str, rows: "list[Need]", **given: Any) -> None:
        if rows:
            before(self, cluster, rows, **given)

    patch.setattr(NeedsTable, "replace", keep)


@defect(
    "the first roll-up is not awaited",
    "S9",
    "shard-crash",
    "operator-silent",
    "operator-crash",
    "partition",
    found_by=5,
)
def _gate(patch: pytest.MonkeyPatch) -> None:
    before = Intake.__init__

    def begin(self: Any, *given: Any, **named: Any) -> None:
        before(self, *given, **named)
        self.reported.update(("c0", "c1"))

    patch.setattr(Intake, "__init__", begin)


@defect("a changed roll-up is taken for the same", "L1")
def _same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intake, "is_unchanged", lambda self, cluster, _digest: cluster in self.table.clusters)


# ---- actions and their records ----------------------------------------------------------------------------------


@defect("every third audit record is lost", "S14")
def _audit_lost(patch: pytest.MonkeyPatch) -> None:
    before, turn = Audit.note, every(3)
    patch.setattr(Audit, "note", lambda self, record: None if turn() else before(self, record))


@defect("every third action is recorded twice", "S14")
def _audit_twice(patch: pytest.MonkeyPatch) -> None:
    before, turn = Audit.note, every(3)

    def note(self: Any, record: Any) -> None:
        before(self, record)
        if turn():
            before(self, record)

    patch.setattr(Audit, "note", note)


@defect("a record names another machine", "S14")
def _audit_wrong(patch: pytest.MonkeyPatch) -> None:
    before = Audit._fields

    def fields(self: Any, record: Any) -> dict[str, object]:
        return before(self, record) | {"machine": "another"}

    patch.setattr(Audit, "_fields", fields)


@defect("a token is used twice", "S2")
def _token(patch: pytest.MonkeyPatch) -> None:
    before, turn = TokenSource.next, every(3)

    def again(self: Any) -> FenceToken:
        token = before(self)
        if turn():
            self._sequence -= 1
        return token

    patch.setattr(TokenSource, "next", again)


@defect("nothing is ever reclaimed", "L3", found_by=2)
def _no_reclaim(patch: pytest.MonkeyPatch) -> None:
    before = safety_limits.choose

    def choose(actions: Any, **given: Any) -> Any:
        return before([action for action in actions if action.kind is not ActionKind.RECLAIM], **given)

    patch.setattr(safety_limits, "choose", choose)


@defect("one cluster is never served", "L1", change_seconds_mean=1e6)
def _unserved(patch: pytest.MonkeyPatch) -> None:
    before = safety_limits.choose

    def choose(actions: Any, **given: Any) -> Any:
        return before([action for action in actions if action.profile is None or action.cluster != "c1"], **given)

    patch.setattr(safety_limits, "choose", choose)


@defect("a machine is reclaimed for nothing now and then", "L2", found_by=31)
def _flapping(patch: pytest.MonkeyPatch) -> None:
    before, turn, others = Actuator.enqueue, every(15), count()

    def enqueue(self: Any, actions: Any, cycle: int) -> Any:
        bound = sorted(machine.id for machine in self._inventory if machine.state is S.CONFIGURED)
        if turn() and bound and not actions:
            # A drain for this reason is not refused for want of room on other nodes.
            machine = self._inventory.get(bound[next(others) % len(bound)])
            actions = (
                Action(
                    kind=ActionKind.RECLAIM,
                    machine_id=machine.id,
                    cluster=machine.cluster,
                    reason=UNJOINED_REASON,
                    grace_seconds=5,
                ),
            )
        return before(self, actions, cycle)

    patch.setattr(Actuator, "enqueue", enqueue)


@defect("a refused row is never asked again", "L4", "bootstrap-refused", found_by=2, change_seconds_mean=40.0)
def _forever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backoff, "ROW_BACKOFF_FIRST_SECONDS", 1e9)


@defect("clusters get no reports of their machines", "L5")
def _untold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "send_node_state", lambda _self, _update: None)


# ---- records ----------------------------------------------------------------------------------------------------


@defect("bad records are taken", "S13", "records-mangled")
def _bad(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inventory, "invariant_fault", lambda _machine: None)


@defect("the shard makes up a machine", "S5")
def _ghost(patch: pytest.MonkeyPatch) -> None:
    before, turn = controller.Shard._snapshot, every(4)

    async def snapshot(self: Any) -> Any:
        if turn():
            known = next(iter(self.inventory))
            ghost = replace(known, id=MachineId("ghost"), state=S.SPECULATIVE).without_binding()
            from bigfleet.model.machine import HostRef

            if "ghost" not in self.inventory:
                self.inventory.insert(replace(ghost, host=HostRef()), now_seconds=0.0)
        return await before(self)

    patch.setattr(controller.Shard, "_snapshot", snapshot)


@defect("a cycle breaks now and then", "S0")
def _breaks(patch: pytest.MonkeyPatch) -> None:
    before, turn = CyclePublisher.publish_need_status, every(4)

    def tell(self: Any, effects: Any) -> None:
        if turn():
            raise RuntimeError("planted")
        before(self, effects)

    patch.setattr(CyclePublisher, "publish_need_status", tell)


@defect("the inventory miscounts a cluster's machines", "S0")
def _miscounts(patch: pytest.MonkeyPatch) -> None:
    before, turn = inventory.Inventory._count, every(8)

    def count(self: Any, cluster: str, more: int) -> None:
        before(self, cluster, more + (more > 0 and turn()))

    patch.setattr(inventory.Inventory, "_count", count)
