"""Quantities: exact milli-units in, canonical text out (docs/spec/model.md §5)."""

from decimal import ROUND_UP, Context, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.quantity import (
    MILLI_MAX,
    QUANTITY_CHARACTERS_MAX,
    Family,
    QuantityError,
    format_quantity,
    parse_quantity,
    quantity_family,
)

DECIMAL_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY_POWERS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
digits = st.from_regex(r"[0-9]{1,12}(\.[0-9]{0,9})?|\.[0-9]{1,9}", fullmatch=True)


def exact_milli(number: str, factor: Decimal) -> int:
    """Round away from zero and cap, by decimal arithmetic that shares nothing with the parser."""
    context = Context(prec=200)
    milli = context.multiply(Decimal(number), context.multiply(factor, Decimal(1000)))
    return min(int(milli.to_integral_value(rounding=ROUND_UP, context=context)), MILLI_MAX)


@given(digits, st.sampled_from(sorted(DECIMAL_POWERS)))
def test_decimal_suffixes_scale_exactly(number: str, suffix: str) -> None:
    assert parse_quantity(number + suffix) == exact_milli(number, Decimal(10) ** DECIMAL_POWERS[suffix])


@given(digits, st.sampled_from(sorted(BINARY_POWERS)))
def test_binary_suffixes_scale_exactly(number: str, suffix: str) -> None:
    assert parse_quantity(number + suffix) == exact_milli(number, Decimal(2) ** BINARY_POWERS[suffix])


@given(digits, st.integers(-30, 30), st.sampled_from("eE"))
def test_exponents_scale_exactly(number: str, exponent: int, letter: str) -> None:
    assert parse_quantity(f"{number}{letter}{exponent}") == exact_milli(number, Decimal(10) ** exponent)


@given(digits, st.sampled_from([*DECIMAL_POWERS, *BINARY_POWERS]))
def test_a_minus_sign_negates_and_a_plus_sign_changes_nothing(number: str, suffix: str) -> None:
    milli = parse_quantity(number + suffix)

    assert parse_quantity(f"-{number}{suffix}") == -milli
    assert parse_quantity(f"+{number}{suffix}") == milli


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "+", "-", "--1", "1.2.3", "0x1", "1_0", "١", "²", "inf", "NaN"),
        *(" 1", "1 ", "1\n", "1 Ki", "e3", "Ki", "1kB", "1K", "1i", "1e", "1e+", "1e1.5"),
        "1" * (QUANTITY_CHARACTERS_MAX + 1),
    ],
)
def test_anything_outside_the_grammar_is_refused_with_the_text_quoted(text: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_quantity(text)

    assert repr(text[:20])[:-1] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("0.0001", 1),
        ("-0.0001", -1),
        ("1E", 10**21),
        ("1E3", 10**6),
        ("9223372036854775807", MILLI_MAX),
        ("9223372036854775808", MILLI_MAX),
        ("-8Ei", -MILLI_MAX),
        ("1e999999999999", MILLI_MAX),
        ("0e999999999999", 0),
        ("1e-999999999999", 1),
        ("1" * QUANTITY_CHARACTERS_MAX, MILLI_MAX),
    ],
)
def test_bounds_are_rounded_away_from_zero_and_capped(text: str, milli: int) -> None:
    assert parse_quantity(text) == milli


@given(st.integers(-MILLI_MAX, MILLI_MAX), st.sampled_from(Family))
def test_text_reads_back_as_the_same_value(milli: int, family: Family) -> None:
    assert parse_quantity(format_quantity(milli, family)) == milli


@given(st.integers(-MILLI_MAX, MILLI_MAX), st.sampled_from(Family))
def test_canonical_text_is_a_fixed_point(milli: int, family: Family) -> None:
    text = format_quantity(milli, family)

    assert format_quantity(parse_quantity(text), family) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1024Mi", "1Gi"),
        ("0.5", "500m"),
        ("1.5Gi", "1536Mi"),
        ("1500", "1500"),
        ("2000", "2k"),
        ("1000Ki", "1000Ki"),
        ("1.5Ki", "1536"),
        ("0.5Ki", "512"),
        ("0.0005Ki", "512m"),
        ("1e3", "1e3"),
        ("15e2", "1500"),
        ("5e-1", "500e-3"),
        ("0", "0"),
        ("0Gi", "0"),
        ("-2000", "-2k"),
        ("-2Ki", "-2Ki"),
    ],
)
def test_text_keeps_its_family_and_takes_the_largest_suffix(text: str, canonical: str) -> None:
    assert format_quantity(parse_quantity(text), quantity_family(text)) == canonical
