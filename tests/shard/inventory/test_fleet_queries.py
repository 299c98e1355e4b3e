"""What is counted and found in columns equals what is counted and found machine by machine."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.matching import fits
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_for_dollars
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.inventory import fleet_queries
from bigfleet.shard.inventory.fleet_queries import MachineQuery, ShapeCounts
from bigfleet.shard.inventory.inventory import Inventory
from tests.engine.proof import in_proportion
from tests.shard.world import machine, need

S = MachineState
NOBODY = MachineId("nobody")
CLUSTERED = (S.CONFIGURED, S.DRAINING, S.CONFIGURING)


@st.composite
def machines(draw: st.DrawFn) -> list[Machine]:
    """Draw a fleet of a few shapes, offers, stamps and clusters."""
    fleet = []
    for number in range(draw(st.integers(0, 12))):
        state = draw(st.sampled_from([state for state in S if state is not S.UNSPECIFIED]))
        facts: dict[str, Any] = {
            "instance_type": draw(st.sampled_from(["t4", "t8"])),
            "zone": draw(st.sampled_from(["za", "zb", ""])),
            "capacity_type": draw(st.sampled_from(CapacityType)),
            "allocatable": draw(st.sampled_from([{"cpu": "4"}, {"cpu": "8", "memory": "1Gi"}, {}])),
            "last_error": "broken" if state is S.FAILED else "",
        }
        if state in CLUSTERED:
            facts["cluster"] = ClusterId(draw(st.sampled_from(["c1", "c2"])))
            facts["assigned_interruption_penalty_dollars"] = draw(st.sampled_from([0.0, 3.0, 1e9]))
        fleet.append(machine(f"m{number:02}", state, **facts))
    return fleet


def filled(fleet: list[Machine], gone: frozenset[MachineId] = frozenset()) -> Inventory:
    """Return an inventory that has seen the fleet, of which some machines went after a snapshot."""
    inventory = Inventory()
    for each in fleet:
        inventory.insert(each, now_seconds=0.0)
    inventory.snapshot()
    for machine_id in gone:
        inventory.remove(machine_id)
    return inventory


fleets = machines().flatmap(
    lambda fleet: st.tuples(st.just(fleet), st.frozensets(st.sampled_from([each.id for each in fleet] or [NOBODY])))
)


@pytest.mark.rule("shard 14/8")
@given(fleets)
@settings(max_examples=in_proportion(150), deadline=None)
def test_counts_are_those_of_the_machines(drawn: tuple[list[Machine], frozenset[MachineId]]) -> None:
    """Configured machines by cluster, and every machine by what the metrics tell it apart by."""
    fleet, gone = drawn
    inventory = filled(fleet, gone - {NOBODY})
    view = inventory.snapshot()
    kinds = Counter(
        (
            each.state,
            each.capacity_type,
            bucket_for_dollars(each.assigned_interruption_penalty_dollars) if each.cluster else 0,
        )
        for each in inventory
    )

    assert fleet_queries.machines_by_kind(view) == dict(kinds)
    assert fleet_queries.configured_by_cluster(view) == dict(
        Counter(each.cluster for each in inventory if each.state is S.CONFIGURED)
    )
    for each in fleet:
        assert (fleet_queries.row_of(view, each.id) is None) == (each.id not in inventory)
        if each.id in inventory:
            assert fleet_queries.supply_of(view, each.id) == each.supply


ROWS: list[Need] = [
    need("c1", "4"),
    replace(need("c1", "4"), min_unit=parse_vector({"cpu": "8"})),
    replace(need("c1", "4"), min_unit=parse_vector({"memory": "1Gi"})),
]


@given(fleets, st.sampled_from(ROWS), st.sampled_from(S))
@settings(max_examples=in_proportion(150), deadline=None)
def test_matching_machines_are_counted_by_state(
    drawn: tuple[list[Machine], frozenset[MachineId]], row: Need, state: MachineState
) -> None:
    """Shapes that no machine has any more count for nothing."""
    fleet, gone = drawn
    inventory = filled(fleet, gone - {NOBODY})
    matching = [each for each in inventory if each.state is state and fits(row.profile, row.min_unit, each)]

    assert ShapeCounts(inventory.snapshot()).count(row, state) == len(matching)


wanted_machines = st.builds(
    MachineQuery,
    cluster=st.sampled_from(["", "c1", "nobody"]),
    instance_type=st.sampled_from(["", "t4", "t9"]),
    zone=st.sampled_from(["", "za"]),
    states=st.frozensets(st.sampled_from([int(state) for state in S]), max_size=2),
    capacity_types=st.frozensets(st.sampled_from([int(kind) for kind in CapacityType]), max_size=2),
)


@given(fleets, wanted_machines)
@settings(max_examples=in_proportion(200), deadline=None)
def test_all_and_only_the_machines_asked_for_are_found(
    drawn: tuple[list[Machine], frozenset[MachineId]], wanted: MachineQuery
) -> None:
    """Ids ascending, without those that are left out."""
    fleet, left_out = drawn
    view = filled(fleet).snapshot()
    expected = [each.id for each in fleet if wanted.holds(each) and each.id not in left_out]

    assert [view.ids[row] for row in fleet_queries.find(view, wanted, but_for=left_out)] == expected
    assert fleet_queries.first_after(view, "m05") == sum(each.id <= "m05" for each in fleet)
