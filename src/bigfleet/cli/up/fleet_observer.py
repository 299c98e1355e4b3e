"""Shows several shards as one fleet: sums of their figures, their actions in order, and the figures of each shard.

Each shard is read by a `ShardObserver` and the coordinator by a `CoordinatorWatch`; while one of them cannot be
reached, its last answer is shown. This module does not estimate what a shard did not report.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from bigfleet.cli.up.moves import CoordinatorWatch
from bigfleet.cli.up.observer import RECENT_ACTIONS_MAX, FleetFigures, SeenAction, ShardObserver, ShardTotals
from bigfleet.model import vector
from bigfleet.model.vector import Vector


class SeveralActions:
    """The actions of all shards."""

    def __init__(self, observers: Sequence[ShardObserver]) -> None:
        self._observers = observers

    @property
    def total(self) -> int:
        """Actions seen so far, running ones included."""
        return sum(observer.actions.total for observer in self._observers)

    @property
    def recent(self) -> Sequence[SeenAction]:
        """The last decided ones, oldest first."""
        recent = [action for observer in self._observers for action in observer.actions.recent]
        return sorted(recent, key=lambda action: action.decided_unix_nanos)[-RECENT_ACTIONS_MAX:]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the actions by kind and outcome, in name order."""
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for observer in self._observers:
            for kind, outcomes in observer.actions.counts().items():
                totals[kind].update(outcomes)
        return {kind: dict(sorted(outcomes.items())) for kind, outcomes in sorted(totals.items())}


class SeveralObserver:
    """Reads all shards and the coordinator."""

    def __init__(
        self, observers: Mapping[str, ShardObserver], clusters: Sequence[str], watch: CoordinatorWatch
    ) -> None:
        """`clusters` are those of the run, in its order."""
        self._observers = dict(observers)
        self._clusters = tuple(clusters)
        self.watch = watch
        self.actions = SeveralActions(tuple(observers.values()))

    @property
    def answers(self) -> bool:
        """Return whether the last read of every shard succeeded."""
        return all(observer.answers for observer in self._observers.values())

    @property
    def cycles_total(self) -> int:
        """Cycles of all shards."""
        return sum(observer.cycles_total for observer in self._observers.values())

    @property
    def figures(self) -> FleetFigures:
        """The last answers of all shards."""
        by_shard = {shard: observer.figures for shard, observer in self._observers.items()}
        return merged(by_shard, self._clusters, moved_machines=self.watch.tally.machines_moved_total)

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(observer.close() for observer in self._observers.values()), self.watch.close())

    async def look(self) -> FleetFigures:
        """Read everything once and return it; former answers of those that are away."""
        await asyncio.gather(*(observer.look() for observer in self._observers.values()), self.watch.look())
        return self.figures

    async def look_after(self, unix_nanos: int) -> FleetFigures:
        """Return figures whose views of demand are all later than a wall-clock time; wait as long as that takes."""
        await asyncio.gather(*(observer.look_after(unix_nanos) for observer in self._observers.values()))
        await self.watch.look()
        return self.figures


def merged(by_shard: Mapping[str, FleetFigures], clusters: Sequence[str], *, moved_machines: int) -> FleetFigures:
    """Return the figures of several shards as one fleet's; each cluster is that of the shard that it reports to."""
    all_figures = by_shard.values()
    of_cluster = {name: one for figures in all_figures for name, one in figures.clusters.items()}
    by_model: defaultdict[str, Vector] = defaultdict(dict)
    for figures in all_figures:
        for model, lacking in figures.shortfall_by_model.items():
            by_model[model] = vector.add(by_model[model], lacking)
    return FleetFigures(
        cycle=min(figures.cycle for figures in all_figures),
        computed_at_unix_nanos=min(figures.computed_at_unix_nanos for figures in all_figures),
        clusters={
            name: of_cluster[name] for name in dict.fromkeys((*clusters, *sorted(of_cluster))) if name in of_cluster
        },
        machines=sum((Counter(figures.machines) for figures in all_figures), Counter()),
        shortfall_by_model=dict(sorted(by_model.items())),
        unmet=sum((Counter(figures.unmet) for figures in all_figures), Counter()),
        unjoined_machines=sum(figures.unjoined_machines for figures in all_figures),
        inventory=[machine for figures in all_figures for machine in figures.inventory],
        unjoined_ids=frozenset().union(*(figures.unjoined_ids for figures in all_figures)),
        provisioning={machine: cluster for figures in all_figures for machine, cluster in figures.provisioning.items()},
        shards={
            shard: ShardTotals(
                clusters=tuple(figures.clusters),
                machines=sum(figures.machines.values()),
                bound_machines=figures.bound_machines,
                demand=figures.demand,
                bound=figures.bound,
                shortfall=figures.shortfall,
            )
            for shard, figures in by_shard.items()
        },
        moved_machines=moved_machines,
    )
