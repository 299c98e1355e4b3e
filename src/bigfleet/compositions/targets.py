"""Plans the target compositions of clusters: in sequence for a whole decision, or cluster by cluster for workers.

In sequence, clusters are planned in the order of their highest row; what one composition acquires is not offered to the
next. Workers plan in parallel; if two compositions acquire the same stock, the decision grants it by precedence.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Final

from bigfleet.compositions.problems import ClusterProblem, added_by_offer, problem_of, target_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.fleet import DecisionState, build
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.planner.plan import DEFAULT, THOROUGH, plan
from bigfleet.planner.problem import PlanSettings, ProblemFault
from bigfleet.planner.search import Effort

SettingsByCluster = Mapping[str, PlanSettings]
_DEFAULT: Final = PlanSettings()
#: So many clusters are planned thoroughly: that takes a few seconds at most.
FEW_CLUSTERS: Final = 16


def targets_of(
    snapshot: Snapshot,
    demand: Sequence[Need],
    options: Options,
    *,
    settings: SettingsByCluster | None = None,
    refused: Set[MachineId] = frozenset(),
) -> dict[str, Target]:
    """Return the target of each cluster that can be planned, by cluster; clusters without `settings` get the defaults.

    `refused` are machines that cannot leave now, because their pods fit on no other node. A cluster that is too large
    to be planned gets none: the decision then chooses its machines by itself. Up to
    FEW_CLUSTERS are planned thoroughly.
    """
    is_few = len({need.cluster for need in demand}) <= FEW_CLUSTERS
    effort = THOROUGH if is_few else DEFAULT
    return _targets_in(build(SnapshotMachines(snapshot, options), demand, options), settings or {}, refused, effort)


class FleetPlanner:
    """Plans clusters of a fleet that changes; what it keeps only saves work."""

    def __init__(self) -> None:
        self._machines: ColumnMachines | None = None

    def targets(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        options: Options,
        settings: SettingsByCluster,
        refused: Set[MachineId] = frozenset(),
    ) -> dict[str, Target]:
        """Return the targets of the clusters of the rows, as `targets_of` does; `demand` is in list order.

        `refused` are machines that cannot leave now.
        """
        return _targets_in(build(self._follow(view, options), demand, options), settings, refused)

    def problems(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        options: Options,
        settings: SettingsByCluster,
        refused: Set[MachineId] = frozenset(),
    ) -> dict[str, ClusterProblem]:
        """Return the problems of the clusters of the rows, each with all that is on offer."""
        fleet = self.state(view, demand, options)
        found = (
            (name, problem_of(cluster, fleet, settings.get(name, _DEFAULT), refused=refused))
            for name, cluster in fleet.clusters.items()
        )
        return {name: asked for name, asked in found if asked is not None}

    def state(self, view: ColumnSnapshot, demand: Sequence[Need], options: Options) -> DecisionState:
        """Return the state before Phase 1 of the clusters of the rows; it is of use until the next call."""
        return build(self._follow(view, options), demand, options)

    def _follow(self, view: ColumnSnapshot, options: Options) -> ColumnMachines:
        machines, self._machines = self._machines, None
        if machines is None or machines.follow(view, options) is None:
            machines = ColumnMachines(view, options)
        self._machines = machines
        return machines


def _targets_in(
    fleet: DecisionState,
    settings: SettingsByCluster,
    refused: Set[MachineId] = frozenset(),
    effort: Effort = DEFAULT,
) -> dict[str, Target]:
    left = {place: offer.available for place, offer in enumerate(fleet.offers)}
    targets: dict[str, Target] = {}
    for cluster in dict.fromkeys(row.cluster.id for row in fleet.rows):
        plan_settings = settings.get(cluster, _DEFAULT)
        asked = problem_of(fleet.clusters[cluster], fleet, plan_settings, left=left, refused=refused)
        if asked is None:
            continue
        try:
            answer = plan(asked.problem, effort)
        except ProblemFault:
            continue
        targets[cluster] = target_of(asked, answer)
        for place, count in added_by_offer(asked, answer, fleet, fleet.clusters[cluster]).items():
            left[place] -= count
    return targets
