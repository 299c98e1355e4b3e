"""Runs the real `Shard` with its session servicer, watched, in a process that dies and restarts.

Only its disk outlives it: its epoch and, with several shards, what it owns. Work runs inline. The watch reads what the
shard reports (cycle reports, outcomes of roll-ups, audit lines) and must never decide or change anything.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from bigfleet.engine.decision import ActionKind
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.ports import FenceToken, ShardSettings
from bigfleet.shard.safety_limits import Disposition
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.shard.sessions.registry import RollUpOffer, Session
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.observations import (
    Audited,
    AuditRecord,
    Called,
    ClusterMemory,
    Cycled,
    Died,
    Event,
    Observations,
    ObservedCall,
    RolledUp,
    content_of,
    has_collapsed,
    new_actions,
)
from bigfleet.sim.observed_shard import ObservedShard
from bigfleet.sim.sites.link import ShardLink
from bigfleet.sim.sites.ownership import HeldFile, ShardDisk
from bigfleet.sim.sites.places import ReachableShard
from bigfleet.sim.sites.provider import ProviderSite
from bigfleet.sim.sites.shard_process import make_simulated_shard
from bigfleet.sim.sites.stores import DurableAudit


class WatchedShard(ObservedShard):
    """One shard process."""

    def __init__(
        self, *, number: int, on_event: Callable[[Event], None], observations: Observations, **parts: Any
    ) -> None:
        """`number` counts the processes of the world; `parts` are those of any shard."""
        super().__init__(**parts, on_rollup=self._note_rollup)
        self.number, self.on_event, self.observations = number, on_event, observations

    async def step(self, *, is_timer: bool = True) -> CycleReport:
        """Run one cycle, and report it."""
        memory = self.observations.memory(self)
        if is_timer:
            memory.reclaims.clear()
            memory.caps.clear()
        report = await super().step(is_timer=is_timer)
        self.observations.cycles += 1
        self.last_decision = report.decision or self.last_decision
        actions = tuple(new_actions(self, memory))
        for record in actions:
            if record.disposition in ("", Disposition.EXECUTE.value):
                self.observations.actions[record.kind_label] += 1
                if record.action.kind is ActionKind.RECLAIM and not record.is_redrive:
                    memory.reclaims[record.action.cluster] += 1
            self.observations.note(
                "decided",
                record.action.machine_id,
                f"{record.kind_label} {record.action.cluster} {record.action.reason} {record.disposition}",
            )
        self._note_caps(report)
        self._note_excess(report)
        self.on_event(Cycled(self, report, actions))
        return report

    def _note_caps(self, report: CycleReport) -> None:
        memory = self.observations.memory(self)
        if not memory.reclaims or report.decision is None or report.decision.basis is None:
            return
        machines = report.decision.basis.snapshot().machines.values()
        for cluster in memory.reclaims:
            bound = sum(each.cluster == cluster and each.state is MachineState.CONFIGURED for each in machines)
            cap = max(1, int(self.settings.reclaim_cap_fraction * bound))
            memory.caps[cluster] = max(cap, memory.caps.get(cluster, 0))

    def _note_excess(self, report: CycleReport) -> None:
        if report.decision is None or report.decision.basis is None:
            return
        memory, now_seconds = self.observations.memory(self), report.decision.basis.options.now_seconds
        excess = [each.machine_id for each in report.decision.actions if each.reason == "phase3.excess"]
        known = memory.excess_since_seconds
        memory.excess_since_seconds = {machine_id: known.get(machine_id, now_seconds) for machine_id in excess}

    def _note_rollup(self, session: Session, offer: RollUpOffer, outcome: RollUpOutcome) -> None:
        """Note what became of one roll-up."""
        if outcome is RollUpOutcome.MISROUTED:
            return
        memory = self.observations.memory(self).clusters.setdefault(session.cluster, ClusterMemory())
        rows = None
        if outcome in (RollUpOutcome.ACCEPTED, RollUpOutcome.HELD):
            rows = offer.needs()
        event = RolledUp(self, session.cluster, rows, outcome, memory.baseline, memory.suspicious_in_a_row)
        memory.last_outcome = outcome
        if outcome is RollUpOutcome.UNCHANGED:
            memory.suspicious_in_a_row = 0
        elif outcome is RollUpOutcome.HELD:
            memory.suspicious_in_a_row += 1
            self.observations.mark("a roll-up quarantined")
        elif rows is not None:
            if memory.baseline is not None and has_collapsed(memory.baseline, rows):
                self.observations.mark("a quarantined roll-up believed")
            memory.baseline, memory.suspicious_in_a_row = rows, 0
            memory.in_force = content_of(rows)
        self.observations.note("roll-up", session.cluster, f"{outcome.value} {'' if rows is None else len(rows)}")
        self.on_event(event)

    def is_held_until_restart(self) -> bool:
        """Return whether the shard waits for a person with any machine (docs/spec/shard.md §9.6)."""
        return any(math.isinf(hold.until_seconds) for hold in self.machine_backoff._holds.values())


class ShardSite(ReachableShard):
    """One shard's disk and its processes: normally one, two while a zombie is about."""

    def __init__(
        self,
        name: ShardId,
        *,
        network: Network,
        provider: ProviderSite,
        clock: Clock,
        make_ids: Callable[[str], IdSource],
        observations: Observations,
        on_event: Callable[[Event], None],
        disk: ShardDisk | None = None,
        link: ShardLink | None = None,
    ) -> None:
        """Without a disk all is the shard's and only its epoch is stored; without a link it knows no coordinator."""
        super().__init__(name)
        self.name = name
        self.epoch = 0
        self.disk = disk
        self.shard: WatchedShard | None = None
        #: Every audit log that was ever written.
        self.logs: list[DurableAudit] = []
        self._network = network
        self._provider = provider
        self._clock = clock
        self._make_ids = make_ids
        self._observations = observations
        self._on_event = on_event
        self._link = link

    def start(self, settings: ShardSettings) -> None:
        """Start a process with the next epoch; the one before may still be about."""
        file = None if self.disk is None else self.disk.open()
        self.epoch = self.epoch + 1 if self.disk is None else self.disk.epoch
        process = self.process = Process(self.name)
        self._observations.note("start", self.name, f"epoch {self.epoch}")
        process.spawn(self._run(settings, self.epoch, file), name="shard")

    def lose_disk(self) -> None:
        """Kill the process, and put an empty disk in place of its own."""
        assert self.disk is not None, "a shard alone keeps its epoch outside of the world"
        self.process.kill()
        self._observations.moves.forget(self.name)
        self.disk.lose()

    def owns(self, machine: Machine, assigned_shard: str) -> bool:
        """Return whether a machine is this shard's by its disk; without one everything is."""
        if self.disk is None:
            return True
        return self.disk.ownership.owns(self.name, machine, assigned_shard)

    async def _run(self, settings: ShardSettings, epoch: int, file: HeldFile | None) -> None:
        shard: WatchedShard
        process = self.process

        def on_line(line: bytes) -> None:
            record = msgspec.json.decode(line, type=AuditRecord)
            self._on_event(Audited(shard, record))
            if record.token_sequence:
                self._observations.memory(shard).audited[record.token_sequence] += 1

        def on_call(method: str, machine_id: str, token: FenceToken, answer: str) -> None:
            self._called(shard, ObservedCall(shard, method, machine_id, token.epoch, token.sequence), answer)

        log = DurableAudit(on_line)
        self.logs.append(log)
        shard = make_simulated_shard(
            WatchedShard,
            site=self._provider,
            network=self._network,
            caller=self.name,
            on_call=on_call,
            shard_id=self.name,
            epoch=epoch,
            settings=settings,
            clock=self._clock,
            ids=self._make_ids(f"{self.name}.{epoch}"),
            audit_log=log,
            ownership_file=file,
            number=epoch,
            on_event=self._on_event,
            observations=self._observations,
        )
        self.shard = shard
        process.add_death_callback(lambda: self._died(shard))
        if self._link is not None and file is not None:
            self._link.spawn(shard, file, process)
        try:
            await shard.run()
        except Exception as error:
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            self._observations.breach(
                "S0", f"the shard of epoch {epoch} ended by itself: {type(cause).__name__}: {cause}"
            )

    def _died(self, shard: WatchedShard) -> None:
        called = self._observations.memory(shard).called
        self._on_event(Died(shard, frozenset(map(str, shard.ledger.in_flight())) | called))
        self._observations.moves.busy.discard(self.name)

    def _called(self, shard: WatchedShard, call: ObservedCall, answer: str) -> None:
        name = f"{call.method} {call.epoch}/{call.sequence} {answer}".rstrip()
        self._observations.note("call", call.machine_id, name)
        memory = self._observations.memory(shard)
        if answer:
            memory.open_calls.discard(call.sequence)
            self._observations.mark(f"a call answered {answer}")
            return
        self._on_event(Called(call))
        memory.calls[call.sequence] = call
        memory.open_calls.add(call.sequence)
