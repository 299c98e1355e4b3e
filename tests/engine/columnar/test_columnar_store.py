"""The columns of a shard: views that never change, rows in id order, and one engine over many of them."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columnar.sorting import sort_by
from bigfleet.engine.columns import store as store_module
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore, Vocabulary
from bigfleet.engine.decision import ActionKind, Options
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from tests.engine.proof import examples
from tests.strategies import HOST, NOW_SECONDS, RACK, FleetInput, fleets, machines

EXAMPLES = examples(60)


def idle(number: int, **fields: object) -> Machine:
    machine = Machine(id=MachineId(f"m{number:02}"), state=MachineState.IDLE, host=HOST, resources={"cpu": "4"})
    return replace(machine, **fields)  # type: ignore[arg-type]


def read(view: ColumnSnapshot) -> list[tuple[object, ...]]:
    """Return everything that a view says, machine by machine."""
    snapshot = snapshot_of(view)
    return [
        (machine, dict(machine.supply), snapshot.idle_since_seconds.get(machine.id))
        for machine in snapshot.machines.values()
    ]


def written(fleet: dict[MachineId, Machine], since: dict[MachineId, float]) -> list[tuple[object, ...]]:
    """Return the same of machines as they went in; what no decision reads is left out."""
    rows: list[tuple[object, ...]] = []
    for _, machine in sorted(fleet.items()):
        resources = {name: f"{milli}m" for name, milli in machine.supply.items()}
        bare = replace(machine, host=type(HOST)(), last_error="", node_name="", resources=resources, allocatable={})
        rows.append((bare, dict(machine.supply), since.get(machine.id)))
    return rows


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, Machine]]:
    """Draw inserts, updates and removals of a few machines, and moments at which a view is taken."""
    steps = []
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["put", "put", "remove", "view"]))
        number = draw(st.integers(0, 9))
        steps.append((kind, draw(machines(f"m{number:02}"))))
    return steps


@EXAMPLES
@given(edits())
def test_every_view_says_what_the_store_held_then_and_keeps_saying_it(steps: list[tuple[str, Machine]]) -> None:
    store = ColumnStore()
    fleet: dict[MachineId, Machine] = {}
    since: dict[MachineId, float] = {}
    views: list[tuple[ColumnSnapshot, list[tuple[object, ...]]]] = []
    for turn, (kind, machine) in enumerate([*steps, ("view", steps[0][1])]):
        if kind == "put":
            is_idle = machine.state is MachineState.IDLE
            store.insert(machine, float(turn) if is_idle else None)
            fleet[machine.id] = machine
            since.pop(machine.id, None)
            since.update({machine.id: float(turn)} if is_idle else {})
        elif kind == "remove" and machine.id in fleet:
            store.remove(machine.id)
            del fleet[machine.id]
            since.pop(machine.id, None)
        elif kind == "view":
            # Most views are dropped at once, so that their buffers are used again; some stay.
            view = store.snapshot()
            assert written(fleet, since) == read(view)
            if turn % 3 == 0:
                views.append((view, read(view)))
            del view
    assert len(store) == len(fleet)
    for view, said in views:
        assert said == read(view)


def test_nothing_changed_is_the_same_view() -> None:
    store = ColumnStore()
    store.insert(idle(1))

    assert store.snapshot() is store.snapshot()


def test_a_view_names_the_rows_that_changed_since_the_one_before() -> None:
    store = ColumnStore()
    for number in range(3):
        store.insert(idle(number))
    first = store.snapshot()
    store.update(idle(1, price_usd_per_hour=2.0))

    second = store.snapshot()

    assert first.layout == second.layout
    changed = second.changed_since(first.generation)
    assert changed is not None
    assert changed.tolist() == [1]


def test_a_buffer_is_used_again_when_its_view_is_gone() -> None:
    store = ColumnStore()
    store.insert(idle(1))
    view = store.snapshot()
    state = view.columns.state
    store.update(idle(1, price_usd_per_hour=2.0))
    newer = store.snapshot()
    del view
    store.update(idle(1, price_usd_per_hour=3.0))

    newest = store.snapshot()

    assert newest.columns.state is state
    assert newer.columns.state is not state
    assert newest.vocabulary.offers[newest.columns.offer[0]].price_usd_per_hour == 3.0


def test_a_fleet_at_rest_has_its_columns_once() -> None:
    """The store copies them when it writes, and not before; a removal is a write."""
    store = ColumnStore()
    for number in range(3):
        store.insert(idle(number))
    first = store.snapshot()
    said = read(first)
    assert store._columns is first.columns
    store.update(idle(1, price_usd_per_hour=2.0))
    second = store.snapshot()
    assert store._columns is second.columns
    store.remove(MachineId("m02"))

    assert (read(first), len(read(second)), len(read(store.snapshot()))) == (said, 3, 2)


def test_columns_of_two_views_are_not_used_again_when_one_is_gone() -> None:
    """A machine that came and went before it had a row leaves a view that differs in nothing."""
    store = ColumnStore()
    store.insert(idle(1))
    first = store.snapshot()
    store.insert(idle(2))
    store.remove(MachineId("m02"))
    store.insert(idle(1))
    store._written.clear()
    second = store.snapshot()
    said = read(second)
    assert (first is second, first.columns is second.columns) == (False, True)
    del first
    store.update(idle(1, price_usd_per_hour=2.0))
    store.snapshot()

    assert read(second) == said


def test_unknown_machines_are_neither_updated_nor_removed() -> None:
    store = ColumnStore()
    with pytest.raises(KeyError):
        store.update(idle(1))
    with pytest.raises(KeyError):
        store.remove(MachineId("m01"))
    store.insert(idle(1))
    store.snapshot()
    store.remove(MachineId("m01"))
    with pytest.raises(KeyError):
        store.remove(MachineId("m01"))
    with pytest.raises(KeyError):
        store.update(idle(1))


def test_a_machine_takes_25_bytes_of_columns() -> None:
    store = ColumnStore()
    for number in range(50):
        store.insert(idle(number))

    assert store.snapshot().columns.bytes_per_machine == 25.0


@st.composite
def histories(draw: st.DrawFn) -> list[FleetInput]:
    """Draw cycles of one fleet: machines, rows, flags and time change between them, or nothing does."""
    first = draw(fleets(machines_max=16))
    cycles = [first]
    for _ in range(draw(st.integers(1, 5))):
        snapshot, demand, options = cycles[-1].snapshot, cycles[-1].demand, cycles[-1].options
        fleet, since = dict(snapshot.machines), dict(snapshot.idle_since_seconds)
        for _ in range(draw(st.integers(0, 3))):
            machine = draw(machines(f"m{draw(st.integers(0, 17)):02}", rows=demand))
            fleet[machine.id] = machine
            since.pop(machine.id, None)
            if machine.state is MachineState.IDLE:
                since[machine.id] = NOW_SECONDS
        if fleet and draw(st.integers(0, 3)) == 0:
            gone = draw(st.sampled_from(sorted(fleet)))
            del fleet[gone]
            since.pop(gone, None)
        if demand and draw(st.integers(0, 2)) == 0:
            other = draw(fleets(machines_max=0, rows_max=2)).demand
            demand = tuple(sorted((*demand[1:], *other), key=lambda need: -need.profile.priority))
        if draw(st.booleans()):
            options = replace(options, now_seconds=options.now_seconds + 300.0)
        if draw(st.integers(0, 3)) == 0:
            options = replace(options, reserved=frozenset(), unjoined=frozenset())
        cycles.append(FleetInput(Snapshot.of(fleet.values(), since), demand, options))
    return cycles


@EXAMPLES
@given(histories())
def test_an_engine_that_remembers_decides_like_one_that_does_not(cycles: list[FleetInput]) -> None:
    """What an engine keeps between cycles saves work and changes nothing."""
    engine, store = ColumnarEngine(), ColumnStore()
    known: dict[MachineId, tuple[Machine, float | None]] = {}
    for cycle in cycles:
        wanted = {
            machine_id: (machine, cycle.snapshot.idle_since_seconds.get(machine_id))
            for machine_id, machine in cycle.snapshot.machines.items()
        }
        for machine_id in known.keys() - wanted.keys():
            store.remove(machine_id)
        for machine_id, entry in wanted.items():
            if known.get(machine_id) != entry:
                store.insert(*entry)
        known = wanted

        decision = engine.decide(store.snapshot(), cycle.demand, cycle.options)

        assert reference.decide(cycle.snapshot, cycle.demand, cycle.options) == decision


def test_a_vocabulary_is_made_anew_when_little_of_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "VOCABULARY_SPARE", 0)
    store = ColumnStore()
    store.insert(idle(1), 5.0)
    older = store.snapshot()
    for turn in range(20):
        store.update(idle(1, assigned_priority=turn, cluster=f"c{turn}", labels={"turn": str(turn)}), 5.0)

    newer = store.snapshot()

    assert newer.vocabulary is not older.vocabulary
    assert newer.vocabulary.size == 5
    assert read(older) != read(newer)
    fleet = {MachineId("m01"): idle(1, assigned_priority=19, cluster="c19", labels={"turn": "19"})}
    assert written(fleet, {MachineId("m01"): 5.0}) == read(newer)


def test_a_vocabulary_stays_in_proportion_to_what_machines_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand gangs on ten machines, one after the other: twice what is used and the spare, and few purges."""
    monkeypatch.setattr(store_module, "VOCABULARY_SPARE", 100)
    store, sizes, vocabularies = ColumnStore(), list[int](), list[Vocabulary]()
    for gang in range(1000):
        store.insert(idle(gang % 10, assigned_group=f"gang-{gang}"), 5.0)
        vocabulary = store.snapshot().vocabulary
        sizes.append(vocabulary.size)
        if not vocabularies or vocabulary is not vocabularies[-1]:
            vocabularies.append(vocabulary)

    # Ten stamps, a shape, an offer and the empty cluster are used.
    assert max(sizes) <= 2 * 13 + 100
    assert len(vocabularies) <= 1000 // 100 + 1


