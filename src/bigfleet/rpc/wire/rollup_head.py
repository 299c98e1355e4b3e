"""Reads the head of a session's frame that has a roll-up, and digests the rest unread.

Nine of ten roll-ups repeat the one before, in the same bytes except for the timestamp (docs/spec/shard.md §4).
Operators of BigFleet write fields in the order of their numbers, so cluster and timestamp come first; the rest is only
hashed. A frame in another form reads as None, and the caller must parse it. Two frames that a parser would distinguish
must never have equal digests.
"""

from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError

from bigfleet.rpc.wire.repeated_fields import varint_at

#: OperatorMessage.rollup; ClusterCapacityNeeds.cluster_id and .timestamp_unix_nanos: numbers and wire types.
_ROLLUP_TAG = 2 << 3 | 2
_CLUSTER_TAG = 1 << 3 | 2
_TIMESTAMP_TAG = 2 << 3 | 0
#: A timestamp from 2**63 on is a negative one, ten bytes long.
_INT64_END = 1 << 63


class RollUpHead(NamedTuple):
    """What the first bytes of a roll-up's frame say."""

    cluster_id: str
    timestamp_unix_nanos: int
    #: XXH3, 16 bytes, of the roll-up's bytes without the timestamp.
    digest: bytes
    #: Where in the frame the roll-up's bytes begin; they reach to its end.
    start: int


def head_of_rollup(frame: bytes) -> RollUpHead | None:
    """Return the head of a frame that is a roll-up and nothing else, cluster first; None for any other frame.

    Two frames with equal digests that this returns hold, but for the timestamp, the same message, or neither is one.
    """
    try:
        if frame[0] != _ROLLUP_TAG:
            return None
        size, start = varint_at(frame, 1)
        if start + size != len(frame) or frame[start] != _CLUSTER_TAG:
            return None
        size, name_start = varint_at(frame, start + 1)
        name_end = name_start + size
        timestamp_unix_nanos, rest = 0, name_end
        if name_end < len(frame) and frame[name_end] == _TIMESTAMP_TAG:
            timestamp_unix_nanos, rest = varint_at(frame, name_end + 1)
        if name_end > len(frame) or timestamp_unix_nanos >= _INT64_END:
            return None
        cluster_id = frame[name_start:name_end].decode()
    except (IndexError, DecodeError, UnicodeDecodeError):
        return None
    content = memoryview(frame)
    hashed = xxhash.xxh3_128(content[start:name_end])
    hashed.update(content[rest:])
    return RollUpHead(cluster_id, timestamp_unix_nanos, hashed.digest(), start)
