"""Simulates the scheduler placing pods one by one on many candidate fleets at once.

The queue is sorted by priority and follows a hash within a priority. A machine is feasible when the profile matches,
the request fits and `max_per_machine` is kept. Among the feasible machines the mean over the scored dimensions of the
share that is free (least-allocated) or used (most-allocated) after the placement decides. kube-scheduler rounds that
score to whole points and breaks ties by chance; here a hash of less than one point is added, which has the same effect.

All limits of a machine live in bit fields of one or more 64-bit words with one guard bit each: subtracting a request
clears the guard bit of every limit that it exceeds, so one subtraction and one comparison test all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bigfleet.planner.hashing import noise, queue_ranks

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]
Short = NDArray[np.int32]

#: One point of the scheduler's score.
POINT: Final = 1 << 20
#: Score of a class that does not match; far beyond any score.
NEVER: Final = 1 << 30
#: Widest bit field of a dimension, without its guard bit.
FIELD_BITS: Final = 20
_WORD_BITS: Final = 63
#: Machines times fleets that are simulated together; more no longer fits the processor's cache.
_BATCH: Final = 1 << 13
#: Tie-breaks of a machine repeat after so many steps.
TIES: Final = 4096

#: A fleet: columns with their counts, ascending by column, counts above 0.
Fleet = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Requests of parts and limits of columns, packed; W words."""

    request: tuple[Int, ...]
    limit: tuple[Int, ...]
    guard: tuple[int, ...]


def pack_words(request: Int, supply: Int, per_machine: Sequence[int]) -> Words:
    """Return the packed form of scaled requests (P, D), supplies (C, D) and limits of pods per machine (P).

    Every entry of a supply must fit FIELD_BITS bits.
    """
    parts, columns = request.shape[0], supply.shape[0]
    fields: list[tuple[int, Int, Int]] = []
    for d in range(request.shape[1]):
        if request[:, d].any():
            bits = int(supply[:, d].max(initial=0)).bit_length()
            # What exceeds every supply is marked as never matching elsewhere; the field must not overflow.
            fields.append((bits, np.minimum(request[:, d], (1 << bits) - 1), supply[:, d]))
    for p, limit in enumerate(per_machine):
        if limit:
            takes = np.zeros(parts, np.int64)
            takes[p] = 1
            bits = min(limit, (1 << FIELD_BITS) - 1)
            fields.append((bits.bit_length(), takes, np.full(columns, bits, np.int64)))
    words: list[tuple[Int, Int, int]] = []
    used = _WORD_BITS
    for bits, takes, has in fields:
        if used + bits + 1 > _WORD_BITS:
            words.append((np.zeros(parts, np.int64), np.zeros(columns, np.int64), 0))
            used = 0
        request_word, limit_word, guard = words[-1]
        guard |= 1 << (used + bits)
        words[-1] = (request_word + (takes << used), limit_word + (has << used) + (1 << (used + bits)), guard)
        used += bits + 1
    return Words(tuple(w[0] for w in words), tuple(w[1] for w in words), tuple(w[2] for w in words))


@dataclass(frozen=True, slots=True)
class Arena:
    """What a simulation needs to know of a problem; P parts, C columns."""

    words: Words
    #: Score that a part takes from a machine, NEVER where it does not match, (P, C + 1); the last column is no machine.
    takes: Short
    #: Score of an empty machine of a column, (C + 1).
    empty: Short
    #: Pods of each part, (P).
    count: Int
    #: Place of each part in the queue, ascending, (P).
    tier: Int

    def queue(self, order: int) -> Int:
        """Return the part of each pod in one order of the queue."""
        parts = np.repeat(np.arange(len(self.count)), self.count)
        return parts[np.lexsort((queue_ranks(len(parts), order), self.tier[parts]))]