@EXAMPLES
@given(fleets(machines_max=10), fleets(machines_max=10))
def test_an_answer_stays_what_it_was_while_engine_and_store_go_on(first: FleetInput, second: FleetInput) -> None:
    """Its objects are made late, and yet from the moment of the decision: new racks and sizes change nothing."""
    engine, store = ColumnarEngine(), ColumnStore()
    for machine in first.snapshot.machines.values():
        store.insert(machine, first.snapshot.idle_since_seconds.get(machine.id))
    expected = reference.decide(first.snapshot, first.demand, first.options)
    demand = list(first.demand)
    answer = engine.decide(store.snapshot(), demand, first.options)

    demand.clear()
    for number, machine in enumerate(second.snapshot.machines.values()):
        rack, size = f"a-new-rack-{number}", {"cpu": f"{number}001m", "disk": "1"}
        store.insert(replace(machine, labels={RACK: rack}, zone=f"a{number}", resources=size, allocatable={}))
    engine.decide(store.snapshot(), second.demand, second.options)

    assert expected == answer


def test_time_alone_brings_releases_and_nothing_else() -> None:
    store = ColumnStore()
    store.insert(idle(1, capacity_type=CapacityType.SPOT), 0.0)
    view, engine = store.snapshot(), ColumnarEngine()
    options = Options(now_seconds=59.0, reported=frozenset())

    before = engine.decide(view, (), options)
    after = engine.decide(view, (), replace(options, now_seconds=60.0))

    assert [action.kind for action in before.actions] == []
    assert [action.kind for action in after.actions] == [ActionKind.DELETE]


