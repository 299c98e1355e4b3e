"""Machines of pools without stock are found among what machines use, however much more a vocabulary holds."""

import tracemalloc
from dataclasses import replace

from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore, Offer, Shape
from bigfleet.engine.decision import CapacityPool, Options
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState

UNUSED = 20_000
SOLD_OUT = frozenset({CapacityPool("t1", "za", CapacityType.SPOT), CapacityPool("t2", "zb", CapacityType.ON_DEMAND)})


def slot(number: int, instance_type: str, zone: str, capacity_type: CapacityType) -> Machine:
    """Return a Speculative machine with a price of its own."""
    return Machine(
        id=MachineId(f"m{number}"),
        state=MachineState.SPECULATIVE,
        instance_type=instance_type,
        zone=zone,
        capacity_type=capacity_type,
        resources={"cpu": "4"},
        price_usd_per_hour=1.0 + number,
    )


def fleet() -> ColumnSnapshot:
    """Return six slots; the first and the fifth are of pools without stock."""
    store = ColumnStore()
    kinds = [
        ("t1", "za", CapacityType.SPOT),
        ("t1", "za", CapacityType.ON_DEMAND),
        ("t1", "zb", CapacityType.SPOT),
        ("t2", "za", CapacityType.ON_DEMAND),
        ("t2", "zb", CapacityType.ON_DEMAND),
        ("t3", "zc", CapacityType.RESERVED),
    ]
    for number, kind in enumerate(kinds):
        store.insert(slot(number, *kind), None)
    return store.snapshot()


def options(*probes: str) -> Options:
    """Return options with both pools sold out."""
    return Options(
        now_seconds=0.0, reported=frozenset(), sold_out=SOLD_OUT, probes=frozenset(MachineId(each) for each in probes)
    )


def test_speculative_machines_of_sold_out_pools_are_found_without_probes() -> None:
    """Type, zone and capacity type must all agree, and the machine must be Speculative."""
    view = fleet()

    assert sold_out_rows(view, options()).tolist() == [0, 4]
    assert sold_out_rows(view, options("m0")).tolist() == [4]
    assert sold_out_rows(view, replace(options(), sold_out=frozenset())).tolist() == []
    view.columns.state[:] = MachineState.IDLE
    assert sold_out_rows(view, options()).tolist() == []


def test_what_no_machine_uses_takes_no_memory() -> None:
    """20,000 shapes and 20,000 offers that no machine has: less than a megabyte for six machines."""
    view = fleet()
    for number in range(UNUSED):
        view.vocabulary.add_shape(Shape("t1", f"z{number}", frozenset(), frozenset()))
        view.vocabulary.add_offer(Offer(int(CapacityType.SPOT), 100.0 + number, 0.0))
    tracemalloc.start()
    try:
        rows = sold_out_rows(view, options()).tolist()
        _now, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert rows == [0, 4]
    assert peak_bytes < 1_000_000
