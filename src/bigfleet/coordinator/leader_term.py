"""Serves administrators and readers during one term, and runs the rebalancing passes.

docs/spec/coordinator.md §4 to §7. It connects `leader`, which accepts reports, and `rebalancer`, which plans. The
caller holds the replica's lock, so that its methods never run concurrently. This module does not wait for time to pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from bigfleet.coordinator.commands import Command, RemoveShard, SetDomainOwner
from bigfleet.coordinator.delivery import InstructionEntry
from bigfleet.coordinator.ephemeral_state import FRESH_CYCLES, EphemeralState, ReportAnswer
from bigfleet.coordinator.leader import BadReport, Leader
from bigfleet.coordinator.metrics import KINDS, CoordinatorMetrics, Figures, kind_of
from bigfleet.coordinator.rebalancer import Heard, Rebalancing, ownership_overlap
from bigfleet.coordinator.received_report import received_of
from bigfleet.coordinator.tables import DomainState, Tables
from bigfleet.coordinator.transfers import Knobs, Transfer
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Domain, OwnershipRow, RowKind
from bigfleet.model.shard_report import ShardReport

_log = structlog.get_logger("bigfleet.coordinator.leader_term")


class ShardAlive(Exception):
    """A shard may not be removed yet; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """How a coordinator works; the defaults are those of the command line."""

    report_interval_seconds: float = 30.0
    #: 0: no rebalancing.
    rebalance_interval_seconds: float = 150.0
    cooldown_seconds: float = 240.0
    #: Passes run and are listed, nothing is enqueued.
    is_dry_run: bool = False
    knobs: Knobs = field(default_factory=Knobs)


