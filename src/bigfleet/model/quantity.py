"""Parses Kubernetes quantities to exact integers in milli-units.

One number form (docs/spec/model.md §5): rounded away from zero, capped at (2**63 - 1) units. There is no float
on any path here, so equal text gives equal integers in every process. Never parse a quantity anywhere else.
"""

import re
from enum import Enum
from functools import lru_cache

MILLI = 1000
UNITS_MAX = 2**63 - 1
MILLI_MAX = UNITS_MAX * MILLI
QUANTITY_CHARACTERS_MAX = 64

_GRAMMAR = re.compile(r"([+-]?)([0-9]*)(?:(\.)([0-9]*))?(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?", re.ASCII)
_DECIMAL_EXPONENTS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_EXPONENTS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
# 64 characters of digits and the cap of 10**22 milli-units: an exponent beyond this only saturates, up or down.
_EXPONENT_BOUND = 128


class Family(Enum):
    """The way a quantity was written, which its sums keep when they are printed."""

    DECIMAL = "decimal"
    BINARY = "binary"
    EXPONENT = "exponent"


class QuantityError(ValueError):
    """The text is no Kubernetes quantity; the message quotes it and says why."""


@lru_cache(maxsize=65536)
def parse_quantity(text: str) -> int:
    """Return the quantity in milli-units, rounded away from zero, its magnitude at most `MILLI_MAX`.

    Raises QuantityError for anything outside the grammar of docs/spec/model.md §5.
    """
    return _parse(text)[0]


@lru_cache(maxsize=65536)
def quantity_family(text: str) -> Family:
    """Return the family that the text is written in. Raises QuantityError as `parse_quantity` does."""
    return _parse(text)[1]


# Whoever wants a quantity's number mostly wants its family next.
@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[int, Family]:
    if len(text) > QUANTITY_CHARACTERS_MAX:
        raise QuantityError(
            f"{text[:20]!r}… has {len(text)} characters, a quantity has at most {QUANTITY_CHARACTERS_MAX}"
        )
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise QuantityError(f"{text!r} is no quantity: a number such as 4, 1.5, 500m or 16Gi is expected")
    sign, whole, _point, fraction, suffix, exponent_text = match.groups()
    fraction = fraction or ""
    if not whole and not fraction:
        raise QuantityError(f"{text!r} is no quantity: it has no digits")
    digits = int(whole + fraction)
    family = Family.DECIMAL
    if suffix in _BINARY_EXPONENTS:
        family = Family.BINARY
        numerator, denominator = digits * MILLI * 2 ** _BINARY_EXPONENTS[suffix], 10 ** len(fraction)
    else:
        if exponent_text is not None:
            family = Family.EXPONENT
            exponent = max(-_EXPONENT_BOUND, min(_EXPONENT_BOUND, int(exponent_text)))
        else:
            exponent = _DECIMAL_EXPONENTS[suffix or ""]
        power = exponent + 3 - len(fraction)
        numerator, denominator = digits * 10 ** max(power, 0), 10 ** max(-power, 0)
    magnitude = min(-(-numerator // denominator), MILLI_MAX)
    return (-magnitude if sign == "-" else magnitude), family


_DECIMAL_SUFFIXES = (("E", 18), ("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3))
_BINARY_SUFFIXES = (("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10))


def format_quantity(milli: int, family: Family) -> str:
    """Return the canonical text: the family's largest suffix that divides exactly, `0` for zero.

    A binary value under 1024 units or with a fraction prints in decimal form (docs/spec/model.md §5).
    """
    if milli == 0:
        return "0"
    units, fraction = divmod(abs(milli), MILLI)
    sign = "-" if milli < 0 else ""
    if family is Family.BINARY and not fraction and units >= 1024:
        for suffix, power in _BINARY_SUFFIXES:
            if units % 2**power == 0:
                return f"{sign}{units // 2**power}{suffix}"
        return f"{sign}{units}"
    if fraction:
        return f"{sign}{abs(milli)}{'e-3' if family is Family.EXPONENT else 'm'}"
    for suffix, power in _DECIMAL_SUFFIXES:
        if units % 10**power == 0:
            text = f"e{power}" if family is Family.EXPONENT else suffix
            return f"{sign}{units // 10**power}{text}"
    return f"{sign}{units}"
