"""Encodes the stamps of a bound machine as text that its provider stores and echoes (docs/spec/model.md §4).

This is the only durable copy of why a machine serves a cluster: a restarted shard reads it back, key by key. A key
that cannot be read leaves its field untouched and is reported; it never spoils the others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Final

from bigfleet.model import labels
from bigfleet.model.ids import Fingerprint, text_bytes
from bigfleet.model.machine import Machine

_INT32 = range(-(2**31), 2**31)
#: Stamps repeat: a fleet has some dozens of priorities and penalties, a List shows them for every machine.
_STAMPS_SHARED_MAX = 4096
#: A provider takes 64 KiB of metadata with a Configure (docs/spec/provider.md §3); the group has up to 1 KiB, and the
#: other keys have some hundred bytes. A machine must not be blamed for what its row says.
FINGERPRINT_BYTES_MAX: Final = 48 * 1024


def fingerprint_fault(fingerprint: str) -> str:
    """Return why no machine can store this fingerprint, "" for one that is short enough."""
    size_bytes = text_bytes(fingerprint)
    if size_bytes <= FINGERPRINT_BYTES_MAX:
        return ""
    return f"requirements and spreads are {size_fault(size_bytes)}"


def size_fault(size_bytes: int) -> str:
    """Return what is wrong with requirements of that size."""
    return (
        f"too long: {size_bytes:,} bytes, at most {FINGERPRINT_BYTES_MAX:,} are allowed;"
        " use fewer values, or a label that stands for them"
    )


def encode_metadata(machine: Machine) -> dict[str, str]:
    """Return the five keys of a machine's stamps; all are present, the group may be empty."""
    return {
        labels.ASSIGNED_PRIORITY: str(machine.assigned_priority),
        labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: dollars_text(machine.assigned_interruption_penalty_dollars),
        labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS: dollars_text(machine.assigned_reclamation_penalty_dollars),
        labels.ASSIGNED_NEED_FINGERPRINT: machine.assigned_need_fingerprint,
        labels.ASSIGNED_GROUP: machine.assigned_group,
    }


def decode_metadata(machine: Machine, metadata: Mapping[str, str]) -> tuple[Machine, list[str]]:
    """Return the machine with the stamps that the metadata holds, and the malformed keys in key order.

    Absent keys leave their field as it is, unknown keys are ignored.
    """
    changes: dict[str, object] = {}
    malformed = []
    for key, (name, read) in _READERS.items():
        text = metadata.get(key)
        if text is None:
            continue
        try:
            changes[name] = read(text)
        except ValueError:
            malformed.append(key)
    if not changes:
        return machine, sorted(malformed)
    return replace(machine, **changes), sorted(malformed)  # type: ignore[arg-type]


def dollars_text(dollars: float) -> str:
    """Return the shortest decimal text without exponent that reads back equal; infinity is `+Inf`."""
    if math.isinf(dollars):
        return "+Inf"
    text = format(Decimal(repr(dollars)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


@lru_cache(maxsize=_STAMPS_SHARED_MAX)
def _read_priority(text: str) -> int:
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit():
        raise ValueError(f"{text!r} is no decimal integer")
    priority = int(text)
    if priority not in _INT32:
        raise ValueError(f"{priority} is no int32")
    return priority


@lru_cache(maxsize=_STAMPS_SHARED_MAX)
def _read_dollars(text: str) -> float:
    if "_" in text or not text.isascii() or text != text.strip():
        raise ValueError(f"{text!r} is no number")
    dollars = float(text)
    if math.isnan(dollars) or dollars < 0:
        raise ValueError(f"{text!r} is negative or not a number")
    return dollars


_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    labels.ASSIGNED_PRIORITY: ("assigned_priority", _read_priority),
    labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: ("assigned_interruption_penalty_dollars", _read_dollars),
    labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS: ("assigned_reclamation_penalty_dollars", _read_dollars),
    labels.ASSIGNED_NEED_FINGERPRINT: ("assigned_need_fingerprint", Fingerprint),
    labels.ASSIGNED_GROUP: ("assigned_group", str),
}
