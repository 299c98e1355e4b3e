"""Moves between shards as they are counted and told, and several shards seen as one fleet."""

from dataclasses import replace
from typing import Any

import pytest

from bigfleet.cli.get.moves import DRAINED, Move, MoveState
from bigfleet.cli.up.fleet_observer import SeveralActions, merged
from bigfleet.cli.up.moves import MOVES_MAX, MoveTally
from bigfleet.cli.up.observer import ActionTally, ClusterFigures, FleetFigures, SeenAction
from bigfleet.cli.up.shard_tables import move_line
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

Status = pb.InstructionStatus


def asked(move_id: str = "7-1", state: Any = Status.STATE_PENDING, *, count: int = 4, reason: str = "") -> Status:
    """What a donor is told."""
    status = Status(shard_id="shard-1", state=state, why="shard-0 lacks cpu 60", last_reason=reason)
    status.instruction.instruction_id = move_id
    payload = status.instruction.transfer_ownership
    payload.from_shard_id, payload.to_shard_id = "shard-1", "shard-0"
    payload.selector.count, payload.selector.instance_type, payload.selector.zone = count, "std.16x64", "sim-1b"
    return status


def adoption(move_id: str = "7-1", state: Any = Status.STATE_PENDING, *ids: str) -> Status:
    """What the recipient is told."""
    status = Status(shard_id="shard-0", state=state, why="released for this shard: 2")
    status.instruction.instruction_id = f"{move_id}/adopt"
    payload = status.instruction.transfer_ownership
    payload.from_shard_id, payload.to_shard_id = "shard-1", "shard-0"
    payload.machine_ids.extend(ids or ("a", "b"))
    return status


def answer(*statuses: Status) -> pb.ListInstructionsResponse:
    return pb.ListInstructionsResponse(instructions=statuses)


def states(moves: list[Move]) -> list[MoveState]:
    return [move.state for move in moves]


def test_a_move_is_told_at_each_step_and_its_machines_are_counted_once() -> None:
    tally = MoveTally()
    told = [
        tally.take(answer(asked())),
        tally.take(answer(asked(state=Status.STATE_DELIVERED))),
        tally.take(answer(asked(state=Status.STATE_DONE))),
        tally.take(answer(asked(state=Status.STATE_DONE), adoption())),
        tally.take(answer(asked(state=Status.STATE_DONE), adoption("7-1", Status.STATE_DONE))),
        tally.take(answer(asked(state=Status.STATE_DONE), adoption("7-1", Status.STATE_DONE))),
    ]

    assert list(map(states, told)) == [[MoveState.ASKED], [], [MoveState.GIVEN], [], [MoveState.ARRIVED], []]
    (move,) = tally.moves
    assert (move.donor, move.recipient, move.tier, move.machines) == ("shard-1", "shard-0", "idle", 2)
    assert (move.instance_type, move.zone, move.why) == ("std.16x64", "sim-1b", "shard-0 lacks cpu 60")
    assert tally.machines_moved_total == 2


def test_what_another_leader_goes_on_with_keeps_its_reason() -> None:
    tally = MoveTally()
    tally.take(answer(asked(state=Status.STATE_DELIVERED)))
    tally.take(answer())
    tally.take(answer(adoption("7-1", Status.STATE_DONE)))

    (move,) = tally.moves
    assert (move.state, move.why, move.zone) == (MoveState.ARRIVED, "shard-0 lacks cpu 60", "sim-1b")
    assert tally.machines_moved_total == 2


def test_a_drain_is_no_move_of_machines_but_what_it_frees_is() -> None:
    drain = Status(shard_id="shard-1", state=Status.STATE_DONE, why="cheaper work")
    drain.instruction.instruction_id = "7-2"
    drain.instruction.cross_shard_drain.to_shard_id = "shard-0"
    drain.instruction.cross_shard_drain.selector.count = 3
    freed = asked("7-3", Status.STATE_DONE)
    freed.instruction.transfer_ownership.ClearField("selector")
    freed.instruction.transfer_ownership.machine_ids.extend(("a", "b"))
    tally = MoveTally()
    tally.take(answer(drain, freed))

    assert [(move.tier, move.state, move.machines, move.donor) for move in tally.moves] == [
        ("drain", MoveState.DRAINING, 3, "shard-1"),
        (DRAINED, MoveState.GIVEN, 2, "shard-1"),
    ]
    assert tally.machines_moved_total == 0


