"""The shard itself: it cycles on a timer and on changed demand, and puts the parts of this package together.

docs/spec/shard.md §3. One cycle at a time: reconcile, snapshot, decide on that one snapshot off the loop, rails,
enqueue, show. The cycle never waits for an action. What a cycle could not do is derived again by the next one.
"""

import asyncio
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from bigfleet.engine import parking, reference, shortfalls
from bigfleet.engine.decision import Decision, Options, ParkingKey
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.frames import MalformedMessage, NodeStateUpdate
from bigfleet.model.ids import IdSource, MachineId, ShardId
from bigfleet.model.need import RowKey
from bigfleet.model.states import MachineState
from bigfleet.shard import rails
from bigfleet.shard.actuation import Actuator
from bigfleet.shard.backoff import Refusals, Strikes
from bigfleet.shard.demand import Intake, RollUpOutcome
from bigfleet.shard.executors import Executors
from bigfleet.shard.ingest import Ingest
from bigfleet.shard.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import Compute, Provider, ProviderRefusal, ShardSettings, TokenSource
from bigfleet.shard.reconcile import Reconciler
from bigfleet.shard.sessions import RollUpOffer, Session, Sessions
from bigfleet.shard.views import CycleView, ViewContext, build_view, short_of, split_residual

_log = structlog.get_logger("bigfleet.shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleReport:
    """What one cycle did, for logs and tests."""

    cycle: int
    is_timer: bool
    decision: Decision | None
    capped: int = 0
    postponed: int = 0
    enqueued: int = 0


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
    ) -> None:
        self.shard_id = shard_id
        self.epoch = epoch
        self.settings = settings
        self.inventory = Inventory()
        self.metrics = ShardMetrics(registry, self.inventory)
        self.intake = Intake(guard=settings.empty_rollup_guard)
        self.sessions = Sessions(epoch=epoch, outbox_frames_max=settings.outbox_frames_max)
        self.strikes = Strikes(clock)
        self.refusals = Refusals(clock)
        self.ingest = Ingest(inventory=self.inventory, sessions=self.sessions, metrics=self.metrics, clock=clock)
        self._clock = clock
        self._compute = compute
        self.executors = Executors(
            settings=settings,
            inventory=self.inventory,
            ingest=self.ingest,
            sessions=self.sessions,
            provider=provider,
            tokens=TokenSource(shard_id, epoch),
            metrics=self.metrics,
            clock=clock,
            ids=ids,
            strikes=self.strikes,
            refusals=self.refusals,
            revisit=lambda machine_id: self.reconciler.revisit(machine_id),
        )
        self.actuator = Actuator(
            settings=settings,
            inventory=self.inventory,
            metrics=self.metrics,
            clock=clock,
            ids=ids,
            execute=self.executors.execute,
            is_backed_off=self.refusals.is_backed_off,
        )
        self.reconciler = Reconciler(
            settings=settings,
            provider=provider,
            inventory=self.inventory,
            ingest=self.ingest,
            executors=self.executors,
            strikes=self.strikes,
            metrics=self.metrics,
        )
        #: The last finished cycle; replaced, never changed.
        self.view = CycleView()
        #: Latched by the first successful reconcile; a later provider error never takes it back.
        self.is_ready = False
        self.cycle = 0
        self._wakeup = asyncio.Event()
        self._parking_ages: dict[ParkingKey, int] = {}
        self._ledger: shortfalls.Ledger = {}
        self._row_ages: dict[RowKey, int] = {}
        self._reclaims_spent: dict[str, int] = {}
        self._connect_parts()

    def _connect_parts(self) -> None:
        self.sessions.on_open = self._session_opened
        self.sessions.on_lifecycle = self._session_lifecycle
        self.sessions.on_node_status = lambda session, status: self.ingest.note_node_name(session.cluster, status)
        self.metrics.epoch.set(self.epoch)
        self.metrics.actuation_paused.set(int(self.settings.actuation_paused))

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Cycle until cancelled; workers run beside."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.actuator.run(), name="actuator")
            group.create_task(self._cycles(), name="cycles")

    def wake(self) -> None:
        """Ask for a cycle soon; many requests give one."""
        self._wakeup.set()

    async def _cycles(self) -> None:
        next_tick_seconds = self._clock.monotonic_seconds()
        started_seconds = float("-inf")
        while True:
            is_timer = await self._next_trigger(next_tick_seconds, started_seconds)
            started_seconds = self._clock.monotonic_seconds()
            if is_timer:
                # Several ticks may have passed; they are still one.
                while next_tick_seconds <= started_seconds:
                    next_tick_seconds += self.settings.cycle_interval_seconds
            await self.step(is_timer=is_timer)

    async def _next_trigger(self, next_tick_seconds: float, started_seconds: float) -> bool:
        """Wait for the next cycle; return whether the ticker has fired."""
        while True:
            now_seconds = self._clock.monotonic_seconds()
            if now_seconds >= next_tick_seconds:
                self._wakeup.clear()
                return True
            gap_seconds = self.settings.wake_gap_seconds
            woken_at_seconds = next_tick_seconds if gap_seconds is None else started_seconds + gap_seconds
            if self._wakeup.is_set() and now_seconds >= woken_at_seconds:
                self._wakeup.clear()
                return False
            until_seconds = min(next_tick_seconds, woken_at_seconds) if self._wakeup.is_set() else next_tick_seconds
            if self._wakeup.is_set():
                await self._clock.sleep(until_seconds - now_seconds)
                continue
            try:
                async with asyncio.timeout(until_seconds - now_seconds):
                    await self._wakeup.wait()
            except TimeoutError:
                continue

    async def step(self, *, is_timer: bool = True) -> CycleReport:
        """Run one cycle; an error inside is logged and counted, and nothing after it is enqueued."""
        self.cycle += 1
        self.actuator.cycle = self.cycle
        started_seconds = self._clock.monotonic_seconds()
        try:
            report = await self._one_cycle(is_timer)
        except asyncio.CancelledError:
            raise
        except Exception:
            self.metrics.cycle_failures.inc()
            _log.exception("cycle_failed", cycle=self.cycle)
            return CycleReport(cycle=self.cycle, is_timer=is_timer, decision=None)
        self.metrics.cycle_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)
        self.metrics.cycle_duration.observe(self._clock.monotonic_seconds() - started_seconds)
        return report

    async def _one_cycle(self, is_timer: bool) -> CycleReport:
        lap = _Lap(self._clock, self.metrics)
        await self._reconcile()
        lap.end("reconcile")
        if not self.is_ready:
            # An unread inventory is not an empty one: no phase runs on it.
            return CycleReport(cycle=self.cycle, is_timer=is_timer, decision=None)
        computed_at_unix_nanos = self._clock.unix_nanos()
        snapshot = self.inventory.snapshot()
        demand = self.intake.table.in_list_order()
        options = Options(
            now_seconds=self._clock.monotonic_seconds(),
            reported=frozenset(self.intake.reported),
            parking_ages=self._parking_ages,
        )
        lap.end("snapread")
        decision = await self._compute(lambda: reference.decide(snapshot, demand, options))
        lap.end("decide")
        self.refusals.keep_only({need.key for need in demand} | {result.need.key for result in decision.rows})
        refused = frozenset(result.need.key for result in decision.rows if self.refusals.is_refused(*result.need.key))
        self._age(decision, snapshot, refused, is_timer)
        self._refresh_overflowed_sessions()
        lap.end("emit")
        report = self._carry_out(decision, snapshot, is_timer)
        lap.end("execute")
        context = ViewContext(
            cycle=self.cycle,
            computed_at_unix_nanos=computed_at_unix_nanos,
            snapshot=snapshot,
            demand=demand,
            options=options,
            parking_ages=self._parking_ages,
            row_ages=self._row_ages,
            refused=refused,
        )
        self.view = await self._compute(lambda: build_view(decision, context))
        self.metrics.demand_rows.set(len(demand))
        self.metrics.shortfalls.set(len(self._ledger))
        return report

    async def _reconcile(self) -> None:
        try:
            await self.reconciler.run(self.actuator)
        except (ProviderRefusal, TimeoutError) as error:
            _log.warning("reconcile_failed", cycle=self.cycle, error=str(error) or "List timed out")
            return
        if not self.is_ready:
            self.is_ready = True
            _log.info("ready", machines=len(self.inventory), cycle=self.cycle)
            for session in self.sessions:
                self._resync(session)

    def _age(self, decision: Decision, snapshot: Snapshot, refused: Set[RowKey], is_timer: bool) -> None:
        self._parking_ages = parking.next_ages(self._parking_ages, decision.rows, advance=is_timer)
        self._ledger = shortfalls.record(self._ledger, decision.rows, advance=is_timer)
        ages: dict[RowKey, int] = {}
        for result in decision.rows:
            is_refused = result.need.key in refused
            short = short_of(result, result.unresolved, is_refused=is_refused, snapshot=snapshot)
            if not short:
                continue
            covered = vector.subtract(result.need.aggregate, short)
            for member, residual in split_residual(result.members, covered):
                if residual:
                    known = self._row_ages.get(member.key)
                    ages[member.key] = 1 if known is None else known + int(is_timer)
        self._row_ages = ages

    def _carry_out(self, decision: Decision, snapshot: Snapshot, is_timer: bool) -> CycleReport:
        actions = tuple(action for action in decision.actions if self.actuator.is_open_to(action))
        self.metrics.actions_deduped.inc(len(decision.actions) - len(actions))
        posture = rails.disposition(paused=self.settings.actuation_paused, dry_run=self.settings.dry_run)
        if posture is not rails.Disposition.EXECUTE:
            self.actuator.suppress(actions, self.cycle, posture)
            return CycleReport(cycle=self.cycle, is_timer=is_timer, decision=decision)
        if is_timer:
            self._reclaims_spent = {}
        capped = rails.cap_reclaims(
            actions,
            fraction=self.settings.reclaim_cap_fraction,
            configured_by_cluster=Counter(machine.cluster for machine in snapshot.of_state(MachineState.CONFIGURED)),
            spent=self._reclaims_spent,
        )
        self._reclaims_spent = dict(capped.spent)
        self.metrics.reclaims_capped.inc(capped.capped)
        limited, postponed = rails.limit_actions(capped.kept, self.settings.actions_per_cycle_max)
        self.metrics.actions_deferred.inc(postponed)
        counts = self.actuator.enqueue(limited, self.cycle)
        if postponed:
            self.wake()
        return CycleReport(
            cycle=self.cycle,
            is_timer=is_timer,
            decision=decision,
            capped=capped.capped,
            postponed=postponed,
            enqueued=counts.enqueued,
        )

    @property
    def compute(self) -> Compute:
        """Runs pure work off the loop; who asks for much of it keeps others from doing so at the same time."""
        return self._compute

    @property
    def shortfall_ledger(self) -> shortfalls.Ledger:
        """What the fleet lacks, by fingerprint, as of the last cycle."""
        return self._ledger

    # ---- sessions -----------------------------------------------------------------------------------------------

    def take_rollup(self, session: Session, offer: RollUpOffer) -> RollUpOutcome:
        """Take one roll-up, from route to table (docs/spec/shard.md §4); every caller enters through here."""
        outcome = self._judge_rollup(session, offer)
        self.metrics.rollups.labels(outcome.value).inc()
        self.metrics.rollup_quarantined.labels(session.cluster).set(int(self.intake.is_quarantined(session.cluster)))
        return outcome

    def _judge_rollup(self, session: Session, offer: RollUpOffer) -> RollUpOutcome:
        if offer.cluster_id != session.cluster:
            _log.warning("rollup_misrouted", session=session.cluster, cluster=offer.cluster_id)
            return RollUpOutcome.MISROUTED
        if self.intake.is_unchanged(session.cluster, offer.digest):
            self.sessions.acknowledge_rollup(session, offer, held=False)
            return RollUpOutcome.UNCHANGED
        try:
            needs = offer.needs()
        except MalformedMessage as fault:
            self.metrics.rollups_rejected.labels(session.cluster).inc()
            _log.warning("rollup_rejected", cluster=session.cluster, place=fault.place, fault=fault.fault)
            self.sessions.reject_rollup(session, offer, str(fault))
            return RollUpOutcome.REJECTED
        verdict = self.intake.offer(
            session.cluster, needs, digest=offer.digest, now_unix_nanos=self._clock.unix_nanos()
        )
        if not verdict.is_accepted:
            _log.warning("rollup_held", cluster=session.cluster, verdict=verdict.value, rows=len(needs))
            self.sessions.acknowledge_rollup(session, offer, held=True)
            return RollUpOutcome.HELD
        if verdict is rails.Verdict.ACCEPT_CONFIRMED:
            _log.warning("rollup_believed", cluster=session.cluster, rows=len(needs))
        self.wake()
        self.sessions.acknowledge_rollup(session, offer, held=False)
        return RollUpOutcome.ACCEPTED

    async def serve_rollups(self, session: Session) -> None:
        """Take the session's roll-ups one after the other, newest first in line, until the session ends."""
        while self.sessions.is_current(session):
            await session.rollup_arrived.wait()
            session.rollup_arrived.clear()
            offer, session.pending_rollup = session.pending_rollup, None
            if offer is None or not self.sessions.is_current(session):
                continue
            try:
                self.take_rollup(session, offer)
            except Exception:  # the next roll-up must still find its taker, and the last good demand stays
                _log.exception("rollup_failed", cluster=session.cluster)

    def stop_sessions(self) -> None:
        """Refuse new sessions and end every stream: the first step of a clean stop."""
        self.sessions.stop()

    def _session_opened(self, session: Session) -> None:
        self.refusals.session_opened(session.cluster)
        self._resync(session)

    def _session_lifecycle(self, event: str, session: Session) -> None:
        self.metrics.session_lifecycle.labels(event).inc()
        self.metrics.active_sessions.set(len(self.sessions))
        self.metrics.outbox_dropped.inc(session.outbox.dropped if event in ("removed", "replaced") else 0)
        if event == "removed" and session.cluster not in self.intake.table.clusters:
            # A cluster that is gone, or never was one, leaves no series behind.
            self.metrics.rollup_quarantined.remove(session.cluster)
            self.metrics.rollups_rejected.remove(session.cluster)

    def _refresh_overflowed_sessions(self) -> None:
        for session in self.sessions:
            if session.outbox.overflowed:
                self._resync(session)

    def _resync(self, session: Session) -> None:
        """Tell a session its drains under way, then its machines, as they are when the stream takes them."""
        again, cluster = self.executors.instruction_again, session.cluster
        session.outbox.start_resync(
            [
                *(partial(again, machine_id) for machine_id in self.executors.drain_waits_of(cluster)),
                *(partial(self._node_state, machine_id, cluster) for machine_id in self.inventory.bound_to(cluster)),
            ]
        )

    def _node_state(self, machine_id: MachineId, cluster: str) -> NodeStateUpdate | None:
        machine = self.inventory.get(machine_id)
        if machine is None or machine.cluster != cluster:
            return None
        return self.ingest.node_state(machine, machine.cluster)


class _Lap:
    """Times the phases of one cycle."""

    def __init__(self, clock: Clock, metrics: ShardMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._started_seconds = clock.monotonic_seconds()

    def end(self, phase: str) -> None:
        """Observe the time since the last phase ended."""
        now_seconds = self._clock.monotonic_seconds()
        self._metrics.cycle_phase.labels(phase).observe(now_seconds - self._started_seconds)
        self._started_seconds = now_seconds
