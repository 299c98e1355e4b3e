"""Ages, verdicts and gauges of short rows equal what following the definition row by row finds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import column_snapshot
from bigfleet.engine.decision import CapacityPool, Options, RowResult, WithheldPools
from bigfleet.engine.fleet_engine import FleetEngine
from bigfleet.engine.shortfalls import priority_class
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.frames import UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import PODS
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.shard.cycle.shortfall_ages import ShortfallAges, next_ages, short_of_cycle
from bigfleet.shard.inventory.fleet_queries import FailingPools, SoldOutShapes
from bigfleet.shard.inventory.machine_shapes import Ask, Fits, FleetClasses, Prices, live_prices
from bigfleet.shard.status.need_status import (
    ROWS_MAX,
    Unmet,
    UnmetRows,
    missing_machines,
    shortfall_counts,
    statuses,
)
from bigfleet.shard.status.views import (
    ViewContext,
    in_a_spread_domain,
    is_unbootable,
    reason_of,
    short_of,
    split_residual,
)
from tests.engine.proof import in_proportion
from tests.shard.world import machine
from tests.strategies import FleetInput, fleets


def residuals(result: RowResult, lacking: Vector, context: ViewContext) -> Iterator[tuple[Need, Vector]]:
    """Yield the rows behind a row and what each lacks, when the row lacks so much before refusals and failures."""
    key = result.need.key
    short = short_of(
        result,
        lacking,
        is_refused=key in context.refused,
        snapshot=context.snapshot,
        failing=context.failing.get(key),
    )
    split = split_residual(result.members, vector.subtract(result.need.aggregate, short))
    # Pods that request nothing are in no aggregate; rows that are decided over pods have one member.
    pods = short.get(PODS, 0) if PODS not in result.need.aggregate else 0
    for member, residual in split:
        lacking = {**residual, PODS: pods} if pods else residual
        if lacking:
            yield member, lacking


def unmet_one_by_one(short: Sequence[RowResult], context: ViewContext, fits: Fits) -> Iterator[Unmet]:
    """Yield the short rows, each as if it were the only one."""
    sold_out = SoldOutShapes(context.snapshot, context.options)
    for result in short:
        key = result.need.key
        for member, residual in residuals(result, result.deficit, context):
            ask, spread = Ask.of(member), in_a_spread_domain(member)
            reason = reason_of(
                result,
                is_refused=key in context.refused,
                is_unbootable=is_unbootable(context.failing.get(key)) or sold_out.are_withheld_from(member),
                lacks_stock=key in context.failing or sold_out.could_host(member),
                has_supply=bool(fits.fitting(ask).any()),
                lacks_domain=spread is not None and not fits.fitting(Ask.of(spread)).any(),
            )
            yield Unmet(member, ask, residual, reason, result.need.parked, member.key, key, result.impossible)


def missing_of(row: Unmet, prices: Prices, fits: Fits) -> int:
    """Return how many machines one row lacks."""
    places = np.flatnonzero(fits.fitting(row.ask) & fits.offering(tuple(sorted(row.residual))))
    unit = fits.supply(int(places[prices[places].argmin()])) if len(places) else row.need.min_unit
    unit = unit or row.need.min_unit
    return max((ceil(milli / unit[name]) for name, milli in row.residual.items() if name in unit), default=1)


def priced(priority: int) -> Need:
    """Return a row of 4 cpu."""
    unit = parse_vector({"cpu": "4"})
    return Need(cluster=ClusterId("c1"), profile=Profile(priority=priority), aggregate=unit, min_unit=unit)


def plain_context(fleet: FleetInput) -> ViewContext:
    """Return a context without refusals and failures."""
    return ViewContext(
        cycle=1,
        computed_at_unix_nanos=1,
        snapshot=column_snapshot(fleet.snapshot),
        demand=fleet.demand,
        options=fleet.options,
        refused=frozenset(),
    )


def drawn_context(fleet: FleetInput, data: st.DataObject) -> ViewContext:
    """Return a context in which some rows are refused, and creations and bootstraps of some fail."""
    keys = sorted({need.key for need in fleet.demand})
    pools = sorted({CapacityPool.of(machine) for machine in fleet.snapshot.machines.values()})
    some_keys = st.frozensets(st.sampled_from(keys)) if keys else st.just(frozenset[RowKey]())
    some_pools = st.frozensets(st.sampled_from(pools)) if pools else st.just(frozenset[CapacityPool]())
    return ViewContext(
        cycle=1,
        computed_at_unix_nanos=1,
        snapshot=column_snapshot(fleet.snapshot),
        demand=fleet.demand,
        options=fleet.options,
        refused=data.draw(some_keys),
        failing=dict.fromkeys(data.draw(some_keys), FailingPools(data.draw(some_pools), data.draw(some_pools))),
        row_ages={key: number for number, key in enumerate(keys)},
    )


@given(fleets(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=in_proportion(100), deadline=None)
def test_short_rows_are_what_each_is_when_it_is_looked_at_by_itself(
    fleet: FleetInput, over_pods: bool, advance: bool, data: st.DataObject
) -> None:
    """Over aggregates and over pods; rows that lack all take a shorter way, and rows that ask alike share answers."""
    context = drawn_context(fleet, data)
    view, refused, failing = context.snapshot, context.refused, context.failing
    engine = FleetEngine() if over_pods else ColumnarEngine()
    decision = engine.decide(view, fleet.demand, fleet.options)
    short = short_of_cycle(decision.rows, refused, failing)
    classes, fits = FleetClasses().of(view, np.zeros(0, np.int64))
    prices = live_prices(view, classes)
    before = ShortfallAges(rows=dict(list(context.row_ages.items())[::2]))

    ages = next_ages(before, short, snapshot=view, refused=refused, failing=failing, advance=advance)
    unmet = UnmetRows().of(short, context, fits)

    assert ages.rows == {
        member.key: before.rows[member.key] + int(advance) if member.key in before.rows else 1
        for result in short
        for member, _residual in residuals(result, result.unresolved, context)
    }
    expected = list(unmet_one_by_one(short, context, fits))
    assert [*map(tuple, unmet)] == [*map(tuple, expected)]
    assert [id(row.need) for row in unmet] == [id(row.need) for row in expected]
    assert shortfall_counts(unmet, context.row_ages) == Counter(
        (row.reason, priority_class(row.need.profile.priority)) for row in expected if row.key in context.row_ages
    )
    lacking: Counter[int] = Counter()
    for row in expected:
        lacking[row.need.profile.interruption_bucket] += missing_of(row, prices, fits)
    assert missing_machines(unmet, prices, fits) == lacking


@given(fleets(), st.data())
@settings(max_examples=in_proportion(60), deadline=None)
def test_results_that_are_made_together_are_those_that_are_made_one_by_one(
    fleet: FleetInput, data: st.DataObject
) -> None:
    """Of rows that are short and of rows that are asked for by their keys, gangs and parked ones among them."""
    decision = ColumnarEngine().decide(column_snapshot(fleet.snapshot), fleet.demand, fleet.options)
    keys = sorted({result.need.key for result in decision.rows})
    also = data.draw(st.frozensets(st.sampled_from(keys))) if keys else frozenset[RowKey]()

    together = short_of_cycle(decision.rows, also)

    assert together == [result for result in decision.rows if not result.satisfied or result.need.key in also]
    given_rows = {id(need) for need in fleet.demand}
    assert all(id(member) in given_rows for result in together for member in result.members)


@given(fleets(), st.data())
@settings(max_examples=in_proportion(60), deadline=None)
def test_what_was_found_in_earlier_cycles_changes_nothing(fleet: FleetInput, data: st.DataObject) -> None:
    """Machines come and go, pools sell out, refusals and failures begin and end, while the rows stay the same."""
    engine, memory = ColumnarEngine(), UnmetRows()
    machines = list(fleet.snapshot.machines.values())
    pools = sorted({CapacityPool.of(machine) for machine in machines})
    some_machines = st.lists(st.sampled_from(machines), unique_by=id) if machines else st.just([])
    some_pools = st.frozensets(st.sampled_from(pools)) if pools else st.just(frozenset[CapacityPool]())
    clusters = sorted({need.cluster for need in fleet.demand})
    some_clusters = st.frozensets(st.sampled_from(clusters or [ClusterId("")]))
    for _cycle in range(4):
        present = data.draw(some_machines | st.just(machines))
        options = replace(fleet.options, sold_out=data.draw(st.just(frozenset[CapacityPool]()) | some_pools))
        if data.draw(st.sampled_from((True, False))):
            withheld = WithheldPools(pools=data.draw(some_pools))
            options = replace(options, withheld=dict.fromkeys(data.draw(some_clusters), withheld))
        now = FleetInput(Snapshot.of(present, {}), fleet.demand, options)
        context = drawn_context(now, data) if data.draw(st.booleans()) else plain_context(now)
        decision = engine.decide(context.snapshot, fleet.demand, options)
        short = short_of_cycle(decision.rows, context.refused, context.failing)
        _classes, fits = FleetClasses().of(context.snapshot, np.zeros(0, np.int64))

        found = memory.of(short, context, fits)

        assert short == [
            row for row in decision.rows if not row.satisfied or row.need.key in {*context.refused, *context.failing}
        ]
        expected = list(unmet_one_by_one(short, context, fits))
        assert [*map(tuple, found)] == [*map(tuple, expected)]
        assert [id(row.need) for row in found] == [id(row.need) for row in expected]


def test_what_was_found_of_a_row_is_used_again_while_nothing_of_it_changes() -> None:
    """Among others that change; a machine that matches is one thing that does."""
    short, other = (priced(priority) for priority in (2, 1))
    engine, memory = ColumnarEngine(), UnmetRows()

    def found(*machines: Machine, demand: tuple[Need, ...]) -> list[Unmet]:
        now = FleetInput(Snapshot.of(machines, {}), demand, Options(now_seconds=0.0, reported=frozenset()))
        context = plain_context(now)
        decision = engine.decide(context.snapshot, demand, now.options)
        _classes, fits = FleetClasses().of(context.snapshot, np.zeros(0, np.int64))
        return memory.of(short_of_cycle(decision.rows, frozenset()), context, fits)

    first = found(demand=(short, other))
    second = found(demand=(short, priced(1)))
    third = found(machine("m", MachineState.FAILED), demand=(short, other))
    fourth = found(machine("m", MachineState.DRAINING, cluster="c9"), demand=(short, other))

    assert first[0] is second[0] is third[0]
    assert first[1] is not second[1]
    assert (first[0].reason, fourth[0].reason) == (UnmetReason.NO_MATCHING_SUPPLY, UnmetReason.PRIORITY_STARVED)


def test_one_status_more_than_may_be_sent_is_made_of_each_cluster() -> None:
    """The one more says that the list was cut; a cluster's many rows take nothing from another's."""
    unit = parse_vector({"cpu": "1"})
    needs = [
        Need(cluster=ClusterId(cluster), profile=Profile(priority=priority), aggregate=unit, min_unit=unit)
        for cluster, rows in (("many", ROWS_MAX + 7), ("few", 2), ("deaf", 3))
        for priority in range(rows)
    ]
    results = [
        RowResult(need=need, members=(need,), deficit=need.aggregate, unresolved=need.aggregate) for need in needs
    ]
    context = plain_context(FleetInput(Snapshot.of(()), tuple(needs), Options(now_seconds=0.0, reported=frozenset())))
    _classes, fits = FleetClasses().of(context.snapshot, np.zeros(0, np.int64))

    found = statuses(UnmetRows().of(results, context, fits), {"many", "few", "silent"}, {}, {})

    assert {cluster: len(rows) for cluster, rows in found.items()} == {"many": ROWS_MAX + 1, "few": 2}