def test_notes_domains_and_what_is_taken_back_are_no_moves() -> None:
    note, back, domain = asked("7-4/note/shard-1"), asked("7-5"), Status(shard_id="shard-1")
    back.instruction.transfer_ownership.to_shard_id = "shard-1"
    domain.instruction.instruction_id = "7-6"
    domain.instruction.assign_domain.topology_key = "k"

    assert MoveTally().take(answer(note, back, domain)) == []


def test_a_refusal_is_told_with_its_words() -> None:
    tally = MoveTally()
    (move,) = tally.take(answer(asked(state=Status.STATE_FAILED, reason="nothing matches")))

    assert move_line(move) == (
        "move 7-1 shard-1 → shard-0, 4 std.16x64 in sim-1b, idle (tier 1): failed (nothing matches)"
    )


def test_a_new_move_is_told_with_its_reason() -> None:
    (move,) = MoveTally().take(answer(asked()))

    assert move_line(move).endswith("idle (tier 1): shard-0 lacks cpu 60")


def test_the_oldest_moves_are_forgotten() -> None:
    tally = MoveTally()
    tally.take(answer(*(asked(f"7-{number}") for number in range(MOVES_MAX + 5))))

    assert len(tally.moves) == MOVES_MAX
    assert tally.moves[0].move_id == "7-5"


def of_shard(cluster: str, *, cycle: int, short: int) -> FleetFigures:
    one = ClusterFigures(demand={"cpu": 4000}, shortfall={"cpu": short}, bound={"cpu": 4000 - short}, bound_machines=3)
    return FleetFigures(
        cycle=cycle,
        computed_at_unix_nanos=cycle,
        clusters={cluster: one},
        machines={(MachineState.CONFIGURED, CapacityType.SPOT): 3, (MachineState.IDLE, CapacityType.SPOT): 2},
        shortfall_by_model={"": {"cpu": short}} if short else {},
        unjoined_machines=1,
    )


def test_several_shards_add_up_to_one_fleet() -> None:
    by_shard = {"shard-0": of_shard("b", cycle=9, short=1000), "shard-1": of_shard("a", cycle=5, short=500)}
    fleet = merged(by_shard, ("a", "b"), moved_machines=6)

    assert (fleet.cycle, fleet.computed_at_unix_nanos, list(fleet.clusters)) == (5, 5, ["a", "b"])
    assert (fleet.demand, fleet.shortfall) == ({"cpu": 8000}, {"cpu": 1500})
    assert fleet.shortfall_by_model == {"": {"cpu": 1500}}
    assert fleet.machines == {
        (MachineState.CONFIGURED, CapacityType.SPOT): 6,
        (MachineState.IDLE, CapacityType.SPOT): 4,
    }
    assert (fleet.unjoined_machines, fleet.moved_machines) == (2, 6)
    one = fleet.shards["shard-0"]
    assert (one.clusters, one.machines, one.bound_machines, one.shortfall) == (("b",), 5, 3, {"cpu": 1000})


def test_actions_of_several_shards_are_counted_together_and_told_in_order() -> None:
    observers: list[Any] = []
    for shard, decided in ((0, (1, 4)), (1, (2, 3))):
        tally = ActionTally()
        for nanos in decided:
            tally.take(
                SeenAction(
                    action_id=f"{shard}/{nanos}",
                    kind="Bootstrap",
                    machine_id="m",
                    cluster_id="c",
                    reason="phase1.idle",
                    outcome="success",
                    decided_unix_nanos=nanos,
                )
            )
        observers.append(type("Shard", (), {"actions": tally}))
    actions = SeveralActions(observers)

    assert actions.counts() == {"Bootstrap": {"success": 4}}
    assert [action.decided_unix_nanos for action in actions.recent] == [1, 2, 3, 4]
    assert actions.total == 4


@pytest.mark.parametrize(
    ("tier", "number"),
    [("idle", "tier 1"), ("speculative", "tier 2"), ("drain", "tier 3"), (DRAINED, "after tier 3")],
)
def test_every_tier_has_its_number(tier: str, number: str) -> None:
    (move,) = MoveTally().take(answer(asked()))

    assert f", {tier} ({number}): " in move_line(replace(move, tier=tier))
