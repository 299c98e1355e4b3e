"""Represents one Kubernetes cluster in its session with the shard: routes each frame to the part that handles it.

docs/spec/operator.md. It builds the parts (demand, conditions, nodes, drains, bootstrap) in the order of their
dependencies over the given views, and runs them. A process creates an agent when it becomes leader; the agent ends with
it. This module does not decide about machines.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bigfleet.model import frames
from bigfleet.model.clock import Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, DrainResult, NodeStateUpdate, NodeStatus, RollUp
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.operator.conditions.verdicts import RequestVerdicts
from bigfleet.operator.conditions.writer import StatusWriter
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey
from bigfleet.operator.demand.gang_domains import GangDomains
from bigfleet.operator.demand.joined_nodes import JoinedNodes
from bigfleet.operator.demand.overheads import NodeOverheads
from bigfleet.operator.demand.waiting import UnschedulablePods
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.api import KubernetesApi
from bigfleet.operator.kubernetes.events import EventRecorder, EventSeverity, reference_to
from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.kubernetes.resources import NODES
from bigfleet.operator.kubernetes.timestamps import unix_seconds
from bigfleet.operator.metrics import AgentFigures, OperatorMetrics
from bigfleet.operator.nodes.available_capacity import AvailableCapacities
from bigfleet.operator.nodes.budgets import DisruptionBudgets
from bigfleet.operator.nodes.drain_executor import DrainExecutor
from bigfleet.operator.nodes.drain_forecast import DrainForecaster
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.pod_index import PodsByNode
from bigfleet.operator.nodes.preflight import Preflight
from bigfleet.operator.nodes.statuses import NodeStatuses
from bigfleet.operator.nodes.upcoming_nodes import UpcomingNodes
from bigfleet.operator.ports import SessionDialer, SessionEnded
from bigfleet.operator.session import SessionClient, SessionSettings
from bigfleet.operator.views import OperatorViews
from bigfleet.operator.work_queue import KeyQueue, WorkQueue

#: How often the gauges are set.
_SAMPLE_SECONDS = 1.0
#: Hints that are written at the same time.
HINT_WORKERS = 2


class BootstrapAnswerer(Protocol):
    """Answers bootstrap requests; see `bigfleet.operator.bootstrap.service`."""

    @property
    def reload_errors_total(self) -> int:
        """How many versions of the template were not taken into use."""
        ...

    async def answer(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return what boots the machine, or an answer with an error."""
        ...

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Hear that a machine's node is Ready."""
        ...

    async def run(self) -> None:
        """Run the background work of bootstrapping, such as deleting tokens, until cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What the command line says of the work inside the cluster."""

    session: SessionSettings
    status_workers: int = 16
    handler_workers: int = 32
    #: Pods that are left when a drain's grace ends are deleted.
    drain_force: bool = False


