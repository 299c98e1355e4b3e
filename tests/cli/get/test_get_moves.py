"""Moves as `bigfleet get moves` shows them: both halves in one row, dry runs too, and nothing that is no move."""

import io
from typing import Any

from rich.console import Console

from bigfleet.cli.get import coordinator_records as records
from bigfleet.cli.get.output import TableWriter
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

Status = pb.InstructionStatus
IDS = ("aws/reserved/m6i/a/001", "aws/reserved/m6i/a/002")


def told(full_id: str, state: Any, *, to: str = "east-0", by: str = "east-1", **fields: Any) -> Status:
    """An instruction to transfer machines."""
    status = Status(shard_id=by, state=state, enqueued_unix_nanos=10**9, **fields)
    status.instruction.instruction_id = full_id
    payload = status.instruction.transfer_ownership
    payload.from_shard_id, payload.to_shard_id = by, to
    return status


def with_selector(status: Status, count: int = 3) -> Status:
    selector = status.instruction.transfer_ownership.selector
    selector.count, selector.instance_type, selector.zone = count, "m6i", "a"
    return status


def with_machines(status: Status, *, zones: tuple[str, ...] = ("a", "a")) -> Status:
    payload = status.instruction.transfer_ownership
    payload.machine_ids.extend(IDS)
    for machine_id, zone in zip(IDS, zones, strict=True):
        payload.machines.add(id=machine_id, instance_type="m6i", zone=zone)
    return status


def rows(*statuses: Status, shard: str = "") -> list[dict[str, Any]]:
    return list(records.move_records(pb.ListInstructionsResponse(instructions=statuses), shard=shard))


def table(*statuses: Status) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    TableWriter(console, records.MOVES, now_seconds=31.0).write(rows(*statuses))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


ASKED = with_selector(told("7-1", Status.STATE_DONE, why="east-0 lacks cpu 60"))
ADOPTED = with_machines(told("7-1/adopt", Status.STATE_DONE, why="released for this shard: 2"))


def test_both_halves_of_a_move_are_one_row_with_the_reason_of_the_first() -> None:
    assert rows(ASKED, ADOPTED) == [
        {
            "id": "7-1",
            "from": "east-1",
            "to": "east-0",
            "tier": "idle",
            "state": "arrived",
            "count": 2,
            "instanceType": "m6i",
            "zone": "a",
            "machines": list(IDS),
            "lastReason": None,
            "enqueued": "1970-01-01T00:00:01.000Z",
            "why": "east-0 lacks cpu 60",
        }
    ]


def test_a_row_says_how_many_of_which_kind_from_where_and_how_long_ago() -> None:
    head, row = table(ASKED, ADOPTED)

    assert head.split() == ["ID", "FROM", "TO", "STATE", "AGE", "TIER", "WHAT", "REASON", "WHY"]
    assert row.split("  ")[0] == "7-1"
    for expected in ("arrived", "30s", "idle", "2 m6i in a", "east-0 lacks cpu 60"):
        assert expected in row


def test_machines_of_several_zones_name_their_type_alone() -> None:
    half = with_machines(told("7-1/adopt", Status.STATE_PENDING), zones=("a", "b"))

    (row,) = rows(half)
    assert (row["state"], row["instanceType"], row["zone"]) == ("given", "m6i", None)
    assert "2 m6i  " in table(half)[1]


def test_machines_of_unknown_kind_are_named_by_the_first() -> None:
    named = told("7-2", Status.STATE_PENDING)
    named.instruction.transfer_ownership.machine_ids.extend(IDS)

    assert rows(named)[0]["tier"] == "drained"
    assert f"{IDS[0]} and 1 more" in table(named)[1]


def test_a_dry_run_proposes() -> None:
    dry = with_selector(told("7-0/dry-run/1", Status.STATE_CANCELLED, why="dry run: east-0 lacks cpu 60"))

    assert [(row["id"], row["state"]) for row in rows(dry)] == [("7-0/dry-run/1", "proposed")]


def test_one_shard_s_moves_are_those_from_it_and_to_it() -> None:
    other = with_selector(told("7-3", Status.STATE_PENDING, by="east-2", to="east-3"))

    assert [row["id"] for row in rows(ASKED, other, shard="east-0")] == ["7-1"]
    assert [row["id"] for row in rows(ASKED, other, shard="east-2")] == ["7-3"]


def test_notes_and_what_comes_home_are_no_moves() -> None:
    note = told("7-1/note/east-1", Status.STATE_DONE)
    home = told("7-4", Status.STATE_DONE, to="east-1")
    forgotten = told("7-1/forget/east-1", Status.STATE_DONE, to="")

    assert rows(note, home, forgotten) == []