@EXAMPLES
@given(st.data())
def test_sorting_by_columns_is_sorting_by_their_tuples(data: st.DataObject) -> None:
    """However wide the columns are: by digits, packed into one integer, or column by column."""
    widths = data.draw(st.lists(st.sampled_from([1, 3, 10, 16, 17, 30, 40]), min_size=1, max_size=4))
    size = data.draw(st.integers(0, 30))
    columns = [
        data.draw(st.lists(st.integers(0, 2**width - 1), min_size=size, max_size=size).map(np.array))
        for width in widths
    ]
    rows = np.sort(np.array(data.draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size, unique=True)), int))

    ordered = sort_by(columns, rows)

    places = sorted(range(size), key=lambda place: (*(int(column[place]) for column in columns), int(rows[place])))
    assert [int(rows[place]) for place in places] == ordered.tolist()


def test_columns_are_contiguous_and_of_the_types_that_kernels_take() -> None:
    store = ColumnStore()
    store.insert(idle(1))

    types = [column.dtype for column in store.snapshot().columns]

    assert [np.uint8, np.int32, np.int32, np.int32, np.int32, np.float64] == types


# ---- rows by id, new rows, members, notes ------------------------------------------------------------------------


@EXAMPLES
@given(edits(), st.sampled_from([0, 1, 3]))
def test_how_many_wait_for_rows_or_columns_shows_in_no_view(steps: list[tuple[str, Machine]], most: int) -> None:
    """Whether machines get their rows, and are written, one by one or all together."""
    with pytest.MonkeyPatch.context() as patch:
        stores = [ColumnStore(), ColumnStore()]
        for kind, machine in [*steps, ("view", steps[0][1])]:
            shown = []
            for store, limit in zip(stores, (most, 8192), strict=True):
                patch.setattr(store_module, "WAITING_MAX", limit)
                patch.setattr(store_module, "WRITTEN_MAX", limit)
                if kind == "put":
                    store.insert(machine)
                elif kind == "remove":
                    with contextlib.suppress(KeyError):
                        store.remove(machine.id)
                else:
                    view = store.snapshot()
                    shown.append(read(view))
                    assert [view.rows[machine_id] for machine_id in view.ids] == list(range(len(view)))
                    assert (list(view.rows), view.ids) == (sorted(view.ids), sorted(view.ids))
            assert shown[:1] == shown[1:]
            assert len(stores[0]) == len(stores[1])


