"""The orders of a snapshot (docs/spec/model.md §3)."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.snapshot import Snapshot, idle_order_key, keep_priority_key
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from tests.engine_cases import machine_of
from tests.strategies import machines


@st.composite
def some_machines(draw: st.DrawFn) -> list[Machine]:
    ids = draw(st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=8))
    return [draw(machines(machine_id)) for machine_id in ids]


@given(some_machines())
def test_every_machine_is_in_its_state_by_id_and_in_its_cluster_by_keep_priority(fleet: Sequence[Machine]) -> None:
    snapshot = Snapshot.of(fleet)

    assert list(snapshot.machines) == sorted(machine.id for machine in fleet)
    for state in MachineState:
        in_state = [machine for machine in fleet if machine.state is state]
        assert list(snapshot.of_state(state)) == sorted(in_state, key=lambda machine: machine.id)
        for cluster in {machine.cluster for machine in in_state if machine.cluster}:
            bound = [machine for machine in in_state if machine.cluster == cluster]
            assert list(snapshot.of_cluster(cluster, state)) == sorted(bound, key=keep_priority_key)


def test_keep_priority_is_price_then_reclamation_dollars_descending_then_id() -> None:
    entries = [("d", 2, 0), ("c", 1, 5), ("b", 1, 5), ("a", 1, "+Inf"), ("e", 1, 0)]
    fleet = [
        machine_of({"st": "Configured", "cluster": "c1", "price": price, "arec": dollars}, machine_id, {})
        for machine_id, price, dollars in entries
    ]

    assert [machine.id for machine in sorted(fleet, key=keep_priority_key)] == ["a", "b", "c", "e", "d"]


def test_idle_machines_are_acquired_by_price_then_id() -> None:
    fleet = [
        machine_of({"st": "Idle", "price": price}, machine_id, {})
        for machine_id, price in (("b", 1), ("a", 1), ("c", 0))
    ]

    assert [machine.id for machine in sorted(fleet, key=idle_order_key)] == ["c", "a", "b"]
