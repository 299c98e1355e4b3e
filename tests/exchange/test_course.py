"""Any course of an exchange keeps its limits, and ends; what it says of savings is what its machines cost."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.exchange.course import (
    ACQUIRING_SECONDS_MAX,
    ExchangeCourse,
    ExchangeEnd,
    ExchangePhase,
    Seen,
    Sighting,
    abandoned,
    begun,
    drains,
    followed,
    joined_by,
)
from bigfleet.exchange.values import ExchangeProposal, ExchangeSettings
from bigfleet.model.states import CapacityType
from tests.engine.proof import examples
from tests.exchange.building import asked, held, idle, need, offers, pods
from tests.exchange.fleets import moves, own, rented
from tests.exchange.test_between_clusters import demand

SETTINGS = ExchangeSettings()
S = Sighting
KEY = class_key(offers(1, "new", 8, 1.0)[0])
OTHER = class_key(offers(1, "other", 4, 0.5)[0])
MINUTE = 60.0


def proposal() -> ExchangeProposal:
    """Return a ready proposal: two machines at $3.00 go for one at $1.00."""
    found = asked([*held(2, "old", 4, 3.0), *offers(3, "new", 8, 1.0)], [need(pods(1000, 1, 5))])
    (only,) = found.proposals
    assert only.waits_for is None
    return only


def course(*, machines: int = 2, goes: tuple[str, ...] = (), comes: int = 1) -> ExchangeCourse:
    """Return an exchange that has just begun: so many machines come for those that go."""
    found = begun(proposal(), exchange_id="x-1", cluster="c", machines=machines, settings=SETTINGS, now_seconds=1000.0)
    return replace(found, goes=goes or found.goes, comes=((KEY, comes),))


def serving(*names: str, price: float = 3.0) -> dict[str, Seen]:
    """Return machines that serve."""
    return {name: Seen(S.SERVING, price) for name in names}


def with_new(found: ExchangeCourse, sighting: Sighting = S.SERVING, price: float = 1.0) -> ExchangeCourse:
    """Return the course with the machine that comes."""
    return joined_by(found, {"new-000": (KEY, Seen(sighting, price))})


def draining() -> tuple[ExchangeCourse, dict[str, Seen]]:
    """Return an exchange of two machines of which one may drain at a time, and what is seen of them."""
    seen = {**serving("old-000", "old-001"), **serving("new-000", price=1.0)}
    found = followed(with_new(course()), seen, now_seconds=1100.0)
    return drains(found, 1100.0), seen


def test_it_says_what_the_proposal_said() -> None:
    """What goes, what comes by class, the promise and its part that is no price."""
    said = proposal()
    found = begun(said, exchange_id="x-1", cluster="c", machines=40, settings=SETTINGS, now_seconds=0.0)

    assert (found.goes, found.comes) == (("old-000", "old-001"), ((KEY, 1),))
    assert found.budget == 2
    assert found.promised_usd_per_hour == pytest.approx(5.0)
    assert found.draining_seconds_max == 600 + 2 * 600
    assert replace(found, budget=1, draining_seconds_max=600 + 4 * 600) == begun(
        said, exchange_id="x-1", cluster="c", machines=2, settings=SETTINGS, now_seconds=0.0
    )


def test_nothing_leaves_before_everything_that_comes_serves() -> None:
    """Until then all that goes is kept, and all that came."""
    found = followed(
        with_new(course(), S.BINDING),
        serving("old-000", "old-001") | {"new-000": Seen(S.BINDING, 1.0)},
        now_seconds=1060.0,
    )

    assert (found.leaving, found.wave) == (frozenset(), frozenset())
    assert found.retained == {"old-000", "old-001", "new-000"}
    assert not found.has_all
    with pytest.raises(AssertionError, match="before everything that comes serves"):
        drains(found, 1060.0)


def test_machines_leave_one_wave_after_the_other() -> None:
    """All leave at once for the decision; no more than the budget may drain."""
    found, seen = draining()
    assert found.leaving == {"old-000", "old-001"}
    assert found.wave == {"old-000"}
    assert found.retained == {"old-001", "new-000"}

    found = followed(found, {**seen, "old-000": Seen(S.DRAINING, 3.0)}, now_seconds=1700.0)
    assert found.wave == {"old-000"}
    found = followed(found, {**seen, "old-000": Seen(S.IDLE, 3.0)}, now_seconds=1800.0)
    assert found.leaving == found.wave == {"old-001"}
    assert found.realised_usd_per_hour == pytest.approx(3.0 - 1.0)

    found = followed(found, {**seen, "old-000": Seen(S.IDLE), "old-001": Seen(S.SPECULATIVE)}, now_seconds=1900.0)
    assert (found.phase, found.end) == (ExchangePhase.ENDED, ExchangeEnd.DONE)
    assert found.realised_usd_per_hour == pytest.approx(5.0)
    assert (found.leaving, found.retained) == (frozenset(), frozenset())


def test_a_machine_that_was_created_and_is_bound_to_nobody_is_acquired_again() -> None:
    """An asynchronous Create ends with an Idle machine; the decision binds it, or another one of its class."""
    old = serving("old-000", "old-001")
    found = followed(with_new(course(), S.CREATING), {**old, "new-000": Seen(S.IDLE, 1.0)}, now_seconds=1060.0)

    assert (found.end, found.missing, dict(found.came)) == (None, {KEY: 1}, {})
    found = with_new(found, S.BINDING)
    found = followed(found, {**old, "new-000": Seen(S.IDLE, 1.0)}, now_seconds=1120.0)
    assert found.end is ExchangeEnd.MACHINE_FAILED


@pytest.mark.parametrize("sighting", [S.AWAY, S.SPECULATIVE, S.DRAINING])
def test_a_machine_that_does_not_come_ends_it(sighting: Sighting) -> None:
    """What goes counts again at once."""
    old = serving("old-000", "old-001")
    found = followed(with_new(course(), S.CREATING), {**old, "new-000": Seen(sighting, 1.0)}, now_seconds=1060.0)

    assert (found.phase, found.end) == (ExchangePhase.ENDED, ExchangeEnd.MACHINE_FAILED)
    assert found.realised_usd_per_hour == 0


def test_a_machine_that_goes_and_leaves_by_itself_ends_it() -> None:
    """It failed or was handed over: the calculation no longer holds."""
    found = followed(with_new(course()), serving("old-000") | serving("new-000", price=1.0), now_seconds=1060.0)
    assert found.end is ExchangeEnd.MACHINE_LEFT

    found, seen = draining()
    del seen["old-001"]
    assert followed(found, seen, now_seconds=1200.0).end is ExchangeEnd.MACHINE_LEFT


def test_a_machine_that_came_and_stops_serving_ends_it() -> None:
    """The pods of what goes have no other place."""
    found, seen = draining()
    assert followed(found, {**seen, "new-000": Seen(S.BINDING, 1.0)}, now_seconds=1200.0).end is (
        ExchangeEnd.MACHINE_FAILED
    )


@pytest.mark.parametrize(("price", "end"), [(3.4, None), (3.6, ExchangeEnd.PRICE_MOVED)])
def test_a_price_that_moves_back_ends_it_below_half_of_the_promise(price: float, end: ExchangeEnd | None) -> None:
    """$5.00 an hour were promised: $2.60 are enough, $2.40 are not."""
    found, seen = draining()
    assert followed(found, {**seen, "new-000": Seen(S.SERVING, price)}, now_seconds=1200.0).end is end


def test_a_refusal_of_a_machine_that_leaves_ends_it() -> None:
    """Holds of other machines do not concern it."""
    found, seen = draining()
    assert followed(found, seen, now_seconds=1200.0, refused=frozenset({"other"})).end is None
    assert followed(found, seen, now_seconds=1200.0, refused=frozenset({"old-001"})).end is ExchangeEnd.WOULD_NOT_FIT


def test_each_phase_has_a_limit() -> None:
    """After it what is left stays."""
    old = serving("old-000", "old-001")
    waits = course()
    assert followed(waits, old, now_seconds=1000.0 + ACQUIRING_SECONDS_MAX).end is None
    late = followed(waits, old, now_seconds=1001.0 + ACQUIRING_SECONDS_MAX)
    assert late.end is ExchangeEnd.ACQUIRED_TOO_LATE

    found, seen = draining()
    assert followed(found, seen, now_seconds=1100.0 + found.draining_seconds_max).end is None
    assert followed(found, seen, now_seconds=1101.0 + found.draining_seconds_max).end is ExchangeEnd.DRAINED_TOO_LATE


def test_an_exchange_that_ended_stays_as_it_ended() -> None:
    """Whatever is seen later."""
    found, _ = draining()
    ended = abandoned(found, ExchangeEnd.SHORTFALL)
    assert abandoned(ended, ExchangeEnd.PRICE_MOVED) is ended
    assert followed(ended, {}, now_seconds=1e9) is ended


# ---- any course --------------------------------------------------------------------------------------------------

sightings = st.sampled_from([*S, S.SERVING, S.SERVING, S.SERVING, S.CREATING, S.BINDING, S.DRAINING, S.IDLE])
prices = st.sampled_from([0.5, 1.0, 3.0, 3.0, 6.0])
OLD = tuple(f"old-{n:03}" for n in range(5))
NEW = ("new-000", "new-001", "new-002")


@st.composite
def looks(draw: st.DrawFn) -> dict[str, Seen]:
    """Draw what is seen of all machines; most of the time most of them serve."""
    is_calm = draw(st.booleans())
    return {
        name: Seen(S.SERVING if is_calm and name in OLD else draw(sightings), 3.0 if name in OLD else draw(prices))
        for name in (*OLD, *NEW)
        if is_calm or draw(st.integers(0, 9))
    }


def check(found: ExchangeCourse, before: ExchangeCourse) -> None:
    """Assert what holds at each moment, and between two."""
    assert len(found.wave) <= found.budget
    assert found.wave <= found.leaving <= set(OLD)
    assert not found.leaving & found.came.keys()
    assert not found.retained & found.wave
    assert (found.end is None) == (found.phase is not ExchangePhase.ENDED)
    wanted: Mapping[ClassKey, int] = dict(found.comes)
    for machine_class in (KEY, OTHER):
        assert sum(each == machine_class for each, _ in found.came.values()) <= wanted.get(machine_class, 0)
    if before.phase is ExchangePhase.ENDED:
        assert found is before
    if before.phase is ExchangePhase.ACQUIRING and found.phase is not ExchangePhase.ACQUIRING:
        assert not found.gone
    assert found.gone.keys() >= before.gone.keys()
    if found.end is ExchangeEnd.DONE:
        assert not found.remaining


@examples(300)
@given(
    steps=st.lists(st.tuples(looks(), st.sampled_from([10.0, 60.0, 600.0])), min_size=1, max_size=30),
    budget=st.integers(1, 3),
    comes=st.integers(1, 3),
)
def test_any_course_keeps_its_limits_and_ends(
    steps: list[tuple[dict[str, Seen], float]], budget: int, comes: int
) -> None:
    """Whatever happens to the machines."""
    found = replace(course(goes=OLD, comes=comes), budget=budget)
    began_seconds = now_seconds = found.since_seconds
    for seen, seconds in steps:
        now_seconds += seconds
        new = {name: (KEY, seen[name]) for name in NEW if name in seen and seen[name].sighting is not S.AWAY}
        before, found = found, joined_by(found, new)
        found = followed(found, seen, now_seconds=now_seconds)
        check(found, before)
        if found.phase is ExchangePhase.ACQUIRING and found.has_all:
            before, found = found, drains(found, now_seconds)
            check(found, before)
    bound_seconds = ACQUIRING_SECONDS_MAX + found.draining_seconds_max
    if now_seconds - began_seconds > bound_seconds + 600:
        assert found.phase is ExchangePhase.ENDED
    late = followed(found, {name: Seen(S.SERVING, 3.0) for name in OLD}, now_seconds=now_seconds + bound_seconds + 1)
    assert late.phase is ExchangePhase.ENDED


# ---- machines that are paid for anyway -----------------------------------------------------------------------------


def test_the_price_of_an_idle_machine_that_is_paid_for_anyway_costs_nothing() -> None:
    """A Reserved machine at $2.90 saves the whole price of a rented one at $3.00, and prices did not move."""
    spare = idle(1, "own", 4, 2.9, capacity_type=CapacityType.RESERVED, instance_type="own4")
    (said,) = asked([*held(1, "old", 4, 3.0), *spare], [need(pods(3500, 1, 1))]).proposals
    assert said.gate.saving_usd_per_hour == pytest.approx(3.0)
    found = begun(said, exchange_id="x-1", cluster="c", machines=1, settings=SETTINGS, now_seconds=0.0)
    found = joined_by(found, {"own-000": (class_key(spare[0]), Seen(S.SERVING, 2.9))})
    seen = {**serving("old-000"), "own-000": Seen(S.SERVING, 2.9)}
    found = drains(followed(found, seen, now_seconds=60.0), 60.0)
    assert found.end is None
    assert found.expected_usd_per_hour == pytest.approx(3.0)
    found = followed(found, {**seen, "old-000": Seen(S.SPECULATIVE)}, now_seconds=120.0)
    assert found.end is ExchangeEnd.DONE
    assert found.realised_usd_per_hour == pytest.approx(3.0)


def test_a_part_of_a_move_is_worth_what_the_taker_saves() -> None:
    """It promises what it rents. It ends when that exceeds half of what both clusters were to save."""
    (said,) = moves([*own("a", 1), *rented("b", 1), *offers(2, "new", 4, 0.3, instance_type="new4")], demand()).values()
    found = begun(said, exchange_id="x-1", cluster="a", machines=1, settings=SETTINGS, now_seconds=0.0)
    assert found.taker == "b"
    assert found.promised_usd_per_hour == pytest.approx(-0.3)
    assert found.expected_usd_per_hour == pytest.approx(2.7)
    (key,) = said.comes_by_class
    found = joined_by(found, {"new-000": (key, Seen(S.SERVING, 0.3))})
    seen = {"a-own-000": Seen(S.SERVING, 0.5), "new-000": Seen(S.SERVING, 0.3)}
    going = drains(followed(found, seen, now_seconds=60.0), 60.0)
    done = followed(going, {**seen, "a-own-000": Seen(S.IDLE)}, now_seconds=120.0)
    assert done.end is ExchangeEnd.DONE
    assert done.realised_usd_per_hour == pytest.approx(-0.3)
    still = followed(going, {**seen, "new-000": Seen(S.SERVING, 1.6)}, now_seconds=120.0)
    assert still.end is None
    dear = followed(going, {**seen, "new-000": Seen(S.SERVING, 1.7)}, now_seconds=120.0)
    assert dear.end is ExchangeEnd.PRICE_MOVED


def test_prices_that_no_float_adds_up_are_followed_like_others() -> None:
    """A step runs within a cycle: an error in it would end the cycle of all clusters."""
    start = course()
    found = followed(start, serving(*start.goes, price=1.7e308), now_seconds=1001.0)
    assert (found.expected_usd_per_hour, found.end) == (math.inf, None)
