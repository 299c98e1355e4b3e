"""Machines that wait for their nodes are a dictionary by machine, in whichever way they came."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import MachineId
from bigfleet.model.validation import InvariantBroken
from bigfleet.shard.sessions.missing_nodes import MissingNodes
from tests.engine.proof import in_proportion

names = st.integers(0, 20).map(lambda number: MachineId(f"m-{number:02}"))
steps = st.one_of(
    st.tuples(st.just("wait"), st.lists(names, min_size=1, max_size=1), st.integers(0, 3)),
    st.tuples(st.just("end"), st.lists(names, min_size=1, max_size=1), st.just(0)),
    st.tuples(st.just("many"), st.lists(names, max_size=12, unique=True), st.integers(0, 3)),
)


@given(st.lists(steps, max_size=40))
@settings(max_examples=in_proportion(300), deadline=None)
def test_it_is_a_dictionary(story: list[tuple[str, list[MachineId], int]]) -> None:
    """Singly and many at once, in any order of ids and seconds."""
    missing, expected = MissingNodes(), dict[MachineId, float]()
    for kind, ids, since_seconds in story:
        if kind == "wait":
            missing.wait(ids[0], since_seconds)
            expected[ids[0]] = since_seconds
        elif kind == "end":
            assert missing.end(ids[0]) == (expected.pop(ids[0], None) is not None)
        else:
            fresh = [each for each in ids if each not in expected]
            if not fresh:
                continue
            assert set(fresh) <= set(missing.wait_many(fresh, since_seconds))
            expected.update(dict.fromkeys(fresh, since_seconds))
        missing.validate()
        asked = [MachineId(f"m-{number:02}") for number in range(22)]
        assert [missing.since_seconds(each) for each in asked] == [expected.get(each) for each in asked]
        assert [each in missing for each in asked] == [each in expected for each in asked]
        assert len(missing) == len(expected)


def test_those_that_came_together_go_with_the_last_one() -> None:
    """What holds them takes no memory any longer."""
    missing, ids = MissingNodes(), [MachineId(f"m-{number}") for number in range(5)]
    missing.wait_many(ids, 1.0)
    for each in ids:
        assert missing.end(each)
    assert (len(missing), missing._together) == (0, [])


def test_a_group_out_of_order_is_found_by_validation() -> None:
    """The check of the invariants has teeth."""
    missing = MissingNodes()
    missing.wait_many([MachineId("a"), MachineId("b")], 1.0)
    missing.validate()
    missing._together[0].ids.reverse()
    with pytest.raises(InvariantBroken, match="out of order"):
        missing.validate()
