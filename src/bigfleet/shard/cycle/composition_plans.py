"""Stores the target composition of each cluster and replans clusters whose demand changed.

docs/spec/shard.md §4.1. Without workers a cluster is planned within the cycle. With workers, planning runs
asynchronously: a cluster whose demand changed acquires nothing until its composition arrives, for at most
`plan_wait_seconds`. A late or failed plan delays nothing else. This module does not decide what is acquired.

An older composition is used while demand differs little. The first decision after a plan arrives always acts on it,
also when demand has changed again, so that continuously changing demand waits at most one planning time.

A composition has room for what the scheduler may not pack well (docs/spec/shard.md §4.2). Where nodes stay empty, the
scheduler packed better: the cluster is planned on the other machines that it holds, with nothing on offer, and follows
that composition while all pods fit there and none waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from bigfleet.compositions.problems import ClusterProblem, hosts_all, target_of, target_of_held, without_offers
from bigfleet.compositions.targets import FleetPlanner
from bigfleet.engine.class_changes import with_classes_changed
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, Decision, Options, WithheldPools
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.engine.targets import ClassKey, Target, class_key
from bigfleet.model.clock import Clock
from bigfleet.model.compute import Compute
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.planner.composition import Composition
from bigfleet.planner.plan import DEFAULT, THOROUGH
from bigfleet.planner.plan import plan as plan_inline
from bigfleet.planner.problem import PlanSettings, Problem, ProblemFault
from bigfleet.planner.search import Effort
from bigfleet.shard.cycle.created_machines import ClassChange, CreatedMachines
from bigfleet.shard.cycle.empty_nodes import EmptyNodes
from bigfleet.shard.inventory.fleet_queries import machines_on_their_way
from bigfleet.shard.metrics import ShardMetrics

_log = structlog.get_logger("bigfleet.shard.cycle.composition_plans")

#: Demand that is no further than this from what was planned for, in any dimension, waits for no new composition.
SAME_DEMAND: Final = 0.05
#: A cluster that stays short, or lacks machines of its composition, is planned again after so long.
RETRY_SECONDS: Final = 60.0
#: A cluster whose pods waited although it followed a composition without room to spare follows none for so long.
ROOM_SECONDS: Final = 3600.0


class PlanWorkers(Protocol):
    """Computes plans outside of the shard's event loop."""

    @property
    def free(self) -> int:
        """How many more problems may be handed over now."""
        ...

    async def plan(self, problem: Problem, effort: Effort) -> Composition:
        """Return the composition. Raises ProblemFault for a problem that cannot be planned, else what went wrong."""
        ...


class _Without(NamedTuple):
    """The machines that a composition of held machines leaves out, a tight one or that after an abandoned exchange."""

    #: Those that stay empty and are not excess, or those that do not serve yet.
    unused: tuple[Machine, ...]
    #: Those that the composition before it leaves out already: retained, they would stay until demand changes.
    excess: tuple[Machine, ...] = ()


@dataclass(slots=True)
class _Plan:
    """What is known of one cluster."""

    #: The rows that it was planned for; None before the first plan.
    rows: tuple[Need, ...] | None = None
    target: Target | None = None
    made_seconds: float = 0.0
    #: The rows that are being planned, and which machines of the cluster became another class since that began.
    pending: tuple[Need, ...] | None = None
    changed: list[ClassChange] = field(default_factory=list)
    #: Since when the decision waits for a composition; None while it does not.
    waits_since_seconds: float | None = None
    #: Whether the composition is new: the next decision acts on it.
    is_new: bool = False
    is_short: bool = False
    #: Whether the composition has no machine but those that hosted pods.
    is_tight: bool = False
    #: No tight composition before that.
    tight_from_seconds: float = float("-inf")
    #: Whether an exchange was abandoned: the cluster is planned on what serves it, if that hosts all of its pods.
    is_settling: bool = False
    #: The rows and the empty machines that were last tried.
    tight_tried: tuple[tuple[Need, ...], tuple[MachineId, ...]] | None = None
    settings: PlanSettings = field(default_factory=PlanSettings)


