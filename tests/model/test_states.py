"""The state table: every pair of states, and every state in its class (docs/spec/model.md §2)."""

import pytest

from bigfleet.model.states import (
    BOUND_STATES,
    RESTING_STATES,
    TRANSITIONAL_STATES,
    TRANSITIONS,
    UNBOUND_STATES,
    CapacityType,
    MachineState,
    is_legal_transition,
    transition_reason,
)

S = MachineState
LEGAL = {
    S.SPECULATIVE: {S.CREATING},
    S.CREATING: {S.IDLE, S.FAILED},
    S.IDLE: {S.CONFIGURING, S.DELETING},
    S.CONFIGURING: {S.CONFIGURED, S.IDLE, S.FAILED},
    S.CONFIGURED: {S.DRAINING},
    S.DRAINING: {S.IDLE, S.FAILED},
    S.DELETING: {S.SPECULATIVE, S.FAILED},
    S.FAILED: set(),
    S.UNSPECIFIED: set(),
}


@pytest.mark.parametrize("source", S)
@pytest.mark.parametrize("target", S)
def test_a_pair_of_states_is_legal_as_the_table_says(source: MachineState, target: MachineState) -> None:
    assert is_legal_transition(source, target) == (target in LEGAL[source] or source is target)
    assert ((source, target) in TRANSITIONS) == (target in LEGAL[source])


@pytest.mark.parametrize("edge", TRANSITIONS)
def test_every_edge_has_a_reason_of_its_own(edge: tuple[MachineState, MachineState]) -> None:
    assert transition_reason(*edge)
    assert list(TRANSITIONS.values()).count(transition_reason(*edge)) == 1


def test_staying_is_no_edge() -> None:
    with pytest.raises(KeyError):
        transition_reason(S.IDLE, S.IDLE)


def test_every_state_is_classified() -> None:
    """At rest, in transition, or an end: a new state fails here until somebody says what it is."""
    assert RESTING_STATES | TRANSITIONAL_STATES | {S.FAILED, S.UNSPECIFIED} == set(S)
    assert not RESTING_STATES & TRANSITIONAL_STATES
    assert not BOUND_STATES & UNBOUND_STATES
    assert BOUND_STATES | UNBOUND_STATES | {S.CREATING, S.FAILED, S.UNSPECIFIED} == set(S)


def test_only_transitional_states_end_by_themselves() -> None:
    """Every transitional state has somewhere to go, and all but a drain that began may also come back."""
    assert all(LEGAL[state] for state in TRANSITIONAL_STATES)
    assert all(S.FAILED in LEGAL[state] for state in TRANSITIONAL_STATES)
    assert not any(S.FAILED in LEGAL[state] for state in RESTING_STATES)


def test_numbers_and_labels_are_those_of_the_wire() -> None:
    assert [(state.value, state.label) for state in S] == list(
        enumerate(
            [
                "Unspecified",
                "Speculative",
                "Creating",
                "Idle",
                "Configuring",
                "Configured",
                "Draining",
                "Deleting",
                "Failed",
            ]
        )
    )
    assert [(capacity_type.value, capacity_type.label) for capacity_type in CapacityType] == list(
        enumerate(["Unspecified", "BareMetal", "Reserved", "OnDemand", "Spot"])
    )
