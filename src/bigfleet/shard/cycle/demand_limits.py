"""Applies the limits of the cluster policy to demand and to decisions (docs/spec/shard.md §1.1).

Priorities, penalties and the number of rows are limited before a roll-up is decided on. Machines and dollars per hour
are limited over the decision: if a cluster would get more, its demand and its target composition are cut and the shard
decides again. The demand of the last decision is recorded, so that a replay needs no policy.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from bigfleet.engine.decision import Action, ActionKind, Decision
from bigfleet.engine.targets import Target
from bigfleet.model.compute import Compute
from bigfleet.model.frames import NeedStatus
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_label
from bigfleet.model.profile import Profile
from bigfleet.recording.hook import CycleInput
from bigfleet.shard.cluster_policy import ClusterLimits, ClusterPolicies
from bigfleet.shard.cycle.supply_limits import (
    CutRow,
    RefusedSupply,
    allowed_targets,
    cut_rows,
    refused_supply,
    releases_of_refused,
)
from bigfleet.shard.metrics import DEMAND_LIMITS, ShardMetrics
from bigfleet.shard.outcomes import ActionRecord
from bigfleet.shard.status.limit_status import LimitedDemand, ReportedRow, RowName, limit_status

_log = structlog.get_logger("bigfleet.shard.cycle.demand_limits")

#: Decisions of one cycle; what the last one gives beyond a limit is refused.
_DECISIONS_MAX: Final = 3
_GAINS = (ActionKind.BOOTSTRAP, ActionKind.PROVISION)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedRows:
    """The rows of one cluster as its policy has them decided on."""

    rows: Sequence[Need]
    #: Of rows that were changed, and of unchanged ones that they became equal to.
    reported: Mapping[RowName, Sequence[ReportedRow]] = field(default_factory=dict)
    left_out: Sequence[NeedStatus] = ()
    #: Rows by the limit that changed them or left them out.
    counts: Mapping[str, int] = field(default_factory=dict)


def limited_rows(rows: Sequence[Need], limits: ClusterLimits) -> LimitedRows:
    """Return a cluster's rows with priorities and penalties lowered and the least urgent rows left out.

    When nothing exceeds a limit the rows are the same object.
    """
    if not limits.bounds_rows:
        return LimitedRows(rows=rows)
    profiles: dict[str, tuple[Profile, str]] = {}
    counts: Counter[str] = Counter()
    lowered: list[Need] = []
    names: defaultdict[RowName, dict[RowName, str]] = defaultdict(dict)
    for row in rows:
        profile = row.profile
        known = profiles.get(profile.fingerprint)
        if known is None:
            known = profiles[profile.fingerprint] = _lowered(profile, limits)
        if profile.priority > limits.priority_max:
            counts["priority"] += 1
        if max(profile.interruption_bucket, profile.reclamation_bucket) > limits.penalty_max:
            counts["penalty"] += 1
        lowered.append(replace(row, profile=known[0]) if known[1] else row)
        names[known[0].fingerprint, row.group][profile.fingerprint, row.group] = known[1]
    remaining = lowered
    left_out: list[NeedStatus] = []
    if len(rows) > limits.rows_max:
        order = sorted(range(len(rows)), key=lambda place: -lowered[place].profile.priority)
        places = set(order[: int(limits.rows_max)])
        remaining = [row for place, row in enumerate(lowered) if place in places]
        text = f"the cluster policy allows {limits.rows_max:,.0f} rows; rows of lower priority are left out"
        left_out = [limit_status(row, row.aggregate, text) for place, row in enumerate(rows) if place not in places]
        counts["rows"] = len(left_out)
    reported = {
        name: tuple(ReportedRow(one, note) for one, note in found.items())
        for name, found in names.items()
        if any(found.values())
    }
    return LimitedRows(rows=remaining if counts else rows, reported=reported, left_out=tuple(left_out), counts=counts)


def _lowered(profile: Profile, limits: ClusterLimits) -> tuple[Profile, str]:
    """Return the profile within the limits, and what was changed, "" for nothing."""
    priority = int(min(profile.priority, limits.priority_max))
    interruption = int(min(profile.interruption_bucket, limits.penalty_max))
    reclamation = int(min(profile.reclamation_bucket, limits.penalty_max))
    notes = []
    if priority < profile.priority:
        notes.append(f"priority {profile.priority} to {priority}")
    for name, before, after in (
        ("interruption penalty", profile.interruption_bucket, interruption),
        ("reclamation penalty", profile.reclamation_bucket, reclamation),
    ):
        if after < before:
            notes.append(f"{name} {bucket_label(before)} to {bucket_label(after)}")
    if not notes:
        return profile, ""
    changed = replace(profile, priority=priority, interruption_bucket=interruption, reclamation_bucket=reclamation)
    return changed, f"the cluster policy lowers its {' and its '.join(notes)}"


class DemandLimits:
    """The limits of one shard's clusters. Only the shard's loop uses it."""

    def __init__(self, *, metrics: ShardMetrics, compute: Compute, actions: Mapping[MachineId, ActionRecord]) -> None:
        """`actions` are those that wait or run, by machine."""
        self._metrics = metrics
        self._compute = compute
        self._actions = actions
        self._policies = ClusterPolicies()
        #: Rows as reported, and what became of them, of the clusters whose rows a limit changed.
        self._reported: dict[str, Sequence[Need]] = {}
        self._limited: dict[str, LimitedRows] = {}
        #: Rows that the decision in progress was cut by, by limit.
        self._cut_by: Counter[str] = Counter()
        #: The machines that the last decision would give beyond a limit, apart from those that are released instead.
        self.refused: Set[MachineId] = frozenset()
        #: Releases of Idle machines that it would give beyond a limit, and whose hold is over.
        self._releases: Mapping[MachineId, Action] = {}
        #: The targets that were cut last, by cluster, each with what it was before. One that is cut alike is the same
        #: object again, as the engine and recordings expect of a target that does not change.
        self._cut_targets: dict[str, tuple[Target, Target]] = {}
        #: Reported to operators; replaced, never changed.
        self.effect = LimitedDemand()

    def reported(self, cluster: str, rows: Sequence[Need]) -> Sequence[Need]:
        """Take a cluster's rows as reported and return them as they are to be decided on."""
        limited = limited_rows(rows, self._policies.limits(cluster))
        if limited.rows is rows:
            self._reported.pop(cluster, None)
            self._limited.pop(cluster, None)
        else:
            self._reported[cluster], self._limited[cluster] = rows, limited
            if limited.counts:
                advice = "the cluster policy changed or left out rows; raise its limits if the demand is intended"
                _log.warning("rollup.limited", cluster=cluster, advice=advice, **limited.counts)
        return limited.rows

    def followed(
        self, policies: ClusterPolicies, rows_in_force: Callable[[], Mapping[str, Sequence[Need]]]
    ) -> Iterator[tuple[str, Sequence[Need]]]:
        """Take up new policies; yield each cluster whose rows are to be decided on otherwise, with its rows.

        `rows_in_force` returns those of all clusters, as they were reported where no limit changed them.
        """
        if policies is self._policies:
            return
        before, self._policies = self._policies, policies
        for cluster, rows in {**rows_in_force(), **self._reported}.items():
            if before.limits(cluster) != policies.limits(cluster):
                had_limited = cluster in self._limited
                limited = self.reported(cluster, rows)
                if had_limited or cluster in self._limited:
                    yield cluster, limited

    async def decide(
        self, asked: CycleInput, decide: Callable[[CycleInput], Awaitable[Decision]]
    ) -> tuple[CycleInput, Decision]:
        """Decide, again with less demand while clusters would get more than they may; return the last decision."""
        decision = await decide(asked)
        cut: dict[str, list[NeedStatus]] = {}
        refused = await self._refused(asked, decision)
        targets: dict[str, Target] = {}
        for _ in range(_DECISIONS_MAX - 1):
            found, cut_targets = await self._cut(asked, decision, refused)
            if not found and not cut_targets:
                break
            self._note(found, refused, cut)
            targets |= self._same_again(cut_targets, asked.options.targets)
            rest = {id(each.need): each.rest for each in found}
            asked = asked._replace(
                demand=tuple(rest.get(id(need), need) for need in asked.demand),
                options=replace(asked.options, targets={**asked.options.targets, **targets}),
            )
            decision = await decide(asked)
            refused = await self._refused(asked, decision)
        self._cut_targets = {cluster: self._cut_targets[cluster] for cluster in targets}
        self._releases = releases_of_refused(decision, asked.snapshot, refused)
        self.refused = refused.machines - self._releases.keys()
        self._metrics.actions_limited.inc(len(refused.machines))
        self._publish(cut)
        return asked, decision

    def carried_out(self, decision: Decision) -> Decision:
        """Return the last decision with releases in place of the refused actions whose machine is to be released."""
        releases = self._releases
        if not releases:
            return decision
        return replace(decision, actions=tuple(releases.get(each.machine_id, each) for each in decision.actions))

    def _same_again(self, cut: Mapping[str, Target], targets: Mapping[str, Target]) -> dict[str, Target]:
        """Return targets that were cut, as the objects of the last time where they are equal to those."""
        found = {}
        for cluster, target in cut.items():
            whole = targets[cluster]
            before = self._cut_targets.get(cluster)
            if before is None or before[0] is not whole or before[1] != target:
                before = self._cut_targets[cluster] = (whole, target)
            found[cluster] = before[1]
        return found

    async def _refused(self, asked: CycleInput, decision: Decision) -> RefusedSupply:
        if not self._policies.has_limits:
            return RefusedSupply()
        limits_of, pending = self._policies.limits, self._pending()
        return await self._compute(lambda: refused_supply(decision.actions, asked.snapshot, limits_of, pending))

    async def _cut(
        self, asked: CycleInput, decision: Decision, refused: RefusedSupply
    ) -> tuple[Sequence[CutRow], Mapping[str, Target]]:
        """Return the rows and the targets of the clusters that exceed a limit, cut to what they may have."""
        if not refused.machines:
            return (), {}
        view, targets = asked.snapshot, asked.options.targets
        return await self._compute(
            lambda: (cut_rows(decision, view, refused), allowed_targets(decision, view, refused, targets))
        )

    def _pending(self) -> dict[MachineId, str]:
        """Return the clusters for which machines are being acquired or preempted."""
        pending: dict[MachineId, str] = {}
        for machine_id, record in self._actions.items():
            action = record.action
            if action.kind in _GAINS:
                pending[machine_id] = action.cluster
            elif action.kind is ActionKind.PREEMPT and action.preemptor is not None:
                pending[machine_id] = action.preemptor.cluster
        return pending

    def _note(self, found: Sequence[CutRow], refused: RefusedSupply, cut: dict[str, list[NeedStatus]]) -> None:
        for each in found:
            cluster = each.need.cluster
            limits = self._policies.limits(cluster)
            most = (
                f"{limits.machines_max:,.0f} machines"
                if refused.exceeded[cluster] == "machines"
                else f"${limits.dollars_per_hour_max:,.2f} per hour"
            )
            text = f"the cluster policy allows the cluster at most {most}"
            cut.setdefault(cluster, []).append(limit_status(each.need, each.residual, text))
            self._cut_by[refused.exceeded[cluster]] += 1

    def _publish(self, cut: Mapping[str, Sequence[NeedStatus]]) -> None:
        counts, self._cut_by = self._cut_by, Counter()
        for limited in self._limited.values():
            counts.update(limited.counts)
        for limit in DEMAND_LIMITS:
            self._metrics.demand_limited_rows.labels(limit).set(counts[limit])
        self.effect = LimitedDemand(
            reported={cluster: limited.reported for cluster, limited in self._limited.items() if limited.reported},
            left_out={cluster: limited.left_out for cluster, limited in self._limited.items() if limited.left_out},
            cut=cut,
        )
