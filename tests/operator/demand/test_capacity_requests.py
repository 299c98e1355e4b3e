"""What a stored CapacityRequest asks for, and what is refused by the name of its field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.frames import RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape
from bigfleet.operator.demand import capacity_requests
from bigfleet.operator.demand.capacity_requests import capacity_request
from bigfleet.operator.requests import (
    CapacityRequest,
    CoLocation,
    Exclusion,
    LabelSelector,
    SelectorExpression,
    UnmappableReason,
    UnmappableRequest,
    map_request,
)
from bigfleet.operator.rollup import RollUpBuilder, recount
from bigfleet.rpc.wire import amounts
from bigfleet.rpc.wire.convert_need import REQUIREMENTS_MAX, VALUES_MAX, ReceivedRollUp, rollup_to_wire
from tests.operator.demand.objects import request


def test_every_field_of_a_request_is_mapped() -> None:
    stored = request(
        "web",
        namespace="shop",
        priority=7,
        resources={"cpu": "500m", "memory": 1024, "gpu": 0.5},
        requirements=[
            {"key": "zone", "operator": "In", "values": ["b", "a"]},
            {"key": "spot", "operator": "DoesNotExist"},
        ],
        topologySpread=[
            {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        coLocation={
            "topologyKey": "rack",
            "labelSelector": {
                "matchLabels": {"app": "web"},
                "matchExpressions": [{"key": "tier", "operator": "In", "values": ["x"]}],
            },
        },
        exclusion={"group": "web", "maxPerMachine": 2},
        interruptionPenalty="500m",
        reclamationPenalty=3,
    )

    assert capacity_request(stored) == CapacityRequest(
        id="shop/web",
        resources={"cpu": "500m", "memory": "1024", "gpu": "0.5"},
        requirements=(Requirement("zone", Operator.IN, ("a", "b")), Requirement("spot", Operator.DOES_NOT_EXIST)),
        spreads=(
            TopologySpread("zone", 2, SpreadMode.DO_NOT_SCHEDULE),
            TopologySpread("rack", 1, SpreadMode.SCHEDULE_ANYWAY),
        ),
        priority=7,
        interruption_bucket=2,
        reclamation_bucket=5,
        co_location=CoLocation(
            topology_key="rack",
            namespace="shop",
            selector=LabelSelector(
                match_labels={"app": "web"}, match_expressions=(SelectorExpression("tier", "In", ("x",)),)
            ),
        ),
        exclusion=Exclusion(group="shop\0web", max_per_machine=2),
    )


def test_equal_groups_of_two_namespaces_do_not_exclude_each_other() -> None:
    one, other = (
        map_request(capacity_request(request(namespace=namespace, exclusion={"group": "web"}))) for namespace in "ab"
    )

    assert (one.exclusion, other.exclusion) == ("a\0web", "b\0web")


def test_pods_of_two_namespaces_with_equal_host_ports_exclude_each_other() -> None:
    """They are one shape: a machine for each of them."""
    builder = RollUpBuilder(ClusterId("c"))
    for namespace in "ab":
        for name in ("p", "q"):
            stored = request(name, namespace=namespace, exclusion={"group": "hostPort TCP/8080"})
            builder.put(capacity_request(stored))

    (row,) = builder.rows()

    assert row.shapes == (DemandShape({"cpu": 1000}, 4, 1),)


_REQUIREMENT, _QUANTITY = UnmappableReason.INVALID_REQUIREMENT, UnmappableReason.INVALID_QUANTITY


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        ({"priority": 2**31}, _REQUIREMENT, r"spec\.priority: 2147483648"),
        ({"resources": {"cpu": "much"}}, _QUANTITY, r"resources: cpu: 'much' is no quantity"),
        ({"resources": {"cpu": -1}}, _QUANTITY, r"resources: cpu: '-1' is negative"),
        ({"resources": {f"r{n}": 1 for n in range(33)}}, _REQUIREMENT, r"spec\.resources: has 33 entries"),
        ({"resources": {"": 1}}, _REQUIREMENT, r"spec\.resources\[\]: is empty"),
        ({"resources": {"cpu\x1b[2J": 1}}, _REQUIREMENT, r"spec\.resources.*: has the control character '\\x1b'"),
        (
            {"requirements": [{"key": "zone", "operator": "In", "values": ["a\nb"]}]},
            _REQUIREMENT,
            r"requirements\[0\]\.values: has the control character '\\n'",
        ),
        (
            {"requirements": [{"key": "zo\0ne", "operator": "Exists"}]},
            _REQUIREMENT,
            r"requirements\[0\]\.key: has the control character '\\x00'",
        ),
        ({"resources": {"r" * 1025: 1}}, _REQUIREMENT, r"has 1025 bytes, at most 1024"),
        ({"requirements": [{"key": "", "operator": "Exists"}]}, _REQUIREMENT, r"requirements\[0\]\.key: is empty"),
        (
            {"requirements": [{"key": "k", "operator": "Exists"}, {"key": "k", "operator": "Gt", "values": ["1"]}]},
            _REQUIREMENT,
            r"requirements\[1\]\.operator: 'Gt' is none of In, NotIn, Exists, DoesNotExist",
        ),
        ({"requirements": [{"key": "k", "operator": "Same"}]}, _REQUIREMENT, "'Same' is none of"),
        ({"requirements": [{"key": "k", "operator": "In"}]}, _REQUIREMENT, r"values: operator In needs values"),
        (
            {"requirements": [{"key": "k", "operator": "Exists", "values": ["v"]}]},
            _REQUIREMENT,
            "operator Exists takes no values",
        ),
        (
            {"requirements": [{"key": "k", "operator": "In", "values": [str(n) for n in range(1001)]}]},
            _REQUIREMENT,
            r"requirements\[0\]\.values: has 1,001 entries",
        ),
        ({"requirements": [{"key": "k", "operator": "Exists"}] * 65}, _REQUIREMENT, "has 65 entries, at most 64"),
        (
            {
                "requirements": [{"key": "k", "operator": "Exists"}] * 64,
                "coLocation": {"topologyKey": "rack"},
            },
            _REQUIREMENT,
            "has 64 entries, at most 63",
        ),
        (
            {"topologySpread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Maybe"}]},
            _REQUIREMENT,
            r"topologySpread\[0\]\.whenUnsatisfiable: 'Maybe' is none of DoNotSchedule, ScheduleAnyway",
        ),
        (
            {"topologySpread": [{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
            _REQUIREMENT,
            r"topologySpread\[0\]\.maxSkew: 0 is not between 1",
        ),
        (
            {"topologySpread": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway"}] * 9},
            _REQUIREMENT,
            r"topologySpread: has 9 entries",
        ),
        ({"coLocation": {"topologyKey": ""}}, _REQUIREMENT, r"coLocation\.topologyKey: '' is no label key"),
        (
            {"coLocation": {"topologyKey": "k", "labelSelector": {"matchLabels": {"a": "1,b=2"}}}},
            _REQUIREMENT,
            r"matchLabels\[a\]: '1,b=2' is no label value",
        ),
        (
            {
                "coLocation": {
                    "topologyKey": "k",
                    "labelSelector": {"matchExpressions": [{"key": "a b", "operator": "Exists"}]},
                }
            },
            _REQUIREMENT,
            r"matchExpressions\[0\]: 'a b' is no label key",
        ),
        (
            {
                "coLocation": {
                    "topologyKey": "k",
                    "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Like", "values": ["b"]}]},
                }
            },
            _REQUIREMENT,
            r"matchExpressions\[0\]\.operator: 'Like' is none of",
        ),
        ({"exclusion": {"group": ""}}, _REQUIREMENT, r"exclusion\.group: is empty"),
        ({"exclusion": {"group": "g", "maxPerMachine": 0}}, _REQUIREMENT, r"exclusion\.maxPerMachine: 0 is not"),
        ({"interruptionPenalty": "dear"}, _QUANTITY, r"spec\.interruptionPenalty: 'dear' is no quantity"),
        ({"reclamationPenalty": "1Q"}, _QUANTITY, r"spec\.reclamationPenalty: '1Q' is no quantity"),
    ],
)
def test_what_cannot_be_mapped_names_its_field(spec: dict[str, Any], reason: UnmappableReason, message: str) -> None:
    with pytest.raises(UnmappableRequest, match=message) as caught:
        map_request(capacity_request(request(**spec)))

    assert caught.value.reason is reason


def test_the_bounds_are_those_of_the_wire() -> None:
    assert capacity_requests.RESOURCES_MAX == amounts.RESOURCE_NAMES_MAX
    assert capacity_requests.STRING_BYTES_MAX == amounts.STRING_BYTES_MAX
    assert capacity_requests.REQUIREMENTS_MAX == REQUIREMENTS_MAX
    assert capacity_requests.VALUES_MAX == VALUES_MAX


_LABEL_TEXT = st.text("ab1._-/", min_size=1, max_size=3)
_EXPRESSIONS: st.SearchStrategy[Any] = st.one_of(
    st.tuples(
        _LABEL_TEXT, st.sampled_from(["In", "NotIn"]), st.lists(st.text("ab", max_size=2), min_size=1, max_size=2)
    ),
    st.tuples(_LABEL_TEXT, st.sampled_from(["Exists", "DoesNotExist"]), st.just([])),
)
_CO_LOCATIONS = st.tuples(
    st.text("r\0/", min_size=1, max_size=3),
    st.text("ab-", min_size=1, max_size=2),
    st.one_of(
        st.none(),
        st.tuples(
            st.dictionaries(_LABEL_TEXT, st.text("ab", max_size=2), max_size=2), st.lists(_EXPRESSIONS, max_size=2)
        ),
    ),
)


def _group(topology_key: str, namespace: str, selector: Any) -> str:
    co_location: dict[str, Any] = {"topologyKey": topology_key}
    if selector is not None:
        labels, expressions = selector
        co_location["labelSelector"] = {
            "matchLabels": labels,
            "matchExpressions": [{"key": k, "operator": o, "values": v} for k, o, v in expressions],
        }
    return map_request(capacity_request(request(namespace=namespace, coLocation=co_location))).group


def _meaning(topology_key: str, namespace: str, selector: Any) -> Any:
    if selector is None:
        return (topology_key, namespace, None)
    labels, expressions = selector
    meant = tuple(sorted((k, o, tuple(sorted(v))) for k, o, v in expressions))
    return (topology_key, namespace, tuple(sorted(labels.items())), meant)


@given(_CO_LOCATIONS, _CO_LOCATIONS)
def test_groups_collide_only_for_equal_key_namespace_and_selector(one: Any, other: Any) -> None:
    try:
        groups = _group(*one), _group(*other)
    except UnmappableRequest:
        return

    assert (groups[0] == groups[1]) == (_meaning(*one) == _meaning(*other))


def test_a_group_with_a_long_selector_is_within_the_bound_of_the_wire() -> None:
    """Its selector is replaced by a digest; different selectors are different groups still."""
    labels = {f"label-{number}": "x" * 60 for number in range(30)}

    groups = {_group("rack", "ns", (labels | {"app": app}, [])) for app in ("a", "b")}

    assert len(groups) == 2
    assert max(len(group.encode()) for group in groups) <= capacity_requests.STRING_BYTES_MAX


_TEXTS = st.one_of(st.text(max_size=4), st.sampled_from(["k" * 1024, "k" * 1025, "é" * 600, "zone"]))
_QUANTITIES = st.one_of(st.integers(-1, 5), st.floats(0, 1e20), st.sampled_from(["1", "500m", "x", "9" * 70, "1e30"]))
_OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", ""])
_SPECS = st.fixed_dictionaries(
    {"priority": st.integers(-(2**40), 2**40) | st.integers(-5, 5), "resources": st.dictionaries(_TEXTS, _QUANTITIES)},
    optional={
        "requirements": st.lists(
            st.fixed_dictionaries({"key": _TEXTS, "operator": _OPERATORS, "values": st.lists(_TEXTS, max_size=2)}),
            max_size=3,
        ),
        "topologySpread": st.lists(
            st.fixed_dictionaries(
                {
                    "topologyKey": _TEXTS,
                    "maxSkew": st.sampled_from([0, 1, 2**31 - 1, 2**31]),
                    "whenUnsatisfiable": st.sampled_from(["DoNotSchedule", "ScheduleAnyway", ""]),
                }
            ),
            max_size=2,
        ),
        "coLocation": st.fixed_dictionaries(
            {
                "topologyKey": _TEXTS,
                "labelSelector": st.fixed_dictionaries({"matchLabels": st.dictionaries(_TEXTS, _TEXTS)}),
            }
        ),
        "exclusion": st.fixed_dictionaries({"group": _TEXTS, "maxPerMachine": st.sampled_from([0, 1, 2**31])}),
        "interruptionPenalty": _QUANTITIES,
    },
)


@given(_SPECS)
def test_what_is_mapped_is_taken_by_the_shard(spec: dict[str, Any]) -> None:
    """One object must not have the roll-up of its whole cluster refused."""
    try:
        mapped = capacity_request(request(**spec))
        map_request(mapped)
    except UnmappableRequest:
        return
    cluster = ClusterId("c")

    message = rollup_to_wire(RollUp(cluster_id=cluster, timestamp_unix_nanos=1, needs=recount(cluster, [mapped])))

    assert len(ReceivedRollUp(message).needs()) == 1
