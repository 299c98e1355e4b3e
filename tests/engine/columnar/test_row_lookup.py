"""Rows by id are the same whether they are halved for or noted, in every layout and with any hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columns import row_lookup
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from tests.engine.proof import examples
from tests.strategies import HOST

EXAMPLES = examples(60)
NAMES = [MachineId(f"m{number:02}") for number in range(24)]


class Clashing(str):
    """An id whose hash is that of many others."""

    __slots__ = ()

    def __hash__(self) -> int:
        return int(self[1:]) % 3


def idle(machine_id: MachineId) -> Machine:
    return Machine(id=machine_id, state=MachineState.IDLE, host=HOST, resources={"cpu": "4"})


def grown(machine_ids: list[MachineId]) -> ColumnStore:
    """Return a store whose machines got their rows one after the other."""
    store = ColumnStore()
    for machine_id in machine_ids:
        store.insert(idle(machine_id))
        store.settle()
    return store


@EXAMPLES
@given(st.permutations(NAMES), st.integers(0, 24), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_rows_are_found_before_they_are_noted_and_after(
    order: list[MachineId], size: int, gone: set[MachineId], is_clashing: bool
) -> None:
    """Removed machines included, until the next layout; ids without a row have none."""
    known = [MachineId(Clashing(name)) if is_clashing else name for name in order[:size]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_lookup, "HALVED_MAX", 2)
        store = grown(known)
        for machine_id in known:
            if str(machine_id) in gone:
                store.remove(machine_id)
        for expected in (sorted(known), sorted(name for name in known if str(name) not in gone)):
            for _ in range(3):
                rows = {name: store.row(MachineId(Clashing(name)) if is_clashing else name) for name in NAMES}
                assert rows == {name: expected.index(name) if name in expected else None for name in NAMES}
            # One more machine makes another layout, without those that are gone.
            store.insert(idle(MachineId("z")))
            store.settle()


def test_rows_are_noted_once_that_has_paid_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that have no row do not count: noting rows would not find them sooner."""
    monkeypatch.setattr(row_lookup, "HALVED_MAX", 3)
    halved: list[str] = []
    halve = row_lookup.halved

    def heard(ids: list[MachineId], wanted: MachineId) -> int | None:
        halved.append(wanted)
        return halve(ids, wanted)

    monkeypatch.setattr(row_lookup, "halved", heard)
    # One machine has its place whatever its hash is.
    finder = grown(NAMES[:1])._finder
    halved.clear()
    for name in ("absent", "absent", "absent", *NAMES[:1] * 5):
        finder.row(MachineId(name))

    assert halved == ["absent", "absent", "absent", *NAMES[:1] * 3]


def test_a_machine_that_comes_back_is_counted_once() -> None:
    """Before it is written and after."""
    store = grown(NAMES[:4])
    for name in NAMES[:2]:
        store.remove(name)
    assert len(store) == 2
    store.insert(idle(NAMES[0]))
    store.insert(idle(NAMES[0]))

    assert len(store) == 3
    store.remove(NAMES[0])
    assert (len(store), store.snapshot().ids) == (2, NAMES[2:4])
