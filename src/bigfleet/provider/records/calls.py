"""Defines a mutating call, and validates its fields (docs/spec/provider.md §3, step 1).

This module must not know a machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigfleet.model.ids import IDENTIFIER_BYTES_MAX
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import NO_METADATA

METADATA_BYTES_MAX = 64 * 1024
BLOB_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One mutating call."""

    kind: Kind
    machine_id: str
    token: Token
    cluster: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    blob: bytes = field(default=b"", repr=False)
    grace_seconds: int = 0


def argument_fault(call: Call) -> str | None:
    """Return what is wrong with the arguments of a call (steps 3 and 4), or None."""
    return (
        _identifier_fault("machine_id", call.machine_id)
        or (_identifier_fault("cluster_id", call.cluster) if call.kind is Kind.CONFIGURE else None)
        or _token_fault(call.token)
        or _size_fault(call)
    )


def _identifier_fault(field: str, text: str) -> str | None:
    if not text:
        return f"{field} is empty"
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > IDENTIFIER_BYTES_MAX:
        return f"{field} has {size_bytes} bytes, at most {IDENTIFIER_BYTES_MAX} are allowed"
    return None


def _token_fault(token: Token) -> str | None:
    if token.shard_id:
        return _identifier_fault("shard_id", token.shard_id)
    if token.epoch or token.sequence:
        return "shard_id is empty, but shard_epoch or sequence_number is set"
    return None


def _size_fault(call: Call) -> str | None:
    if call.grace_seconds < 0:
        return f"grace_period_seconds is {call.grace_seconds}, it must not be negative"
    if call.metadata:
        size_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in call.metadata.items())
        if size_bytes > METADATA_BYTES_MAX:
            return f"shard_metadata has {size_bytes} bytes, at most {METADATA_BYTES_MAX} are allowed"
    if len(call.blob) > BLOB_BYTES_MAX:
        return f"bootstrap_blob has {len(call.blob)} bytes, at most {BLOB_BYTES_MAX} are allowed"
    return None


def shown(text: str) -> str:
    """Return an id as it may be printed: quoted, escaped, short."""
    return repr(text if len(text) <= IDENTIFIER_BYTES_MAX else text[:IDENTIFIER_BYTES_MAX] + "…")
