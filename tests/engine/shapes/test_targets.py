"""A target composition follows a machine that becomes another class."""

from collections import Counter

import pytest

from bigfleet.engine.targets import ClassKey, Target, TargetClaim
from bigfleet.model.states import CapacityType

A, B = (
    ClassKey("t4", "za", CapacityType.BARE_METAL, 1.0, 0.0, labels, (("cpu", 4000),)) for labels in ((), (("k", "v"),))
)
ROW, OTHER = ("c1", "f", ""), ("c1", "g", "")


def planned(target: Target) -> Counter[tuple[ClassKey, frozenset[tuple[str, int, int]]]]:
    """Return how many machines have what planned on them, by class: fingerprint, shape and pods of each claim."""
    on: dict[tuple[ClassKey, int], set[tuple[str, int, int]]] = {}
    for claim in target.claims:
        for number in range(claim.first, claim.first + claim.machines):
            on.setdefault((claim.machine_class, number), set()).add((claim.row[1], claim.shape, claim.count))
    assert all(number < target.counts[key] for key, number in on)
    return Counter((key, frozenset(claims)) for (key, _number), claims in on.items())


def test_what_was_planned_on_the_last_planned_machine_goes_with_it() -> None:
    claims = (TargetClaim(A, 0, 3, ROW, 0, 2), TargetClaim(A, 0, 2, OTHER, 1, 1), TargetClaim(B, 0, 1, OTHER, 1, 4))
    target = Target({A: 4, B: 1}, claims).with_class_changed(A, B)

    assert target.counts == {A: 3, B: 2}
    full, half = frozenset({("f", 0, 2), ("g", 1, 1)}), frozenset({("f", 0, 2)})
    assert planned(target) == {(A, full): 2, (B, half): 1, (B, frozenset({("g", 1, 4)})): 1}

    target = target.with_class_changed(A, B)
    assert target.counts == {A: 2, B: 3}
    assert planned(target) == {(A, full): 1, (B, full): 1, (B, half): 1, (B, frozenset({("g", 1, 4)})): 1}


def test_a_machine_with_nothing_planned_on_it_goes_when_there_is_no_other() -> None:
    target = Target({A: 1}).with_class_changed(A, B)

    assert (target.counts, target.claims) == ({B: 1}, ())


@pytest.mark.parametrize(("before", "after"), [(B, A), (A, A)])
def test_a_change_that_is_none_of_the_target_changes_nothing(before: ClassKey, after: ClassKey) -> None:
    target = Target({A: 2}, (TargetClaim(A, 0, 2, ROW, 0, 1),))

    assert target.with_class_changed(before, after) is target