class Term:
    """The leader of one term with everything that is known to it."""

    def __init__(
        self, leader: Leader, *, settings: CoordinatorSettings, clock: Clock, metrics: CoordinatorMetrics
    ) -> None:
        self.leader = leader
        self.heard: dict[ShardId, Heard] = {}
        #: What the last pass of a dry run would have sent to donors.
        self.proposed: tuple[Transfer, ...] = ()
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._begin()

    def _begin(self) -> None:
        """Forget everything but the tables: a new term, or the same leader under a raised one."""
        self.term = self.leader.term
        self.heard.clear()
        self.proposed = ()
        self.began_seconds = self._clock.monotonic_seconds()
        self.rebalancing = Rebalancing(
            knobs=self._settings.knobs,
            cooldown_seconds=self._settings.cooldown_seconds,
            began_seconds=self.began_seconds,
        )
        #: Shards that may own the same machines, and how many passes in a row have found just these.
        self._overlap: tuple[frozenset[ShardId], int] = (frozenset(), 0)

    @property
    def tables(self) -> Tables:
        """The tables as this leader has them."""
        return self.leader.tables

    @property
    def ephemeral(self) -> EphemeralState:
        """What reports have shown."""
        return self.leader.ephemeral

    async def report(self, report: ShardReport) -> ReportAnswer:
        """Take a report and answer it. Raises as `Leader.report`."""
        for_leader = received_of(report)
        try:
            return await self.leader.report(for_leader)
        except BadReport:
            self._metrics.report("refused")
            raise
        finally:
            if self.leader.term != self.term:
                self._begin()
            known = self.ephemeral.known.get(report.shard_id)
            if known is not None and known.report is for_leader:
                self._hear(report)
            self._metrics.ended(self.ephemeral.ledger.entries)

    def _hear(self, report: ShardReport) -> None:
        now_unix_nanos = self._clock.unix_nanos()
        before = self.heard.get(report.shard_id)
        if before is None:
            before = Heard(report=report, received_unix_nanos=now_unix_nanos, holding=None)
        self.heard[report.shard_id] = before.after(report, now_unix_nanos)

    # ---- what administrators ask ---------------------------------------------------------------------------------

    async def commit(self, command: Command) -> None:
        """Commit a command. Raises as `StateStore.commit`."""
        await self.leader.commit(command)

    async def assign(self, domain: Domain, shard_id: ShardId) -> None:
        """Assign a domain to a shard, which gets it in the answer to its next report. Raises as `StateStore.commit`."""
        await self.commit(SetDomainOwner(domain, shard_id, self._neighbours(shard_id)))

    def _neighbours(self, shard_id: ShardId) -> frozenset[ShardId]:
        known = self.ephemeral.known.get(shard_id)
        address = "" if known is None else known.report.provider_address
        if not address:
            return frozenset()
        return frozenset(
            other for other, each in self.ephemeral.known.items() if each.report.provider_address == address
        )

    async def remove_shard(self, shard_id: ShardId, *, is_forced: bool) -> None:
        """Remove a shard and forget it. Raises ShardAlive, and as `StateStore.commit`."""
        now_seconds = self._clock.monotonic_seconds()
        if shard_id in self.tables.shards and not is_forced:
            grace_seconds = FRESH_CYCLES * self._settings.report_interval_seconds
            advice = "stop it and wait, or force it when its process is gone for good"
            if self.ephemeral.is_fresh(shard_id, now_seconds):
                raise ShardAlive(f"shard {shard_id!r} reported within the last {grace_seconds:g} s; {advice}")
            if now_seconds - self.began_seconds < grace_seconds:
                raise ShardAlive(
                    f"this leader is younger than {grace_seconds:g} s and cannot know yet whether shard {shard_id!r} "
                    f"is alive; {advice}"
                )
        await self.commit(RemoveShard(shard_id))
        self.leader.ephemeral = self.ephemeral.without_shard(shard_id, now_seconds)
        self.heard.pop(shard_id, None)

    # ---- passes --------------------------------------------------------------------------------------------------

    def rebalance(self) -> None:
        """Run one pass, unless the term is too young for one, and enqueue what it proposes."""
        now_seconds = self._clock.monotonic_seconds()
        if not self.rebalancing.is_due(now_seconds):
            return
        self._warn_of_overlap()
        self.leader.ephemeral = replace(self.ephemeral, ledger=self.ephemeral.ledger.at(now_seconds))
        plan = self.rebalancing.run(self.ephemeral, self.heard, self.tables, now_seconds)
        self._metrics.passed(plan, self._clock.monotonic_seconds() - now_seconds)
        skipped = {reason.label: count for reason, count in plan.skips().items() if count}
        _log.info("coordinator.rebalanced", moves=len(plan.moves), skipped=skipped, dry_run=self._settings.is_dry_run)
        if self._settings.is_dry_run:
            self.proposed = plan.moves
            return
        first = self.ephemeral.ledger.next_sequence
        self.leader.ephemeral = self.rebalancing.emitted(plan.moves, self.ephemeral, now_seconds)
        sent = [entry for entry in self.ephemeral.ledger.entries if entry.instruction.version.sequence >= first]
        self._metrics.moved(entry.move for entry in sent if entry.move is not None)
        self._metrics.ended(self.ephemeral.ledger.entries)
        for entry in sent:
            _log.info(
                "coordinator.transfer_started",
                instruction=entry.instruction.instruction_id,
                donor=entry.to,
                reason=entry.why,
            )

    def _warn_of_overlap(self) -> None:
        """Log the second pass in a row that finds an overlap: a shard that just started has not shown what it owns."""
        found = ownership_overlap(self.ephemeral, self.tables)
        before, passes = self._overlap
        self._overlap = (found, passes + 1 if found == before else 1)
        if found and self._overlap[1] == 2:
            _log.warning(
                "coordinator.overlap_found",
                shards=sorted(found),
                advice="behind one provider each of them needs --ownership assigned and its domains; until then they "
                "take each other's idle machines, and none is moved between them",
            )

    # ---- what readers see ----------------------------------------------------------------------------------------

    def is_alive(self, shard_id: ShardId) -> bool:
        """Return whether a shard reported within three report cycles."""
        return self.ephemeral.is_fresh(shard_id, self._clock.monotonic_seconds())

    def instructions(self) -> tuple[InstructionEntry, ...]:
        """Return every instruction that is remembered, expired ones as such."""
        return self.ephemeral.ledger.at(self._clock.monotonic_seconds()).entries

    def conflicts(self) -> Mapping[ClusterId, tuple[ShardId, ...]]:
        """Return the shards that claim to serve a cluster which is bound to another, by id."""
        found: dict[ClusterId, list[ShardId]] = {}
        for shard_id, known in sorted(self.ephemeral.known.items()):
            for cluster in known.clusters:
                bound = self.tables.clusters.get(cluster)
                if bound is not None and bound.shard_id != shard_id:
                    found.setdefault(cluster, []).append(shard_id)
        return {cluster: tuple(shards) for cluster, shards in found.items()}

    def cluster_heard_unix_nanos(self, cluster: ClusterId, shard_id: ShardId) -> int:
        """Return when its shard last reported, if that serves the cluster; 0 when this leader never heard so."""
        known, heard = self.ephemeral.known.get(shard_id), self.heard.get(shard_id)
        if known is None or heard is None or cluster not in known.clusters:
            return 0
        return heard.received_unix_nanos

    def figures(self) -> Figures:
        """Return what the gauges show. Asked from another thread: it reads immutable values alone."""
        ephemeral, tables = self.ephemeral, self.tables
        now_seconds = self._clock.monotonic_seconds()
        pending = dict.fromkeys(map(str, tables.shards), 0)
        surfaced = dict.fromkeys(KINDS, 0)
        for entry in ephemeral.ledger.entries:
            if not entry.state.is_final and entry.to in pending:
                pending[entry.to] += 1
            if entry.is_surfaced:
                surfaced[kind_of(entry.instruction)] += 1
        unadopted = _unadopted(ephemeral)
        oldest_unix_nanos = min((row.since_unix_nanos for row in unadopted if row.since_unix_nanos), default=0)
        age_seconds = (self._clock.unix_nanos() - oldest_unix_nanos) / NANOS_PER_SECOND if oldest_unix_nanos else 0.0
        return Figures(
            is_leader=True,
            term=ephemeral.term,
            shards=len(tables.shards),
            shards_alive=sum(ephemeral.is_fresh(shard_id, now_seconds) for shard_id in tables.shards),
            clusters=len(tables.clusters),
            cluster_conflicts=len(self.conflicts()),
            domains=len(tables.domains),
            domains_releasing=sum(row.state is DomainState.RELEASING for row in tables.domains.values()),
            ownership_overlap=len(ownership_overlap(ephemeral, tables)),
            machines_unadopted=len(unadopted),
            oldest_unadopted_seconds=max(0.0, age_seconds),
            pending=pending,
            surfaced=surfaced,
        )


def _unadopted(ephemeral: EphemeralState) -> list[OwnershipRow]:
    """Return the released rows whose machine no shard has adopted since."""
    views = [known.reported.rows for known in ephemeral.known.values() if known.reported is not None]
    adopted: dict[str, OwnershipRow] = {}
    for rows in views:
        for machine_id, row in rows.items():
            if row.kind is RowKind.ADOPTED and (machine_id not in adopted or adopted[machine_id].version < row.version):
                adopted[machine_id] = row
    return [
        row
        for rows in views
        for machine_id, row in rows.items()
        if row.kind is RowKind.RELEASED and (machine_id not in adopted or adopted[machine_id].version < row.version)
    ]
