"""Groups the unserved shortfalls of one pass by requirements, so that equal ones are settled together.

docs/spec/coordinator.md §7. Most of 20,000 shortfalls get nothing, and equal ones get nothing for the same reason. This
module does not decide which shortfall gets a machine.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bigfleet.coordinator.reports import DIMENSIONS_COMPARED, ShardFigures
from bigfleet.coordinator.transfers import Knobs, Skip

#: Not looked at yet.
OPEN = 0
SETTLED = 1
#: To be looked at by itself.
APART = 2
#: Above every deficit that is compared.
_NEVER = 2**62


class Pending:
    """Shortfalls in places: those of all shards in turn. A group are those behind one provider that ask the same."""

    def __init__(
        self,
        shards: Sequence[ShardFigures],
        owners: NDArray[np.int64],
        reasons: NDArray[np.int8],
        knobs: Knobs,
        apart: Iterable[int],
    ) -> None:
        """Those with a reason are settled; those `apart` are never settled with others. There is at least one place.

        `owners` says for each place which of the shards it is of.
        """
        self.reasons = reasons
        #: For each place: OPEN, SETTLED, or APART.
        self.states = bytearray(len(reasons))
        self._states = np.frombuffer(self.states, np.uint8)
        self._states[list(apart)] = APART
        self._states[reasons != 0] = SETTLED
        self._is_old = np.concatenate([shard.ages for shard in shards]) > knobs.preempt_age_cycles
        #: By dimension.
        self._deficits = np.ascontiguousarray(np.concatenate([shard.deficits for shard in shards]).T)
        self._owners = owners
        addresses = {address: n for n, address in enumerate({shard.provider_address for shard in shards})}
        of_shard = np.array([addresses[shard.provider_address] for shard in shards])
        serials = np.concatenate([shard.serials for shard in shards])
        _, first, group_of, sizes = np.unique(
            serials * len(addresses) + of_shard[self._owners],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        self.group_of: list[int] = group_of.tolist()
        #: One place of each group.
        self.examples: list[int] = first.tolist()
        self._members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(sizes)[:-1])

    def settle(
        self,
        group: int,
        reason: Skip,
        *,
        from_milli: Sequence[int] | None = None,
        with_old: bool,
        but_of: int | None = None,
    ) -> None:
        """Settle the remaining shortfalls of a group with one reason.

        `from_milli`: only deficits of at least so much in each of the group's dimensions, names ascending. `with_old`:
        also those that are old enough for a drain. `but_of`: not those of this shard.
        """
        places = self._members[group]
        is_meant = self._states[places] == OPEN
        if not with_old:
            is_meant &= ~self._is_old[places]
        if but_of is not None:
            is_meant &= self._owners[places] != but_of
        if from_milli is not None:
            for column, milli in enumerate(from_milli[:DIMENSIONS_COMPARED]):
                is_meant &= self._deficits[column][places] >= min(milli, _NEVER)
        places = places[is_meant]
        self.reasons[places] = reason
        self._states[places] = SETTLED
