"""What the audit log says of each action, and what its chain shows of tampering (docs/spec/shard.md §13)."""

import io
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.audit.log import GENESIS, AuditHead, chained, digest, read_line
from bigfleet.shard.audit.verification import AuditFault, Checked, check
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS
from tests.engine.proof import in_proportion
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState

FIELDS = [
    "time",
    "shard",
    "epoch",
    "cycle",
    "decided_cycle",
    "action_id",
    "kind",
    "machine",
    "cluster",
    "reason",
    "need_fingerprint",
    "group",
    "grace_seconds",
    "preemptor_priority",
    "outcome",
    "message",
    "seconds",
    "operation_id",
    "token_sequence",
    "without_session",
    "sequence",
    "chain",
]


# ---- what is written --------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 13/1")
@pytest.mark.virtual_time
async def test_a_record_says_what_was_done_to_whom_why_and_how_it_ended() -> None:
    """Every field of the specification, in its order; the first record of a file tells what it goes on from."""
    log = MemoryAuditLog()
    world = World(ScriptedProvider(synchronous=True), epoch=7, audit_log=log)
    world.provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, price_usd_per_hour=2.0))
    row = need("c1", "8", group="g")
    operator = world.connect("c1")
    operator.report(row)
    await world.cycle()
    operator.report()
    await world.settle(2)

    first, second, reclaim = log.records[:3]
    assert list(second) == FIELDS
    assert list(first) == [*FIELDS[:-1], "previous", "chain"]
    assert first["previous"] == GENESIS
    assert (first["shard"], first["epoch"], first["cycle"], first["decided_cycle"]) == ("shard-0", 7, 1, 1)
    assert (first["kind"], first["machine"], first["cluster"]) == ("Bootstrap", "m1", "c1")
    assert (first["reason"], first["need_fingerprint"], first["group"]) == ("phase1.idle", row.fingerprint, "g")
    assert (first["outcome"], first["operation_id"], first["token_sequence"]) == ("success", "op-1", 1)
    told = datetime.fromisoformat(first["time"])
    assert (told.tzinfo, told >= datetime.fromtimestamp(START_UNIX_SECONDS, UTC)) == (UTC, True)
    assert (reclaim["kind"], reclaim["grace_seconds"], reclaim["message"]) == ("Reclaim", 600, "DRAINED")
    assert (reclaim["need_fingerprint"], reclaim["group"]) == (row.fingerprint, "g")
    assert reclaim["seconds"] == 5.0


@pytest.mark.rule("shard 13/2")
@pytest.mark.virtual_time
async def test_every_mutating_call_has_exactly_one_record() -> None:
    """By the sequence number of its token, refused calls and both halves of a purchase included."""
    log = MemoryAuditLog()
    provider = ScriptedProvider(synchronous=True)
    provider.add(
        machine("m1", S.IDLE),
        *(machine(f"s{n}", S.SPECULATIVE, capacity_type=CapacityType.SPOT) for n in range(2)),
    )
    provider.refusals = {("configure", "m1"): [RefusalKind.REFUSED], ("create", "s0"): [RefusalKind.REFUSED]}
    world = World(provider, settings=ShardSettings(empty_rollup_guard=False), audit_log=log)
    operator = world.connect("c1")
    operator.report(need("c1", "12"))
    await world.settle()
    operator.report()
    await world.settle(8)
    await world.shard._clock.sleep(601)
    await world.settle()

    records = [(record["machine"], record["token_sequence"]) for record in log.records if record["token_sequence"]]
    assert records == [(machine_id, sequence) for _method, machine_id, sequence in provider.calls]
    assert {record["kind"] for record in log.records} == {"Bootstrap", "Provision", "Reclaim", "Delete"}


@pytest.mark.rule("shard 6/9", "shard 12/11", "shard 13/3", "shard 15/27")
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("posture", "outcome"),
    [
        (ShardSettings(actuation_paused=True, action_history_max=2), "suppressed"),
        (ShardSettings(dry_run=True, action_history_max=2), "dryrun"),
    ],
)
async def test_each_action_that_is_kept_from_being_carried_out_is_recorded(
    posture: ShardSettings, outcome: str
) -> None:
    """All of them, also where the history holds fewer."""
    log = MemoryAuditLog()
    provider = ScriptedProvider()
    provider.add(*(machine(f"m{number:03d}", S.IDLE) for number in range(450)))
    world = World(provider, settings=posture, audit_log=log)
    world.connect("c1").report(need("c1", "1800"))
    await world.cycle()

    assert {record["outcome"] for record in log.records} == {outcome}
    assert [record["machine"] for record in log.records] == [f"m{number:03d}" for number in range(450)]
    assert (len(world.shard.ledger.history), provider.calls) == (2, [])
    assert check([("log", log.lines)]).findings == ()


