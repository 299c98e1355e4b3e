"""Limits the size and the elements of operators' frames and shards' reports before they are parsed.

docs/adr/0245-elements-are-counted-before-the-parse.md, docs/spec/wire.md §2. Each check returns what is wrong, None
if nothing is. The limits only bound what parsing costs: what a sound roll-up or report may say is
checked by what reads it. No honest peer can exceed them.
"""

from typing import Final

from google.protobuf.message import DecodeError

from bigfleet.coordinator.ephemeral_state import SOLD_OUT_MAX
from bigfleet.model.frames import MalformedMessage
from bigfleet.rpc.wire.convert_coordinator import (
    ACK_MACHINES_MAX,
    ACKS_MAX,
    CAPACITY_ROWS_MAX,
    CLUSTERS_MAX,
    COUNT_KEYS_MAX,
    MOVED_ROWS_MAX,
    OWNERSHIP_ROWS_MAX,
    SHORTFALLS_MAX,
)
from bigfleet.rpc.wire.convert_need import REQUIREMENTS_MAX, VALUES_MAX
from bigfleet.rpc.wire.element_scan import FIELD_BYTES_MIN, ListLimit, ScanPlan, field_at, plan_of, scan
from bigfleet.rpc.wire.gen import coordinator_pb2, shard_pb2

#: A frame that is neither a roll-up nor bootstrap data. The largest of them is a node's status: 32 names of 1 KiB with
#: quantities of 64 characters, and two names, 37 KiB in all. Texts for people are cut on arrival, and may be longer.
SMALL_FRAME_BYTES_MAX: Final = 256 * 1024
#: Fields of a larger frame itself; there is one, and what later versions may add.
FRAME_FIELDS_MAX: Final = 64

#: Messages of a frame: rows, requirements, quantities, shapes. An operator's largest roll-up has 20 MiB as it counts
#: them, and it counts at least 21 bytes for each (a shape with one quantity: 43): fewer than a million.
FRAME_MESSAGES_MAX: Final = 1 << 20
#: Fields around them; the same shape has four, and a value of a requirement is one.
FRAME_FIELDS_IN_ALL_MAX: Final = 1 << 22
#: Names of one map of resources, of which 32 are allowed: a map of a million takes ten times as long for each.
FRAME_NAMES_MAX: Final = 4_096

#: A report to a coordinator. 100,000 releases with records of 600 bytes, as many rows for machines that are elsewhere,
#: and what else the limits of §2 allow, have 110 MB.
REPORT_BYTES_MAX: Final = 128 * 1024 * 1024
#: 100,000 releases with records of 22 messages and 20 other fields, and as many rows without.
REPORT_MESSAGES_MAX: Final = 1 << 22
REPORT_FIELDS_MAX: Final = 1 << 23

#: No message with fewer bytes has too many elements to be parsed at once.
SCANNED_BYTES_MIN: Final = FRAME_MESSAGES_MAX * FIELD_BYTES_MIN

_LARGE_KINDS: Final = frozenset({"rollup", "bootstrap_response"})
_SMALL_KINDS: Final = {
    each.number: each.name for each in shard_pb2.OperatorMessage.DESCRIPTOR.fields if each.name not in _LARGE_KINDS
}
_ROWS: Final = "rows"
_NAMES: Final = ListLimit(FRAME_NAMES_MAX, "names")
_FRAME_PLAN: Final = plan_of(
    shard_pb2.OperatorMessage.DESCRIPTOR,
    {
        "CapacityNeed.aggregate_resources": _NAMES,
        "CapacityNeed.min_unit": _NAMES,
        "PodShape.resources": _NAMES,
        "NodeOverhead.resources": _NAMES,
    },
)
_REPORT_PLAN: Final = plan_of(
    coordinator_pb2.ShardReport.DESCRIPTOR,
    {
        "ShardReport.shortfalls": ListLimit(SHORTFALLS_MAX, _ROWS),
        "ShardReport.instruction_acks": ListLimit(ACKS_MAX, _ROWS),
        "ShardReport.clusters": ListLimit(CLUSTERS_MAX, "ids"),
        "ShardReport.sold_out": ListLimit(SOLD_OUT_MAX, _ROWS),
        "ShardSummary.per_instance_type_counts": ListLimit(COUNT_KEYS_MAX, "keys"),
        "ShardSummary.per_zone_counts": ListLimit(COUNT_KEYS_MAX, "keys"),
        "ShardSummary.idle_by_type_zone": ListLimit(CAPACITY_ROWS_MAX, _ROWS),
        "ShardSummary.speculative_by_type_zone": ListLimit(CAPACITY_ROWS_MAX, _ROWS),
        "Shortfall.requirements": ListLimit(REQUIREMENTS_MAX, "requirements"),
        "NodeSelectorRequirement.values": ListLimit(VALUES_MAX, "values"),
        "InstructAck.machine_ids": ListLimit(OWNERSHIP_ROWS_MAX, "ids"),
        "InstructAck.machines": ListLimit(ACK_MACHINES_MAX, "records"),
        "Ownership.domains": ListLimit(OWNERSHIP_ROWS_MAX, _ROWS),
        "Ownership.adopted": ListLimit(MOVED_ROWS_MAX, _ROWS),
        "Ownership.released": ListLimit(MOVED_ROWS_MAX, _ROWS),
        "Ownership.reservations": ListLimit(OWNERSHIP_ROWS_MAX, _ROWS),
        "Ownership.disowned": ListLimit(MOVED_ROWS_MAX, _ROWS),
    },
)


def frame_size_fault(content: bytes) -> MalformedMessage | None:
    """Return what is wrong with the size of an operator's frame for its kind. Reads at most its first fields."""
    if len(content) <= SMALL_FRAME_BYTES_MAX:
        return None
    position, fields = 0, 0
    sizes: dict[int, int] = {}
    try:
        while position < len(content):
            if fields == FRAME_FIELDS_MAX:
                fault = f"has more than {FRAME_FIELDS_MAX} fields and {SMALL_FRAME_BYTES_MAX:,} bytes, one is enough"
                return MalformedMessage("frame", fault)
            number, begin, position = field_at(content, position)
            sizes[number] = sizes.get(number, 0) + position - begin
            fields += 1
    except DecodeError as error:
        return MalformedMessage("frame", str(error))
    for number, size_bytes in sizes.items():
        kind = _SMALL_KINDS.get(number)
        if kind is not None and size_bytes > SMALL_FRAME_BYTES_MAX:
            fault = f"has {size_bytes:,} bytes, at most {SMALL_FRAME_BYTES_MAX:,} are allowed"
            return MalformedMessage(kind, fault)
    return None


def frame_elements_fault(content: bytes) -> MalformedMessage | None:
    """Return what is wrong with the number of elements in an operator's frame. Takes up to a second: use a thread."""
    return _fault(
        content, _FRAME_PLAN, messages_max=FRAME_MESSAGES_MAX, fields_max=FRAME_FIELDS_IN_ALL_MAX, whole="frame"
    )


def report_elements_fault(content: bytes) -> MalformedMessage | None:
    """Return what is wrong with the number of elements in a report. Takes up to two seconds: use a thread."""
    return _fault(content, _REPORT_PLAN, messages_max=REPORT_MESSAGES_MAX, fields_max=REPORT_FIELDS_MAX, whole="report")


def _fault(
    content: bytes, plan: ScanPlan, *, messages_max: int, fields_max: int, whole: str
) -> MalformedMessage | None:
    found = scan(content, plan, messages_max=messages_max, fields_max=fields_max)
    if found.fault is None:
        return None
    place, text = found.fault
    return MalformedMessage(place or whole, text)
