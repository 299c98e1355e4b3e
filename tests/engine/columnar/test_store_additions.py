"""Machines that are added many at once stand among the others as if each had been inserted."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import Columns, ColumnStore, Numbers
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from tests.engine.proof import examples
from tests.strategies import machines

EXAMPLES = examples(100)

of_any = st.integers(0, 19).flatmap(lambda number: machines(f"m{number:02}"))
steps = st.one_of(
    st.tuples(st.just("put"), st.lists(of_any, min_size=1, max_size=1)),
    st.tuples(st.just("remove"), st.lists(of_any, min_size=1, max_size=1)),
    st.tuples(st.just("add"), st.lists(of_any, max_size=6, unique_by=lambda machine: machine.id)),
    st.tuples(st.sampled_from(["view", "notes", "ids", "rows", "length", "validate"]), st.just(list[Machine]())),
)


def add(store: ColumnStore, new: Sequence[Machine], turn: int) -> None:
    """Add machines many at once, each with a note."""
    vocabulary, columns = store.vocabulary, Columns.empty(len(new))
    numbers: list[Numbers] = [
        (
            machine.state,
            vocabulary.cluster(machine.cluster),
            vocabulary.shape(machine),
            vocabulary.offer(machine),
            vocabulary.stamp(machine),
            np.nan,
        )
        for machine in new
    ]
    columns.fill(np.arange(len(new)), numbers)
    store.add([machine.id for machine in new], columns, np.full((len(new), 2), turn, np.uint64))


@EXAMPLES
@given(st.lists(steps, max_size=30))
def test_added_machines_are_as_inserted_ones(story: list[tuple[str, list[Machine]]]) -> None:
    """Also where rows, notes or a view are asked for between two additions."""
    store, plain = ColumnStore(), ColumnStore()
    fleet, notes = dict[MachineId, Machine](), dict[MachineId, int]()
    for turn, (kind, shown) in enumerate(story, start=1):
        if kind == "put":
            for each in (store, plain):
                each.insert(shown[0])
            fleet[shown[0].id] = shown[0]
            notes.pop(shown[0].id, None)
        elif kind == "remove" and shown[0].id in fleet:
            for each in (store, plain):
                each.remove(shown[0].id)
            del fleet[shown[0].id]
            notes.pop(shown[0].id, None)
        elif kind == "add":
            new = [machine for machine in shown if machine.id not in fleet]
            add(store, new, turn)
            for machine in new:
                plain.insert(machine)
                fleet[machine.id], notes[machine.id] = machine, turn
        elif kind == "length":
            assert len(store) == len(fleet)
        elif kind == "ids":
            for cluster in {machine.cluster for machine in fleet.values() if machine.cluster}:
                assert store.ids_in(cluster) == plain.ids_in(cluster)
        elif kind == "rows":
            layout = store.layout
            assert None not in [store.row(machine_id) for machine_id in notes], "an added machine has no row"
            assert store.layout == layout
        elif kind == "notes":
            noted = store.notes()
            rows = {machine_id: store.row(machine_id) for machine_id in notes}
            assert {each: int(noted[row][0]) for each, row in rows.items() if row is not None} == notes
        elif kind == "view":
            assert snapshot_of(store.snapshot()) == snapshot_of(plain.snapshot())
        else:
            store.validate()
    view = store.snapshot()
    assert snapshot_of(view) == snapshot_of(plain.snapshot())
    assert view.ids == sorted(view.ids)
    noted = store.notes()
    held = {view.ids[row]: int(noted[row][0]) for row in range(len(noted)) if noted[row].any()}
    assert held == notes