@pytest.mark.rule("shard 13/8")
@pytest.mark.virtual_time
async def test_texts_from_outside_are_bounded_and_always_writable() -> None:
    """An operator's error may be long, and may hold what UTF-8 cannot say."""
    log = MemoryAuditLog()
    world = World(audit_log=log)
    world.provider.add(machine("m1", S.IDLE))
    world.connect("c1").report(need("c1", "4"))
    await world.step()
    record = world.shard.ledger.history[0]
    record.message = "\ud800" + "x" * 5000
    world.shard.audit.note(record)

    assert log.records[0]["message"] == "?" + "x" * 1023


@pytest.mark.rule("shard 13/9")
@pytest.mark.virtual_time
async def test_a_chain_goes_on_over_a_restart() -> None:
    """The next process writes the next number, and both parts are one whole log."""
    log = MemoryAuditLog()
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE))
    first = World(provider, audit_log=log)
    first.connect("c1").report(need("c1", "4"))
    await first.cycle()
    later = MemoryAuditLog(log.end)
    second = World(provider, epoch=2, audit_log=later)
    second.connect("c1").report(need("c1", "8"))
    await second.cycle()

    assert [record["sequence"] for record in log.records + later.records] == [1, 2]
    assert check([("old", log.lines), ("new", later.lines)]) == Checked(
        findings=(), records=2, first_sequence=1, head=later.end
    )


@pytest.mark.rule("shard 13/5", "shard 13/9", "shard 15/26")
@pytest.mark.virtual_time
async def test_a_full_disk_is_counted_and_holds_up_nothing() -> None:
    """Actions are carried out, each lost record is counted, and the gap shows afterwards."""
    log = MemoryAuditLog()
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(4)))
    world = World(provider, audit_log=log)
    operator = world.connect("c1")
    for wanted in ("4", "8", "12", "16"):
        log.is_full = wanted in ("8", "12")
        operator.report(need("c1", wanted))
        await world.cycle()

    assert [outcome for _kind, _machine, outcome in world.outcomes()] == ["success"] * 4
    assert world.metric("audit_write_errors_total") == log.refused == 2
    assert [record["sequence"] for record in log.records] == [1, 4]
    (finding,) = check([("log", log.lines)]).findings
    assert (finding.line, finding.fault) == (2, AuditFault.GAP)
    assert finding.text == "records 2 to 3 are not here: they could not be written"
    assert world.metric("cycle_failures_total") == 0


