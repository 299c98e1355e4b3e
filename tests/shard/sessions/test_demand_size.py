"""What makes a roll-up suspicious, compared with the definition written down naively (docs/adr/0144)."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector
from bigfleet.shard.safety_limits import DemandQuarantine, QuarantineVerdict
from bigfleet.shard.sessions.demand_size import DemandSize
from tests.engine.proof import in_proportion

#: How a row without a quantity counts.
NOTHING: Vector = {"": 1}
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", "gpu"]), st.integers(1, 40), max_size=3)


@st.composite
def roll_ups(draw: st.DrawFn) -> list[Need]:
    """Draw rows of different groups; a min unit never exceeds the aggregate."""
    rows = []
    for group in draw(st.lists(st.integers(0, 14), max_size=14, unique=True)):
        aggregate = draw(AMOUNTS)
        min_unit = {name: draw(st.integers(1, amount)) for name, amount in aggregate.items() if draw(st.booleans())}
        rows.append(Need(ClusterId("c1"), Profile(requirements=()), aggregate, min_unit, group=str(group)))
    return rows


def total(rows: list[Need], name: str) -> int:
    """Return what the rows ask for in sum."""
    return sum((row.aggregate or NOTHING).get(name, 0) for row in rows)


def is_suspicious(before: list[Need], after: list[Need], largest: Vector) -> bool:
    """Say it in the words of the specification."""
    for name in {name for row in before for name in row.aggregate or NOTHING}:
        asking = [(row.aggregate or NOTHING, row.min_unit) for row in before if name in (row.aggregate or NOTHING)]
        machines = sum(aggregate[name] // min_unit.get(name, aggregate[name]) for aggregate, min_unit in asking)
        if (len(asking) >= 10 or machines >= 10) and Fraction(total(after, name), total(before, name)) < Fraction(
            1, 10
        ):
            return True
    for row in before:
        if row.key in {other.key for other in after}:
            continue
        for name, amount in row.aggregate.items():
            fell = total(before, name) - total(after, name)
            machine = max(largest.get(name, 0), row.min_unit.get(name, amount))
            if Fraction(amount, machine) >= 10 and fell >= Fraction(9 * amount, 10):
                return True
    return False


@pytest.mark.rule("shard 6/5")
@given(roll_ups(), roll_ups(), AMOUNTS)
@settings(deadline=None, max_examples=in_proportion(400))
def test_a_loss_is_what_the_specification_says(before: list[Need], after: list[Need], largest: Vector) -> None:
    """In every dimension, with integers alone."""
    loss = DemandSize.of(before).loss(DemandSize.of(after), after, lambda: largest)

    assert bool(loss) == is_suspicious(before, after, largest), loss


@pytest.mark.rule("shard 6/5")
@given(st.lists(roll_ups(), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_streak_is_held_twice_and_believed_the_third_time(course: list[list[Need]]) -> None:
    """The baseline is always the last accepted roll-up, and growth is never held."""
    state, baseline, held = DemandQuarantine(), None, 0
    for rows in course:
        verdict, state = state.admit(rows)
        suspicious = baseline is not None and is_suspicious(baseline, rows, {})
        assert verdict.is_accepted == (not suspicious or held == 2)
        assert (verdict is QuarantineVerdict.ACCEPT_CONFIRMED) == (suspicious and held == 2)
        held = 0 if verdict.is_accepted else held + 1
        assert state.suspicious_in_a_row == held
        if verdict.is_accepted:
            baseline = rows


@given(roll_ups(), roll_ups())
@settings(deadline=None)
def test_no_roll_up_that_only_grows_is_suspicious(before: list[Need], more: list[Need]) -> None:
    """Rows are added, and none is changed."""
    known = {row.key for row in before}
    after = before + [row for row in more if row.key not in known]

    assert DemandSize.of(before).loss(DemandSize.of(after), after, dict) == ""
