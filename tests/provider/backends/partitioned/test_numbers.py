"""Numbers of slots: the lowest that is nobody's comes first, the highest on offer goes first (docs/spec/provider.md
§22)."""

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.provider.backends.partitioned.slots import NUMBER_MAX, SlotNumbers, split_id


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60))
def test_numbers_behave_like_four_sets(steps: list[tuple[int, int]]) -> None:
    numbers = SlotNumbers()
    offered: set[int] = set()
    used: set[int] = set()
    withheld: set[int] = set()
    for what, number in steps:
        if what in (0, 1):
            lowest = next(each for each in range(100) if each not in offered | used | withheld)
            assert numbers.offer_lowest() == lowest
            offered.add(lowest)
        elif what == 2:
            numbers.use(number)
            offered.discard(number)
            withheld.discard(number)
            used.add(number)
        elif what == 3:
            numbers.offer(number)
            used.discard(number)
            withheld.discard(number)
            offered.add(number)
        elif what == 4:
            numbers.forget(number)
            for each in (offered, used, withheld):
                each.discard(number)
        elif offered:
            highest = max(offered)
            offered.remove(highest)
            if what == 5:
                assert numbers.drop_highest() == highest
            else:
                assert numbers.withhold_highest() == highest
                withheld.add(highest)
        assert list(numbers.offered) == sorted(offered)
        assert set(numbers.used) == used


def test_ids_are_split_only_when_they_could_be_ours() -> None:
    assert split_id("p/g/z/half/007") == ("p/g/z/half/", 7)
    assert split_id("p/g/z/half/1000") == ("p/g/z/half/", 1000)
    for machine_id in ("p/g/z/half/7", "p/g/z/half/0007", "p/g/z/half/x", "fake-0", "", f"a/{NUMBER_MAX + 1}", "a/²"):
        assert split_id(machine_id) is None
