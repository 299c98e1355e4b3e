"""Instructions on their way (docs/spec/coordinator.md §6): due, sent again, tried again, given up, never forgotten."""

import pytest

from bigfleet.coordinator.delivery import ANSWER_MAX, FINISHED_MAX, InstructionEntry, InstructionLedger, State
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import (
    Ack,
    AssignDomain,
    InstructionOutcome,
    Payload,
    ReassignSpeculative,
    Selector,
    TransferOwnership,
    UnassignDomain,
)
from bigfleet.model.ownership import Domain

EAST, WEST = ShardId("east"), ShardId("west")
CYCLE_SECONDS = 30.0
ZONE = Domain("zone", "a")
RELEASE = TransferOwnership(from_shard=EAST, to_shard=WEST, selector=Selector(count=2))
ADOPT = TransferOwnership(from_shard=WEST, to_shard=EAST, machine_ids=(MachineId("m"),))
TAKE_BACK = TransferOwnership(from_shard=EAST, to_shard=EAST, machine_ids=(MachineId("m"),))
#: What follows from state is told until it is done.
PERSISTENT = (AssignDomain(ZONE), UnassignDomain(ZONE), ADOPT, TAKE_BACK)


def told(*payloads: Payload, now_seconds: float = 0.0) -> InstructionLedger:
    ledger = InstructionLedger(report_cycle_seconds=CYCLE_SECONDS)
    for payload in payloads:
        ledger = ledger.enqueued(EAST, payload, term=7, now_seconds=now_seconds)
    return ledger


def only(ledger: InstructionLedger) -> InstructionEntry:
    (entry,) = ledger.entries
    return entry


def answered(ledger: InstructionLedger, outcome: InstructionOutcome, now_seconds: float) -> InstructionLedger:
    entry = next(iter(ledger.live()))
    return ledger.acked(EAST, [Ack(entry.instruction.instruction_id, outcome, "why")], now_seconds)


@pytest.mark.rule("coordinator 6/1")
def test_ids_are_term_and_sequence_and_an_answer_is_in_their_order() -> None:
    ledger = told(RELEASE, AssignDomain(ZONE), AssignDomain(Domain("zone", "b")))

    assert [entry.instruction.instruction_id for entry in ledger.due(EAST, 0.0)] == ["7-1", "7-2", "7-3"]
    assert ledger.due(WEST, 0.0) == ()


@pytest.mark.rule("coordinator 6/2")
def test_what_was_delivered_is_sent_again_in_every_answer_until_it_is_acked() -> None:
    ledger = told(AssignDomain(ZONE))
    for now_seconds in (0.0, 1.0, 500.0):
        due = ledger.due(EAST, now_seconds)
        assert [entry.instruction.instruction_id for entry in due] == ["7-1"]
        ledger = ledger.delivered(due)
        assert only(ledger).state is State.DELIVERED
    ledger = answered(ledger, InstructionOutcome.ACCEPTED, 500.0)

    assert (only(ledger).state, ledger.due(EAST, 501.0)) == (State.DONE, ())


@pytest.mark.rule("coordinator 6/3", "coordinator 12/15")
def test_a_refusal_is_final_and_surfaced() -> None:
    ledger = answered(told(RELEASE), InstructionOutcome.REJECTED_INVALID, 5.0)

    assert (only(ledger).state, only(ledger).is_surfaced) == (State.FAILED, True)


@pytest.mark.rule("coordinator 6/4", "coordinator 12/15")
def test_a_failure_is_tried_again_after_one_and_four_cycles_and_the_third_is_final_and_surfaced() -> None:
    ledger = answered(told(RELEASE), InstructionOutcome.FAILED, 10.0)
    assert (only(ledger).state, only(ledger).is_surfaced) == (State.PENDING, False)
    assert ledger.due(EAST, 39.9) == ()
    assert ledger.due(EAST, 40.0)

    ledger = answered(ledger.delivered(ledger.due(EAST, 40.0)), InstructionOutcome.FAILED, 40.0)
    assert ledger.due(EAST, 159.9) == ()
    assert ledger.due(EAST, 160.0)

    ledger = answered(ledger, InstructionOutcome.FAILED, 160.0)
    assert (only(ledger).state, only(ledger).is_surfaced) == (State.FAILED, True)
    assert only(ledger).last == Ack("7-1", InstructionOutcome.FAILED, "why")


