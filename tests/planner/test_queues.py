"""Queues are sorted by tier and hash, and do not depend on which of them one call computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.planner import arena
from bigfleet.planner.arena import Arena
from bigfleet.planner.hashing import mix


def arena_of(counts: list[int], tiers: list[int]) -> Arena:
    """Return an arena of so many pods by part, with the tier of each part."""
    none = np.zeros((len(counts), 0), np.int64)
    return Arena(takes=none, empty=none[0], count=np.array(counts, np.int64), tier=np.array(tiers, np.int64))


parts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=8)


@given(parts, st.lists(st.integers(0, 5000), max_size=9))
def test_a_queue_is_sorted_by_tier_and_then_by_the_hash_of_its_order(
    given_parts: list[tuple[int, int]], orders: list[int]
) -> None:
    counts, tiers = [list(each) for each in zip(*given_parts, strict=True)]
    pods = [part for part, count in enumerate(counts) for _ in range(count)]

    found = arena_of(counts, tiers).queues(orders)

    for order, queue in zip(orders, found, strict=True):
        wanted = sorted(range(len(pods)), key=lambda pod: (tiers[pods[pod]], mix(pod + ((order + 1) << 32))))
        assert queue.tolist() == [pods[pod] for pod in wanted]


@pytest.mark.parametrize("at_once", [1, 30, 70])
def test_a_queue_does_not_depend_on_how_many_one_call_sorts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large queues are sorted a few at a time, which bounds the memory."""
    large = arena_of([7, 3, 20], [1, 0, 1])
    wanted = [queue.tolist() for queue in large.queues(range(10))]
    monkeypatch.setattr(arena, "_RANKS_AT_ONCE", at_once)

    assert [queue.tolist() for queue in large.queues(range(10))] == wanted
    assert len({tuple(queue) for queue in wanted}) == 10
