"""Serves as the leader: accepts reports, writes the tables, answers shards (docs/spec/coordinator.md §4).

A short flow over a `StateStore`; pure functions make its decisions. Reports of shards are handled one after the other.
It never opens a connection.
"""

from collections.abc import Callable

import structlog

from bigfleet.coordinator.commands import AddShard, BindClusters, Command, CommandRefused, Rule, UpdateShard
from bigfleet.coordinator.ephemeral_state import EphemeralState, ReceivedReport, ReportAnswer
from bigfleet.coordinator.ownership_reconcile import OwnershipPlan, WantedInstruction, reconcile_ownership
from bigfleet.coordinator.quota_transfer import quota_returns_of, quota_transfer_of, what_is_left
from bigfleet.coordinator.stores.protocol import (
    TERM_MAX,
    Leadership,
    NotLeader,
    OutcomeUnknown,
    StateStore,
    StoreUnavailable,
)
from bigfleet.coordinator.tables import Tables
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, ShardId

#: Registered shards; a report of another one is rejected. Clusters that are bound; another one is not.
SHARDS_MAX = 10_000
CLUSTERS_BOUND_MAX = 100_000
#: Clusters that one command binds: the first report of a large shard names thousands.
BOUND_AT_ONCE_MAX = 500
#: Remembered so that each is logged once; at this number all are forgotten, and logged once more.
LOGGED_CONFLICTS_MAX = 10_000

_log = structlog.get_logger("bigfleet.coordinator.leader")


def _ignore(_outcome: str) -> None: ...


class BadReport(Exception):
    """A report has an invalid argument; the message names it."""


