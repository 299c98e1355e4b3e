"""Plans the target compositions of all clusters of a decision, in process.

Clusters are planned in the order of their highest row; what a cluster's composition acquires is not offered to the
next.
"""

from collections.abc import Mapping, Sequence

from bigfleet.compositions.problems import added_by_offer, problem_of, target_of
from bigfleet.engine.decision import Options
from bigfleet.engine.shapes.fleet import build
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target
from bigfleet.model.need import Need
from bigfleet.planner.plan import plan
from bigfleet.planner.problem import SchedulerOrder


def targets_of(
    snapshot: Snapshot,
    demand: Sequence[Need],
    options: Options,
    *,
    orders: Mapping[str, SchedulerOrder] | None = None,
) -> dict[str, Target]:
    """Return the target of each cluster that can be planned, by cluster; `orders` names each scheduler's order."""
    fleet = build(snapshot, demand, options)
    left = {place: offer.available for place, offer in enumerate(fleet.offers)}
    targets: dict[str, Target] = {}
    for cluster in dict.fromkeys(row.cluster.id for row in fleet.rows):
        order = (orders or {}).get(cluster, SchedulerOrder.LEAST_ALLOCATED)
        asked = problem_of(fleet.clusters[cluster], fleet, order=order, left=left)
        if asked is None:
            continue
        answer = plan(asked.problem)
        targets[cluster] = target_of(asked, answer)
        for place, count in added_by_offer(asked, answer, fleet).items():
            left[place] -= count
    return targets
