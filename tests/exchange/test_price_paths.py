"""Tests that prices which turned back soon after earlier turns are expected to turn back again."""

from collections.abc import Sequence

import pytest

from bigfleet.engine.decision import CapacityPool
from bigfleet.exchange.plausibility import WINDOW_SECONDS, PriceBook
from bigfleet.exchange.price_paths import PATH_SECONDS, PricePaths, share_of
from bigfleet.model.states import CapacityType

A, B = (CapacityPool("m8", zone, CapacityType.SPOT) for zone in "ab")
QUARTERS = 4


def wave(half_hours: float, hours: float, *, first: int = 1) -> list[int]:
    """Return the signs of prices in antiphase that turn after so many hours, in quarters of an hour."""
    return [first * (-1) ** int(n / QUARTERS // half_hours) for n in range(int(hours * QUARTERS))]


def share_when_it_counts(half_hours: float, turns: int) -> float:
    """Return the share four hours after a turn, from the side of what has become the cheaper one."""
    signs = wave(half_hours, turns * half_hours + 4.25)
    return share_of([sign * signs[-1] for sign in signs])


@pytest.mark.parametrize("half_hours", [4.5, 5.5, 6.75, 8])
@pytest.mark.parametrize("turns", [1, 2, 3, 6])
def test_prices_that_turn_back_within_eight_hours_do_not_pay(half_hours: float, turns: int) -> None:
    """What came would be the dearer one for as long as it was the cheaper one, or longer; so from the first turn on."""
    assert share_when_it_counts(half_hours, turns) == 0


def test_prices_that_turn_each_day_count_in_full() -> None:
    """And those of each half day: eight hours remain when a turn counts."""
    assert [share_when_it_counts(hours, 3) for hours in (12.25, 24)] == [1, 1]
    assert 0 < share_when_it_counts(10, 3) < 1


@pytest.mark.parametrize("before", [[], [0] * 100, [-1] * 16])
def test_without_an_earlier_turn_the_past_says_nothing(before: list[int]) -> None:
    """Prices that are not known, that were equal, or that were the other way round for less than four hours."""
    assert share_of([*before, *[1] * 17]) == 1


def test_prices_that_were_the_other_way_round_for_long_stay_as_they_are_now() -> None:
    """A price that fell for good counts as soon as it is four hours old."""
    assert share_of([*[-1] * 24 * QUARTERS, *[1] * 17]) == 1


def test_an_interruption_of_a_quarter_of_an_hour_is_no_turn() -> None:
    """An offer that is dearer for a moment every six hours is the cheaper one all the same."""
    cheap = [sign for _ in range(10) for sign in (-1, *[1] * 6 * QUARTERS)]
    assert share_of(cheap) == 1


def test_prices_that_last_longer_than_ever_count_after_four_more_hours() -> None:
    """Waves of five hours, and then no turn any more."""
    past = wave(5, 30, first=-1)
    now = -past[-1]
    found = [share_of([sign * now for sign in (*past, *[now] * hours * QUARTERS)]) for hours in (5, 8, 10)]
    assert found == [0, 0, 1]


# ---- prices of pools -------------------------------------------------------------------------------------------------


def observed(*prices: Sequence[float | None]) -> PricePaths:
    """Return the paths of the pools A and B, with one observation in each quarter of an hour."""
    paths = PricePaths()
    for number, found in enumerate(prices):
        offered = {pool: price for pool, price in zip((A, B), found, strict=True) if price is not None}
        paths.observe(number * WINDOW_SECONDS, PriceBook(offered, {}))
    return paths


def share(paths: PricePaths, extra_usd_per_hour: float = 0.0) -> float:
    """Return the share for one machine of A that goes and one of B that comes."""
    return paths.lasting_share({A: 1}, {B: 1}, fraction_min=0.1, extra_usd_per_hour=extra_usd_per_hour)


def of_signs(signs: Sequence[int]) -> PricePaths:
    """Return the paths in which B is cheaper by 20 cents where the sign is 1."""
    return observed(*((0.33, 0.13) if sign > 0 else (0.13, 0.33) for sign in signs))


def test_the_prices_of_the_pools_concerned_are_compared() -> None:
    """And what comes without a price by the hour is always the cheaper one."""
    paths = of_signs(wave(5, 34.25, first=1))

    assert share(paths) == 0
    assert paths.lasting_share({A: 1}, {}, fraction_min=0.1, extra_usd_per_hour=0.0) == 1


def test_expected_interruptions_count_with_the_price() -> None:
    """At $1 an hour of interruptions fewer B is the cheaper one at any of these prices."""
    assert share(of_signs(wave(5, 34.25)), extra_usd_per_hour=1.0) == 1


def test_small_differences_are_no_turns() -> None:
    """5 cents of 60 are below the least saving of an exchange."""
    waves = wave(5, 30, first=1)
    paths = observed(*((0.6, 0.55) if sign > 0 else (0.55, 0.6) for sign in waves), *[(0.6, 0.3)] * 17)
    assert share(paths) == 1


def test_a_pool_without_a_price_says_nothing() -> None:
    """Nor does one that was seen long ago only."""
    assert share(observed(*[(0.33, None)] * 40)) == 1

    paths = of_signs(wave(5, 34.25))
    paths.observe(34.25 * 3600 + PATH_SECONDS + 2 * WINDOW_SECONDS, PriceBook({B: 0.1}, {}))
    assert share(paths) == 1


def test_a_pool_that_is_sold_out_has_its_last_price() -> None:
    """What is held of it may be unobserved for some time."""
    signs = wave(5, 34.25)
    prices = [(0.33, 0.13) if sign > 0 else (0.13, 0.33) for sign in signs]
    assert share(observed(*prices[:-3], *[(None, b) for _, b in prices[-3:]])) == 0


def test_paths_are_bounded() -> None:
    """Prices that change all the time are stored for three days, one of each quarter of an hour."""
    paths = PricePaths()
    for number in range(5 * 24 * 60):
        paths.observe(number * 60.0, PriceBook({A: 0.1 + number % 7 / 100}, {}))
    (path,) = paths._paths.values()
    assert len(path.prices) <= PATH_SECONDS / WINDOW_SECONDS + 2


def test_the_mean_change_is_that_of_the_saving() -> None:
    """After two hours at 20 cents the saving is -20 cents for two hours."""
    paths = of_signs([*[1] * 8, *[-1] * 8])

    assert paths.mean_change_usd_per_hour({A: 1}, {B: 1}, 0.0) == pytest.approx(-0.2)
    assert paths.mean_change_usd_per_hour({A: 1}, {B: 1}, 8 * WINDOW_SECONDS) == pytest.approx(0.0)
    assert paths.mean_change_usd_per_hour({A: 1}, {B: 1}, -WINDOW_SECONDS) is None