class CompositionPlans:
    """The compositions of one shard's clusters.

    All of it is touched by the shard's loop alone, and by the computation that `options_with` waits for.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        compute: Compute,
        metrics: ShardMetrics,
        workers: PlanWorkers | None,
        wait_seconds: float,
        empty_nodes: EmptyNodes,
        settings_of: Callable[[str], PlanSettings],
        refused: Callable[[], Set[MachineId]],
        wake: Callable[[], None],
    ) -> None:
        """`refused` returns the machines that their operators do not drain now."""
        self._clock = clock
        self._compute = compute
        self._metrics = metrics
        self._workers = workers
        self._wait_seconds = wait_seconds
        self._empty_nodes = empty_nodes
        self._settings_of = settings_of
        self._refused = refused
        self._wake = wake
        self._planner = FleetPlanner()
        self._created = CreatedMachines()
        self._plans: dict[str, _Plan] = {}
        #: The same object while no target changes: an engine that keeps clusters looks for that.
        self._targets: dict[str, Target] = {}
        self._sold_out: Set[CapacityPool] = frozenset()
        self._withheld: Mapping[str, WithheldPools] = {}
        self._left_out: frozenset[MachineId] = frozenset()
        self._frozen: Set[str] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()

    async def options_with(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        by_cluster: Mapping[str, tuple[Need, ...]],
        options: Options,
        *,
        frozen: Set[str] = frozenset(),
        excess: Iterable[Machine] = (),
    ) -> Options:
        """Return the options with the compositions that there are, and the clusters that wait for one.

        `frozen` are clusters that follow other compositions now: they are not planned. `excess` are the machines that
        the last decision left without use.
        """
        self._frozen = frozen
        if not says_pods(demand):
            self._plans.clear()
            self._created.clear()
            self._targets, self._left_out = {}, frozenset()
            return options
        await self._follow_created(view)
        self._drop_sold_out(options)
        stale = self._stale(by_cluster)
        settling = self._to_settle(view, options.withheld)
        tight = self._to_tighten(by_cluster, excess)
        if self._workers is not None:
            await self._hand_over(view, demand, by_cluster, options, stale, {**tight, **settling})
        elif settling:
            await self._tighten_inline(view, demand, by_cluster, options, settling)
        if self._workers is None and stale:
            rows = [need for need in demand if need.cluster in stale]
            settings = {cluster: self._plans[cluster].settings for cluster in stale}
            refused = self._refused()
            made = await self._compute(lambda: self._planner.targets(view, rows, options, settings, refused))
            for cluster in stale:
                self._keep(cluster, by_cluster[cluster], made.get(cluster))
        # First, because it drops targets.
        awaiting = self._awaiting(by_cluster)
        planned = replace(options, targets=self._targets, awaiting_plan=awaiting)
        if self._workers is None:
            # For the next cycle, which knows how full the nodes of these clusters are.
            await self._tighten_inline(view, demand, by_cluster, options, tight)
        return planned

    def left_out(self) -> frozenset[MachineId]:
        """Return the empty machines that tight compositions leave out, or may leave out soon."""
        return self._left_out

    def decided(self, decision: Decision) -> None:
        """Note which clusters stay short: they are planned again after a while, with what is on offer then."""
        if not self._plans:
            return
        self._created.decided(decision)
        short = {row.need.cluster for row in decision.rows if row.unplaced}
        for cluster, plan in self._plans.items():
            plan.is_short = cluster in short

    async def _follow_created(self, view: ColumnSnapshot) -> None:
        """Have the compositions name the machines that were acquired for them as they are now."""
        now_seconds = self._clock.monotonic_seconds()
        changes: dict[str, list[ClassChange]] = {}
        for change in await self._compute(lambda: self._created.follow(view, now_seconds)):
            changes.setdefault(change.cluster, []).append(change)
        before: dict[str, Target] = {}
        for cluster, found in changes.items():
            plan = self._plans.get(cluster)
            if plan is not None and plan.pending is not None:
                plan.changed += found
            if plan is not None and plan.target is not None:
                before[cluster] = plan.target
        if not before:
            return
        after = await self._compute(
            lambda: {cluster: _as_created(target, changes[cluster]) for cluster, target in before.items()}
        )
        # A composition that arrived meanwhile names them already.
        followed = {
            cluster: target
            for cluster, target in after.items()
            if (plan := self._plans.get(cluster)) is not None and plan.target is before[cluster]
        }
        for cluster, target in followed.items():
            self._plans[cluster].target = target
        self._set_targets(followed)

    # ---- for exchanges ---------------------------------------------------------------------------------------------

    @property
    def has_workers(self) -> bool:
        """Return whether plans are computed outside of the shard's event loop."""
        return self._workers is not None

    def target_of(self, cluster: str) -> Target | None:
        """Return the composition that a cluster follows; None without one, and while another one is computed."""
        plan = self._plans.get(cluster)
        return None if plan is None or plan.pending is not None else plan.target

    async def asked_without(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, cluster: str, going: Counter[ClassKey]
    ) -> ClusterProblem | None:
        """Return the cluster's problem with nothing on offer, without so many machines; None if it has none."""
        problems = await self._problems(view, demand, options, [cluster] if cluster in self._plans else [])
        asked = problems.get(cluster)
        return None if asked is None else without_offers(asked, going)

    async def held_target(self, cluster: str, asked: ClusterProblem) -> Target | None:
        """Return a composition that retains every machine of the problem; None when not every pod has a place."""
        try:
            return target_of_held(asked, await self._answer(asked.problem, DEFAULT))
        except asyncio.CancelledError:
            raise
        except Exception as fault:  # no failure of a worker may stop a cycle
            _log.warning("planner.plan_failed", cluster=cluster, error=f"{type(fault).__name__}: {fault}")
            return None

    def adopt(self, cluster: str, rows: tuple[Need, ...], target: Target) -> None:
        """Follow a composition that retains what the cluster holds, made for these rows."""
        if cluster in self._plans:
            self._keep(cluster, rows, target)
            self._plans[cluster].is_tight = True
            self._empty_nodes.disturbed(cluster)

    def settle(self, cluster: str) -> None:
        """Drop the cluster's composition; follow one of the machines that serve it, else plan it again.

        A machine that was acquired for the dropped one may never serve.
        """
        plan = self._plans.get(cluster)
        if plan is not None:
            plan.rows = plan.target = plan.tight_tried = None
            plan.is_tight, plan.is_settling = False, True
            self._set_target(cluster, None)

    async def close(self) -> None:
        """Cancel pending plans."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- which -----------------------------------------------------------------------------------------------------

    def _stale(self, by_cluster: Mapping[str, tuple[Need, ...]]) -> list[str]:
        """Return the clusters to plan, the most changed first."""
        now_seconds = self._clock.monotonic_seconds()
        for gone in self._plans.keys() - by_cluster.keys():
            del self._plans[gone]
            self._set_target(gone, None)
            self._empty_nodes.forget(gone)
        found: list[tuple[float, float, str]] = []
        for cluster, rows in by_cluster.items():
            plan = self._plans.get(cluster)
            if plan is None:
                plan = self._plans[cluster] = _Plan()
            if cluster in self._frozen:
                continue
            settings = self._settings_of(cluster)
            if plan.settings != settings:
                plan.settings, plan.rows = settings, None
            if plan.rows is rows:
                is_due = plan.is_short and now_seconds - plan.made_seconds >= RETRY_SECONDS
                if is_due and plan.pending is None:
                    found.append((0.0, plan.made_seconds, cluster))
                continue
            if plan.is_settling and not plan.is_short and not any(row.waiting for row in rows):
                continue
            plan.is_settling = False
            if plan.is_tight and any(row.waiting for row in rows):
                plan.is_tight, plan.tight_from_seconds = False, now_seconds + ROOM_SECONDS
            if plan.pending is None and not self._stays_tight(plan, rows):
                found.append((-_change(plan.rows or (), rows), plan.made_seconds, cluster))
        return [cluster for _, _, cluster in sorted(found)]

    def _stays_tight(self, plan: _Plan, rows: tuple[Need, ...]) -> bool:
        """Return whether changed rows are tried on the machines that the cluster holds before others are planned."""
        was_tried = plan.tight_tried is not None and plan.tight_tried[0] is rows
        return plan.is_tight and not plan.is_short and not was_tried and is_alike(plan.rows or (), rows)

    def _to_settle(self, view: ColumnSnapshot, withheld: Mapping[str, WithheldPools]) -> dict[str, _Without]:
        """Return the clusters to plan on what serves them, and the machines of each that do not serve yet.

        Those of withheld pools are in no problem.
        """
        found = {}
        for cluster, plan in self._plans.items():
            if plan.is_settling and plan.pending is None and cluster not in self._frozen:
                pools = _withheld_from(cluster, withheld)
                machines = machines_on_their_way(view, cluster)
                found[cluster] = _Without(tuple(each for each in machines if CapacityPool.of(each) not in pools))
        return found

    def _to_tighten(self, by_cluster: Mapping[str, tuple[Need, ...]], excess: Iterable[Machine]) -> dict[str, _Without]:
        """Return the clusters to plan without offers, and the machines that each is planned without."""
        empty = self._empty_nodes.due()
        known = {*empty, *(name for name, plan in self._plans.items() if plan.is_tight)}
        excess_of = _by_cluster(excess, known) if known else {}
        now_seconds = self._clock.monotonic_seconds()
        found = {}
        for cluster, plan in self._plans.items():
            rows, going = by_cluster[cluster], set(_ids(excess_of.get(cluster, ())))
            machines = tuple(machine for machine in empty.get(cluster, ()) if machine.id not in going)
            is_wanted = bool(machines) if plan.rows is rows else self._stays_tight(plan, rows)
            if not is_wanted or plan.target is None or plan.pending is not None or cluster in self._frozen:
                continue
            if plan.is_short or any(row.waiting for row in rows):
                self._empty_nodes.disturbed(cluster)
            elif now_seconds >= plan.tight_from_seconds and plan.tight_tried != (rows, _ids(machines)):
                found[cluster] = _Without(unused=machines, excess=tuple(excess_of.get(cluster, ())))
        tightened = [machines for name, machines in empty.items() if self._is_tightened(name, found)]
        self._left_out = frozenset(machine.id for machines in tightened for machine in machines)
        return found

    def _is_tightened(self, cluster: str, found: Collection[str]) -> bool:
        """Return whether a cluster has a tight composition, or may get one: it is planned, or will be now."""
        plan = self._plans.get(cluster)
        return plan is not None and (plan.is_tight or plan.pending is not None or cluster in found)

    def _drop_sold_out(self, options: Options) -> None:
        """Have clusters planned again whose composition counts on a pool that ran out of stock, or was withheld."""
        gone, self._sold_out = options.sold_out - self._sold_out, options.sold_out
        before, self._withheld = self._withheld, options.withheld
        for cluster, plan in self._plans.items() if gone or options.withheld else ():
            lost = gone | (_withheld_from(cluster, options.withheld) - _withheld_from(cluster, before))
            keys = () if plan.target is None else plan.target.counts
            # A tight composition is held already and counts on no stock.
            if not plan.is_tight and any(
                CapacityPool(key.instance_type, key.zone, key.capacity_type) in lost for key in keys
            ):
                plan.rows = None

    def _awaiting(self, by_cluster: Mapping[str, tuple[Need, ...]]) -> frozenset[str]:
        waiting = frozenset(
            c for c, plan in self._plans.items() if c not in self._frozen and self._waits(c, plan, by_cluster[c])
        )
        self._metrics.clusters_awaiting_plan.set(len(waiting))
        return waiting

    def _waits(self, cluster: str, plan: _Plan, rows: tuple[Need, ...]) -> bool:
        """Return whether the next decision waits for the cluster's composition.

        When it has waited long enough, it acts without one: the old one is for other demand, and would hold machines
        that are not needed any more for as long as no plan arrives.
        """
        is_new, plan.is_new = plan.is_new, False
        if plan.rows is rows or is_new or (plan.rows is not None and is_alike(plan.rows, rows)):
            plan.waits_since_seconds = None
            return False
        now_seconds = self._clock.monotonic_seconds()
        if plan.waits_since_seconds is None:
            plan.waits_since_seconds = now_seconds
        if now_seconds - plan.waits_since_seconds < self._wait_seconds:
            return True
        if plan.target is not None:
            plan.target = None
            self._set_target(cluster, None)
            self._metrics.plans.labels("outdated").inc()
        return False

    # ---- planning --------------------------------------------------------------------------------------------------

    async def _tighten_inline(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        by_cluster: Mapping[str, tuple[Need, ...]],
        options: Options,
        tight: Mapping[str, _Without],
    ) -> None:
        problems = await self._problems(view, demand, options, tight)
        for cluster, without in tight.items():
            asked = problems.get(cluster)
            if asked is None:
                self._plans[cluster].is_settling = False
            else:
                await self._plan(cluster, by_cluster[cluster], asked, without)

    async def _hand_over(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        by_cluster: Mapping[str, tuple[Need, ...]],
        options: Options,
        stale: Sequence[str],
        tight: Mapping[str, _Without],
    ) -> None:
        """Give the workers as many clusters as they have room for; the others wait for the next cycle."""
        workers = self._workers
        assert workers is not None, "without workers a cluster is planned at once"
        ready = [cluster for cluster in (*stale, *tight) if self._plans[cluster].pending is None]
        chosen = ready[: workers.free]
        effort = THOROUGH if len(chosen) == len(ready) else DEFAULT
        problems = await self._problems(view, demand, options, chosen)
        for cluster in chosen:
            asked, without = problems.get(cluster), tight.get(cluster)
            if asked is None:
                self._keep(cluster, by_cluster[cluster], None)
                continue
            self._plans[cluster].pending, self._plans[cluster].changed = by_cluster[cluster], []
            planning = self._plan(cluster, by_cluster[cluster], asked, without, effort)
            task = asyncio.create_task(planning, name=f"plan of {cluster}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _problems(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, clusters: Collection[str]
    ) -> dict[str, ClusterProblem]:
        """Return the problems of these clusters, each with all that is on offer."""
        if not clusters:
            return {}
        names = set(clusters)
        rows = [need for need in demand if need.cluster in names]
        settings = {cluster: self._plans[cluster].settings for cluster in clusters}
        refused = self._refused()
        return await self._compute(lambda: self._planner.problems(view, rows, options, settings, refused))

    async def _answer(self, problem: Problem, effort: Effort) -> Composition:
        if self._workers is not None:
            return await self._workers.plan(problem, effort)
        return await self._compute(lambda: plan_inline(problem, effort))

    async def _plan(
        self,
        cluster: str,
        rows: tuple[Need, ...],
        asked: ClusterProblem,
        without: _Without | None,
        effort: Effort = DEFAULT,
    ) -> None:
        """Plan a cluster, `without` machines that a composition of held ones leaves out; None for any other."""
        target, outcome = None, "made"
        is_settling, self._plans[cluster].is_settling = self._plans[cluster].is_settling, False
        if without is not None:
            asked = without_offers(asked, Counter(map(class_key, (*without.unused, *without.excess))))
            if not is_settling:
                self._plans[cluster].tight_tried = (rows, _ids(without.unused))
        try:
            answer = await self._answer(asked.problem, effort)
            if without is None or (is_settling and hosts_all(asked.problem, answer)):
                target = target_of(asked, answer)
            elif not is_settling:
                target = target_of_held(asked, answer)
        except asyncio.CancelledError:
            raise
        except ProblemFault:
            outcome = "too_large"
        except Exception as fault:  # no failure of a worker may stop a cycle
            outcome = "failed"
            _log.warning("planner.plan_failed", cluster=cluster, error=f"{type(fault).__name__}: {fault}")
        plan = self._plans.get(cluster)
        while plan is not None and target is not None and plan.changed:
            # More may change while these are applied.
            changes, plan.changed = plan.changed, []
            target = await self._compute(partial(_as_created, target, changes))
            plan = self._plans.get(cluster)
        if plan is not None:
            plan.pending, plan.changed = None, []
        if is_settling and target is None:
            return  # the next cycle plans it with what is on offer
        if without is None or is_settling:
            self._metrics.plans.labels(outcome).inc()
            if plan is not None:
                self._keep(cluster, rows, target)
                self._wake()
        elif plan is not None:
            self._keep_tight(cluster, rows, target, len(without.unused))

    def _keep(self, cluster: str, rows: tuple[Need, ...], target: Target | None) -> None:
        plan = self._plans[cluster]
        plan.rows, plan.target, plan.made_seconds = rows, target, self._clock.monotonic_seconds()
        plan.is_new, plan.is_tight, plan.tight_tried, plan.is_settling = True, False, None, False
        self._set_target(cluster, target)

    def _keep_tight(self, cluster: str, rows: tuple[Need, ...], target: Target | None, empty: int) -> None:
        """Follow a tight composition, without so many empty machines; without one the rows are planned as usual."""
        if target is None:
            self._metrics.plans.labels("not_tightened").inc()
            return
        plan = self._plans[cluster]
        tried = plan.tight_tried
        self._keep(cluster, rows, target)
        plan.is_tight, plan.tight_tried = True, tried
        self._metrics.plans.labels("tightened").inc()
        if empty:
            _log.info("planner.composition_tightened", cluster=cluster, machines=empty)

    def _set_target(self, cluster: str, target: Target | None) -> None:
        self._set_targets({cluster: target})

    def _set_targets(self, targets: Mapping[str, Target | None]) -> None:
        changed = {cluster: target for cluster, target in targets.items() if self._targets.get(cluster) != target}
        if not changed:
            return
        # Options of earlier cycles hold the old mapping.
        self._targets = {name: known for name, known in self._targets.items() if name not in changed}
        self._targets.update((cluster, target) for cluster, target in changed.items() if target is not None)


def _as_created(target: Target, changes: Sequence[ClassChange]) -> Target:
    return with_classes_changed(target, [(change.before, change.after) for change in changes])


def _by_cluster(machines: Iterable[Machine], clusters: Set[str]) -> dict[str, list[Machine]]:
    """Return the machines of some clusters."""
    found: dict[str, list[Machine]] = {}
    for machine in machines:
        if machine.cluster in clusters:
            found.setdefault(machine.cluster, []).append(machine)
    return found


def _withheld_from(cluster: str, withheld: Mapping[str, WithheldPools]) -> frozenset[CapacityPool]:
    found = withheld.get(cluster)
    return frozenset() if found is None else found.pools


def _ids(machines: Sequence[Machine]) -> tuple[MachineId, ...]:
    return tuple(machine.id for machine in machines)


def is_alike(before: Sequence[Need], after: Sequence[Need]) -> bool:
    """Return whether a composition for the one demand does for the other: no new kind of pod, and little change."""
    return before is after or (_kinds(after) <= _kinds(before) and _change(before, after) <= SAME_DEMAND)


def _kinds(rows: Sequence[Need]) -> set[tuple[RowKey, frozenset[tuple[str, int]], int]]:
    return {(row.key, frozenset(one.resources.items()), one.max_per_machine) for row in rows for one in row.shapes}


def _change(before: Sequence[Need], after: Sequence[Need]) -> float:
    """Return by how much the demand changed: the largest relative change of any dimension, 0 to 1."""
    totals: list[dict[str, int]] = []
    for rows in (before, after):
        total: dict[str, int] = {}
        for row in rows:
            for name, milli in row.aggregate.items():
                total[name] = total.get(name, 0) + milli
        totals.append(total)
    names = totals[0].keys() | totals[1].keys()
    pairs = [(totals[0].get(name, 0), totals[1].get(name, 0)) for name in names]
    return max((abs(new - old) / max(new, old) for old, new in pairs if new != old), default=0.0)
