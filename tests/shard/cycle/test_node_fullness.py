"""How full a node is: by its scarcest resource, DaemonSets apart."""

import pytest

from bigfleet.engine.columns.store import ColumnStore
from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.cycle.node_fullness import HELD, NodeFullness, fullness
from bigfleet.shard.inventory.ingest import NodeLoad
from tests.shard.world import machine

SUPPLY = {"cpu": 4000, "memory": 8000}
DAEMONS = {"cpu": 400, "memory": 100}


@pytest.mark.parametrize(
    ("requested", "overhead", "quarters"),
    [
        ({}, {}, 0),
        ({"cpu": 400, "memory": 100}, DAEMONS, 0),
        ({"cpu": 401, "memory": 100}, DAEMONS, 1),
        ({"cpu": 1000}, {}, 1),
        ({"cpu": 1001}, {}, 2),
        ({"cpu": 1000, "memory": 7000}, {}, 4),
        ({"cpu": 9000}, {}, 4),
        # What the machine does not have is all used: a status may be older than the machine's record.
        ({"gpu": 1000}, {}, 4),
        ({"cpu": 500}, {"cpu": 5000}, 0),
    ],
)
def test_fullness_is_in_quarters_of_the_resource_that_is_used_most(
    requested: Vector, overhead: Vector, quarters: int
) -> None:
    assert fullness(requested, SUPPLY, overhead) == quarters


def test_only_nodes_that_an_excess_machine_can_change_places_with_are_read() -> None:
    """Of 100 machines of two clusters and five shapes the ten of its cluster and shape, with one excess machine."""
    store = ColumnStore()
    for number in range(100):
        cluster, zone = f"c{number % 2}", f"z{number // 2 % 5}"
        store.insert(machine(f"m{number:02d}", MachineState.CONFIGURED, cluster=cluster, zone=zone), None)
    store.insert(machine("m00-idle", MachineState.IDLE, zone="z0"), 0.0)
    asked: list[str] = []

    def load_of(machine_id: MachineId) -> NodeLoad:
        asked.append(machine_id)
        return NodeLoad(1, f"node-{machine_id}", {"cpu": 2000}, 2)

    excess = [MachineId("m00"), MachineId("gone")]
    found = NodeFullness(load_of).read(
        store.snapshot(), excess, held={MachineId("m10")}, short=frozenset(), overheads={}
    )

    like = [f"m{number:02d}" for number in range(0, 100, 10)]
    assert asked == [each for each in like if each != "m10"]
    assert found == {**dict.fromkeys(like, 2), "m00": 1, "m10": HELD}


def test_a_machine_that_stays_because_its_row_is_short_comes_before_the_others_of_its_kind() -> None:
    """Also with an empty node: as the excess one it would not be reclaimed, and the next cycle would name another."""
    store = ColumnStore()
    for name, fingerprint in (("m0", "f"), ("m1", "g"), ("m2", "f")):
        stamped = machine(name, MachineState.CONFIGURED, cluster="c1", assigned_need_fingerprint=fingerprint)
        store.insert(stamped, None)
    loads = {"m0": NodeLoad(1, "node-m0", {"cpu": 2000}, 2), "m2": NodeLoad(1, "node-m2", {"cpu": 4000}, 4)}

    read = NodeFullness(loads.get).read
    found = read(
        store.snapshot(), [MachineId("m2")], held=frozenset(), short={("c1", "g", ""), ("c2", "f", "")}, overheads={}
    )

    assert found == {"m0": 2, "m1": HELD, "m2": 3}


def test_no_node_is_read_without_an_excess_machine() -> None:
    store = ColumnStore()
    store.insert(machine("m0", MachineState.CONFIGURED, cluster="c1"), None)
    read = NodeFullness(lambda _machine: NodeLoad(1, "node", {"cpu": 2000}, 2)).read

    assert read(store.snapshot(), [], held=frozenset(), short=frozenset(), overheads={}) == {}
