"""Passes a decision's actions through the safety limits to the action queue, and keeps their state between cycles.

docs/spec/shard.md §6. The arithmetic is in `bigfleet.shard.safety_limits` and `bigfleet.shard.cycle.reclaim_delay`;
work in proportion to the number of actions runs off the loop. This module does not change a decision: a later cycle
decides again on actions that a safety limit holds back.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Action, Decision
from bigfleet.engine.folding import forms_of
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.compute import Compute
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.shard import safety_limits
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_queue import Actuator
from bigfleet.shard.actuation.backoff import DemandBackoff
from bigfleet.shard.actuation.provider_backoff import ProviderBackoff
from bigfleet.shard.cycle.node_fullness import NodeFullness
from bigfleet.shard.cycle.reclaim_delay import ExcessTimers, FitHolds, excess_machines, is_delayable
from bigfleet.shard.cycle.replacements import serving_for_replacements
from bigfleet.shard.cycle.shortfall_ages import short_of_cycle
from bigfleet.shard.cycle.vain_preemptions import VainPreemptions
from bigfleet.shard.inventory.fleet_queries import configured_by_cluster
from bigfleet.shard.inventory.ingest import NodeLoad
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ShardSettings

_log = structlog.get_logger("bigfleet.shard.cycle.guardrails")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedActions:
    """How many of one cycle's actions the safety limits held back, and how many were enqueued."""

    capped: int = 0
    delayed: int = 0
    postponed: int = 0
    enqueued: int = 0


