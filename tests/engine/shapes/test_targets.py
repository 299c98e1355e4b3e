"""A target composition follows a machine that becomes another class."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.class_changes import with_classes_changed
from bigfleet.engine.targets import ClassKey, Target, TargetClaim
from bigfleet.model.need import RowKey
from bigfleet.model.states import CapacityType

A, B, C = KEYS = tuple(
    ClassKey("t4", "za", CapacityType.BARE_METAL, 1.0, 0.0, labels, (("cpu", 4000),))
    for labels in ((), (("k", "v"),), (("k", "w"),))
)
ROW, OTHER = ("c1", "f", ""), ("c1", "g", "")
Changes = list[tuple[ClassKey, ClassKey]]


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
    target = with_classes_changed(Target({A: 4, B: 1}, claims), [(A, B)])

    assert target.counts == {A: 3, B: 2}
    full, half = frozenset({("f", 0, 2), ("g", 1, 1)}), frozenset({("f", 0, 2)})
    assert planned(target) == {(A, full): 2, (B, half): 1, (B, frozenset({("g", 1, 4)})): 1}

    target = with_classes_changed(target, [(A, B)])
    assert target.counts == {A: 2, B: 3}
    assert planned(target) == {(A, full): 1, (B, full): 1, (B, half): 1, (B, frozenset({("g", 1, 4)})): 1}


def test_a_machine_with_nothing_planned_on_it_goes_when_there_is_no_other() -> None:
    target = with_classes_changed(Target({A: 1}), [(A, B)])

    assert (target.counts, target.claims) == ({B: 1}, ())


@pytest.mark.parametrize(("before", "after"), [(B, A), (A, A)])
def test_a_change_that_is_none_of_the_target_changes_nothing(before: ClassKey, after: ClassKey) -> None:
    target = Target({A: 2}, (TargetClaim(A, 0, 2, ROW, 0, 1),))

    assert with_classes_changed(target, [(before, after)]) is target


@pytest.mark.parametrize("together", [1, 50, 2000])
def test_a_run_of_machines_that_all_change_stays_a_run(together: int) -> None:
    """However many change at a time, alike neighbours are one claim."""
    claims = (TargetClaim(A, 0, 2000, ROW, 0, 2), TargetClaim(A, 0, 1200, OTHER, 1, 1))
    target, most = Target({A: 2000}, claims), 0
    for _ in range(2000 // together):
        target = with_classes_changed(target, [(A, B)] * together)
        most = max(most, len(target.claims))

    assert most <= 4
    assert (target.counts, Counter(claim.machines for claim in target.claims)) == ({B: 2000}, {2000: 1, 1200: 1})


def test_a_joined_claim_is_placed_before_what_follows_it_on_the_new_machine() -> None:
    """The claim of the former class comes first, that of the new class last."""
    claims = (TargetClaim(A, 0, 1, ROW, 0, 2), TargetClaim(A, 0, 1, OTHER, 1, 1), TargetClaim(B, 0, 1, ROW, 0, 2))
    target = with_classes_changed(Target({A: 1, B: 1}, claims), [(A, B)])

    assert target.claims == (TargetClaim(B, 0, 2, ROW, 0, 2), TargetClaim(B, 1, 1, OTHER, 1, 1))


class CountedClaims(tuple[TargetClaim, ...]):
    """Counts the passes over the claims."""

    passes = 0

    def __iter__(self) -> Iterator[TargetClaim]:
        self.passes += 1
        return super().__iter__()


def test_all_changes_of_a_composition_take_one_pass_over_its_claims() -> None:
    claims = CountedClaims(TargetClaim(A, number, 1, ROW, 0, 1 + number % 3) for number in range(500))
    target = with_classes_changed(Target({A: 500}, claims), [(A, (B, C)[number % 2]) for number in range(500)])

    assert claims.passes == 1
    assert target.counts == {B: 250, C: 250}


def one_after_the_other(target: Target, changes: Changes) -> Target:
    """Return what `with_classes_changed` is to mean: each change splits the claims on one machine."""
    for before, after in changes:
        if before == after or not target.counts.get(before):
            continue
        planned = [claim.first + claim.machines for claim in target.claims if claim.machine_class == before]
        number, place = max(planned, default=target.counts[before]) - 1, target.counts.get(after, 0)
        counts = {**target.counts, before: target.counts[before] - 1, after: place + 1}
        claims = []
        for claim in target.claims:
            if claim.machine_class != before or claim.first + claim.machines <= number:
                claims.append(claim)
                continue
            if claim.machines > 1:
                claims.append(replace(claim, machines=claim.machines - 1))
            claims.append(replace(claim, machine_class=after, first=place, machines=1))
        target = replace(target, counts={key: count for key, count in counts.items() if count}, claims=tuple(claims))
    return target


def on_each_machine(target: Target) -> dict[tuple[ClassKey, int], list[tuple[RowKey, int, int]]]:
    """Return what is planned on each numbered machine, in the order in which it is placed there."""
    found: dict[tuple[ClassKey, int], list[tuple[RowKey, int, int]]] = {}
    for claim in target.claims:
        for number in range(claim.first, claim.first + claim.machines):
            found.setdefault((claim.machine_class, number), []).append((claim.row, claim.shape, claim.count))
    return found


@st.composite
def targets(draw: st.DrawFn) -> Target:
    """Draw a composition of few classes, with claims that overlap, touch and repeat each other."""
    counts = {key: draw(st.integers(0, 5)) for key in KEYS}
    claims = []
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=8)):
        if counts[key]:
            first = draw(st.integers(0, counts[key] - 1))
            machines = draw(st.integers(1, counts[key] - first))
            row, shape = draw(st.sampled_from([(ROW, 0), (ROW, 1), (OTHER, 0)]))
            claims.append(TargetClaim(key, first, machines, row, shape, draw(st.integers(1, 2))))
    return Target({key: count for key, count in counts.items() if count}, tuple(claims))


key_pairs = st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS))


@given(targets(), st.lists(st.lists(key_pairs, max_size=6), max_size=3))
def test_changes_together_place_the_same_pods_as_one_after_the_other(target: Target, cycles: list[Changes]) -> None:
    expected = found = target
    for changes in cycles:
        expected, found = one_after_the_other(expected, changes), with_classes_changed(found, changes)

        assert found.counts == expected.counts
        assert on_each_machine(found) == on_each_machine(expected)


@given(targets(), st.lists(key_pairs, max_size=6))
def test_neighbours_that_are_alike_are_one_claim_after_a_change(target: Target, changes: Changes) -> None:
    """At most as many claims as runs of machines with the same pods need."""
    found = with_classes_changed(target, changes)
    placed, needed = on_each_machine(found), 0
    for key, number in placed:
        before = placed.get((key, number - 1), [])
        needed += len(placed[key, number]) if before != placed[key, number] else 0

    touched = {key for pair in changes if pair[0] != pair[1] for key in pair}
    assert found is target or len(found.claims) <= needed + sum(c.machine_class not in touched for c in found.claims)