def simulate(arena: Arena, fleets: Sequence[Fleet], orders: Sequence[Int]) -> Int:
    """Return the pods of each part without a place, by fleet and order, (F, O, P)."""
    parts = len(arena.count)
    lost = np.zeros((len(fleets), len(orders), parts), np.int64)
    sizes = [sum(count for _, count in fleet) for fleet in fleets]
    by_size = sorted(range(len(fleets)), key=lambda f: sizes[f])
    at = 0
    while at < len(by_size):
        # Fleets of like size share a batch, so that little of it is padding.
        batch = [by_size[at]]
        while (
            at + len(batch) < len(by_size)
            and (len(batch) + 1) * len(orders) * max(1, sizes[by_size[at + len(batch)]]) <= _BATCH
        ):
            batch.append(by_size[at + len(batch)])
        lost[batch] = _Run(arena, [fleets[f] for f in batch], orders).lost
        at += len(batch)
    return lost


class _Run:
    """The state of one batch while pods arrive; R rows, each one fleet in one order; M machines."""

    def __init__(self, arena: Arena, fleets: Sequence[Fleet], orders: Sequence[Int]) -> None:
        machines = max(1, *(sum(count for _, count in fleet) for fleet in fleets))
        none = arena.takes.shape[1] - 1
        columns = np.full((len(fleets), machines), none, np.int64)
        for f, fleet in enumerate(fleets):
            filled = np.repeat(np.array([c for c, _ in fleet], np.int64), np.array([n for _, n in fleet], np.int64))
            columns[f, : len(filled)] = filled
        self._fleets = np.repeat(np.arange(len(fleets)), len(orders))
        self._columns = np.repeat(columns, len(orders), axis=0)
        self._queues = np.tile(np.array(orders, np.int64).T, (1, len(fleets)))
        self._score = arena.empty[self._columns]
        words = arena.words
        self._free = [np.append(limit, 0)[self._columns] for limit in words.limit]
        self._requests = [request[self._queues] for request in words.request]
        self._guard = words.guard
        self._noise = noise(TIES + machines, POINT).astype(np.int32)
        self.lost = self._place(arena, len(fleets), len(orders))

    def _place(self, arena: Arena, fleets: int, orders: int) -> Int:
        """Place every pod of the queues; return what is lost, (F, O, P)."""
        rows, machines = self._columns.shape
        # What each part takes from each machine of each fleet, (P × F, M), and where the pods of a row find theirs.
        takes = arena.takes.take(self._columns[::orders], axis=1).reshape(-1, machines)
        starts = self._queues * fleets + self._fleets
        first = np.arange(rows) * machines
        shape = (rows, machines)
        change, after = (np.empty(shape, np.int32) for _ in range(2))
        held = np.empty(shape, np.int64)
        rooms = [np.empty(shape, np.int64) for _ in self._free]
        fits, fits_all = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        score, ties = self._score, self._noise
        flat = [(free.ravel(), room.ravel()) for free, room in zip(self._free, rooms, strict=True)]
        flat_score, flat_after, flat_change = score.ravel(), after.ravel(), change.ravel()
        steps = len(self._queues)
        is_placed = np.empty((steps, rows), np.bool_)
        for step in range(steps):
            takes.take(starts[step], axis=0, out=change, mode="clip")
            np.subtract(score, change, out=after)
            tie = (step * 31) % TIES
            np.add(after, ties[tie : tie + machines], out=after)
            for word, (free, room, guard) in enumerate(zip(self._free, rooms, self._guard, strict=True)):
                np.subtract(free, self._requests[word][step][:, None], out=room)
                np.bitwise_and(room, guard, out=held)
                np.equal(held, guard, out=fits if word else fits_all)
                if word:
                    np.logical_and(fits_all, fits, out=fits_all)
            np.multiply(after, fits_all, out=after)
            chosen = after.argmax(axis=1)
            chosen += first
            placed = flat_after.take(chosen) > 0
            is_placed[step] = placed
            if not placed.all():
                chosen = chosen[placed]
            flat_score[chosen] -= flat_change.take(chosen)
            for free_flat, room_flat in flat:
                free_flat[chosen] = room_flat.take(chosen)
        lost = np.zeros((rows, len(arena.count)), np.int64)
        at, row = np.nonzero(~is_placed)
        np.add.at(lost, (row, self._queues[at, row]), 1)
        return lost.reshape(fleets, orders, -1)
