"""Elements that are counted before the parse: the same as a parser makes, and never a fault where it finds none."""

import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.operator import rollup_size
from bigfleet.rpc.wire import message_limits as limits
from bigfleet.rpc.wire.amounts import RESOURCE_NAMES_MAX, STRING_BYTES_MAX
from bigfleet.rpc.wire.element_scan import ListLimit, ScanPlan, plan_of, scan
from bigfleet.rpc.wire.gen import capacity_pb2, coordinator_pb2, provider_pb2, shard_pb2
from tests.engine.proof import in_proportion

TYPES = (shard_pb2.OperatorMessage, coordinator_pb2.ShardReport)
PLANS = {each: plan_of(each.DESCRIPTOR) for each in TYPES}
IN = capacity_pb2.NodeSelectorRequirement.OPERATOR_IN
MANY = 1 << 40


def fill(message: Any, rng: random.Random, depth: int) -> None:
    """Set random fields of a message at random."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            value_type = field.message_type.fields_by_name["value"].type
            for _entry in range(rng.randrange(4)):
                value: Any = "1" if value_type == FieldDescriptor.TYPE_STRING else rng.randrange(1 << 20)
                getattr(message, field.name)["n" * rng.randrange(200)] = value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth:
                for _entry in range(rng.randrange(4) if field.is_repeated else 1):
                    part = getattr(message, field.name)
                    part = part.add() if field.is_repeated else part
                    part.SetInParent()
                    fill(part, rng, depth - 1)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            text: Any = "x" * rng.choice((0, 1, 20, 300))
            text = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
            if field.is_repeated:
                getattr(message, field.name).extend([text] * rng.randrange(4))
            else:
                setattr(message, field.name, text)
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(message, field.name, True)
        elif field.type == FieldDescriptor.TYPE_DOUBLE:
            setattr(message, field.name, rng.random())
        else:
            setattr(message, field.name, rng.randrange(1, 3 if field.enum_type is not None else 1 << 31))


def counted(message: Any, plan: ScanPlan) -> tuple[int, int]:
    """Return how many messages and fields a parsed message has where a plan looks."""
    messages, fields = 0, 0
    inner_of = {step.name: step.inner for step in plan.steps.values()}
    for field, value in message.ListFields():
        entries = list(value.items() if hasattr(value, "items") else value) if field.is_repeated else [value]
        fields += len(entries)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            messages += len(entries)
            inner = inner_of[field.name]
            for entry in entries if inner is not None else ():
                assert inner is not None
                more_messages, more_fields = counted(entry, inner)
                messages, fields = messages + more_messages, fields + more_fields
    return messages, fields


@settings(max_examples=in_proportion(100))
@given(st.sampled_from(TYPES), st.integers(0, 1 << 32))
def test_what_a_parser_makes_is_counted(kind: Any, seed: int) -> None:
    """Rows, requirements, quantities, machines and labels of random frames and reports."""
    message = kind()
    fill(message, random.Random(seed), 5)
    content = message.SerializeToString()
    found = scan(content, PLANS[kind], messages_max=MANY, fields_max=MANY)

    assert found.fault is None
    assert (found.messages, found.fields) == counted(kind.FromString(content), PLANS[kind])


def is_message(kind: Any, content: bytes) -> bool:
    """Return whether the parser takes the bytes."""
    try:
        kind.FromString(content)
    except DecodeError:
        return False
    return True


@settings(max_examples=in_proportion(200))
@given(
    st.sampled_from(TYPES), st.integers(0, 1 << 32), st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6)))
)
def test_bytes_that_a_parser_takes_are_no_fault(kind: Any, seed: int, changes: list[tuple[int, bytes]]) -> None:
    """Messages with other bytes in them, groups and unknown fields among these; most are no message any more."""
    message = kind()
    fill(message, random.Random(seed), 3)
    content = bytearray(message.SerializeToString())
    for place, change in changes:
        at = place % (len(content) + 1)
        content[at : at + len(change) // 2] = change
    found = scan(bytes(content), PLANS[kind], messages_max=MANY, fields_max=MANY)

    if found.fault is not None:
        assert not is_message(kind, bytes(content))


@settings(max_examples=in_proportion(200))
@given(st.sampled_from(TYPES), st.binary(max_size=64))
def test_random_bytes_never_raise(kind: Any, content: bytes) -> None:
    """What is no message ends the count with a fault."""
    found = scan(content, PLANS[kind], messages_max=MANY, fields_max=MANY)

    assert found.fault is None or not is_message(kind, content)


def test_what_is_within_a_group_is_unknown() -> None:
    """Field 2 within a group is no roll-up, and its bytes are no message."""
    content = b"\x1b\x12\x01\xff\x1c\x12\x00"
    found = scan(content, PLANS[shard_pb2.OperatorMessage], messages_max=MANY, fields_max=MANY)

    assert is_message(shard_pb2.OperatorMessage, content)
    assert (found.messages, found.fault) == (1, None)


def test_a_scan_ends_at_each_limit() -> None:
    """The fault names the field and the limit."""
    rollup = capacity_pb2.ClusterCapacityNeeds(needs=[capacity_pb2.CapacityNeed(min_unit={"a": "1", "b": "1"})] * 3)
    content = rollup.SerializeToString()
    plan = plan_of(rollup.DESCRIPTOR)
    capped = plan_of(rollup.DESCRIPTOR, {"CapacityNeed.min_unit": ListLimit(1, "names")})

    assert scan(content, plan, messages_max=9, fields_max=9).fault is None
    assert scan(content, plan, messages_max=8, fields_max=9).fault == (
        "",
        "has more than 8 rows, requirements, quantities and the like",
    )
    assert scan(content, plan, messages_max=9, fields_max=8).fault == ("", "has more than 8 fields")
    assert scan(content, capped, messages_max=9, fields_max=9).fault == ("needs.min_unit", "has more than 1 names")


def test_lists_of_numbers_are_not_scanned() -> None:
    """One field can pack millions of them, so a plan that does not see them would be a hole."""
    with pytest.raises(TypeError, match=r"ListFilter\.states is a list of numbers"):
        plan_of(provider_pb2.ListFilter.DESCRIPTOR)


def test_the_largest_roll_up_of_an_operator_is_within_the_limits() -> None:
    """An operator counts at least so many bytes for a message, and leaves out what is beyond its own limit."""
    shape_bytes = rollup_size._SHAPE_BYTES + rollup_size._AMOUNT_BYTES + len("cpu")
    assert rollup_size.BYTES_MAX * 2 // shape_bytes <= limits.FRAME_MESSAGES_MAX
    assert rollup_size.BYTES_MAX * 4 // shape_bytes <= limits.FRAME_FIELDS_IN_ALL_MAX

    shape = capacity_pb2.PodShape(resources={"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}, count=9)
    row = capacity_pb2.CapacityNeed(
        requirements=[capacity_pb2.NodeSelectorRequirement(key="zone", operator=IN, values=["a", "b", "c"])] * 2,
        aggregate_resources={"cpu": "36", "memory": "36Gi", "nvidia.com/gpu": "36"},
        min_unit={"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"},
        shapes=[shape] * 4,
        waiting=[shape],
    )
    rollup = capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", needs=[row] * 20_000)
    content = shard_pb2.OperatorMessage(rollup=rollup).SerializeToString()
    assert len(content) > limits.SCANNED_BYTES_MIN
    assert limits.frame_size_fault(content) is None
    assert limits.frame_elements_fault(content) is None


def test_the_largest_status_of_a_node_is_within_the_limit_of_its_kind() -> None:
    """Names and quantities at their bounds."""
    names = {f"{number:03}".ljust(STRING_BYTES_MAX, "x"): "1" * 64 for number in range(RESOURCE_NAMES_MAX)}
    name = "x" * STRING_BYTES_MAX
    status = shard_pb2.NodeStatus(machine_id=name, node_name=name, requested=names, pods=1)
    content = shard_pb2.OperatorMessage(node_status=status).SerializeToString()

    assert len(content) * 4 < limits.SMALL_FRAME_BYTES_MAX


def test_what_a_later_version_adds_to_a_large_frame_is_ignored() -> None:
    """A trace next to the roll-up, a kind of frame that is not known here."""
    known = shard_pb2.OperatorMessage(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id="x" * 300_000))
    later = b"\xfa\x7e\x80\x80\x20" + b"y" * (512 * 1024)

    assert limits.frame_size_fault(known.SerializeToString() + b"\xf2\x7e\x01z") is None
    assert limits.frame_size_fault(later) is None
    assert is_message(shard_pb2.OperatorMessage, later)


def test_a_report_at_its_bounds_is_within_the_limits() -> None:
    """Rows and records at the bounds of the wire; a shard that is refused could never report again."""
    machine = provider_pb2.Machine(
        id="m" * 60,
        host=provider_pb2.HostRef(provider="p", ref="r" * 40),
        resources=provider_pb2.Resources(resources=dict.fromkeys(("cpu", "memory", "pods", "disk"), "1")),
        allocatable=provider_pb2.Resources(resources=dict.fromkeys(("cpu", "memory", "pods", "disk"), "1")),
        labels={f"label{number}": "value" for number in range(9)},
    )
    release = coordinator_pb2.Release(machine_id="m" * 60, to_shard_id="s" * 40, instruction_id="7-1", machine=machine)
    # A tenth of all, and a tenth of the limits: the message has 110 MB.
    tenth = coordinator_pb2.ShardReport(
        shard_id="s",
        ownership=coordinator_pb2.Ownership(
            released=[release] * 10_000,
            adopted=[coordinator_pb2.Adoption(machine_id="m" * 60, shard_id="s" * 40, instruction_id="7-1")] * 1_000,
            disowned=[coordinator_pb2.Adoption(machine_id="m" * 60, shard_id="s" * 40, instruction_id="7-1")] * 10_000,
        ),
    ).SerializeToString()
    found = scan(tenth, PLANS[coordinator_pb2.ShardReport], messages_max=MANY, fields_max=MANY)

    assert len(tenth) * 10 < limits.REPORT_BYTES_MAX
    assert found.messages * 10 < limits.REPORT_MESSAGES_MAX
    assert found.fields * 10 < limits.REPORT_FIELDS_MAX
    assert limits.report_elements_fault(tenth) is None
