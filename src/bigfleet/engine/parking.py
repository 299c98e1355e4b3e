"""Parks gangs that have failed for long, so that they stop trying for a while (docs/spec/engine.md §9).

A gang that stalls for 8 cycles keeps what it holds and takes nothing, so that it cannot churn for ever; every 32 it
looks again for one cycle. Ages are the caller's memory, handed in and out as plain mappings.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bigfleet.engine.decision import ParkingKey, RowResult
from bigfleet.model.need import Need

#: Stalled cycles after which a gang is parked.
PARK_AFTER_CYCLES = 8
#: A parked gang tries for one cycle at every multiple of this age.
LOOK_AGAIN_CYCLES = 32


def parking_key(need: Need) -> ParkingKey:
    """Return the class that shares one age: (cluster, group, fingerprint)."""
    return ParkingKey(need.cluster, need.group, need.fingerprint)


def is_parked_age(age: int) -> bool:
    """Return whether a class of that age is parked in the coming cycle."""
    return age >= PARK_AFTER_CYCLES and age % LOOK_AGAIN_CYCLES != 0


def stamp_parked(rows: Sequence[Need], ages: Mapping[ParkingKey, int]) -> list[Need]:
    """Return the folded list with `parked` set on the Same rows whose class is due; a row that is parked stays so."""
    return [
        replace(need, parked=True)
        if not need.parked and need.profile.same_key is not None and is_parked_age(ages.get(parking_key(need), 0))
        else need
        for need in rows
    ]


def with_members_of(
    demand: Sequence[Need], results: Sequence[RowResult], ages: Mapping[ParkingKey, int]
) -> tuple[RowResult, ...]:
    """Return results, in the order of the demand, whose members are its very rows; a parked row is another object.

    Who reads a decision finds rows by identity, because equal rows may stand twice in a roll-up.
    """
    if not ages:
        return tuple(results)
    return tuple(
        result if result.members[0] is need else replace(result, members=(need,))
        for need, result in zip(demand, results, strict=True)
    )


def next_ages(ages: Mapping[ParkingKey, int], results: Iterable[RowResult], *, advance: bool) -> dict[ParkingKey, int]:
    """Return the ages after a cycle, from what the phases left: stalled classes and no others.

    A class is stalled when it has an unsatisfied row and none of its unsatisfied rows acquired a machine, had a
    satisfiable domain, or has a machine that drains for it, picked now or before (docs/adr/0112). Its age rises by
    one per cycle, however many rows share it; with `advance` False (a woken cycle, docs/spec/shard.md §3) ages are
    only retained or forgotten.
    """
    stalled: dict[ParkingKey, bool] = {}
    for result in results:
        if result.need.profile.same_key is None or result.satisfied:
            continue
        key = parking_key(result.need)
        is_awaiting = result.unresolved != result.deficit
        has_hope = result.acquired > 0 or result.satisfiable or is_awaiting
        stalled[key] = stalled.get(key, True) and not has_hope
    parked = (key for key, is_stalled in stalled.items() if is_stalled)
    if advance:
        return {key: ages.get(key, 0) + 1 for key in parked}
    return {key: ages[key] for key in parked if key in ages}
