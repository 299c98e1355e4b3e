"""List: cursors, deltas, removals, pages and picks, against a simple model (docs/spec/provider.md §10)."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.validation import InvariantBroken
from bigfleet.provider.backend import Slot
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.change_log import ChangeLog
from bigfleet.provider.storage.cursor import CURSOR_BYTES, CursorRejection
from bigfleet.provider.storage.view import TOMBSTONES_MAX, CommittedView, ListAnswer, ListKind, Tombstone, draw_places
from tests.engine.proof import in_proportion

S = MachineState
INCARNATION = b"12345678"
REMOVED_B = Tombstone(machine_id="b", revision=1, removed_unix_nanos=0)


def record(machine_id: str, revision: int, state: MachineState = S.SPECULATIVE) -> Record:
    slot = Slot(id=machine_id, instance_type="t", zone="z", capacity_type=CapacityType.ON_DEMAND)
    machine = Machine(
        id=MachineId(machine_id), state=state, instance_type="t", zone="z", capacity_type=CapacityType.ON_DEMAND
    )
    return Record(
        machine=machine, slot=slot, declared_price_usd_per_hour=1.0, declared_probability=0.0, revision=revision
    )


class Fleet:
    """A view, and the changes that tests make to it."""

    def __init__(self) -> None:
        self.view = CommittedView(incarnation=INCARNATION, head=0, floor=0, rng=random.Random(1))

    def put(self, machine_id: str, state: MachineState = S.SPECULATIVE) -> None:
        self.view.put(record(machine_id, self.view.head + 1, state))

    def remove(self, machine_id: str) -> None:
        self.view.remove(Tombstone(machine_id=machine_id, revision=self.view.head + 1, removed_unix_nanos=0))

    def list(
        self, since: bytes = b"", results_max: int = 0, states: frozenset[MachineState] | None = None
    ) -> ListAnswer:
        return self.view.list(states, results_max, since)()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda view: view._change_log.remove(2), "change log"),
        (lambda view: view._states[S.IDLE].add("b"), "other machines are"),
        (lambda view: view.counts.update({(S.IDLE, CapacityType.ON_DEMAND): 1}), "counts"),
        (
            lambda view: view.restore_tombstone(Tombstone(machine_id="b", revision=1, removed_unix_nanos=0)),
            "has a record",
        ),
        (lambda view: setattr(view, "head", 1), "beyond the head"),
    ],
    ids=["a record that no reader sees", "two states", "a count", "removed and there", "the head"],
)
def test_a_view_that_contradicts_itself_is_found(break_it: Callable[[CommittedView], object], said: str) -> None:
    """By the validator, which finds nothing before."""
    fleet = Fleet()
    fleet.put("a", S.IDLE)
    fleet.put("b")
    fleet.view.validate()
    break_it(fleet.view)

    with pytest.raises(InvariantBroken, match=said):
        fleet.view.validate()


def ids(listing: ListAnswer) -> list[str]:
    return [entry.id for entry in listing.records]


class Reader:
    """A client that follows the rules of removals and pages."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.cursor = b""

    def take(self, listing: ListAnswer) -> None:
        assert listing.tombstones, "a page of a walk is not taken here"
        for entry in listing.records:
            self.known[entry.id] = entry.revision
        for machine_id in listing.removed_ids:
            self.known.pop(machine_id, None)
        self.cursor = listing.revision

    def start(self, listing: ListAnswer) -> None:
        self.known = {entry.id: entry.revision for entry in listing.records}
        self.cursor = listing.revision


CHANGES = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "remove", "read", "page"]), st.integers(0, 12), st.integers(1, 4)),
    max_size=120,
)


@settings(max_examples=in_proportion(200), deadline=None)
@given(CHANGES)
def test_threading_cursors_tells_every_change_and_removal_exactly(
    changes: list[tuple[str, int, int]],
) -> None:
    """Two readers, one whole, one paging, always end with what the view holds."""
    fleet, reader, pager = Fleet(), Reader(), Reader()
    truth: dict[str, int] = {}
    reader.start(fleet.list())
    pager.start(fleet.list())
    for step, number, size in changes:
        name = f"m-{number}"
        if step == "put":
            fleet.put(name, S(1 + number % 3))
            truth[name] = fleet.view.head
        elif step == "remove" and name in truth:
            fleet.remove(name)
            del truth[name]
        elif step == "read":
            reader.take(fleet.list(reader.cursor))
            assert reader.known == truth
        elif step == "page":
            page = fleet.list(pager.cursor, size)
            assert len(page.records) <= size
            assert all(entry.revision > 0 for entry in page.records)
            pager.take(page)
    for _ in range(60):
        pager.take(fleet.list(pager.cursor, 3))
    reader.take(fleet.list(reader.cursor))
    assert reader.known == truth
    assert pager.known == truth
    assert ids(fleet.list(reader.cursor)) == []
    assert [r.revision for r in fleet.list().records] == sorted(truth.values())