def test_an_id_without_a_row_is_not_among_the_rows() -> None:
    store = ColumnStore()
    for number in (1, 3):
        store.insert(idle(number))
    rows = store.snapshot().rows

    assert dict(rows) == {"m01": 0, "m03": 1}
    assert [rows.get(MachineId(name)) for name in ("m00", "m02", "m04")] == [None, None, None]
    assert len(rows) == 2


@EXAMPLES
@given(edits())
def test_the_machines_of_a_cluster_are_found_at_any_time(steps: list[tuple[str, Machine]]) -> None:
    """Those that wait for a row too; ids ascending."""
    store, fleet = ColumnStore(), dict[MachineId, Machine]()
    for kind, machine in steps:
        if kind == "put":
            store.insert(machine)
            fleet[machine.id] = machine
        elif kind == "remove" and machine.id in fleet:
            store.remove(machine.id)
            del fleet[machine.id]
        elif kind == "view":
            store.snapshot()
        for cluster in {each.cluster for each in fleet.values() if each.cluster} | {"nobody"}:
            assert store.ids_in(cluster) == sorted(each.id for each in fleet.values() if each.cluster == cluster)


@EXAMPLES
@given(edits(), st.lists(st.booleans(), min_size=25, max_size=25))
def test_a_note_stays_until_its_machine_changes(steps: list[tuple[str, Machine]], noting: list[bool]) -> None:
    """Wherever the row goes meanwhile."""
    store, notes, known = ColumnStore(), dict[str, bytes](), set[MachineId]()
    for turn, ((kind, machine), is_noting) in enumerate(zip(steps, noting, strict=False)):
        if kind == "put":
            store.insert(machine)
            known.add(machine.id)
            notes.pop(machine.id, None)
        elif kind == "remove" and machine.id in known:
            store.remove(machine.id)
            known.discard(machine.id)
            notes.pop(machine.id, None)
        elif kind == "view":
            store.snapshot()
        if is_noting and machine.id in known:
            notes[machine.id] = bytes([turn + 1]) * 16
            store.note(machine.id, notes[machine.id])
        if turn % 4 == 0:
            store.settle()
            # A view may number the rows again, and then the notes are others.
            ids, told = list(store.snapshot().rows), store.notes()
            found = {ids[row]: told[row].tobytes() for row in range(len(told)) if told[row].any()}
            assert found == notes
            assert store.rows_without(np.zeros(0, np.int64)) == sorted(known)
    with pytest.raises(KeyError):
        store.note(MachineId("nobody"), bytes(16))