class Guardrails:
    """The safety limits of one shard. Its loop alone calls it, once per cycle."""

    def __init__(
        self,
        *,
        settings: ShardSettings,
        clock: Clock,
        load_of: Callable[[MachineId], NodeLoad | None],
        fit_holds: FitHolds,
        ledger: ActionLedger,
        actuator: Actuator,
        demand_backoff: DemandBackoff,
        provider_backoff: ProviderBackoff,
        metrics: ShardMetrics,
        compute: Compute,
        awaited: Callable[[], Set[MachineId]] = frozenset,
        refused: Callable[[], Set[MachineId]] = frozenset,
        left_out: Callable[[], Set[MachineId]] = frozenset,
    ) -> None:
        """Take the parts.

        `load_of` returns what was last reported of a machine's node, `awaited` the machines that wait for the pods
        which they were acquired for (9.9), `refused` those that the cluster policy does not let their clusters have,
        `left_out` the empty ones that a composition leaves out or may leave out soon (4.2).
        """
        self._awaited = awaited
        self._refused = refused
        self._left_out = left_out
        self._settings = settings
        self._clock = clock
        self._fit_holds = fit_holds
        self._ledger = ledger
        self._actuator = actuator
        self._demand_backoff = demand_backoff
        self._provider_backoff = provider_backoff
        self._metrics = metrics
        self._compute = compute
        self._node_fullness = NodeFullness(load_of)
        #: How full the nodes are of the clusters that had excess machines in the last cycle (9.3); replaced only.
        self.fullness: Mapping[str, int] = {}
        #: Reclaims of the timer period by cluster (safety limit 1).
        self._reclaims_spent: Mapping[str, int] = {}
        #: The excess machines of the last cycle (safety limit 5); replaced, never changed.
        self.excess = ExcessTimers()
        #: Rows that do not take what is preempted for them (safety limit 7).
        self.vain_preemptions = VainPreemptions(clock)
        #: The clusters whose excess machines waited for a session in the last cycle (9.3, D2''); replaced only.
        self._away: Set[str] = frozenset()
        #: The excess machines of the last cycle that serve until their replacements do (safety limit 6); replaced only.
        self._serving_on: Set[MachineId] = frozenset()
        metrics.reclaim_after.set(settings.reclaim_after_seconds)

    async def enqueue(
        self, decision: Decision, snapshot: ColumnSnapshot, *, cycle: int, now_seconds: float, is_timer: bool
    ) -> AdmittedActions:
        """Enqueue what the safety limits admit, or set all of it aside under a pause or a dry run."""
        disposition = safety_limits.disposition(paused=self._settings.actuation_paused, dry_run=self._settings.dry_run)
        if is_timer:
            self._reclaims_spent = {}
        # What starts meanwhile is caught when the actions are enqueued.
        in_flight = self._ledger.in_flight() | self._refused()
        if disposition is not safety_limits.Disposition.EXECUTE:
            open_actions = await self._compute(lambda: _open_actions(decision, in_flight))
            self._metrics.actions_deduped.inc(len(decision.actions) - len(open_actions))
            await self._actuator.suppress(open_actions, cycle, disposition)
            return AdmittedActions()
        if not await self._provider_backoff.look():
            self._metrics.actions_refused.inc(len(decision.actions))
            await self._follow_excess(decision, now_seconds=now_seconds, is_timer=is_timer)
            return AdmittedActions()
        chosen = await self._choose(decision, snapshot, in_flight, now_seconds=now_seconds, is_timer=is_timer)
        self._reclaims_spent = dict(chosen.spent)
        metrics = self._metrics
        metrics.actions_deduped.inc(chosen.in_flight)
        metrics.actions_refused.inc(chosen.refused)
        metrics.actions_dropped.inc(chosen.left)
        metrics.reclaims_capped.inc(chosen.capped)
        metrics.actions_deferred.inc(chosen.postponed)
        metrics.preemptions_vain.inc(self.vain_preemptions.follow(chosen.actions))
        counts = self._actuator.enqueue(chosen.actions, cycle)
        return AdmittedActions(
            capped=chosen.capped, delayed=chosen.delayed, postponed=chosen.postponed, enqueued=counts.enqueued
        )

    def delay_of(self, machine: Machine) -> tuple[int, str]:
        """Return until when a machine's reclaim waits, Unix nanoseconds, and why; (0, "") for no such machine."""
        machine_id = machine.id
        hold, since = self._fit_holds.get(machine_id), self.excess.since_seconds.get(machine_id)
        now_seconds, after_seconds = self._clock.monotonic_seconds(), self._settings.reclaim_after_seconds
        until_seconds, why = (now_seconds, "")
        if since is not None and not self.excess.is_due(machine_id, after_seconds):
            until_seconds, why = since + after_seconds, "excess"
        elif machine_id in self._serving_on:
            until_seconds, why = now_seconds + self._settings.cycle_interval_seconds, "replacement_not_ready"
        elif since is not None and machine.cluster in self._away:
            until_seconds, why = now_seconds + self._settings.cycle_interval_seconds, "no_session"
        if hold is not None and hold.until_seconds >= until_seconds:
            until_seconds, why = hold.until_seconds, f"would_not_fit: {hold.text}" if hold.text else "would_not_fit"
        if not why:
            return 0, ""
        return self._clock.unix_nanos() + int((until_seconds - now_seconds) * NANOS_PER_SECOND), why

    async def _follow_excess(self, decision: Decision, *, now_seconds: float, is_timer: bool) -> None:
        """Note which machines are excess in a cycle that enqueues nothing: one that is used starts its delay over."""
        before, after_seconds = self.excess, self._settings.reclaim_after_seconds

        def follow() -> ExcessTimers:
            return before.followed_by(excess_machines(decision.actions), now_seconds=now_seconds, is_timer=is_timer)

        if after_seconds > 0:
            self.excess = await self._compute(follow)
            self._metrics.reclaim_delayed_machines.set(self.excess.waiting(after_seconds))

    async def _choose(
        self,
        decision: Decision,
        snapshot: ColumnSnapshot,
        in_flight: Set[MachineId],
        *,
        now_seconds: float,
        is_timer: bool,
    ) -> safety_limits.Chosen:
        settings, before, spent = self._settings, self.excess, self._reclaims_spent
        backed_off, without_session = self._demand_backoff.backed_off(), self._demand_backoff.without_session()
        after_seconds = settings.reclaim_after_seconds
        in_vain = self.vain_preemptions.held()
        fit_held = self._fit_holds.held()
        self._metrics.reclaim_held_machines.set(len(fit_held))
        self._metrics.preemption_held_rows.set(len(in_vain))
        held = fit_held | self._awaited()
        left_out = self._left_out()
        self._away = away = self._fit_holds.awaited_sessions()
        overheads = decision.basis.options.overheads if decision.basis is not None else {}

        def choose() -> tuple[ExcessTimers, Set[MachineId], Mapping[str, int], safety_limits.Chosen]:
            excess, found = before, list(excess_machines(decision.actions))
            if after_seconds > 0:
                excess = before.followed_by(found, now_seconds=now_seconds, is_timer=is_timer)
            due = [each for each in found if excess.is_due(each, after_seconds) and each not in held]
            serving_on = serving_for_replacements(snapshot, due, decision)
            chosen = safety_limits.choose(
                decision.actions,
                in_flight=in_flight,
                backed_off=backed_off,
                without_session=without_session,
                in_vain=in_vain,
                is_delayed=lambda action: (
                    is_delayable(action)
                    and (
                        action.machine_id in held
                        or action.machine_id in serving_on
                        or action.cluster in away
                        or not excess.is_due(action.machine_id, after_seconds)
                    )
                ),
                fraction=settings.reclaim_cap_fraction,
                configured_by_cluster=configured_by_cluster(snapshot),
                spent=spent,
                actions_max=settings.actions_per_cycle_max,
                room=self._actuator.candidates_max,
            )
            going = excess.since_seconds.keys() | left_out
            short = _stamps_of_short_rows(decision) if going else frozenset()
            fullness = self._node_fullness.read(snapshot, going, held=fit_held, short=short, overheads=overheads)
            return excess, serving_on, fullness, chosen

        self.excess, self._serving_on, self.fullness, chosen = await self._compute(choose)
        waiting = self.excess.waiting(after_seconds)
        self._metrics.reclaim_waiting_for_replacement_machines.set(len(self._serving_on))
        self._metrics.reclaim_delayed_machines.set(waiting)
        started = len(self.excess.since_seconds.keys() - before.since_seconds.keys())
        if started:
            _log.info("reclaim.delay_started", machines=started, waiting=waiting, reclaim_after_seconds=after_seconds)
        return chosen


def _stamps_of_short_rows(decision: Decision) -> Set[RowKey]:
    """Return the rows for which a machine stays also without a claim, as machines are stamped with them."""
    return frozenset(need.key for result in short_of_cycle(decision.rows, frozenset()) for need in forms_of(result))


def _open_actions(decision: Decision, in_flight: Set[MachineId]) -> tuple[Action, ...]:
    return tuple(action for action in decision.actions if action.machine_id not in in_flight)