class Leader:
    """The leader of one term, until it leads no more."""

    def __init__(
        self,
        store: StateStore,
        won: Leadership,
        *,
        clock: Clock,
        report_cycle_seconds: float,
        on_report: Callable[[str], None] = _ignore,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_report = on_report
        self._report_cycle_seconds = report_cycle_seconds
        self.tables: Tables = won.tables
        self.ephemeral = EphemeralState.of_new_leader(won.term, report_cycle_seconds)
        self._logged_conflicts: set[tuple[ClusterId, ShardId]] = set()
        #: Registered shards that were answered under this term; no other can have accepted it from this leader.
        self._answered: set[ShardId] = set()

    @property
    def term(self) -> int:
        """The term under which it leads."""
        return self.ephemeral.term

    async def report(self, report: ReceivedReport) -> ReportAnswer:
        """Take a report and answer it, in the order of §4.

        Raises BadReport, NotLeader, StoreUnavailable and OutcomeUnknown; nothing of the report is taken then.
        """
        if not report.shard_id:
            raise BadReport("shard_id is empty")
        own_term = report.echoed_term == self.term and report.shard_id in self._answered
        if report.echoed_term >= self.term and not own_term:
            await self._outrun(report)
        if not await self._is_registered(report):
            return self._refused("superseded", report)
        if not self.ephemeral.is_in_order(report):
            return self._refused("out_of_order", report)
        if report.shard_id not in self.tables.shards:
            raise NotLeader("the shard was removed meanwhile")
        now_seconds = self._clock.monotonic_seconds()
        self.ephemeral = self.ephemeral.reported(report, now_seconds)
        await self._bind(report)
        peers = self.ephemeral.peer_views(report.shard_id, self.tables, now_seconds)
        plan = reconcile_ownership(report.shard_id, peers)
        for command in plan.commands:
            await self._try(command)
        plan.instructions = [wanted for wanted in plan.instructions if await self._is_quota_moved(wanted, report)]
        if not await self._is_quota_returned(plan, report):
            plan.taken_back = []
        self.ephemeral = self.ephemeral.with_plan(plan, report.shard_id, now_seconds)
        self.ephemeral, answer = self.ephemeral.answered(report.shard_id, plan, peers, now_seconds)
        if answer.instructions and not await self._may_instruct(report):
            raise NotLeader("another replica leads")
        self._answered.add(report.shard_id)
        self._on_report("ok")
        return answer

    async def _may_instruct(self, report: ReceivedReport) -> bool:
        """Return whether instructions may go to a shard; before it has accepted this term it could obey a former one.

        A shard with a new file would take any term: then the store itself is asked who leads.
        """
        return report.echoed_term == self.term or await self._store.is_leader()

    def _refused(self, outcome: str, report: ReceivedReport) -> ReportAnswer:
        _log.warning(
            "coordinator.report_rejected", shard=report.shard_id, epoch=report.epoch, cycle=report.cycle, reason=outcome
        )
        self._answered.add(report.shard_id)
        self._on_report(outcome)
        return ReportAnswer(term=self.term, acknowledged=False)

    async def _outrun(self, report: ReceivedReport) -> None:
        """A shard has accepted a higher term, or this one from another leader: step down or raise it (§3 point 6).

        A store that was wiped counts its terms again. The shard would take instructions of ours for those that it has.
        """
        if report.echoed_term > TERM_MAX:
            raise BadReport(f"coordinator_term {report.echoed_term} is above {TERM_MAX}")
        if not await self._store.is_leader():
            raise NotLeader("a shard has seen a later leader")
        term = await self._store.raise_term(report.echoed_term)
        _log.warning("coordinator.term_raised", term=term, seen=report.echoed_term, reason="a shard had accepted it")
        self.ephemeral = EphemeralState.of_new_leader(term, self._report_cycle_seconds)
        self._answered.clear()

    async def _is_registered(self, report: ReceivedReport) -> bool:
        """Register the shard, or note what changed; False when a newer process of it has reported."""
        known = self.tables.shards.get(report.shard_id)
        if known is None and len(self.tables.shards) >= SHARDS_MAX:
            raise BadReport(f"{SHARDS_MAX} shards are registered, the most allowed; remove those that are gone")
        if known is None:
            now_unix_nanos = self._clock.unix_nanos()
            await self._commit(AddShard(report.shard_id, report.address, report.epoch, now_unix_nanos))
        elif (known.address, known.epoch) != (report.address, report.epoch):
            try:
                await self._commit(UpdateShard(report.shard_id, report.address, report.epoch))
            except CommandRefused as refused:
                if refused.rule is Rule.EPOCH_FELL:
                    return False
                raise
        return True

    async def _bind(self, report: ReceivedReport) -> None:
        """Bind new clusters. A cluster that is bound to another shard is logged and keeps its binding (§4 step 6)."""
        reported = sorted(self.ephemeral.known[report.shard_id].clusters)
        new = [cluster for cluster in reported if cluster not in self.tables.clusters]
        room = max(0, CLUSTERS_BOUND_MAX - len(self.tables.clusters))
        if len(new) > room:
            _log.error("coordinator.cluster_not_bound", cluster=new[room], most=CLUSTERS_BOUND_MAX)
        for first in range(0, min(len(new), room), BOUND_AT_ONCE_MAX):
            if first:
                # A store on this machine writes without a pause.
                await self._clock.sleep(0)
            part = tuple(new[first : min(first + BOUND_AT_ONCE_MAX, room)])
            await self._try(BindClusters(part, report.shard_id, self._clock.unix_nanos()))
        for cluster in reported:
            bound = self.tables.clusters.get(cluster)
            if bound is None or bound.shard_id == report.shard_id:
                continue
            if (cluster, report.shard_id) not in self._logged_conflicts:
                # Once for each: reports come every half minute, and lists show it as long as it lasts.
                if len(self._logged_conflicts) >= LOGGED_CONFLICTS_MAX:
                    self._logged_conflicts.clear()
                self._logged_conflicts.add((cluster, report.shard_id))
                owner = bound.shard_id
                _log.warning(
                    "coordinator.cluster_reported_twice",
                    cluster=cluster,
                    bound_to=owner,
                    also=report.shard_id,
                    advice="the binding stays; connect the cluster's operator to one shard only",
                )

    async def _is_quota_moved(self, wanted: WantedInstruction, report: ReceivedReport) -> bool:
        """Book the quota that moves with slots; False when it could not be written, and the recipient must wait."""
        transfer = quota_transfer_of(wanted, report.provider_address, self.tables, self._clock.unix_nanos())
        try:
            if transfer is not None:
                await self._commit(transfer)
        except CommandRefused as refused:
            _log.warning("coordinator.quota_transfer_reduced", instruction=wanted.instruction_id, error=str(refused))
            return transfer is None or await self._is_written(what_is_left(transfer, self.tables))
        except (StoreUnavailable, OutcomeUnknown) as error:
            advice = "the slots are not moved until the store answers"
            _log.warning(
                "coordinator.quota_transfer_failed",
                instruction=wanted.instruction_id,
                error=str(error),
                advice=advice,
            )
            return False
        return True

    async def _is_quota_returned(self, plan: OwnershipPlan, report: ReceivedReport) -> bool:
        """Book back the quota of slots that are taken back; False when it could not be written, and they must wait."""
        reported = self.ephemeral.known[report.shard_id].reported
        if not plan.taken_back or reported is None:
            return True
        returns = quota_returns_of(plan.taken_back, report.shard_id, reported, report.provider_address, self.tables)
        for command in returns:
            if not await self._is_written(command):
                advice = "the slots are not taken back until the store answers"
                _log.warning("coordinator.quota_transfer_failed", instruction=command.instruction_id, advice=advice)
                return False
        return True

    async def _is_written(self, command: Command) -> bool:
        try:
            await self._commit(command)
        except CommandRefused:
            # Neither quota nor recipient any more: there is nothing to book.
            return True
        except (StoreUnavailable, OutcomeUnknown):
            return False
        return True

    async def commit(self, command: Command) -> None:
        """Commit an administrator's command. Raises as `StateStore.commit`."""
        await self._commit(command)

    async def _commit(self, command: Command) -> None:
        self.tables = await self._store.commit(command)

    async def _try(self, command: Command) -> None:
        """Commit a change that the next report would repeat, so a failure only delays it."""
        try:
            await self._commit(command)
        except (CommandRefused, StoreUnavailable, OutcomeUnknown) as error:
            _log.warning(
                "coordinator.commit_failed",
                command=type(command).__name__,
                error=str(error),
                advice="the next report tries again",
            )
