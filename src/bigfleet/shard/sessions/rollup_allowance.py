"""Limits how many rows of each cluster are read, and reads large roll-ups one at a time.

docs/spec/shard.md §4.4. A cluster over its allowance waits; others do not. Among the clusters that wait, the one with
the fewest rows read lately goes first. The limit itself reads no roll-up.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush

from bigfleet.model.clock import Clock

#: What a cluster may have read in the long run: a roll-up of the largest size every ten seconds.
ROWS_PER_SECOND_MAX = 2_000
#: A roll-up is read while the cluster owes at most so many rows; two of the largest size are read at once.
ROWS_OWED_MAX = 20_000
#: What a roll-up of fewer rows costs: parsing, comparison, acknowledgement.
ROWS_CHARGED_MIN = 100
#: An ordinary row has 100 to 400 bytes: a roll-up costs at least one row for so many, however few it has.
ROW_BYTES = 400

#: A shorter wait for the turn is not worth a word.
TURN_SECONDS_UNANNOUNCED_MAX = 1.0

_CLUSTERS_KEPT_MIN = 64


class RollUpAllowances:
    """The debt of each cluster in rows: those that were read, less its allowance since then.

    Memory: twice the clusters that owe any.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: When each cluster owes nothing any more, monotonic seconds.
        self._paid_seconds: dict[str, float] = {}
        self._clusters_max = _CLUSTERS_KEPT_MIN

    def owed(self, cluster: str) -> float:
        """Return how many rows a cluster owes."""
        left_seconds = self._paid_seconds.get(cluster, 0.0) - self._clock.monotonic_seconds()
        return max(0.0, left_seconds * ROWS_PER_SECOND_MAX)

    def wait_seconds(self, cluster: str) -> float:
        """Return after which time the next roll-up of a cluster may be read, 0 for now."""
        return max(0.0, (self.owed(cluster) - ROWS_OWED_MAX) / ROWS_PER_SECOND_MAX)

    @staticmethod
    def reason(wait_seconds: float) -> str:
        """Return what an operator is sent whose cluster has to wait."""
        limit = f"over the limit of {ROWS_PER_SECOND_MAX:,} rows a second for a cluster"
        return f"{limit}; the newest roll-up is read in {wait_seconds:.1f} s"

    def charge(self, cluster: str, rows: int, size_bytes: int = 0) -> None:
        """Count rows that are read, or as many as their bytes would be of ordinary ones."""
        now_seconds = self._clock.monotonic_seconds()
        if len(self._paid_seconds) >= self._clusters_max:
            self._paid_seconds = {name: paid for name, paid in self._paid_seconds.items() if paid > now_seconds}
            # Each pass over all of them is paid for by as many charges.
            self._clusters_max = max(_CLUSTERS_KEPT_MIN, 2 * len(self._paid_seconds))
        begin_seconds = max(now_seconds, self._paid_seconds.get(cluster, 0.0))
        charged = max(rows, size_bytes // ROW_BYTES, ROWS_CHARGED_MIN)
        self._paid_seconds[cluster] = begin_seconds + charged / ROWS_PER_SECOND_MAX


class ReadingTurns:
    """One large roll-up at a time, for at most half of the time: reading one keeps the interpreter for a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._next_number = 0
        self._is_taken = False
        self._free_seconds = 0.0
        self._last_seconds = 0.0

    def expected_seconds(self) -> float:
        """Return after about which time a newcomer would have its turn: each takes as long as the last one did."""
        rest_seconds = max(0.0, self._free_seconds - self._clock.monotonic_seconds())
        return rest_seconds + (self._is_taken + len(self._waiting)) * 2 * self._last_seconds

    @staticmethod
    def reason(wait_seconds: float) -> str:
        """Return what an operator is sent whose roll-up has to wait."""
        return (
            f"large roll-ups are read one at a time; the newest of this cluster is read in about {wait_seconds:.1f} s"
        )

    @asynccontextmanager
    async def turn(self, owed_rows: float) -> AsyncIterator[None]:
        """Wait for a turn, those who owe less first, and keep it while the context lasts."""
        await self._wait(owed_rows)
        try:
            rest_seconds = self._free_seconds - self._clock.monotonic_seconds()
            if rest_seconds > 0:
                await self._clock.sleep(rest_seconds)
            began_seconds = self._clock.monotonic_seconds()
            try:
                yield
            finally:
                ended_seconds = self._clock.monotonic_seconds()
                self._last_seconds = ended_seconds - began_seconds
                self._free_seconds = ended_seconds + self._last_seconds
        finally:
            self._is_taken = False
            self._grant()

    async def _wait(self, owed_rows: float) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next_number += 1
        entry = (owed_rows, self._next_number, granted)
        heappush(self._waiting, entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._is_taken = False
                self._grant()
            else:
                self._waiting.remove(entry)
                heapify(self._waiting)
            raise

    def _grant(self) -> None:
        if self._waiting:
            self._is_taken = True
            heappop(self._waiting)[2].set_result(None)
