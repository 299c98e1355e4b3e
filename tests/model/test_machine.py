"""Machines: supply, cost, attributes and the invariant (docs/spec/model.md §1, §2, §9)."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, InvariantFault, Machine, invariant_fault
from bigfleet.model.states import MachineState
from tests.strategies import HOST, machines

IDLE = Machine(id=MachineId("m"), state=MachineState.IDLE, host=HOST)

#: State → whether a host and a cluster are wanted (True), refused (False) or free (None).
WANTED = {
    MachineState.SPECULATIVE: (False, False),
    MachineState.CREATING: (False, False),
    MachineState.IDLE: (True, None),
    MachineState.CONFIGURING: (True, None),
    MachineState.CONFIGURED: (True, True),
    MachineState.DRAINING: (True, True),
    MachineState.DELETING: (True, None),
    MachineState.FAILED: (None, None),
}


@pytest.mark.parametrize("state", MachineState)
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("cluster", [True, False])
def test_a_record_is_sound_when_its_state_allows_host_and_cluster(
    state: MachineState, host: bool, cluster: bool
) -> None:
    machine = replace(
        IDLE,
        state=state,
        host=HOST if host else NO_HOST,
        cluster=ClusterId("c1" if cluster else ""),
        last_error="broken" if state is MachineState.FAILED else "",
    )

    fault = invariant_fault(machine)

    wanted = WANTED.get(state)
    is_sound = wanted is not None and wanted[0] in (None, host) and wanted[1] in (None, cluster)
    assert (fault is None) == is_sound
    assert fault is None or fault[0] is InvariantFault.STRUCTURAL


def test_a_failed_machine_must_say_why() -> None:
    fault = invariant_fault(replace(IDLE, state=MachineState.FAILED))

    assert fault is not None
    assert "last_error" in fault[1]


@given(machines())
def test_drawn_machines_are_sound(machine: Machine) -> None:
    assert invariant_fault(machine) is None


@given(st.floats(), st.floats())
def test_the_first_broken_part_is_the_reason(probability: float, price: float) -> None:
    fault = invariant_fault(replace(IDLE, interruption_probability=probability, price_usd_per_hour=price))

    if not 0 <= probability <= 1:
        assert fault is not None
        assert fault[0] is InvariantFault.INTERRUPTION_PROBABILITY
    elif not price >= 0:
        assert fault is not None
        assert fault[0] is InvariantFault.PRICE
    else:
        assert fault is None


def test_allocatable_hides_resources_in_every_dimension() -> None:
    shape = {"cpu": "8", "memory": "8Gi"}

    assert replace(IDLE, resources=shape).supply == {"cpu": 8000, "memory": 8 * 2**30 * 1000}
    assert replace(IDLE, resources=shape, allocatable={"cpu": "7"}).supply == {"cpu": 7000}
    assert replace(IDLE, resources=shape, allocatable={"cpu": "0"}).supply == {}


def test_a_machine_that_is_never_interrupted_costs_its_price() -> None:
    safe = replace(IDLE, price_usd_per_hour=2.0)

    assert safe.effective_cost_usd_per_hour(math.inf) == 2.0
    assert safe.cost_for_bucket_usd_per_hour(27) == 2.0


def test_cost_is_price_plus_probability_times_penalty() -> None:
    spot = replace(IDLE, price_usd_per_hour=0.3, interruption_probability=0.1)

    assert spot.effective_cost_usd_per_hour(4.0) == 0.3 + 0.1 * 4.0
    assert spot.effective_cost_usd_per_hour(-4.0) == 0.3
    assert spot.cost_for_bucket_usd_per_hour(5) == 0.3 + 0.1 * 4.0
    assert spot.effective_cost_usd_per_hour(math.inf) == math.inf


def test_type_and_zone_come_from_the_record_before_the_labels() -> None:
    labelled = replace(IDLE, labels={labels.INSTANCE_TYPE: "label", labels.ZONE: "label", "empty": ""})

    assert labelled.attribute(labels.INSTANCE_TYPE) == "label"
    assert replace(labelled, instance_type="record").attribute(labels.INSTANCE_TYPE) == "record"
    assert replace(labelled, zone="za").attribute(labels.ZONE) == "za"
    assert labelled.attribute("empty") == ""
    assert labelled.attribute("absent") is None


@given(machines(in_states=st.just(MachineState.CONFIGURED)))
def test_losing_the_binding_clears_every_stamp_and_nothing_else(machine: Machine) -> None:
    free = replace(machine.without_binding(), state=MachineState.IDLE)

    blank = Machine(id=machine.id, state=MachineState.IDLE)
    for name in (
        "cluster",
        "assigned_priority",
        "assigned_interruption_penalty_dollars",
        "assigned_reclamation_penalty_dollars",
        "assigned_need_fingerprint",
        "assigned_group",
        "intended_cluster",
        "preempted_for",
    ):
        assert getattr(free, name) == getattr(blank, name)
    for name in ("host", "instance_type", "zone", "labels", "supply", "price_usd_per_hour", "capacity_type"):
        assert getattr(free, name) == getattr(machine, name)