@pytest.mark.rule("coordinator 6/5")
@pytest.mark.parametrize("payload", PERSISTENT, ids=["assign", "unassign", "adopt", "take back"])
def test_what_follows_from_state_is_never_given_up(payload: Payload) -> None:
    ledger, now_seconds = told(payload), 0.0
    for _ in range(6):
        now_seconds = only(ledger).next_delivery_seconds
        ledger = answered(ledger.delivered(ledger.due(EAST, now_seconds)), InstructionOutcome.FAILED, now_seconds).at(
            now_seconds
        )

    assert (only(ledger).state, only(ledger).is_surfaced) == (State.PENDING, True)
    assert only(ledger).next_delivery_seconds - now_seconds == 10 * CYCLE_SECONDS
    done = answered(ledger.delivered(ledger.due(EAST, 1e6)), InstructionOutcome.ACCEPTED, 1e6)
    assert (only(done).state, only(done).is_surfaced) == (State.DONE, False)
    # Nor does it ever expire.
    assert only(ledger.at(1e9)).state is State.PENDING


@pytest.mark.rule("coordinator 6/6", "coordinator 12/15")
@pytest.mark.parametrize("is_delivered", [False, True])
def test_what_a_donor_does_not_answer_within_ten_cycles_expires(is_delivered: bool) -> None:
    ledger = told(RELEASE)
    ledger = ledger.delivered(ledger.due(EAST, 0.0)) if is_delivered else ledger

    assert not only(ledger.at(299.9)).state.is_final
    assert only(ledger.at(300.0)).state is State.EXPIRED


@pytest.mark.rule("coordinator 6/7")
def test_two_with_the_same_effect_are_one() -> None:
    assert len(told(AssignDomain(ZONE), AssignDomain(ZONE), RELEASE, RELEASE).entries) == 2


@pytest.mark.rule("coordinator 6/7")
def test_an_opposite_cancels_what_was_not_delivered_and_follows_what_was() -> None:
    assert [entry.state for entry in told(AssignDomain(ZONE), UnassignDomain(ZONE)).entries] == [State.CANCELLED]

    ledger = told(AssignDomain(ZONE))
    ledger = ledger.delivered(ledger.due(EAST, 0.0)).enqueued(EAST, UnassignDomain(ZONE), term=7, now_seconds=0.0)
    assert [entry.state for entry in ledger.entries] == [State.DELIVERED, State.PENDING]


@pytest.mark.rule("coordinator 6/8")
def test_acks_of_others_and_of_unknown_ids_are_ignored() -> None:
    ledger = told(RELEASE)

    assert ledger.acked(EAST, [Ack("7-99", InstructionOutcome.ACCEPTED)], 1.0) == ledger
    assert ledger.acked(WEST, [Ack("7-1", InstructionOutcome.ACCEPTED)], 1.0) == ledger


@pytest.mark.rule("coordinator 6/9")
def test_what_is_final_is_listed_for_an_hour_and_no_more_than_a_thousand() -> None:
    done = answered(told(RELEASE), InstructionOutcome.ACCEPTED, 100.0)
    assert len(done.at(100.0 + 3_599.0).entries) == 1
    assert done.at(100.0 + 3_600.0).entries == ()

    ledger = told(*(AssignDomain(Domain("zone", str(number))) for number in range(FINISHED_MAX + 5)))
    acks = [Ack(entry.instruction.instruction_id, InstructionOutcome.ACCEPTED) for entry in ledger.entries]
    kept = ledger.acked(EAST, acks, 1.0).at(2.0).entries
    assert len(kept) == FINISHED_MAX
    assert kept[0].instruction.instruction_id == "7-6"


@pytest.mark.rule("coordinator 6/1")
def test_an_answer_carries_a_thousand_at_most() -> None:
    ledger = told(*(AssignDomain(Domain("zone", str(number))) for number in range(ANSWER_MAX + 5)))

    assert len(ledger.due(EAST, 0.0)) == ANSWER_MAX


@pytest.mark.rule("coordinator 5/2")
def test_with_its_shard_everything_pending_goes() -> None:
    ledger = told(RELEASE, ReassignSpeculative(from_shard=EAST, to_shard=WEST, selector=Selector(count=1)))

    assert [entry.state for entry in ledger.without_shard(EAST, 1.0).entries] == [State.CANCELLED] * 2
    assert not list(ledger.without_shard(EAST, 1.0).live())
