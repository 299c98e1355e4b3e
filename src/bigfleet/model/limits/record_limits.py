"""Defines the limits of a provider's record and checks them (docs/spec/provider.md §9).

A shard rejects a record beyond them, the provider kit quarantines it, and the conformance suite fails it. What a
provider lists reaches logs, terminals, operators and the engine's vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bigfleet.model.ids import control_character_in

#: Bytes of one record; of a larger one only the id is read.
RECORD_BYTES_MAX: Final = 128 * 1024
TEXT_BYTES_MAX: Final = 1_024
RESOURCE_NAMES_MAX: Final = 32
LABELS_MAX: Final = 256
#: No machine costs so much; sums of prices stay far below the largest float.
PRICE_USD_PER_HOUR_MAX: Final = 1e9
#: No text of so many characters has more bytes than `TEXT_BYTES_MAX`.
SURELY_SHORT_CHARACTERS: Final = TEXT_BYTES_MAX // 4


def high_price_text(usd_per_hour: float, key: str) -> str:
    """Return the sentence about a price above the limit; `key` is the name of its field."""
    return f"{key} is {usd_per_hour:g}, at most {PRICE_USD_PER_HOUR_MAX:,.0f} is allowed"


def counts_fault(resources: Mapping[str, str], allocatable: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """Return which map has too many keys, or None."""
    for name, quantities in (("resources", resources), ("allocatable", allocatable)):
        if len(quantities) > RESOURCE_NAMES_MAX:
            return f"{name} has {len(quantities)} names, at most {RESOURCE_NAMES_MAX} are allowed"
    if len(labels) > LABELS_MAX:
        return f"labels has {len(labels)} keys, at most {LABELS_MAX} are allowed"
    return None


def long_fault(name: str, text: str) -> str | None:
    """Return the sentence about a text that has too many bytes, or None."""
    # Bytes are counted where there may be too many of them.
    if len(text) > SURELY_SHORT_CHARACTERS and _bytes(text) > TEXT_BYTES_MAX:
        return f"{name} {_too_long(text)}"
    return None


def texts_fault(texts: Sequence[str]) -> str | None:
    """Return the first text that is too long or has a control character, or None."""
    together = "".join(texts)
    # Most records are sound: with one look at all their texts, a record is checked in half the time.
    if len(together) <= TEXT_BYTES_MAX and together.isascii() and together.isprintable():
        return None
    for text in texts:
        if _bytes(text) > TEXT_BYTES_MAX:
            return f"a text {_too_long(text)}"
        character = control_character_in(text)
        if character:
            return f"a text has the control character {character!r}, which no name or value may have"
    return None


def texts_of(*maps: Mapping[str, str]) -> list[str]:
    """Return the keys and values of maps."""
    texts: list[str] = []
    for mapping in maps:
        texts += mapping.keys()
        texts += mapping.values()
    return texts


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _too_long(text: str) -> str:
    return f"has {_bytes(text)} bytes, at most {TEXT_BYTES_MAX} are allowed: {text[:32]!r}…"