class KubernetesAgent:
    """One cluster; implements `bigfleet.operator.ports.ClusterAgent`."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        api: KubernetesApi,
        views: OperatorViews,
        bootstrap: BootstrapAnswerer,
        events: EventRecorder,
        dialer: SessionDialer,
        metrics: OperatorMetrics,
        clock: Clock,
        rng: Rng,
        settings: AgentSettings,
    ) -> None:
        """Take the views once they are synced."""
        self._views = views
        self._bootstrap = bootstrap
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._session = SessionClient(
            cluster=cluster, agent=self, dialer=dialer, clock=clock, rng=rng, settings=settings.session
        )
        self._queue = WorkQueue(clock=clock, rng=rng, workers=settings.handler_workers)
        pods_by_node = PodsByNode()
        self._nodes = NodeMatcher(api=api, queue=self._queue, clock=clock)
        self._statuses = NodeStatuses(
            nodes=self._nodes, pods=pods_by_node, clock=clock, send=self._session.node_changed
        )
        self._upcoming = UpcomingNodes(
            api=api, nodes=self._nodes, queue=self._queue, clock=clock, on_write=metrics.upcoming_node_written
        )
        # Of their own, because there may be thousands: what is said of machines must not wait behind them.
        self._hint_queue = WorkQueue(clock=clock, rng=rng, workers=HINT_WORKERS)
        self._hints = AvailableCapacities(
            api=api, stored=views.available_capacities, queue=self._hint_queue, clock=clock
        )
        preflight = Preflight(nodes=self._nodes, pods=pods_by_node, clock=clock)
        budgets = DisruptionBudgets(api=api, clock=clock)
        self._drains = self._make_drains(api, pods_by_node, budgets, preflight, rng, force=settings.drain_force)
        self._forecasts = DrainForecaster(
            nodes=self._nodes,
            pods=pods_by_node,
            budgets=budgets,
            preflight=preflight,
            leaving=self._drains.leaving,
            clock=clock,
            answer=self._session.forecast_made,
        )
        overheads = NodeOverheads(views.daemon_sets)
        domains = GangDomains(views.nodes)
        self._joined = joined = JoinedNodes(pods=pods_by_node, clock=clock)
        self._demand = DemandView(
            cluster=cluster,
            requests=views.capacity_requests,
            clock=clock,
            overheads=overheads,
            domains=domains,
            on_demand_changed=self._session.demand_changed,
        )
        self._waiting = UnschedulablePods(pods=views.pods, requests=self._demand, nodes=joined, clock=clock)
        statuses: KeyQueue[ObjectKey] = KeyQueue(clock)
        self._verdicts = RequestVerdicts(demand=self._demand, clock=clock, changed=statuses.put, pods=self._waiting)
        self._writer = self._make_writer(api, statuses, rng, settings.status_workers)
        self._demand.add_listener(self._verdicts)
        self._waiting.add_listener(self._verdicts)
        self._nodes.listen(self._node_changed)
        self._follow(views, pods_by_node, domains, joined, overheads)

    def _follow(
        self,
        views: OperatorViews,
        pods_by_node: PodsByNode,
        domains: GangDomains,
        joined: JoinedNodes,
        overheads: NodeOverheads,
    ) -> None:
        # Nodes before pods, pods before requests: what comes later looks at what came before.
        views.nodes.add_listener(self._nodes)
        views.nodes.add_listener(joined)
        views.pods.add_listener(pods_by_node)
        views.pods.add_listener(domains)
        views.upcoming_nodes.add_listener(self._upcoming)
        views.daemon_sets.add_listener(overheads)
        views.pods.add_listener(overheads.pods)
        views.capacity_requests.add_listener(self._demand)
        views.pods.add_listener(self._waiting)

    def _make_drains(
        self,
        api: KubernetesApi,
        pods: PodsByNode,
        budgets: DisruptionBudgets,
        preflight: Preflight,
        rng: Rng,
        *,
        force: bool,
    ) -> DrainExecutor:
        return DrainExecutor(
            api=api,
            nodes=self._nodes,
            pods=pods,
            budgets=budgets,
            preflight=preflight,
            clock=self._clock,
            rng=rng,
            finished=self._drain_finished,
            on_event=self._record_node_event,
            observer=self._metrics,
            force=force,
        )

    def _make_writer(self, api: KubernetesApi, queue: KeyQueue[ObjectKey], rng: Rng, workers: int) -> StatusWriter:
        return StatusWriter(
            api=api,
            requests=self._views.capacity_requests,
            demand=self._demand,
            verdicts=self._verdicts,
            queue=queue,
            events=self._events,
            clock=self._clock,
            rng=rng,
            pods=self._waiting,
            workers=workers,
            listener=self._metrics,
        )

    async def run(self) -> None:
        """Represent the cluster until cancelled; drains that an earlier leader began go on."""
        for drain in self._drains.resume():
            self._session.resume_drain(drain)
        async with asyncio.TaskGroup() as tasks:
            for name, work in (
                ("queue", self._queue.run()),
                ("hint queue", self._hint_queue.run()),
                ("demand", self._demand.run()),
                ("statuses", self._statuses.run()),
                ("hints", self._hints.run()),
                ("drains", self._drains.run()),
                ("forecasts", self._forecasts.run()),
                ("conditions", self._writer.run()),
                ("bootstrap", self._bootstrap.run()),
                ("events", self._events.run()),
                ("session", self._session.run()),
                ("figures", self._sample()),
            ):
                tasks.create_task(work, name=name)

    # ---- what the session asks ----------------------------------------------------------------------------------

    def roll_up(self) -> RollUp | None:
        """Return the complete demand, or None while the view may be partial."""
        with self._metrics.rollup_duration.time():
            roll_up = self._demand.roll_up(self._waiting.waiting_requests, self._waiting.given_up_requests)
        self._metrics.rolled_up(roll_up)
        return roll_up

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return what boots the machine, or an answer with an error that names the cause for a person."""
        return await self._bootstrap.answer(request)

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Recount the demand, and let conditions speak of it again."""
        self._demand.session_opened()
        self._hints.session_opened()
        self._verdicts.session_opened(shard_capabilities)

    def session_closed(self, ended: SessionEnded) -> None:
        """Let conditions and hints grow old."""
        self._metrics.session_closed(ended)
        self._hints.session_closed()
        self._verdicts.session_closed()

    def acknowledged(self, ack: frames.Acknowledgement) -> None:
        """Acknowledge the requests of the roll-up, or show why it is not in force."""
        self._metrics.acknowledged(ack)
        self._verdicts.acknowledged(ack)

    def node_state(self, update: NodeStateUpdate) -> None:
        """Follow the machine."""
        self._nodes.node_state(update)
        self._drains.node_state(update)
        self._joined.node_state(update)
        self._upcoming.node_state(update)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Forget the machines that are not the cluster's any more."""
        self._nodes.resynced(machine_ids)
        self._drains.resynced(machine_ids)
        self._joined.resynced(machine_ids)
        self._upcoming.resynced(machine_ids)

    def node_statuses(self) -> Iterable[NodeStatus]:
        """Return the status of every node that is tied to a machine."""
        return self._statuses.all()

    def available(self, hint: frames.AvailableCapacity) -> None:
        """Show the hint."""
        self._hints.available(hint)

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        """Judge the requests, and the pods that wait although their need is met."""
        self._waiting.need_status(update)
        self._verdicts.need_status(update)

    def drain_forecast(self, request: frames.DrainForecastRequest) -> None:
        """Answer soon."""
        self._forecasts.ask(request)

    def drain_started(self, drain: DrainRecord) -> None:
        """Begin a drain, or hasten it."""
        self._upcoming.drain_started(drain)
        self._drains.start(drain)

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Stop draining."""
        self._drains.end(drain, withdrawn=withdrawn)

    # ---- what the cluster says ----------------------------------------------------------------------------------

    def _drain_finished(self, result: DrainResult) -> None:
        self._upcoming.drain_finished(result)
        self._session.drain_finished(result)

    def _record_node_event(self, node: NodeObject, reason: str, message: str) -> None:
        self._events.record(reference_to(NODES, node), EventSeverity.NORMAL, reason, message)

    def _node_changed(self, machine_id: str) -> None:
        node = self._nodes.node_of(machine_id)
        if node is not None and node.is_ready:
            self._bootstrap.node_ready(machine_id, since_unix_seconds=_ready_since(node))

    # ---- figures ------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            self._metrics.sample(self.figures())
            await self._clock.sleep(_SAMPLE_SECONDS)

    def figures(self) -> AgentFigures:
        """Return what is counted at this moment."""
        return AgentFigures(
            requests=len(self._demand),
            acknowledged=self._verdicts.acknowledged_count,
            invalid=self._demand.invalid_count,
            is_connected=self._session.is_connected,
            frames_dropped_total=self._session.frames_dropped_total,
            bootstraps_dropped_total=self._session.bootstraps_dropped_total,
            rollups_replaced_total=self._session.rollups_replaced_total,
            recount_mismatches_total=self._demand.recount_mismatches_total,
            template_reload_errors_total=self._bootstrap.reload_errors_total,
            upcoming_phases=self._upcoming.count_phases(),
            available_capacities=len(self._views.available_capacities),
            drains_running=self._drains.drains_running,
            dispatch_inflight=len(self._queue) + len(self._hint_queue),
            nodes_unmatched=self._nodes.count_unmatched(),
        )


def _ready_since(node: NodeObject) -> float | None:
    """Return since when a node has been Ready by its condition, Unix seconds; None if the condition has no time."""
    for condition in node.status.conditions or ():
        if condition.type == "Ready":
            return unix_seconds(condition.last_transition_time)
    return None
