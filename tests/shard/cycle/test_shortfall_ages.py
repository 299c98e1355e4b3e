"""How long things last: the ages are the same whether the rows that are short are asked for or looked for."""

from itertools import product

from hypothesis import given, settings

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import column_snapshot
from bigfleet.shard.cycle.shortfall_ages import KnowsShort, ShortfallAges, next_ages, short_of_cycle
from tests.engine.proof import in_proportion
from tests.strategies import FleetInput, fleets


@given(fleets())
@settings(max_examples=in_proportion(150), deadline=None)
def test_rows_that_are_short_are_all_that_ages_need(fleet: FleetInput) -> None:
    """Parking, unmet rows and the ledger: over two cycles, the second one timed or woken."""
    view = column_snapshot(fleet.snapshot)
    decision = ColumnarEngine().decide(view, fleet.demand, fleet.options)
    assert isinstance(decision.rows, KnowsShort)
    assert decision.rows.short() == tuple(result for result in decision.rows if not result.satisfied)
    acquiring = frozenset(result.need.key for result in decision.rows if result.acquired)
    for advance, refused in product((True, False), (frozenset(), acquiring)):
        asked = looked = ShortfallAges()
        for _ in range(2):
            short, all_short = (short_of_cycle(rows, refused) for rows in (decision.rows, tuple(decision.rows)))
            asked = next_ages(asked, short, snapshot=view, refused=refused, advance=advance)
            looked = next_ages(looked, all_short, snapshot=view, refused=refused, advance=advance)

        assert asked == looked
        assert set(asked.rows.values()) <= {1 + int(advance)}
