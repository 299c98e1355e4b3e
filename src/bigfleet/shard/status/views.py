"""Provides readers with the last finished cycle: every row, whether it is met, and if not, why.

docs/spec/shard.md §10.7 and §12. A cycle leaves its input and its decision, swapped by reference; rows are computed
from them at the first read. A reader never stops a cycle, and a cycle never changes what a reader is streaming. Nothing
here decides.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, ParkingKey, RowResult
from bigfleet.engine.parking import parking_key
from bigfleet.model import vector
from bigfleet.model.frames import UnmetReason
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need, RowKey
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import PODS, lacking_of
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.fleet_queries import FailingPools, ShapeCounts, SoldOutShapes, supply_of

#: Rows for which machines could not be created or bootstrapped, with the pools of those.
Failing = Mapping[RowKey, FailingPools]
NO_FAILURES: Failing = MappingProxyType({})
#: Matching machines are counted up to this (docs/spec/aggregates.md §8).
MATCHING_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingSupply:
    """How many machines could host the row's min unit, whatever their claims; each up to `MATCHING_MAX`."""

    idle: int
    configured: int
    speculative: int

    @property
    def is_capped(self) -> bool:
        """Return whether a count stopped at the maximum."""
        return max(self.idle, self.configured, self.speculative) >= MATCHING_MAX

    @property
    def total(self) -> int:
        """All of them."""
        return self.idle + self.configured + self.speculative


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedView:
    """One reported row, and its result in the last cycle."""

    need: Need
    #: What is short after Phase 1; empty when the row is met.
    residual: Vector
    claimed_machines: int
    bootstraps: int
    provisions: int
    #: Same rows that did not fold.
    domain: str
    satisfiable: bool
    parked: bool
    parked_age_cycles: int
    unmet_age_cycles: int
    reason: UnmetReason
    #: Unmet rows only.
    matching: MatchingSupply | None
    victims: int
    freed: Vector

    @property
    def satisfied(self) -> bool:
        """Return whether nothing is short."""
        return not self.residual


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedOn:
    """What a cycle decided on and what each row got, so that it can be asked afterwards why; held by reference."""

    snapshot: ColumnSnapshot
    #: In list order.
    demand: Sequence[Need]
    options: Options
    #: In the order of the folded list.
    rows: Sequence[RowResult]


@dataclass(slots=True, kw_only=True, eq=False)
class CycleView:
    """The last finished cycle; cycle 0 means that nothing was computed yet, not that there is no demand."""

    cycle: int = 0
    #: Wall clock at which the cycle took its view of demand and machines.
    computed_at_unix_nanos: int = 0
    #: None before the first cycle has finished.
    decided_on: DecidedOn | None = None
    #: Returns the rows, the same each time; it may run in any thread.
    make_needs: Callable[[], tuple[NeedView, ...]] = tuple
    _needs: tuple[NeedView, ...] | None = field(default=None, init=False)

    @property
    def needs(self) -> tuple[NeedView, ...]:
        """The rows: priority descending, arrival, cluster, then list order.

        Made when they are first asked for, some seconds of work for the largest demand: not on a loop.
        """
        if self._needs is None:
            self._needs = self.make_needs()
        return self._needs


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContext:
    """What a view needs beside the decision."""

    cycle: int
    computed_at_unix_nanos: int
    snapshot: ColumnSnapshot
    #: The rows that were decided on, in list order.
    demand: Sequence[Need]
    #: Those of the decision.
    options: Options
    #: Rows, as decided on, whose operator cannot bootstrap them.
    refused: Set[RowKey]
    #: Rows, as decided on, for which machines could not be created or bootstrapped, with the pools of those.
    failing: Failing = field(default_factory=lambda: NO_FAILURES)
    #: After the decision.
    parking_ages: Mapping[ParkingKey, int] = field(default_factory=dict)
    row_ages: Mapping[RowKey, int] = field(default_factory=dict)


def build_view(decision: Decision, context: ViewContext) -> CycleView:
    """Return the view of a cycle, whose rows are made when they are asked for."""
    return CycleView(
        cycle=context.cycle,
        computed_at_unix_nanos=context.computed_at_unix_nanos,
        decided_on=DecidedOn(
            snapshot=context.snapshot, demand=context.demand, options=context.options, rows=decision.rows
        ),
        make_needs=lambda: need_views(decision, context),
    )


def need_views(decision: Decision, context: ViewContext) -> tuple[NeedView, ...]:
    """Return what is shown of each row; a folded row is split over the rows that it was folded from."""
    supply = _Supply(context.snapshot, context.options)
    needs = [view for result in decision.rows for view in _views_of(result, context, supply)]
    # Equal rows may stand twice in a roll-up, so it is the object that has a place.
    places = {id(need): place for place, need in enumerate(context.demand)}
    needs.sort(key=lambda view: places[id(view.need)])
    return tuple(needs)


