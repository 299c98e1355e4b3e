"""What a roll-up says: exact sums, largest indivisible request, one order, and never anything but the requests."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import SHAPES_MAX, DemandShape, largest_of, total_of
from bigfleet.operator.requests import (
    CapacityRequest,
    CoLocation,
    Exclusion,
    LabelSelector,
    SelectorExpression,
    UnmappableReason,
    UnmappableRequest,
    map_request,
    penalty_bucket,
)
from bigfleet.operator.rollup import RollUpBuilder, recount

CLUSTER = ClusterId("c")


def request(id: str = "a", resources: Mapping[str, str] | None = None, **fields: object) -> CapacityRequest:
    return CapacityRequest(id=id, resources=resources or {"cpu": "1"}, **fields)  # type: ignore[arg-type]


def test_a_row_sums_its_requests_and_takes_the_largest_of_each_dimension() -> None:
    builder = RollUpBuilder(CLUSTER)
    builder.put(request("a", {"cpu": "500m", "memory": "4Gi"}))
    builder.put(request("b", {"cpu": "2", "memory": "1Gi"}))

    (row,) = builder.rows()

    assert row.aggregate == {"cpu": 2500, "memory": 5 * 2**30 * 1000}
    assert row.min_unit == {"cpu": 2000, "memory": 4 * 2**30 * 1000}


def test_pods_of_equal_requests_are_one_shape() -> None:
    """Groups that exclude themselves stay apart, and a shape leaves with its last pod."""
    builder = RollUpBuilder(CLUSTER)
    for number in range(3):
        builder.put(request(f"web-{number}", {"cpu": "500m"}))
        builder.put(request(f"db-{number}", {"cpu": "2"}, exclusion=Exclusion(group="db")))
    builder.put(request("cache-0", {"cpu": "2000m"}, exclusion=Exclusion(group="cache", max_per_machine=2)))
    builder.put(request("large", {"cpu": "64"}))
    builder.remove("large")

    (row,) = builder.rows()

    assert row.shapes == (
        DemandShape({"cpu": 2000}, 3, 1),
        DemandShape({"cpu": 2000}, 1, 2),
        DemandShape({"cpu": 500}, 3),
    )
    assert total_of(row.shapes) == row.aggregate
    assert largest_of(row.shapes) == row.min_unit


def test_many_different_pods_are_sent_as_at_most_64_shapes() -> None:
    """They ask for a little more than the pods do; the aggregate stays the exact sum."""
    builder = RollUpBuilder(CLUSTER)
    for number in range(500):
        builder.put(request(f"p{number}", {"cpu": f"{1000 + number}m"}))

    (row,) = builder.rows()

    assert len(row.shapes) <= SHAPES_MAX
    assert row.aggregate == {"cpu": sum(range(1000, 1500))}
    assert row.aggregate["cpu"] < total_of(row.shapes)["cpu"] < row.aggregate["cpu"] * 1.05


@pytest.mark.parametrize("exclusion", [Exclusion(group=""), Exclusion(group="g", max_per_machine=0)])
def test_an_exclusion_without_a_group_or_a_limit_is_refused(exclusion: Exclusion) -> None:
    with pytest.raises(UnmappableRequest, match="exclusion: a group and 1 to 2147483647 pods a machine are expected"):
        map_request(request(exclusion=exclusion))


def test_the_largest_request_leaves_with_its_pod() -> None:
    builder = RollUpBuilder(CLUSTER)
    builder.put(request("small", {"cpu": "1"}))
    builder.put(request("large", {"cpu": "64", "gpu": "8"}))
    builder.remove("large")

    (row,) = builder.rows()

    assert row.aggregate == {"cpu": 1000}
    assert row.min_unit == {"cpu": 1000}


def test_a_request_put_again_replaces_itself() -> None:
    builder = RollUpBuilder(CLUSTER)
    assert builder.put(request("a", {"cpu": "1"}))
    assert not builder.put(request("a", {"cpu": "1000m"}))
    assert builder.put(request("a", {"cpu": "3"}, priority=7))

    (row,) = builder.rows()

    assert (row.profile.priority, row.aggregate) == (7, {"cpu": 3000})


def test_rows_come_by_priority_then_fingerprint_then_group() -> None:
    builder = RollUpBuilder(CLUSTER)
    co_location = CoLocation(topology_key="rack", namespace="n")
    for number, (priority, key) in enumerate([(1, "b"), (5, "z"), (1, "a"), (5, "y")]):
        builder.put(request(f"r{number}", priority=priority, requirements=(Requirement(key, Operator.EXISTS),)))
    builder.put(request("gang-2", priority=9, co_location=CoLocation(topology_key="rack", namespace="o")))
    builder.put(request("gang-1", priority=9, co_location=co_location))

    rows = builder.rows()

    keys = [(-row.profile.priority, row.fingerprint, row.group) for row in rows]
    assert keys == sorted(keys)
    assert [row.group.split("\0")[1] for row in rows[:2]] == ["n", "o"]


def test_a_request_that_cannot_be_mapped_is_left_out_and_the_others_stand() -> None:
    builder = RollUpBuilder(CLUSTER)
    builder.put(request("a"))
    with pytest.raises(UnmappableRequest, match="cpu") as caught:
        builder.put(request("b", {"cpu": "much"}))

    assert caught.value.reason is UnmappableReason.INVALID_QUANTITY
    assert [row.aggregate for row in builder.rows()] == [{"cpu": 1000}]


@pytest.mark.parametrize(
    "requirement",
    [
        Requirement("", Operator.EXISTS),
        Requirement("k", Operator.SAME),
        Requirement("k", Operator.UNSPECIFIED),
        Requirement("k", Operator.IN),
        Requirement("k", Operator.NOT_IN),
        Requirement("k", Operator.EXISTS, ("v",)),
    ],
)
def test_a_requirement_outside_of_the_schema_is_refused(requirement: Requirement) -> None:
    with pytest.raises(UnmappableRequest) as caught:
        map_request(request(requirements=(requirement,)))

    assert caught.value.reason is UnmappableReason.INVALID_REQUIREMENT


def test_spreads_that_bind_nobody_are_dropped() -> None:
    strict = TopologySpread("zone", 1, SpreadMode.DO_NOT_SCHEDULE)
    loose = TopologySpread("rack", 1, SpreadMode.SCHEDULE_ANYWAY)

    mapped = map_request(request(spreads=(strict, loose)))

    assert mapped.profile.spreads == (strict,)


def test_a_gang_carries_one_same_requirement_on_its_key() -> None:
    mapped = map_request(request(co_location=CoLocation(topology_key="rack", namespace="n")))

    assert mapped.profile.requirements == (Requirement("rack", Operator.SAME),)
    assert mapped.group == "rack\0n\0"


def test_a_group_is_written_in_one_canonical_way() -> None:
    selector = LabelSelector(
        match_labels={"b": "2", "a": "1"},
        match_expressions=(
            SelectorExpression("tier", "NotIn", ("z", "y")),
            SelectorExpression("app", "Exists"),
        ),
    )

    group = CoLocation(topology_key="rack", namespace="n", selector=selector).group

    assert group == "rack\0n\0a=1,b=2,;app Exists ;tier NotIn y,z;"


def test_a_selector_that_selects_everything_differs_from_none() -> None:
    everything = CoLocation(topology_key="rack", namespace="n", selector=LabelSelector())

    assert everything.group != CoLocation(topology_key="rack", namespace="n").group


@pytest.mark.parametrize(
    ("quantity", "bucket"),
    [
        (None, 0),
        ("0", 1),
        ("-1", 1),
        ("500m", 2),
        ("501m", 3),
        ("1", 3),
        ("1001m", 4),
        ("8388608", 26),
        ("8388608001m", 27),
        ("9M", 27),
    ],
)
def test_penalties_round_up_to_their_bucket(quantity: str | None, bucket: int) -> None:
    assert penalty_bucket(quantity) == bucket


def test_a_penalty_that_is_no_quantity_is_refused() -> None:
    with pytest.raises(UnmappableRequest, match="dear"):
        penalty_bucket("dear")


_REQUESTS = st.builds(
    request,
    id=st.sampled_from("abcdefgh"),
    resources=st.dictionaries(
        st.sampled_from(["cpu", "memory", "gpu"]), st.integers(0, 5).map(lambda n: f"{n * 250}m"), max_size=3
    ),
    priority=st.integers(0, 2),
    co_location=st.sampled_from([None, CoLocation(topology_key="rack", namespace="n")]),
)
_EVENTS = st.lists(st.one_of(_REQUESTS, st.sampled_from("abcdefgh")), max_size=60)
#: Requests that are set aside, or no longer.
_ASIDE = st.tuples(st.sampled_from("abcdefgh"), st.booleans())


@settings(max_examples=60, deadline=None)
@given(_EVENTS)
def test_running_sums_equal_a_recount_after_any_events(events: list[CapacityRequest | str]) -> None:
    builder = RollUpBuilder(CLUSTER)
    alive: dict[str, CapacityRequest] = {}
    for event in events:
        if isinstance(event, str):
            assert builder.remove(event) == (alive.pop(event, None) is not None)
        else:
            builder.put(event)
            alive[event.id] = event

        assert builder.rows() == recount(CLUSTER, alive.values())
        assert len(builder) == len(alive)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(_REQUESTS, st.sampled_from("abcdefgh"), _ASIDE), max_size=60))
def test_requests_that_are_set_aside_are_in_no_row_until_they_are_back(
    events: list[CapacityRequest | str | tuple[str, bool]],
) -> None:
    builder = RollUpBuilder(CLUSTER)
    alive: dict[str, CapacityRequest] = {}
    aside: set[str] = set()
    for event in events:
        if isinstance(event, str):
            builder.remove(event)
            alive.pop(event, None)
            aside.discard(event)
        elif isinstance(event, tuple):
            id, is_aside = event
            assert builder.set_aside(id, is_aside) == (id in alive and (id in aside) != is_aside)
            aside = (aside | {id} if is_aside else aside - {id}) & alive.keys()
            assert not (is_aside and builder.set_waiting(id, True))
        elif builder.put(event):
            alive[event.id] = event
            # Another request is another matter.
            aside.discard(event.id)

        assert builder.rows() == recount(CLUSTER, [each for id, each in alive.items() if id not in aside])
        assert len(builder) == len(alive)
        for id, each in alive.items():
            assert (builder.vector(id) or {}).keys() <= builder.resource_names(_row_id(each))


def test_a_row_of_which_all_requests_are_set_aside_is_back_with_them() -> None:
    builder = RollUpBuilder(CLUSTER)
    builder.put(request("a", {"cpu": "1"}))
    builder.put(request("b", {"cpu": "2"}))
    before = builder.rows()
    builder.set_aside("a", True)
    builder.set_aside("b", True)
    builder.put(request("c", {"cpu": "4"}))
    builder.remove("c")
    assert builder.rows() == ()

    builder.set_aside("a", False)
    builder.set_aside("b", False)
    assert builder.rows() == before


def _row_id(given: CapacityRequest) -> tuple[str, str]:
    mapped = map_request(given)
    return mapped.profile.fingerprint, mapped.group


def test_maxima_stay_right_through_thousands_of_distinct_values() -> None:
    builder = RollUpBuilder(CLUSTER)
    for number in range(3000):
        builder.put(request(f"r{number}", {"cpu": f"{number + 1}m"}))
    for number in range(2999, 9, -1):
        builder.remove(f"r{number}")

    (row,) = builder.rows()

    assert (row.aggregate, row.min_unit) == ({"cpu": 55}, {"cpu": 10})
