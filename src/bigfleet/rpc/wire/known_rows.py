"""Caches rows of large roll-ups by their bytes, so that a repeated row is not read again.

docs/adr/0213-known-rows.md. A row depends on its cluster and its bytes only, so an entry needs no invalidation. The key
is all bytes of a row, never a part of them.
"""

from typing import Final

from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need

#: Rows of a generation: two clusters with the largest roll-ups that are allowed.
GENERATION_ROWS_MAX: Final = 40_000
#: Bytes of those rows on the wire, which bound what a cluster with large rows can have remembered.
GENERATION_BYTES_MAX: Final = 8 * 1024 * 1024
#: A larger row is not remembered; an ordinary one has 100 to 400 bytes.
ROW_BYTES_MAX: Final = 4_096


class KnownRows:
    """Rows by cluster and bytes, in two generations.

    A row is found while fewer than `GENERATION_ROWS_MAX` other rows, of fewer than `GENERATION_BYTES_MAX` bytes, were
    asked for since. Several threads may use it: a race loses entries and never mixes them.
    """

    def __init__(self) -> None:
        self._young: dict[tuple[ClusterId, bytes], Need] = {}
        self._old: dict[tuple[ClusterId, bytes], Need] = {}
        self._young_bytes = 0

    def __len__(self) -> int:
        """Return how many entries both generations have."""
        return len(self._young) + len(self._old)

    def find(self, cluster: ClusterId, content: bytes) -> Need | None:
        """Return the row that these bytes of this cluster were read as, None when it is not remembered."""
        key = (cluster, content)
        need = self._young.get(key)
        if need is None:
            need = self._old.get(key)
            if need is not None:
                self._put(key, need)
        return need

    def remember(self, cluster: ClusterId, content: bytes, need: Need) -> None:
        """Keep a sound row, without arrival, under the bytes that it was read from."""
        if len(content) <= ROW_BYTES_MAX:
            self._put((cluster, content), need)

    def _put(self, key: tuple[ClusterId, bytes], need: Need) -> None:
        if len(self._young) >= GENERATION_ROWS_MAX or self._young_bytes + len(key[1]) > GENERATION_BYTES_MAX:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[key] = need
        self._young_bytes += len(key[1])