def short_of(
    result: RowResult,
    short: Vector,
    *,
    is_refused: bool,
    snapshot: ColumnSnapshot,
    failing: FailingPools | None = None,
) -> Vector:
    """Return what a row really lacks: `short`, and what it was given that is not to be counted on.

    That is what it was just given, if its operator cannot bootstrap it; and what is being created or bootstrapped for
    it, or is to be, in the pools `failing` in which that fails.
    """
    given: list[MachineId] = []
    if is_refused:
        given += (*result.bootstraps, *result.provisions)
    elif failing is not None:
        given += (each for each in result.claimed if failing.are_of(snapshot, each))
    if not given:
        return short
    remaining = result.held
    for machine_id in given:
        remaining = vector.subtract(remaining, taken_of(result, machine_id, snapshot))
    lacking = vector.subtract(result.need.aggregate, remaining)
    shapes = (*result.need.shapes, *result.need.waiting)
    uncertain = frozenset(given)
    uncounted = [(shapes[p.shape].resources, p.count) for p in result.placements if p.machine_id in uncertain]
    return {**lacking, **beyond(result.need, vector.add(_of_no_request(short), lacking_of(uncounted)))}


def beyond(need: Need, short: Vector) -> Vector:
    """Return what a row lacks that is in no aggregate: pods that request nothing, by their number."""
    return {} if PODS in need.aggregate else _of_no_request(short)


def _of_no_request(short: Vector) -> Vector:
    return {PODS: short[PODS]} if PODS in short else {}


def taken_of(result: RowResult, machine_id: MachineId, snapshot: ColumnSnapshot) -> Vector:
    """Return what the row has of a machine: its claims of a decision over pods, else all that the machine offers."""
    if not result.placements and not result.shares:
        return supply_of(snapshot, machine_id)
    shapes, taken = (*result.need.shapes, *result.need.waiting), vector.ZERO
    for placement in result.placements:
        if placement.machine_id == machine_id:
            taken = vector.add(taken, vector.scale(shapes[placement.shape].resources, placement.count))
    for each, amounts in result.shares:
        if each == machine_id:
            taken = vector.add(taken, amounts)
    return taken


def split_residual(
    members: Sequence[Need], covered: Vector, besides: Vector = vector.ZERO
) -> Iterator[tuple[Need, Vector]]:
    """Yield each member with what it lacks: in list order, as many met as the covered amount pays for.

    `besides` is what `beyond` returns; rows over pods are not folded, so it is of the first member.
    """
    left = covered
    for member in members:
        residual = vector.subtract(member.aggregate, left)
        left = vector.subtract(left, member.aggregate)
        yield member, {**residual, **besides} if besides else residual
        besides = vector.ZERO


def lacks_all(result: RowResult, short: Vector) -> bool:
    """Return whether a row that is not folded lacks all that it asks for; then its residual is its aggregate.

    It saves splitting: nearly every row is like that when tens of thousands are short.
    """
    members = result.members
    return len(members) == 1 and members[0] is result.need and short == result.need.aggregate


def residuals_of(result: RowResult, context: ViewContext) -> Iterable[tuple[Need, Vector]]:
    """Return the reported rows behind a row with what each lacks after Phase 1; nothing is empty."""
    need, short = result.need, result.deficit
    key = need.key
    is_refused = key in context.refused
    if is_refused or key in context.failing:
        short = short_of(
            result, short, is_refused=is_refused, snapshot=context.snapshot, failing=context.failing.get(key)
        )
    if lacks_all(result, short):
        return ((need, need.aggregate),)
    return split_residual(result.members, vector.subtract(need.aggregate, short), beyond(need, short))


