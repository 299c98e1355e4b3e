"""Prices that are wrong, out of proportion or new cause no exchange."""

import math
from dataclasses import replace

import pytest

from bigfleet.engine.decision import CapacityPool
from bigfleet.exchange.plausibility import (
    MEMORY_SECONDS,
    WINDOW_SECONDS,
    PriceBook,
    PriceHistory,
    current_prices,
    proportionate,
)
from bigfleet.exchange.values import ExclusionReason
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType
from tests.exchange.building import asked, held, need, offers, pods

SPOT = CapacityType.SPOT
DEMAND = [need(pods(500, 1, 14))]
#: The other types of a catalogue.
OTHERS = [machine for cpu in (16, 32, 48) for machine in offers(1, f"other{cpu}", cpu, 0.05 * cpu)]


@pytest.mark.parametrize("price", [0.0, math.nan, math.inf, -0.1])
def test_a_price_that_is_none_attracts_nothing(price: float) -> None:
    """A rented machine for nothing, or for no number, is a fault of the data."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.40)
    wrong = [replace(m, price_usd_per_hour=price) if m.id.startswith("cheap") else m for m in machines]

    assert asked(machines, DEMAND).proposals
    assert asked(wrong, DEMAND).proposals == ()


def test_one_wrong_price_of_a_pool_makes_the_pool_doubtful() -> None:
    """It is not known which of its prices is right."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.40)
    machines[-1] = replace(machines[-1], price_usd_per_hour=0.0)

    assert asked(machines, DEMAND).proposals == ()


def test_a_hundredth_of_a_price_attracts_nothing() -> None:
    """$0.004 for 8 cpu where others cost $0.05 a cpu; a tenth of their price is a good offer."""
    base = held(2, "dear", 4, 0.2) + OTHERS

    assert asked(base + offers(4, "cheap", 8, 0.04), DEMAND).proposals
    assert asked(base + offers(4, "cheap", 8, 0.004), DEMAND).proposals == ()


def test_a_spot_price_below_a_twentieth_of_the_types_own_is_wrong() -> None:
    """The same type on demand says what it is worth, however few types are known."""
    base = held(2, "dear", 4, 3.0) + offers(1, "on-demand", 8, 7.0)

    assert asked(base + offers(4, "spot", 8, 0.40, capacity_type=SPOT), DEMAND).proposals
    assert asked(base + offers(4, "spot", 8, 0.30, capacity_type=SPOT), DEMAND).proposals == ()


def test_a_held_machine_without_a_price_is_kept() -> None:
    """What it costs is not known, so nothing is saved."""
    machines = held(1, "odd", 4, math.nan, instance_type="odd") + held(1, "dear", 4, 3.0)

    found = asked(machines + offers(4, "cheap", 8, 0.40), DEMAND)

    assert found.excluded == ((ExclusionReason.PRICE, 1),)
    assert [each.machine_ids for each in found.proposals] == [("dear-000",)]


def test_machines_that_are_paid_for_may_cost_nothing() -> None:
    """Bare metal has no price by the hour."""
    metal = offers(1, "metal", 8, 0.0, capacity_type=CapacityType.BARE_METAL)

    assert set(current_prices(metal).offered.values()) == {0.0}
    assert set(proportionate(current_prices(metal), metal).offered.values()) == {0.0}


# ---- prices over time ------------------------------------------------------------------------------------------------


def settled_after(*prices: float | None, step_seconds: float = 60.0) -> float | None:
    """Return the offered price of one pool that counts after these prices, one a step."""
    history, found = PriceHistory(), None
    for number, price in enumerate(prices):
        machines = [] if price is None else offers(2, "spot", 8, price, capacity_type=SPOT)
        history.observe(number * step_seconds, current_prices(machines))
        found = next(iter(history.settled.offered.values()), None)
    return found


STEPS = int(WINDOW_SECONDS / 60) + 1
#: After so many minutes a price is forgotten: stretches of a window are remembered, and the last one as a whole.
FORGOTTEN = int((MEMORY_SECONDS + WINDOW_SECONDS) / 60) + 1


