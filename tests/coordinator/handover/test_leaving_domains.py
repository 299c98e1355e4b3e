"""A shard that is leaving a domain is told so now and then, not with every report while machines there are bound."""

from dataclasses import replace

import pytest

from bigfleet.coordinator.delivery import PERSISTENT_RETRY_CYCLES, State
from bigfleet.coordinator.ephemeral_state import EphemeralState
from bigfleet.coordinator.ownership_reconcile import OwnershipPlan, WantedInstruction
from bigfleet.model.ids import ShardId
from bigfleet.model.instructions import Ack, AssignDomain, InstructionOutcome, Payload, UnassignDomain
from bigfleet.model.ownership import Domain

EAST = ShardId("east")
CYCLE_SECONDS = 30.0
ZONE = Domain("zone", "a")
RETRY_SECONDS = PERSISTENT_RETRY_CYCLES * CYCLE_SECONDS


def new_leader() -> EphemeralState:
    return EphemeralState.of_new_leader(7, CYCLE_SECONDS)


def told(ephemeral: EphemeralState, payload: Payload, now_seconds: float) -> EphemeralState:
    """What squaring wants after a report."""
    return ephemeral.with_plan(OwnershipPlan(instructions=[WantedInstruction(EAST, "", payload)]), EAST, now_seconds)


def done(ephemeral: EphemeralState, now_seconds: float) -> EphemeralState:
    """The shard is told, and acknowledges."""
    due = ephemeral.ledger.due(EAST, now_seconds)
    acks = [Ack(entry.instruction.instruction_id, InstructionOutcome.ACCEPTED) for entry in due]
    return replace(ephemeral, ledger=ephemeral.ledger.delivered(due).acked(EAST, acks, now_seconds))


def live(ephemeral: EphemeralState) -> list[Payload | None]:
    return [entry.instruction.payload for entry in ephemeral.ledger.live()]


@pytest.mark.rule("coordinator 9.2/2")
def test_a_domain_that_is_being_left_is_told_again_after_ten_report_cycles() -> None:
    ephemeral = done(told(new_leader(), UnassignDomain(ZONE), 0.0), 1.0)
    for now_seconds in (2.0, 30.0, RETRY_SECONDS):
        ephemeral = told(ephemeral, UnassignDomain(ZONE), now_seconds)
        assert live(ephemeral) == []
    ephemeral = told(ephemeral, UnassignDomain(ZONE), 1.0 + RETRY_SECONDS)

    assert live(ephemeral) == [UnassignDomain(ZONE)]
    assert [entry.state for entry in ephemeral.ledger.entries] == [State.DONE, State.PENDING]


def test_what_was_not_answered_is_told_at_once() -> None:
    ephemeral = told(new_leader(), UnassignDomain(ZONE), 0.0)
    ephemeral = told(ephemeral, UnassignDomain(ZONE), 1.0)

    assert live(ephemeral) == [UnassignDomain(ZONE)]


@pytest.mark.rule("coordinator 9.2/2")
def test_a_domain_that_was_given_back_meanwhile_is_taken_at_once() -> None:
    ephemeral = done(told(new_leader(), UnassignDomain(ZONE), 0.0), 1.0)
    given = told(ephemeral, AssignDomain(ZONE), 2.0)
    delivered = replace(given, ledger=given.ledger.delivered(given.ledger.due(EAST, 2.0)))

    # The answer to the second may be lost, and the shard holds the domain all the same.
    for after in (done(given, 3.0), delivered):
        assert UnassignDomain(ZONE) in live(told(after, UnassignDomain(ZONE), 4.0))


def test_other_domains_are_told_meanwhile() -> None:
    ephemeral = done(told(new_leader(), UnassignDomain(ZONE), 0.0), 1.0)
    other = UnassignDomain(Domain("zone", "b"))

    assert live(told(ephemeral, other, 2.0)) == [other]