def _views_of(result: RowResult, context: ViewContext, supply: "_Supply") -> Iterator[NeedView]:
    key = result.need.key
    for position, (member, residual) in enumerate(residuals_of(result, context)):
        is_first = position == 0
        matching, reason = None, UnmetReason.UNSPECIFIED
        if residual:
            matching, elsewhere = supply.matching(member)
            has_supply = elsewhere or matching.total > 0
            spread = in_a_spread_domain(member)
            lacks_domain = spread is not None and not supply.has(spread)
            reason = reason_of(
                result,
                is_refused=key in context.refused,
                is_unbootable=is_unbootable(context.failing.get(key)) or supply.is_withheld(member),
                lacks_stock=key in context.failing or supply.is_sold_out(member),
                has_supply=has_supply,
                lacks_domain=lacks_domain,
            )
        yield NeedView(
            need=member,
            residual=residual,
            claimed_machines=len(result.claimed) if is_first else 0,
            bootstraps=len(result.bootstraps) if is_first else 0,
            provisions=len(result.provisions) if is_first else 0,
            domain=result.domain,
            satisfiable=result.satisfiable,
            parked=result.need.parked,
            parked_age_cycles=context.parking_ages.get(parking_key(member), 0),
            unmet_age_cycles=context.row_ages.get(member.key, 0),
            reason=reason,
            matching=matching,
            victims=len(result.victims) if is_first else 0,
            freed=result.freed if is_first else vector.ZERO,
        )


def in_a_spread_domain(need: Need) -> Need | None:
    """Return the row as one that requires the label of its strict spread; None for a row without one."""
    profile = need.profile
    if profile.strict_spread is None:
        return None
    domain = Requirement(profile.strict_spread.topology_key, Operator.EXISTS)
    return replace(need, profile=replace(profile, requirements=(*profile.requirements, domain)))


def is_unbootable(failing: FailingPools | None) -> bool:
    """Return whether machines could not be bootstrapped for a row."""
    return failing is not None and bool(failing.bootstrapped)


def reason_of(
    result: RowResult,
    *,
    is_refused: bool,
    has_supply: bool,
    lacks_stock: bool = False,
    is_unbootable: bool = False,
    lacks_domain: bool = False,
) -> UnmetReason:
    """Return the first reason that holds (docs/spec/shard.md §12).

    `is_unbootable` says that machines could not be bootstrapped for the row, or that one which could serve it is of a
    pool that is withheld from its cluster. `lacks_stock` says that creations for the row fail, or that a machine which
    could serve it is of a pool without stock. `lacks_domain` says that no machine which could serve it has the label of
    its strict spread.
    """
    if is_refused:
        return UnmetReason.BOOTSTRAP_REFUSED
    if is_unbootable:
        return UnmetReason.BOOTSTRAP_FAILED
    if lacks_stock:
        return UnmetReason.STOCKOUT
    if result.impossible and not result.unplaced and any(each.dimension for each in result.impossible):
        return UnmetReason.REQUEST_TOO_LARGE
    is_same = result.need.profile.same_key is not None
    if (is_same and (not result.satisfiable or result.need.parked)) or (has_supply and lacks_domain):
        return UnmetReason.TOPOLOGY_UNSATISFIABLE
    if result.victims:
        return UnmetReason.PREEMPTION_EXHAUSTED
    if has_supply or result.claimed:
        return UnmetReason.PRIORITY_STARVED
    return UnmetReason.NO_MATCHING_SUPPLY


class _Supply:
    """Counts the machines that could host a row, once per profile and min unit."""

    def __init__(self, snapshot: ColumnSnapshot, options: Options) -> None:
        self._snapshot = snapshot
        self._sold_out = SoldOutShapes(snapshot, options)
        self._counts: ShapeCounts | None = None
        self._known: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[MatchingSupply, bool]] = {}

    def is_sold_out(self, need: Need) -> bool:
        """Return whether a machine of a pool without stock could host the row's min unit."""
        return self._sold_out.could_host(need)

    def is_withheld(self, need: Need) -> bool:
        """Return whether a machine of a pool that is withheld from the cluster could host the row's min unit."""
        return self._sold_out.are_withheld_from(need)

    def has(self, need: Need) -> bool:
        """Return whether a machine that is not Failed could host the row's min unit."""
        matching, is_elsewhere = self.matching(need)
        return is_elsewhere or matching.total > 0

    def matching(self, need: Need) -> tuple[MatchingSupply, bool]:
        """Return the counts, and whether a machine on its way from one state to another would fit as well."""
        if self._counts is None:
            # Most cycles leave nothing short, and then there are no readers.
            self._counts = ShapeCounts(self._snapshot)
        key = (need.fingerprint, vector.vector_key(need.min_unit))
        known = self._known.get(key)
        if known is None:
            shape_counts = self._counts
            counts = MatchingSupply(
                idle=min(MATCHING_MAX, shape_counts.count(need, MachineState.IDLE)),
                configured=min(MATCHING_MAX, shape_counts.count(need, MachineState.CONFIGURED)),
                speculative=min(MATCHING_MAX, shape_counts.count(need, MachineState.SPECULATIVE)),
            )
            is_elsewhere = any(shape_counts.count(need, state) for state in sorted(TRANSITIONAL_STATES))
            known = self._known[key] = counts, is_elsewhere
        return known
