"""Reads and writes the annotation that a Node has while it is drained (docs/spec/operator.md §7.2, §7.5).

It is all that a new leader needs to continue the drain. Its deadline is wall clock time, because it crosses processes.
A text that cannot be parsed is an error that the caller reports; it is never taken for a drain.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from bigfleet.files.json_loading import load_json
from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.kubernetes.resources import RECLAIM_ANNOTATION
from bigfleet.operator.kubernetes.timestamps import rfc3339_milli, unix_seconds

_NANOS_PER_MILLI = 1_000_000


class UnreadableAnnotation(ValueError):
    """The annotation is no drain of ours; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAnnotation:
    """One drain as its Node shows it."""

    instruction: str
    machine: str
    #: Unix time.
    deadline_seconds: float
    reason: str
    #: Whether the operator cordoned the Node: only then does a withdrawal uncordon it.
    cordoned: bool
    #: Of the preemptor; 0 is voluntary.
    priority: int = 0

    def text(self) -> str:
        """Return the annotation's value; the deadline in milliseconds, rounded down."""
        fields = {
            "instruction": self.instruction,
            "machine": self.machine,
            "deadline": rfc3339_milli(int(self.deadline_seconds * 1000) * _NANOS_PER_MILLI),
            "reason": self.reason,
            "cordoned": self.cordoned,
            "priority": self.priority,
        }
        return json.dumps(fields, separators=(",", ":"))


def read_annotation(node: NodeObject) -> DrainAnnotation | None:
    """Return the drain that a Node shows, None when it shows none. Raises UnreadableAnnotation."""
    text = (node.metadata.annotations or {}).get(RECLAIM_ANNOTATION)
    if text is None:
        return None
    try:
        fields = load_json(text, object_pairs_hook=dict)
    except ValueError as error:
        raise UnreadableAnnotation(f"{text[:100]!r} is no JSON: {error}") from error
    if not isinstance(fields, Mapping):
        raise UnreadableAnnotation(f"{text[:100]!r} is no JSON object")
    deadline_seconds = unix_seconds(_text(fields, "deadline"))
    if deadline_seconds is None:
        raise UnreadableAnnotation(f"deadline {fields['deadline']!r} is no RFC 3339 time")
    priority = fields.get("priority", 0)
    return DrainAnnotation(
        instruction=_text(fields, "instruction"),
        machine=_text(fields, "machine"),
        deadline_seconds=deadline_seconds,
        reason=_text(fields, "reason"),
        cordoned=fields.get("cordoned") is True,
        priority=priority if isinstance(priority, int) else 0,
    )


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise UnreadableAnnotation(f"{name} is missing or no text")
    return value
