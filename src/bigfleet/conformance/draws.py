"""Draws random values for one behaviour from a stream of its own, seeded by run seed and behaviour id.

A behaviour therefore draws the same values in a run of one and in a run of all. This module must not share a stream.
"""

from collections.abc import Sequence
from typing import TypeVar

from bigfleet.model.ids import Rng

T = TypeVar("T")

_SURROGATES = range(0xD800, 0xE000)
_UNICODE_END = 0x110000
#: Where characters are drawn from: plain, Latin, everything of two bytes and more, and the traps of a C string.
_ALPHABETS: tuple[range, ...] = (range(0x20, 0x7F), range(0x80, 0x250), range(0x250, _UNICODE_END), range(0x20))


class BehaviourDraws:
    """Draws of one stream."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def below(self, bound: int) -> int:
        """Return a number from 0 to below the bound."""
        assert bound > 0, "there is nothing to draw from"
        # A modulus over 64 more bits than needed favours no number by anything that could be seen.
        return self._rng.getrandbits(bound.bit_length() + 64) % bound

    def between(self, first: int, last: int) -> int:
        """Return a number from `first` to `last`, both included."""
        return first + self.below(last - first + 1)

    def choice(self, things: Sequence[T]) -> T:
        """Return one of the things."""
        return things[self.below(len(things))]

    def chance(self, probability: float) -> bool:
        """Say yes with that probability."""
        return self._rng.random() < probability

    def text(self, characters_max: int) -> str:
        """Return any UTF-8 text, often short, control characters and NUL among it."""
        length = self.below(characters_max + 1)
        return "".join(self._character() for _ in range(length))

    def _character(self) -> str:
        alphabet = self.choice(_ALPHABETS)
        number = alphabet[self.below(len(alphabet))]
        return "\N{SNOWMAN}" if number in _SURROGATES else chr(number)
