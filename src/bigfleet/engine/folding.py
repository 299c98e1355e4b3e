"""Folds gangs that one machine can host into plain rows (docs/spec/aggregates.md §4).

Such a gang needs no common domain: any machines that can host it will do. Claims and other rows play no part in the
question, so a gang does not flip between its two forms while it is served; this module must not look at either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigfleet.engine.decision import RowResult
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.model import vector
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement


@dataclass(slots=True)
class FoldedRow:
    """One row of the folded list, and the rows of the original list that it stands for, in list order."""

    need: Need
    members: list[Need]
    folded: bool


def folded_profile(profile: Profile) -> Profile:
    """Turn each Same into what it asks of one machine: In with its values, Exists without; the rest stays."""
    return replace(profile, requirements=tuple(_folded_requirement(r) for r in profile.requirements))


def _folded_requirement(requirement: Requirement) -> Requirement:
    if requirement.operator is not Operator.SAME:
        return requirement
    return Requirement(requirement.key, Operator.IN if requirement.values else Operator.EXISTS, requirement.values)


def folded_need(need: Need) -> Need:
    """Return the folded row of one Same row: folded profile, the whole aggregate as min unit, no group, not parked.

    One machine hosts all of it, so the row has no shapes.
    """
    profile = folded_profile(need.profile)
    return replace(need, profile=profile, min_unit=need.aggregate, group="", parked=False, shapes=(), waiting=())


def proving_shapes(folded: Need, pool: CandidatePool) -> frozenset[int]:
    """Return the shapes that can host the folded row's aggregate alone and carry its strict-spread key, if any."""
    shapes = pool.shapes.fit(folded.profile, folded.min_unit).shapes
    spread = folded.profile.strict_spread
    return frozenset(pool.shapes.values(shapes, spread.topology_key)) if spread is not None else shapes


def is_foldable(folded: Need, pool: CandidatePool) -> bool:
    """Return whether some machine proves the fold."""
    proving = proving_shapes(folded, pool)
    return bool(proving) and not (
        proving.isdisjoint(pool.free_shapes)
        and proving.isdisjoint(pool.bound_shapes(folded.cluster))
        and all(pool.shapes.of[machine.id] not in proving for machine in pool.own_creating(folded))
    )


def fold(demand: Sequence[Need], pool: CandidatePool) -> list[FoldedRow]:
    """Return the folded list: list order is preserved, a folded row stands where its first member stood.

    Folded rows join when cluster, folded fingerprint and aggregate are equal; they never join plain rows.
    """
    rows: list[FoldedRow] = []
    by_kind: dict[tuple[str, str, tuple[tuple[str, int], ...]], FoldedRow] = {}
    for need in demand:
        folded = folded_need(need) if need.profile.same_key is not None else None
        if folded is None or not is_foldable(folded, pool):
            rows.append(FoldedRow(need, [need], folded=False))
            continue
        kind = (folded.cluster, folded.fingerprint, vector.vector_key(folded.aggregate))
        known = by_kind.get(kind)
        if known is None:
            known = by_kind[kind] = FoldedRow(folded, [need], folded=True)
            rows.append(known)
        else:
            known.need = _joined(known.need, folded)
            known.members.append(need)
    return rows


def _joined(row: Need, member: Need) -> Need:
    # Every member has the same aggregate, so summing them is the member's aggregate × members.
    arrivals = [arrival for arrival in (row.arrival_unix_nanos, member.arrival_unix_nanos) if arrival]
    return replace(
        row,
        aggregate=vector.add(row.aggregate, member.aggregate),
        arrival_unix_nanos=min(arrivals, default=0),
    )


def forms_of(result: RowResult) -> tuple[Need, ...]:
    """Return the rows for which a machine may have been bound that serves this one: folded, and as it was given."""
    if result.folded or result.need.profile.same_key is None:
        return (result.need, *result.members)
    return (result.need, folded_need(result.need))
