"""Numbers slots: the numbers of a line that are on offer, those in use, and the lowest free one.

docs/spec/provider.md §22. This module must not know why a slot comes or goes.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Final

#: No line has more slots than this; a higher number is none of ours.
NUMBER_MAX: Final = 1_000_000


def split_id(machine_id: str) -> tuple[str, int] | None:
    """Return prefix and number of a slot's id, or None when it is no such id."""
    prefix, slash, tail = machine_id.rpartition("/")
    is_number = tail.isascii() and tail.isdigit() and len(tail) <= len(str(NUMBER_MAX))
    if not is_number or int(tail) > NUMBER_MAX or f"{int(tail):03d}" != tail:
        return None
    return prefix + slash, int(tail)


class SlotNumbers:
    """The numbers of one line. A number is on offer, in use, withheld, or free."""

    def __init__(self) -> None:
        self._offered: list[int] = []
        self._used: set[int] = set()
        #: On their way out: not on offer, and not to be given again yet.
        self._withheld: set[int] = set()
        #: Below `_top`; all and only the free numbers, besides stale entries that `_is_free` skips.
        self._gaps: list[int] = []
        self._top = 0

    @property
    def offered(self) -> Sequence[int]:
        """The numbers on offer, ascending."""
        return self._offered

    @property
    def used(self) -> Iterator[int]:
        """The numbers in use."""
        return iter(self._used)

    def is_offered(self, number: int) -> bool:
        """Return whether a number is on offer."""
        at = bisect_left(self._offered, number)
        return at < len(self._offered) and self._offered[at] == number

    def is_used(self, number: int) -> bool:
        """Return whether a number is in use."""
        return number in self._used

    def _is_free(self, number: int) -> bool:
        return not self.is_offered(number) and number not in self._used and number not in self._withheld

    def _claim(self, number: int) -> None:
        """Make room below the top for a number that comes from outside."""
        for gap in range(self._top, number):
            heapq.heappush(self._gaps, gap)
        self._top = max(self._top, number + 1)

    def offer(self, number: int) -> None:
        """Put a number on offer, wherever it was."""
        self._claim(number)
        self._used.discard(number)
        self._withheld.discard(number)
        if not self.is_offered(number):
            insort(self._offered, number)

    def use(self, number: int) -> None:
        """Put a number to use, wherever it was."""
        self._claim(number)
        self._unoffer(number)
        self._withheld.discard(number)
        self._used.add(number)

    def forget(self, number: int) -> None:
        """Free a number."""
        if number < self._top and not self._is_free(number):
            self._unoffer(number)
            self._used.discard(number)
            self._withheld.discard(number)
            heapq.heappush(self._gaps, number)

    def _unoffer(self, number: int) -> None:
        if self.is_offered(number):
            del self._offered[bisect_left(self._offered, number)]

    def offer_lowest(self) -> int:
        """Put the lowest free number on offer and return it."""
        while self._gaps:
            number = heapq.heappop(self._gaps)
            if self._is_free(number):
                insort(self._offered, number)
                return number
        self.offer(self._top)
        return self._top - 1

    def drop_highest(self) -> int:
        """Take the highest number off and return it."""
        number = self._offered.pop()
        heapq.heappush(self._gaps, number)
        return number

    def withhold_highest(self) -> int:
        """Take the highest number off, keep it from being given again until `forget`, and return it."""
        number = self._offered.pop()
        self._withheld.add(number)
        return number
