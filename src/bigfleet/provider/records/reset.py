"""Decides what data a drained machine still has, and which cluster it may serve next (docs/spec/provider.md §8).

The backend declares it in `Limits.reset`; the label of a machine overrides it. Pure functions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

from bigfleet.provider.backend import Host, Reset, Slot
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.codec import intern_map

#: What a drain of this machine resets: a value of `Reset`.
RESET_LABEL: Final = "bigfleet.dev/reset"
S = TypeVar("S", bound=Slot)


def with_label(facts: S, reset: Reset | None) -> S:
    """Return the facts with the backend's declaration as a label, unless they have one."""
    if reset is None or RESET_LABEL in facts.labels:
        return facts
    return replace(facts, labels=intern_map({**facts.labels, RESET_LABEL: reset.value}))


def host_with_label(host: Host, slot_labels: Mapping[str, str]) -> Host:
    """Return the result of a Create with the label of its slot, unless it has one."""
    shown = slot_labels.get(RESET_LABEL)
    if shown is None or host.labels is None or RESET_LABEL in host.labels:
        return host
    return replace(host, labels={**host.labels, RESET_LABEL: shown})


def drained(before: Record, after: Record, reset: Reset | None) -> Record:
    """Return the record after a Drain: its host remembers its cluster unless the Drain reset it."""
    return replace(after, former_cluster=before.machine.cluster if _is_left(before, reset) else "")


def unbound(before: Record, after: Record, reset: Reset | None) -> Record:
    """Return the record after its binding was given up without a Drain: nothing was reset by that."""
    is_bound = bool(before.machine.cluster) and not after.machine.cluster and after.machine.host.is_present
    if not is_bound or not _is_left(before, reset):
        return after
    return replace(after, former_cluster=before.machine.cluster)


def _is_left(record: Record, reset: Reset | None) -> bool:
    declared = record.machine.labels.get(RESET_LABEL) or (reset.value if reset is not None else "")
    return declared == Reset.NONE.value


def reuse_fault(record: Record, cluster: str) -> str:
    """Return why the host may not serve a cluster, "" when it may."""
    if record.former_cluster in ("", cluster):
        return ""
    former = record.former_cluster
    return f"{record.id} served {former} and its drain resets nothing: it can only return to {former}, or be deleted"