@pytest.mark.virtual_time
async def test_without_a_log_nothing_is_counted() -> None:
    """No log is no failing one."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m1", S.IDLE))
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()

    assert (world.shard.audit.is_on, world.metric("audit_write_errors_total")) == (False, 0)


# ---- the chain --------------------------------------------------------------------------------------------------


def log_of(count: int, *, first: int = 1, previous: str = GENESIS) -> list[bytes]:
    """Return the lines of a file with that many records."""
    lines: list[bytes] = []
    for number in range(first, first + count):
        line, previous = chained(
            {"time": f"2026-01-01T00:00:{number:02d}Z", "machine": f"m{number}"},
            number,
            previous,
            has_previous=not lines,
        )
        lines.append(line)
    return lines


def head_of(lines: list[bytes]) -> AuditHead:
    """Return the number and the chain of the last line."""
    line = read_line(lines[-1].removesuffix(b"\n"))
    assert line is not None
    return AuditHead(line.sequence, line.chain)


@pytest.mark.rule("shard 13/9")
def test_a_chain_is_the_digest_of_the_one_before_and_of_the_record_without_its_own() -> None:
    """Anybody can check it with a SHA-256 and no program of ours."""
    first, second = log_of(2)
    body = second[: second.index(b',"chain"')] + b"}"

    assert json.loads(second)["chain"] == digest(json.loads(first)["chain"], body)


def faults(*files: list[bytes], anchor: AuditHead | None = None) -> list[tuple[str, int, str]]:
    """Return file, line and fault of each finding."""
    found = check([(f"f{number}", lines) for number, lines in enumerate(files, 1)], anchor)
    return [(finding.file, finding.line, finding.fault.value) for finding in found.findings]


def test_a_whole_log_has_no_findings() -> None:
    """In one file, in several, and from where older files are gone."""
    lines = log_of(9)
    later = log_of(3, first=10, previous=head_of(lines).chain)

    assert faults(lines) == faults(lines, later) == faults(later) == faults([]) == []
    assert check([("f", lines), ("g", later)]).head == head_of(later)


@pytest.mark.rule("shard 13/10")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[:4] + lines[5:], [("f1", 5, "gap")]),
        (lambda lines: lines[:2] + lines[5:], [("f1", 3, "gap")]),
        (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], [("f1", 5, "reordered"), ("f1", 6, "reordered")]),
        (lambda lines: [*lines[:4], lines[4].replace(b"m5", b"m6"), *lines[5:]], [("f1", 5, "edited")]),
        (lambda lines: [*lines[:4], b"\n", *lines[4:]], [("f1", 5, "edited")]),
        (lambda lines: [*lines[:4], lines[2], *lines[4:]], [("f1", 5, "reordered")]),
        (lambda lines: lines[1:], [("f1", 1, "truncated")]),
        (lambda lines: [*lines[:8], lines[8][:40]], [("f1", 9, "truncated")]),
        (lambda lines: [*lines[:8], lines[8].removesuffix(b"\n")], [("f1", 9, "truncated")]),
    ],
    ids=["deleted", "several deleted", "swapped", "edited", "blank", "repeated", "head cut", "tail cut", "end cut"],
)
def test_what_was_done_to_a_log_is_named_at_its_line(change: object, expected: list[tuple[str, int, str]]) -> None:
    """The rest of the log is still looked at, and causes no findings of its own."""
    assert callable(change)
    assert faults(change(log_of(9))) == expected


def test_a_missing_file_is_a_gap() -> None:
    """The file after it does not go on from the one before."""
    first = log_of(3)
    second = log_of(3, first=4, previous=head_of(first).chain)
    third = log_of(3, first=7, previous=head_of(second).chain)

    assert faults(first, second, third) == []
    assert faults(first, third) == [("f2", 1, "gap")]


@pytest.mark.rule("shard 13/10")
def test_what_was_cut_off_at_the_end_shows_against_a_head_that_was_noted() -> None:
    """The lines alone cannot tell, nor whether somebody wrote all of them again."""
    lines = log_of(9)
    noted = head_of(lines)
    forged = log_of(9)[:3] + log_of(6, first=4, previous=head_of(lines[:3]).chain.replace("a", "b"))

    assert faults(lines[:7]) == []
    assert faults(lines[:7], anchor=noted) == [("f1", 0, "truncated")]
    assert faults(lines + log_of(2, first=10, previous=noted.chain), anchor=noted) == []
    assert ("f1", 0, "edited") in faults(forged, anchor=noted)


def _tampered(data: st.DataObject, lines: list[bytes]) -> list[bytes]:
    """Return the lines with one edit, deletion, swap or insertion."""
    place = data.draw(st.integers(0, len(lines) - 1), label="line")
    line = lines[place]
    match data.draw(st.sampled_from(["edit", "delete", "swap", "insert"]), label="change"):
        case "edit":
            position = data.draw(st.integers(0, len(line) - 1), label="byte")
            other = data.draw(st.integers(0, 255).filter(lambda byte: byte != line[position]), label="is now")
            edited = line[:position] + bytes([other]) + line[position + 1 :]
            return io.BytesIO(b"".join([*lines[:place], edited, *lines[place + 1 :]])).readlines()
        case "delete":
            return lines[:place] + lines[place + 1 :]
        case "swap":
            other_place = data.draw(st.integers(0, len(lines) - 1).filter(lambda p: p != place), label="with")
            changed = list(lines)
            changed[place], changed[other_place] = changed[other_place], changed[place]
            return changed
    forged, _chain = chained({"time": "2026"}, data.draw(st.integers(0, 12)), GENESIS, has_previous=True)
    added = data.draw(st.sampled_from([*lines, forged, b"\n", b"{}\n", b"noise\n"]), label="added")
    return [*lines[:place], added, *lines[place:]]


@pytest.mark.rule("shard 13/10")
@settings(max_examples=in_proportion(400), deadline=None)
@given(st.data())
def test_any_edit_deletion_swap_or_insertion_in_a_verified_log_is_found(data: st.DataObject) -> None:
    """Of any byte and any line, against the head that the verification printed."""
    lines = log_of(data.draw(st.integers(2, 10), label="records"))
    noted = check([("log", lines)]).head
    changed = _tampered(data, lines)

    assert changed != lines
    assert faults(changed, anchor=noted) != []
