"""Runs the shard: a cycle on a timer and on changed demand; wires the parts of this package.

docs/spec/shard.md §3. One cycle at a time: reconcile, take a snapshot, decide on it off the event loop, apply the
safety limits, enqueue, publish. Work that grows with the decision runs off the loop, on immutable values. The cycle
never waits for an action. The next cycle decides again what a cycle could not do.
"""

import asyncio
from collections.abc import Callable, Set
from dataclasses import asdict
from functools import partial

import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from bigfleet.engine import shortfalls
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.compute import Compute
from bigfleet.model.frames import NodeStatus
from bigfleet.model.ids import IdSource, MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.validation import validate
from bigfleet.recording.hook import CycleInput, CycleTaker, recorded
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_queue import Actuator
from bigfleet.shard.actuation.backoff import DemandBackoff, MachineBackoff
from bigfleet.shard.actuation.executors import Executors
from bigfleet.shard.actuation.session_resync import SessionResync
from bigfleet.shard.actuation.stockouts import Stockouts
from bigfleet.shard.actuation.stuck_transitions import StuckTransitions
from bigfleet.shard.audit.log import Audit, AuditLog
from bigfleet.shard.cluster_policy import ClusterPolicies
from bigfleet.shard.cycle.composition_plans import CompositionPlans, PlanWorkers
from bigfleet.shard.cycle.conclusion import conclude
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.cycle.cycle_trigger import CycleTrigger
from bigfleet.shard.cycle.demand_limits import DemandLimits
from bigfleet.shard.cycle.empty_nodes import EmptyNodes
from bigfleet.shard.cycle.engine_runner import EngineMaker, EngineRunner, fleet_engine
from bigfleet.shard.cycle.guardrails import Guardrails
from bigfleet.shard.cycle.phase_timer import PhaseTimer
from bigfleet.shard.cycle.reclaim_delay import FitHolds
from bigfleet.shard.cycle.shortfall_ages import ShortfallAges
from bigfleet.shard.cycle.waiting_growth import WaitingGrowth
from bigfleet.shard.exchange.exchange_records import ExchangeStore, MemoryExchanges
from bigfleet.shard.exchange.execution import ExchangeExecution
from bigfleet.shard.inventory.fleet_queries import largest_supply
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.inventory.machine_shapes import MachineRows
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ownership.handover_host import ShardHandoverHost
from bigfleet.shard.ownership.ownership import Ownership, rows_with
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.shard.ownership.retired_clusters import MemoryRetirements, RetirementStore
from bigfleet.shard.ports import Provider, ProviderRefusal, ShardSettings, TokenSource
from bigfleet.shard.reconcile.ownership_filter import EVERYTHING, OwnedResources, OwnershipFilter
from bigfleet.shard.reconcile.reconciler import Reconciler
from bigfleet.shard.sessions.demand import Intake
from bigfleet.shard.sessions.known_clusters import KnownClusters
from bigfleet.shard.sessions.registry import Session, Sessions
from bigfleet.shard.sessions.rollup_intake import OnRollUp, RollUpIntake
from bigfleet.shard.status.cycle_publisher import CyclePublisher, Subscribers
from bigfleet.shard.status.reports import Report, report_of
from bigfleet.shard.status.session_views import SessionViews
from bigfleet.shard.status.views import CycleView, ViewContext, build_view

_log = structlog.get_logger("bigfleet.shard")


