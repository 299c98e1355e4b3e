"""Decides over pods in each cycle, and recomputes only clusters that changed or are short.

A cluster whose rows are complete on what it holds is decided by its own rows, machines, overheads and target alone.
While none of these changes, its rows keep their results. The answer equals that of `decide` on the same input: stored
results only save work.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, Generic, TypeVar

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import (
    Action,
    Basis,
    Decision,
    Options,
    ParkingKey,
    Phase,
    PhaseListener,
    RowResult,
    unheard,
)
from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.parking import stamp_parked
from bigfleet.engine.shapes.columns.actions import PodActions
from bigfleet.engine.shapes.columns.listed import ClusterRows, ClustersInList
from bigfleet.engine.shapes.columns.loops import PodLoops
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.columns.results import PodRows
from bigfleet.engine.shapes.columns.rows import RowsInColumns, in_order, names_of, row_columns
from bigfleet.engine.shapes.credit import is_served_on_columns
from bigfleet.engine.shapes.decide import Conclusion, conclude
from bigfleet.engine.shapes.fleet import DecisionState, Rooms, add_clusters, has_pods, needs_by_cluster
from bigfleet.engine.shapes.following import lacks_of_target
from bigfleet.engine.shapes.reclaim import Reclaimed, releases
from bigfleet.engine.shapes.state import ClusterState, Dimensions, DomainVerdict, Searched
from bigfleet.engine.targets import Target
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead

#: Offers that are numbered before the numbers begin again: each time the first machine of an offer is taken, it gets a
#: new one.
OFFER_NUMBERS_MAX: Final = 100_000

#: Rows of one cluster, with their places in the demand.
_Needs = Sequence[tuple[int, Need]]


@dataclass(frozen=True, slots=True)
class _CompleteCluster:
    """A cluster whose rows were complete on what it holds."""

    cluster: ClusterState
    needs: tuple[Need, ...]
    #: In the order of `needs`.
    results: Sequence[RowResult]
    #: Its machines that nothing needs, in keep-priority order.
    excess: Sequence[MachineId]
    overheads: tuple[Overhead, ...]
    target: Target | None


@dataclass(slots=True)
class _Asked:
    """The demand of a decision, arranged."""

    demand: Sequence[Need]
    #: With its parked rows stamped.
    needs: Sequence[Need]
    ages: Mapping[ParkingKey, int]
    by_cluster: Mapping[str, _Needs]
    names: tuple[str, ...]
    #: All rows; None where clusters are stored, of most of which nothing has to be read, and where rows were read when
    #: they arrived.
    columns: RowsInColumns | None

    @classmethod
    def of(cls, demand: Sequence[Need], ages: Mapping[ParkingKey, int], *, is_stored: bool) -> "_Asked":
        """Arrange a demand; `is_stored` says whether clusters are stored."""
        needs = stamp_parked(list(demand), ages) if ages else demand
        if isinstance(demand, ListedRows) and demand.columns is not None:
            listed = demand.columns
            by_cluster = ClustersInList(listed, needs, are_stamped=bool(ages))
            return cls(demand, needs, dict(ages), by_cluster, in_order(listed.names()), None)
        columns = None if is_stored else row_columns(needs)
        names = names_of(needs) if columns is None else columns.names
        return cls(demand, needs, dict(ages), needs_by_cluster(needs), names, columns)

    def needs_of(self, cluster: str) -> tuple[Need, ...]:
        """Return a cluster's rows in list order."""
        rows = self.by_cluster[cluster]
        return rows.needs if isinstance(rows, ClusterRows) else tuple([need for _, need in rows])

    def columns_of(self, clusters: Collection[str]) -> RowsInColumns:
        """Return the rows of some clusters, there may be rows of others."""
        if self.columns is not None:
            return self.columns
        if isinstance(self.by_cluster, ClustersInList) and clusters:
            return self.by_cluster.columns_of(clusters, self.names)
        rows = sorted((row for name in clusters for row in self.by_cluster[name]), key=itemgetter(0))
        return row_columns([need for _, need in rows], [position for position, _ in rows])