@settings(max_examples=in_proportion(100), deadline=None)
@given(st.integers(1, 5), st.integers(0, 20))
def test_a_walk_by_pages_neither_repeats_nor_loses(size: int, count: int) -> None:
    fleet = Fleet()
    for number in range(count):
        fleet.put(f"m-{number}")
    page = fleet.list(b"", size)
    walked = ids(page)
    while len(page.records) == size:
        page = fleet.list(page.revision, size)
        walked += ids(page)
    assert Counter(walked) == Counter(f"m-{number}" for number in range(count))


def test_a_garbage_cursor_gives_the_full_list() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.put(f"m-{number}")
    good = fleet.list().revision
    assert len(good) == CURSOR_BYTES
    other = CommittedView(incarnation=b"87654321", head=3, floor=0, rng=random.Random(1)).list(None, 0, b"")().revision
    ahead = CommittedView(incarnation=INCARNATION, head=9, floor=0, rng=random.Random(1)).list(None, 0, b"")().revision
    cases = {
        b"x": CursorRejection.MALFORMED,
        b"\x00" * 4096: CursorRejection.MALFORMED,
        good[:-1]: CursorRejection.MALFORMED,
        good[:-1] + bytes([good[-1] ^ 1]): CursorRejection.MALFORMED,
        other: CursorRejection.INCARNATION,
        ahead: CursorRejection.FUTURE,
    }
    for cursor, rejection in cases.items():
        listing = fleet.list(cursor)
        assert (len(listing.records), listing.tombstones, listing.rejection) == (3, False, rejection)
    fleet.view.floor = 4
    fleet.view.head = 5
    assert fleet.list(good).rejection is CursorRejection.EXPIRED


def test_removed_ids_ignore_states_and_cap() -> None:
    fleet = Fleet()
    for number in range(4):
        fleet.put(f"m-{number}")
    cursor = fleet.list().revision
    fleet.remove("m-1")
    fleet.put("m-3", S.IDLE)
    listing = fleet.list(cursor, 1, frozenset({S.CONFIGURED}))
    assert (ids(listing), listing.removed_ids, listing.tombstones) == ([], ("m-1",), True)
    fleet.put("m-1")
    assert fleet.list(cursor).removed_ids == ()


def test_a_pick_is_uniform_and_has_no_cursor() -> None:
    fleet = Fleet()
    for number in range(10):
        fleet.put(f"m-{number}", S.SPECULATIVE if number < 8 else S.IDLE)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        listing = fleet.list(b"", 2, frozenset({S.SPECULATIVE}))
        assert listing.kind is ListKind.PICK
        assert listing.revision == b""
        assert len(set(ids(listing))) == 2
        counts.update(ids(listing))
    assert set(counts) == {f"m-{number}" for number in range(8)}
    assert all(380 < count < 620 for count in counts.values())


@given(st.integers(0, 30), st.data())
def test_drawn_places_differ_and_lie_below_the_total(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    places = draw_places(total, count, random.Random(data.draw(st.integers(0, 99))))
    assert len(set(places)) == count
    assert all(0 <= place < total for place in places)


def test_tombstones_are_bounded_in_number_and_age() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.put(f"m-{number}")
    for number in range(3):
        fleet.remove(f"m-{number}")
    day_nanos = 24 * 3600 * 10**9
    assert fleet.view.expired_tombstones(day_nanos, 0) == []
    assert len(fleet.view.expired_tombstones(day_nanos + 1, 0)) == 3
    assert len(fleet.view.expired_tombstones(0, TOMBSTONES_MAX - 1)) == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_journal_keeps_order_through_many_blocks(seed: int) -> None:
    rng = random.Random(seed)
    journal = ChangeLog()
    places: dict[int, int] = {}
    revision = 0
    for _ in range(15_000):
        machine = rng.randrange(3_000)
        if machine in places:
            journal.remove(places.pop(machine))
        if rng.random() < 0.9:
            revision += 1
            journal.append(record(f"m-{machine}", revision))
            places[machine] = revision
    expected = sorted(places.values())
    assert [r.revision for r in journal.all() if r is not None] == expected
    assert len(journal) == len(expected)
    position = rng.randrange(revision)
    assert [r.revision for r in journal.after(position)] == [r for r in expected if r > position]


def test_equal_content_takes_no_place_in_the_order() -> None:
    fleet = Fleet()
    fleet.put("m-0")
    fleet.put("m-1")
    cursor = fleet.list().revision
    fleet.view.put(replace(record("m-0", 1), failures_in_row=3))
    assert ids(fleet.list(cursor)) == []
    held = fleet.view.get("m-0")
    assert held is not None
    assert held.failures_in_row == 3
    with pytest.raises(AssertionError):
        fleet.view.put(record("m-0", 1, S.IDLE))
