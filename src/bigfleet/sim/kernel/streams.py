"""Derives named streams of randomness from one root seed (docs/spec/simulation.md, Randomness).

Each purpose draws from a stream of its own, so that a new draw in one moves no other. This module must not read the
operating system's randomness, and no stream may depend on the order in which streams are asked for.
"""

import hashlib
import itertools
import random  # noqa: TID251 - every generator is seeded from the root seed

#: The type of a stream, for those that are handed one.
Random = random.Random


def seeded(seed: int | str) -> Random:
    """Return a generator of its own; equal seeds draw equally in every process."""
    return Random(seed)


class Streams:
    """All streams of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Random] = {}

    def of(self, purpose: str) -> Random:
        """Return the stream of a purpose; the same object each time."""
        stream = self._streams.get(purpose)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}\x1f{purpose}".encode(), digest_size=16).digest()
            stream = self._streams[purpose] = seeded(int.from_bytes(digest, "big"))
        return stream

    def ids(self, owner: str) -> "StreamIds":
        """Return a source of ids that no other owner makes."""
        return StreamIds(owner)


class StreamIds:
    """An `IdSource` that counts up under its owner's name; equal in every run of a seed."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers = itertools.count(1)

    def new_id(self) -> str:
        """Return the next id."""
        return f"{self._owner}-{next(self._numbers):08d}"