@dataclass(frozen=True, slots=True)
class _Last:
    """The last decision, and what it was made of beside the machines."""

    needs: Sequence[Need]
    options: Options
    #: Those of Phases 1 and 2.
    actions: Sequence[Action]
    reclaimed: Sequence[Reclaimed]
    claimed: Set[str]
    rows: PodRows

    def answers(self, needs: Sequence[Need], options: Options) -> bool:
        """Return whether a decision on the same machines differs in its releases at most.

        Beside the releases, the time plays no part, and parking ages only as far as they stamp rows.
        """
        known = self.options
        return (
            replace(options, now_seconds=known.now_seconds, parking_ages=known.parking_ages) == known
            and len(needs) == len(self.needs)
            and (needs is self.needs or all(a is b or a == b for a, b in zip(needs, self.needs, strict=True)))
        )


class PodEngine:
    """Decides from columns. One engine serves one caller at a time; equal input gives equal answers from any engine."""

    def __init__(self, *, is_incremental: bool = True, loops: PodLoops | None = None) -> None:
        """Make an engine that knows nothing yet; without `is_incremental` it never does.

        With `loops`, plain clusters are credited in compiled code.
        """
        self._is_incremental, self._loops = is_incremental, loops
        self._machines: ColumnMachines | None = None
        self._asked: _Asked | None = None
        self._rooms: Rooms | None = None
        self._dimensions: Dimensions | None = None
        self._options: Options | None = None
        self._known: frozenset[int] = frozenset()
        self._most: list[int] = []
        self._last: _Last | None = None
        self._previous: dict[str, _CompleteCluster] = {}
        #: What searches of small clusters found in the last two decisions: a cluster that stays short asks the same.
        self._searched = _Recent[Searched]()
        #: What domains offer gangs, which stay the same as long as the rooms and the numbers of shapes and offers do.
        self._verdicts, self._offer_numbers = _Recent[DomainVerdict](), dict[Hashable, int]()
        #: Machines of the clusters that want nothing.
        self._unwanted: dict[str, Sequence[MachineId]] = {}

    @property
    def retained(self) -> Set[str]:
        """The clusters whose results stand until something touches them."""
        return self._previous.keys()

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, *, on_phase: PhaseListener = unheard
    ) -> Decision:
        """Decide one cycle: equal to `bigfleet.engine.shapes.decide` on the same machines, rows and options."""
        last, previous, unwanted = self._last, self._previous, self._unwanted
        # A failure from here on must leave nothing that a later decision could use.
        self._last, self._previous, self._unwanted = None, {}, {}
        is_same_view = self._machines is not None and self._machines.shows(view)
        touched = self._follow(view, options)
        machines, asked = self._machines, self._arranged(demand, options, is_stored=bool(previous))
        assert machines is not None, "following made the machines"
        if is_same_view and last is not None and last.answers(asked.needs, options):
            self._last, self._previous, self._unwanted = last, previous, unwanted
            for phase in Phase:
                on_phase(phase)
            return self._answer(view, demand, options, last)
        is_same_fleet = self._look(machines, options)
        if touched is None or not is_same_fleet:
            previous, unwanted = {}, {}
        else:
            previous = {c: one for c, one in previous.items() if c not in touched and self._holds(one, asked, options)}
            unwanted = {c: one for c, one in unwanted.items() if c not in touched and c not in asked.by_cluster}
        return self._decided(view, demand, options, previous, unwanted, on_phase)

    def _decided(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        options: Options,
        previous: dict[str, _CompleteCluster],
        unwanted: dict[str, Sequence[MachineId]],
        on_phase: PhaseListener,
    ) -> Decision:
        machines, asked, rooms, dimensions = self._machines, self._asked, self._rooms, self._dimensions
        assert machines is not None, "following made the machines"
        assert asked is not None, "the demand was arranged before"
        assert rooms is not None, "what all clusters share was looked at before"
        assert dimensions is not None, "what all clusters share was looked at before"
        changed = {name: asked.by_cluster[name] for name in asked.by_cluster if name not in previous}
        fleet = DecisionState(
            machines=machines,
            columns=machines,
            read=asked.columns_of(changed),
            loops=self._loops,
            options=options,
            dimensions=dimensions,
            rooms=rooms,
            unchanged={name: one.cluster for name, one in previous.items()},
            offers=machines.offers(),
            orphans=machines.orphans(),
            searched=self._searched.known() if self._is_incremental else {},
            verdicts=self._verdicts.known() if self._is_incremental else {},
            offer_numbers=self._offer_numbers if self._is_incremental else {},
        )
        add_clusters(fleet, changed)
        excess = {name: one.excess for name, one in previous.items()}
        answer = conclude(fleet, {**excess, **unwanted}, on_phase)
        rows = self._rows(asked, previous, answer)
        last = _Last(asked.needs, options, answer.actions, answer.reclaimed, answer.claimed, rows)
        if self._is_incremental:
            self._store(fleet, asked, answer, previous)
            self._last = last
        self._options = options
        return self._answer(view, demand, options, last)

    def _answer(self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, last: "_Last") -> Decision:
        """Return a decision; only its releases depend on the time."""
        assert self._machines is not None, "following made the machines"
        return Decision(
            actions=PodActions(
                view, last.actions, last.reclaimed, tuple(releases(self._machines, last.claimed)), options.unjoined
            ),
            rows=last.rows.with_members_of(demand, options.parking_ages),
            basis=Basis(demand=tuple(demand), options=options, snapshot=lambda: snapshot_of(view)),
        )

    # ---- stored results ------------------------------------------------------------------------------------------

    def _follow(self, view: ColumnSnapshot, options: Options) -> set[str] | None:
        """Have the machines of the view; return the clusters whose machines changed, None when all may have."""
        last = self._options
        if self._machines is not None and last is not None and self._is_incremental:
            is_alike = last.idle_head_start == options.idle_head_start
            touched = self._machines.follow(view, options) if is_alike else None
            if touched is not None:
                return touched
        self._machines, self._rooms, self._dimensions = ColumnMachines(view, options), None, None
        return None

    def _arranged(self, demand: Sequence[Need], options: Options, *, is_stored: bool) -> _Asked:
        """Return the demand with its parked rows stamped, by cluster."""
        asked = self._asked
        if asked is None or asked.demand is not demand or asked.ages != options.parking_ages:
            asked = self._asked = _Asked.of(demand, options.parking_ages, is_stored=is_stored)
        return asked

    def _look(self, machines: ColumnMachines, options: Options) -> bool:
        """Bring up to date what all clusters share; return whether stored clusters may still hold."""
        asked, last = self._asked, self._options
        assert asked is not None, "the demand was arranged before"
        if self._dimensions is None or self._dimensions.names != asked.names:
            self._dimensions, self._rooms = Dimensions([dict.fromkeys(asked.names, 0)]), None
        is_known = self._known == machines.known_shapes
        if self._rooms is None or last is None or last.overheads != options.overheads or not is_known:
            is_new = self._rooms is None
            self._rooms = Rooms(machines, options, self._dimensions)
            self._verdicts, self._offer_numbers = _Recent(), {}
        else:
            is_new = False
        if len(self._offer_numbers) > OFFER_NUMBERS_MAX:
            self._verdicts, self._offer_numbers = _Recent(), {}
        self._known = machines.known_shapes
        most = self._rooms.known("", machines.known_shapes)[1]
        is_same = most == self._most and not is_new
        self._most = most
        return is_same

    def _holds(self, known_cluster: _CompleteCluster, asked: _Asked, options: Options) -> bool:
        """Return whether the cluster is asked for the same, and can host the same."""
        name = known_cluster.cluster.id
        needs = asked.by_cluster.get(name, ())
        if len(needs) != len(known_cluster.needs) or any(
            need is not known for (_, need), known in zip(needs, known_cluster.needs, strict=True)
        ):
            return False
        if known_cluster.overheads != options.overheads.get(
            name, ()
        ) or known_cluster.target is not options.targets.get(name):
            return False
        return self._can_host_the_same(known_cluster.cluster)

    def _can_host_the_same(self, cluster: ClusterState) -> bool:
        machines, rooms = self._machines, self._rooms
        assert machines is not None, "following made the machines"
        assert rooms is not None, "what all clusters share was looked at before"
        if cluster.known is machines.known_shapes:
            return True
        if not is_served_on_columns(cluster) and any(row.impossible for row in cluster.rows):
            return False
        for _, need in cluster.needs:
            matching = machines.matching(need.profile)
            requests = [rooms.pod(shape.resources)[0] for shape in (*need.shapes, *need.waiting)]
            if not has_pods(need):
                requests = [rooms.request(need.min_unit)] if rooms.known(cluster.id, matching)[0] else []
            hostable = rooms.hostable(cluster.id, matching)
            if not all(hostable[request] for request in requests):
                return False
        cluster.known = machines.known_shapes
        return True

    def _rows(self, asked: _Asked, previous: Mapping[str, _CompleteCluster], answer: Conclusion) -> PodRows:
        parts = [(asked.by_cluster[name], one.results) for name, one in previous.items()]
        parts += [(asked.by_cluster[name], results) for name, results in answer.complete.items()]
        return PodRows(asked.needs, answer.results, parts, {})

    def _store(
        self, fleet: DecisionState, asked: _Asked, answer: Conclusion, previous: dict[str, _CompleteCluster]
    ) -> None:
        """Store the clusters that are complete, and the excess of all that will not be decided on again."""
        for name, cluster in fleet.clusters.items():
            if not _is_complete(cluster, fleet):
                continue
            cluster.known = fleet.machines.known_shapes
            results = answer.complete.get(name)
            if results is None:
                results = tuple([answer.results[place] for place, _ in asked.by_cluster[name]])
            previous[name] = _CompleteCluster(
                cluster=cluster,
                needs=asked.needs_of(name),
                results=results,
                excess=answer.excess.get(name, ()),
                overheads=fleet.options.overheads.get(name, ()),
                target=fleet.options.targets.get(name),
            )
        self._previous = previous
        self._unwanted = {c: found for c, found in answer.excess.items() if c not in asked.by_cluster}