class Shard:
    """One shard process's state and its loop. All of it is touched by that loop alone."""

    def __init__(
        self,
        *,
        shard_id: ShardId,
        epoch: int,
        settings: ShardSettings,
        provider: Provider,
        clock: Clock,
        ids: IdSource,
        compute: Compute,
        registry: CollectorRegistry,
        make_engine: EngineMaker = fleet_engine,
        audit_log: AuditLog | None = None,
        ownership_file: OwnershipFile | None = None,
        retirements: RetirementStore | None = None,
        exchange_store: ExchangeStore | None = None,
        recorder: CycleTaker | None = None,
        plan_workers: PlanWorkers | None = None,
        on_inventory: Callable[[], None] = lambda: None,
        on_rollup: OnRollUp = lambda *_: None,
    ) -> None:
        """Without `ownership_file` all is ours that no other shard has bound, and that cannot change.

        Without `retirements` or `exchange_store` those end with the process, without `plan_workers` cycles plan.
        `on_inventory` is called once, when the first List has been applied, `on_rollup` with each roll-up.
        """
        self.shard_id, self.epoch, self.settings = shard_id, epoch, settings
        self.inventory = Inventory()
        self.metrics = ShardMetrics(registry, self.inventory)
        self._clock = clock
        #: Runs pure work off the loop; parts that ask for much of it take turns.
        self.compute = compute
        #: The last finished cycle, and the rows of its machines that could not be given away after it; replaced only.
        self.view = CycleView()
        self.taken: MachineRows = np.zeros(0, np.int64)
        self._resources: OwnedResources = ownership_file or EVERYTHING
        self.audit = Audit(shard_id=shard_id, epoch=epoch, log=audit_log, metrics=self.metrics)
        self.ledger = ActionLedger(
            inventory=self.inventory, metrics=self.metrics, clock=clock, ids=ids, audit=self.audit, settings=settings
        )
        self.stockouts = Stockouts(clock, self.metrics)
        self._make_sessions(ownership_file)
        self.machine_backoff = MachineBackoff(clock)
        self.demand_backoff = DemandBackoff(clock)
        retired = retirements or MemoryRetirements()
        self.fit_holds = FitHolds(clock, lambda: self.publisher.awaited_sessions(retired.records.keys()))
        self._make_ingest()
        #: Settings of single clusters; replaced, never changed.
        self.policies = ClusterPolicies()
        #: Receives what every cycle asked its engine, and what it was answered.
        self.recorder = recorder
        self._decider = EngineRunner(
            make_engine=make_engine,
            verify_every_cycles=settings.engine_verify_every_cycles,
            compute=compute,
            metrics=self.metrics,
        )
        self.plans = self._make_plans(plan_workers)
        self.exchanges = ExchangeExecution(self, clock=clock, store=exchange_store or MemoryExchanges())
        self._make_actuators(provider, ids)
        self.ownership = None if ownership_file is None else self._make_ownership(ownership_file, provider, ids)
        self._on_inventory = on_inventory
        self.cycle = 0
        self.has_reconciled = False
        self._has_decided = False
        self._trigger = CycleTrigger(self._clock, settings.wake_gap_seconds)
        self._inspecting = asyncio.Lock()
        self._ages = ShortfallAges()
        self._make_rollups(on_rollup, retired)

    def _make_sessions(self, file: OwnershipFile | None) -> None:
        """Make the sessions, and the parts that follow what operators report and are sent."""
        self.sessions = Sessions(
            epoch=self.epoch,
            outbox_frames_max=self.settings.outbox_frames_max,
            accepted_term=lambda: 0 if file is None else file.accepted_term,
            are_shown_machines=False,
            on_open=self._session_opened,
            on_lifecycle=self._session_lifecycle,
            on_node_status=self._node_reported,
        )
        #: Refuses new sessions and ends every stream: the first step of a clean stop.
        self.stop_sessions = self.sessions.stop
        self.publisher = CyclePublisher(
            settings=self.settings,
            inventory=self.inventory,
            sessions=self.sessions,
            metrics=self.metrics,
            clock=self._clock,
        )
        self.stuck = StuckTransitions(self.settings, self.inventory, self.sessions, self.stockouts, self._clock)
        self.waiting_growth = WaitingGrowth(
            clock=self._clock,
            machine_of=self.inventory.get,
            has_joined=self.publisher.has_joined,
            has_failed=lambda each: self.publisher.joins.is_unjoined(each) or self.stuck.is_no_supply(each),
        )
        self.limits = DemandLimits(metrics=self.metrics, compute=self.compute, actions=self.ledger.pending_actions)
        self.intake = Intake(
            guard=self.settings.empty_rollup_guard,
            bounded=lambda name, rows: self.waiting_growth.reported(name, self.limits.reported(name, rows)),
        )

    def _make_ingest(self) -> None:
        """Make the only writer of the inventory, and the filter of what may enter it."""
        self.ownership_filter = OwnershipFilter(
            me=self.shard_id,
            inherits=self.settings.inherits,
            resources=self._resources,
            is_known=self.inventory.__contains__,
            is_busy=self.ledger.is_pending,
        )
        self.ingest = Ingest(
            inventory=self.inventory,
            sessions=self.sessions,
            metrics=self.metrics,
            clock=self._clock,
            owns=self.ownership_filter.owns,
            on_change=self.publisher.machine_changed,
            on_insert_many=self.publisher.machines_inserted,
            on_observed=self.stockouts.observed,
            on_remove=self.publisher.machine_removed,
            on_status=self._node_seen,
        )

    def _make_plans(self, workers: PlanWorkers | None) -> CompositionPlans:
        self.empty_nodes = EmptyNodes(
            clock=self._clock,
            load_of=self.ingest.node_load,
            machine_of=self.inventory.get,
            overheads_of=lambda cluster: self.intake.table.overheads_by_cluster().get(cluster, ()),
            after_seconds=self.settings.reclaim_after_seconds,
        )
        return CompositionPlans(
            clock=self._clock,
            compute=self.compute,
            metrics=self.metrics,
            workers=workers,
            wait_seconds=self.settings.plan_wait_seconds,
            empty_nodes=self.empty_nodes,
            settings_of=lambda cluster: self.policies.plan_settings(cluster),
            refused=self.fit_holds.held,
            wake=self.wake,
        )

    def _make_actuators(self, provider: Provider, ids: IdSource) -> None:
        """Make the parts that call the provider: those that carry out, and the one that reads."""
        #: The machines whose records are to be read again, and the tokens of all calls of this process.
        self._revisits: set[MachineId] = set()
        self.tokens = TokenSource(self.shard_id, self.epoch)
        self.executors = Executors(
            settings=self.settings,
            inventory=self.inventory,
            ingest=self.ingest,
            sessions=self.sessions,
            provider=provider,
            tokens=self.tokens,
            metrics=self.metrics,
            clock=self._clock,
            ids=ids,
            ledger=self.ledger,
            machine_backoff=self.machine_backoff,
            demand_backoff=self.demand_backoff,
            stockouts=self.stockouts,
            fit_holds=self.fit_holds,
            revisit=self._revisits.add,
            profile_of=self.intake.table.profile_of,
            note_drain=self.stuck.note_drain,
            is_reserved=lambda each: each in self._resources.reservations or each in self.ingest.lost_bindings.held,
        )
        self._resync = SessionResync(
            sessions=self.sessions,
            publisher=self.publisher,
            executors=self.executors,
            ingest=self.ingest,
            inventory=self.inventory,
        )
        self.actuator = Actuator(
            settings=self.settings,
            inventory=self.inventory,
            metrics=self.metrics,
            clock=self._clock,
            ledger=self.ledger,
            slots=self.executors.slots,
            execute=self.executors.execute,
            is_backed_off=self.demand_backoff.is_backed_off,
        )
        self.guardrails = Guardrails(
            settings=self.settings,
            clock=self._clock,
            load_of=self.ingest.node_load,
            fit_holds=self.fit_holds,
            ledger=self.ledger,
            actuator=self.actuator,
            demand_backoff=self.demand_backoff,
            provider_backoff=self.executors.provider_backoff,
            metrics=self.metrics,
            compute=self.compute,
            awaited=lambda: self.waiting_growth.awaited | self.exchanges.retained,
            refused=lambda: self.limits.refused,
            left_out=self.plans.left_out,
        )
        self.reconciler = Reconciler(
            settings=self.settings,
            provider=provider,
            inventory=self.inventory,
            ingest=self.ingest,
            ledger=self.ledger,
            executors=self.executors,
            machine_backoff=self.machine_backoff,
            metrics=self.metrics,
            clock=self._clock,
            ownership_filter=self.ownership_filter,
            revisits=self._revisits,
        )

    def _make_ownership(self, file: OwnershipFile, provider: Provider, ids: IdSource) -> Ownership:
        """Make what carries out a coordinator's instructions; who brings them is not known here."""
        handover_host = ShardHandoverHost(
            settings=self.settings,
            inventory=self.inventory,
            ingest=self.ingest,
            ledger=self.ledger,
            actuator=self.actuator,
            provider=provider,
            tokens=self.tokens,
            audit=self.audit,
            clock=self._clock,
            ids=ids,
            is_ready=lambda: self.view.decided_on is not None,
            claimed=self._claimed,
            unjoined=lambda: self.publisher.joins.unjoined,
            widened=self._widened,
        )
        return Ownership(
            me=self.shard_id,
            file=file,
            handover_host=handover_host,
            metrics=self.metrics,
            clock=self._clock,
            report_interval_seconds=self.settings.report_interval_seconds,
        )

    def _make_rollups(self, on_rollup: OnRollUp, store: RetirementStore) -> None:
        """Make the way of roll-ups, and what ends the memory of a cluster."""
        last_rollups: dict[str, int] = {}
        self.known_clusters = KnownClusters(
            store=store,
            intake=self.intake,
            last_rollups=last_rollups,
            sessions=self.sessions,
            inventory=self.inventory,
            actions=self.ledger.pending_actions,
            demand_backoff=self.demand_backoff,
            publisher=self.publisher,
            metrics=self.metrics,
            clock=self._clock,
            audit=self.audit,
        )
        self.retirement = self.known_clusters.retirement
        self._rollups = RollUpIntake(
            intake=self.intake,
            sessions=self.sessions,
            publisher=self.publisher,
            metrics=self.metrics,
            clock=self._clock,
            compute=self.compute,
            wake=self.wake,
            on_rollup=on_rollup,
            largest_supply=lambda cluster: largest_supply(self.inventory.latest_snapshot, cluster),
            refusal_of=self.retirement.refusal_of,
            last_rollups=last_rollups,
        )
        #: Takes one roll-up, from route to table (docs/spec/shard.md §4); every caller enters through here.
        self.take_rollup = self._rollups.judge
        #: Takes a session's roll-ups one after the other, newest first in line, until the session ends.
        self.serve_rollups = self._rollups.serve
        self.session_views = SessionViews(
            sessions=self.sessions,
            intake=self.intake,
            silence=self.publisher.silence,
            last_rollups=last_rollups,
            clock=self._clock,
        )
        self.metrics.epoch.set(self.epoch)
        self.metrics.actuation_paused.set(int(self.settings.actuation_paused))

    @property
    def is_ready(self) -> bool:
        """Whether the engine is ready and the first reconcile has succeeded; later ones may have failed."""
        return self.has_reconciled and self._decider.is_ready

    async def run(self) -> None:
        """Cycle until cancelled; workers run beside. Raises what making the engine raises."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.make_ready(), name="engine")
            group.create_task(self.actuator.run(), name="actuator")
            group.create_task(self._cycles(), name="cycles")

    def wake(self) -> None:
        """Ask for a cycle soon; many requests give one."""
        self._trigger.wake()

    async def make_ready(self) -> None:
        """Make the engine ready, off the loop: sessions are served and the inventory is read meanwhile."""
        if not self._decider.is_ready:
            await self._decider.make_ready()
            self._log_ready()
            if self.is_ready:
                self.wake()

    def _log_ready(self) -> None:
        if self.is_ready:
            _log.info("shard.became_ready", machines=len(self.inventory), cycle=self.cycle)

    async def _cycles(self) -> None:
        async for is_timer in self._trigger.cycles(self.settings.cycle_interval_seconds):
            await self.step(is_timer=is_timer)

    async def step(self, *, is_timer: bool = True) -> CycleReport:
        """Run one cycle; an error inside is logged and counted, and nothing after it is enqueued.

        Before `make_ready` has returned it reconciles and does nothing else.
        """
        self.cycle += 1
        self.ledger.cycle = self.cycle
        started_seconds = self._clock.monotonic_seconds()
        try:
            report = await self._one_cycle(is_timer)
        except Exception:
            self.metrics.cycle_failures.inc()
            _log.exception("cycle.failed", cycle=self.cycle)
            report = CycleReport(cycle=self.cycle, is_timer=is_timer, decision=None)
        else:
            self.metrics.cycle_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)
        self.metrics.cycle_duration.observe(self._clock.monotonic_seconds() - started_seconds)
        validate(self.inventory, self.actuator, self.publisher)
        return report

    async def _one_cycle(self, is_timer: bool) -> CycleReport:
        timer = PhaseTimer(self._clock, self.metrics)
        await self._reconcile()
        timer.end("reconcile")
        if not self.is_ready:
            # An unread inventory is not an empty one: no phase runs on it, nor without an engine.
            return CycleReport(cycle=self.cycle, is_timer=is_timer, decision=None)
        table, unjoined = self.intake.table, self.publisher.look(self.intake.table.clusters)
        # What follows is one moment; each part of it that grows with the clusters is a moment of its own.
        await self._clock.sleep(0)
        computed_at_unix_nanos = self._clock.unix_nanos()
        snapshot = await self._snapshot()
        if is_timer:
            self.metrics.outbox_frames.set(self.sessions.fullest_outbox)
            may_call = not self.executors.provider_backoff.is_active
            self.stuck.look(snapshot, self.ledger, self.actuator, self.cycle, may_call=may_call)
            self.known_clusters.look()
        limited = self.limits.followed(self.policies, lambda: self.waiting_growth.rows_in_force(table.by_cluster()))
        bounded = ((cluster, self.waiting_growth.reported(cluster, found)) for cluster, found in limited)
        self.intake.replace_rows(bounded, computed_at_unix_nanos)
        self.intake.replace_rows(self.waiting_growth.moved(), computed_at_unix_nanos)
        demand, buckets, by_cluster = table.in_list_order(), table.buckets_in_list_order(), table.by_cluster()
        judged, options = self.publisher.judged(), self._options(snapshot, unjoined)
        excess = filter(None, map(self.inventory.get, self.guardrails.excess.since_seconds))
        options = await self.exchanges.options_with(snapshot, demand, by_cluster, options, excess=excess)
        asked = CycleInput(self.cycle, computed_at_unix_nanos, is_timer, snapshot, demand, options)
        asked, decision = await self._decide(asked, timer)
        self._has_decided = True
        timer.end_decision()
        self.exchanges.decided(decision)
        self.demand_backoff.keep_only(self.intake.table.wants)
        self.guardrails.vain_preemptions.keep_only(self.intake.table.wants)
        self.stockouts.keep_only(self.intake.table.wants)
        self.waiting_growth.decided(decision.rows)
        subscribers = Subscribers(
            demand=by_cluster,
            buckets=buckets,
            judged=judged,
            refusal_texts={**self.stockouts.bootstraps.texts(), **self.demand_backoff.texts()},
            busy=self.ledger.in_flight() | options.reserved,
            now_seconds=self._clock.monotonic_seconds(),
            limits=self.limits.effect,
        )
        context = ViewContext(
            cycle=self.cycle,
            computed_at_unix_nanos=computed_at_unix_nanos,
            snapshot=snapshot,
            demand=asked.demand,
            options=asked.options,
            refused=self.demand_backoff.refused(),
            failing=self.stockouts.failing(),
        )
        ages, effects_of = self._ages, partial(self.publisher.effects_of, subscribers=subscribers)
        concluded = await self.compute(lambda: conclude(ages, decision, context, effects_of, is_timer=is_timer))
        self._ages, context, effects = concluded.ages, concluded.context, concluded.effects
        self._resync.repair()
        self.publisher.publish_hints(effects)
        timer.end("emit")
        carried_out = self.limits.carried_out(decision)
        passed = await self.guardrails.enqueue(
            carried_out, snapshot, cycle=self.cycle, now_seconds=options.now_seconds, is_timer=is_timer
        )
        if passed.postponed:
            self.wake()
        timer.end("execute")
        self.view = build_view(decision, context)
        self.taken = effects.taken
        self.publisher.publish_need_status(effects)
        self.publisher.show(effects, self._ages.ledger, demand_rows=len(demand))
        return CycleReport(cycle=self.cycle, is_timer=is_timer, decision=decision, **asdict(passed))

    async def _decide(self, asked: CycleInput, timer: PhaseTimer) -> tuple[CycleInput, Decision]:
        """Return the decision within the limits of the cluster policy, and what it was made of; that is recorded."""

        async def decide(asked: CycleInput) -> Decision:
            return await self._decider.decide(asked.snapshot, asked.demand, asked.options, timer.decided)

        return await recorded(self.recorder, asked, self.limits.decide(asked, decide))

    def _options(self, snapshot: ColumnSnapshot, unjoined: frozenset[str]) -> Options:
        table = self.intake.table
        options = Options(
            now_seconds=self._clock.monotonic_seconds(),
            reported=self.intake.reported_by_now(),
            reserved=self.ownership_filter.reserved | self.ingest.lost_bindings.held,
            unjoined=unjoined | self.stuck.no_supply(),
            set_aside=self.ingest.rejected,
            parking_ages=self._ages.parking,
            overheads=table.overheads_by_cluster(),
            fullness=self.guardrails.fullness,
        )
        is_pending = self.ledger.is_pending
        return self.stockouts.options_with(options, snapshot, is_pending=is_pending, rows_of=table.need_of)

    async def _reconcile(self) -> None:
        try:
            result = await self.reconciler.run()
        except (ProviderRefusal, TimeoutError) as error:
            _log.warning("reconcile.failed", cycle=self.cycle, error=str(error) or "List timed out")
            if not self.has_reconciled:
                self._trigger.retry_soon()
            return
        if self.ownership is not None:
            self.ownership.reconciled(result)
        if not self.has_reconciled:
            self.has_reconciled = True
            self._log_ready()
            self._on_inventory()
            await self._resync.begin(self._clock)

    async def _snapshot(self) -> ColumnSnapshot:
        if not self._has_decided:
            # The first one writes every machine into its row. Nothing has been decided, so no action is under way
            # that could change a machine meanwhile, and this cycle's reconcile is over.
            return await self.compute(self.inventory.snapshot)
        return self.inventory.snapshot()

    def report(self) -> Report | None:
        """Return what the shard would report of its last finished cycle; None before there is one.

        Cost: a pass over the columns, milliseconds for the largest fleet.
        """
        decided_on = self.view.decided_on
        if decided_on is None:
            return None
        taken = self.taken
        if self.ownership is not None:
            # What came lately is our own clusters' supply, and no other shard's for a while.
            unavailable = self.ownership.handover.cooling | self.ownership_filter.reserved
            taken = rows_with(decided_on.snapshot, taken, unavailable)
        own = self.stockouts.own()
        return report_of(decided_on.snapshot, taken, self._ages.ledger, cycle=self.view.cycle, sold_out=own)

    @property
    def reported_clusters(self) -> Set[str]:
        """The clusters that have reported since this process started; a live view."""
        return self.intake.reported

    def _claimed(self) -> Set[MachineId]:
        """Return the machines that could not be given away after the last finished cycle."""
        decided_on = self.view.decided_on
        return set() if decided_on is None else {decided_on.snapshot.ids[row] for row in self.taken.tolist()}

    def _widened(self) -> None:
        self.reconciler.widen()
        self.wake()

    @property
    def shortfall_ledger(self) -> shortfalls.Ledger:
        """What the fleet lacks, by fingerprint, as of the last cycle."""
        return self._ages.ledger

    async def inspect(self) -> CycleView:
        """Return the last finished cycle with its rows made, off the loop when they were not read before."""
        view = self.view
        async with self._inspecting:
            await self.compute(lambda: view.needs)
        return view

    def _session_opened(self, session: Session) -> None:
        self.demand_backoff.session_opened(session.cluster)
        self.stockouts.bootstraps.try_again(session.cluster)
        self.publisher.session_opened(session)
        self._resync.session_opened(session)

    def _node_reported(self, session: Session, status: NodeStatus) -> bool:
        return self.ingest.note_node_name(session.cluster, status)

    def _node_seen(self, machine: Machine, status: NodeStatus) -> None:
        self.publisher.joins.seen(machine, status)
        self.empty_nodes.seen(machine)
        if status.ready:
            self.stockouts.bootstraps.joined(machine)

    def _session_lifecycle(self, event: str, session: Session) -> None:
        self.metrics.session_lifecycle.labels(event).inc()
        if event in ("removed", "replaced"):
            self.publisher.session_ended(session)
            self.metrics.outbox_dropped.inc(session.outbox.dropped)
        self.metrics.active_sessions.set(len(self.sessions))
        if event == "removed" and session.cluster not in self.intake.table.clusters:
            # A cluster that is gone, or never was one, leaves no series behind.
            self.metrics.rollup_quarantined.remove(session.cluster)
            self.metrics.rollups_rejected.remove(session.cluster)
