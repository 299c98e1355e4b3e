"""Chooses which resources a message names when the objects behind it name more than the shard takes.

The shard refuses a message that names more (docs/spec/wire.md §2), and with it the demand or the session of the whole
cluster. Therefore names are left out of the message, extended resources first. This module must never change an amount.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from bigfleet.operator.demand.capacity_requests import RESOURCES_MAX

#: What nearly every pod needs of a machine.
_FIRST: Final = ("cpu", "memory", "pods", "ephemeral-storage")


def within_bound(total: Mapping[str, int], parts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return a sum of some parts with at most `RESOURCES_MAX` names; unchanged if it has no more.

    cpu, memory, pods and ephemeral-storage stay. The names of parts with few names go before those of parts with many,
    so that an object that names hundreds displaces no resource of the others.
    """
    if len(total) <= RESOURCES_MAX:
        return total
    order = dict.fromkeys(_FIRST)
    for part in sorted(parts, key=lambda part: (len(part), sorted(part))):
        order.update(dict.fromkeys(sorted(part)))
    return {name: total[name] for name in [name for name in order if name in total][:RESOURCES_MAX]}