_A = TypeVar("_A")


class _Recent(Generic[_A]):
    """Caches answers to questions that one of the last two decisions asked."""

    def __init__(self) -> None:
        self._asked: tuple[dict[Hashable, _A], dict[Hashable, _A]] = ({}, {})

    def known(self) -> dict[Hashable, _A]:
        """Return the answers for one decision, which adds those that it makes and those that it uses."""
        older, newer = self._asked
        known = _Remembering({**older, **newer})
        self._asked = (newer, known.asked)
        return known


class _Remembering(dict[Hashable, _A]):
    """Caches answers; `asked` has those that were added since it was made."""

    def __init__(self, known: Mapping[Hashable, _A]) -> None:
        super().__init__(known)
        self.asked: dict[Hashable, _A] = {}

    def __setitem__(self, question: Hashable, answer: _A) -> None:
        super().__setitem__(question, answer)
        self.asked[question] = answer


def _is_complete(cluster: ClusterState, fleet: DecisionState) -> bool:
    """Return whether the cluster's own rows and machines alone made its results."""
    if not cluster.is_credited or cluster.has_orphans or lacks_of_target(cluster, fleet):
        return False
    if cluster.acquired:
        return False
    return is_served_on_columns(cluster) or all(row.is_held for row in cluster.rows)