def test_a_price_counts_when_it_was_there_for_the_whole_window() -> None:
    """After a start nothing counts for a quarter of an hour."""
    assert settled_after(*[0.4] * (STEPS - 1)) is None
    assert settled_after(*[0.4] * STEPS) == 0.4


def test_a_jump_for_one_minute_changes_nothing() -> None:
    """Neither the low price nor the one after it counts before the window is over."""
    assert settled_after(*[0.4] * STEPS, 0.004) == 0.4
    assert settled_after(*[0.4] * STEPS, 0.004, 0.4) == 0.4


def test_a_price_that_stays_low_counts_after_the_memory() -> None:
    """A market that fell has fallen."""
    at_least = int(MEMORY_SECONDS / 60)
    assert settled_after(*[0.4] * STEPS, *[0.2] * at_least) == 0.4
    assert settled_after(*[0.4] * STEPS, *[0.2] * FORGOTTEN) == 0.2


def test_prices_that_move_to_and_fro_within_the_memory_count_with_the_highest() -> None:
    """A fifth down and up again every three hours: what it costs is the upper price."""
    path = [price for _ in range(4) for price in (*[0.5] * 180, *[0.4] * 180)]
    assert [settled_after(*path[: minutes + 1]) for minutes in (190, 359, 700, 1430)] == [0.5] * 4


def test_a_rise_counts_at_once() -> None:
    """Nothing is exchanged for an offer that is dearer than it was."""
    assert settled_after(*[0.4] * STEPS, 0.9) == 0.9


def test_noise_counts_with_its_upper_edge() -> None:
    """± 5 % around $0.40 is $0.42."""
    assert settled_after(*[0.38, 0.42] * STEPS) == 0.42


def test_an_offer_that_comes_and_goes_does_not_count() -> None:
    """Spot that appears for a minute, and spot that left."""
    assert settled_after(*[None] * STEPS, 0.1) is None
    assert settled_after(*[0.4] * STEPS, None, 0.4) is None
    assert settled_after(*[0.4] * STEPS, None) is None


def test_a_held_price_that_rose_counts_after_the_memory() -> None:
    """A fifth up for three hours is how it was three hours ago."""
    history = PriceHistory()
    found: list[float] = []
    for number in range(STEPS + FORGOTTEN):
        history.observe(number * 60.0, current_prices(held(1, "held", 8, 0.4 if number < STEPS else 0.5)))
        found += history.settled.held.values()

    assert (found[180], found[-1]) == (0.4, 0.5)


def test_a_held_machine_counts_with_its_lowest_price() -> None:
    """A held machine whose price jumps for a minute is not dearer for that."""
    history = PriceHistory()
    for number in range(STEPS):
        history.observe(number * 60.0, current_prices(held(1, "held", 8, 0.4)))
    history.observe(STEPS * 60.0, current_prices(held(1, "held", 8, 4.0)))

    assert list(history.settled.held.values()) == [0.4]


def test_a_held_price_that_is_seen_seldom_counts_with_the_one_before() -> None:
    """A large shard looks at a cluster every half hour: a jump at that moment is compared with the look before."""
    history = PriceHistory()
    offered = offers(1, "spot", 8, 0.1, capacity_type=SPOT)
    for number in range(61):
        prices = {0: 0.4, 30: 0.4, 60: 4.0}
        seen = held(1, "held", 8, prices[number]) if number in prices else []
        history.observe(number * 60.0, current_prices([*offered, *seen]))
        if number == 0:
            assert history.settled.held == {}

    assert list(history.settled.held.values()) == [0.4]


def test_the_history_is_bounded() -> None:
    """A sample leaves with the window, and what is remembered of it with the memory."""
    history = PriceHistory()
    for number in range(3000):
        history.observe(number * 60.0, PriceBook({}, {}))

    assert len(history) <= STEPS + 1 + MEMORY_SECONDS / WINDOW_SECONDS + 1


def test_prices_are_compared_by_pool() -> None:
    """A zone that is cheaper than another is no fault."""
    machines: list[Machine] = offers(1, "a", 8, 0.4) + offers(1, "b", 8, 0.2, zone="b")

    found = proportionate(current_prices(machines), machines).offered

    assert found == {CapacityPool.of(machine): machine.price_usd_per_hour for machine in machines}
