"""`bigfleet replay`: a table and a verdict, one cycle in full, what a change changes, and files that it refuses."""

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan.planning import FleetPlan, make_plan
from bigfleet.cli.replay.cycle_plan import plan_of
from bigfleet.cli.replay.replaying import Replayer, cost_usd_per_hour, with_machines
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.engine.decision import Decision
from bigfleet.engine.explain.explanation import explain_decision
from bigfleet.engine.explain.sentences import sentences
from bigfleet.engine.reference import decide as reference
from bigfleet.model.ids import MachineId
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.recording.digest import digest_text, outcome_of
from bigfleet.recording.frames import MAGIC, Frame, FramePacker, Unpacker, frames
from bigfleet.recording.hook import CycleInput
from bigfleet.recording.reader import RecordedCycle
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import CycleRecord
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.processes import bigfleet
from tests.recording.recorded import cycles_of, head, recording
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState
#: The cycle in which c2 comes, takes what is free, and preempts a machine of c1.
PREEMPTING = 5


class AtOnce:
    """Has every cycle written at once, and keeps what was decided."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.decisions: dict[int, Decision] = {}

    def take(self, asked: CycleInput, decision: Decision | None) -> None:
        """Record one cycle."""
        assert decision is not None
        self.decisions[asked.cycle] = decision
        self.recorder.take(asked, decision)
        self.recorder.write_waiting()


async def course(path: Path) -> dict[int, Decision]:
    """Record a shard: c1 takes two spot machines, c2 wants all six, c1 goes, c2 shrinks."""
    provider = ScriptedProvider()
    for number in range(6):
        state, kind = (S.IDLE, CapacityType.SPOT) if number % 2 else (S.SPECULATIVE, CapacityType.ON_DEMAND)
        provider.add(machine(f"m{number}", state, capacity_type=kind, price_usd_per_hour=1 + number / 10))
    world = World(provider)
    first, second = world.connect("c1"), world.connect("c2")
    with recording(path) as recorder:
        taker = world.shard.recorder = AtOnce(recorder)
        first.report(need("c1", "8", priority=100))
        await world.settle(3)
        second.report(need("c2", "20", priority=900))
        await world.settle(3)
        first.report()
        second.report(need("c2", "4", priority=900))
        await world.settle(7)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return taker.decisions


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Decision]]:
    """A recording, and the decisions in it."""
    path = tmp_path_factory.mktemp("replay") / "recording"
    return path, run_virtual(lambda: course(path))


@pytest.fixture
def file(recorded: tuple[Path, dict[int, Decision]]) -> Path:
    """The recording."""
    return recorded[0]


def answer(*arguments: object, code: int = 0) -> str:
    """Return what a call shows."""
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def refusal(*arguments: object) -> str:
    """Return the one line of a call that is refused with exit 2."""
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert isinstance(result.exception, UsageFault), result.output
    line = str(result.exception)
    assert line.splitlines() == [line]
    return line


def altered(file: Path, to: Path, cycle: int, **changes: Any) -> Path:
    """Write the recording with one record changed, as if the shard had decided otherwise."""
    packer, unpacker = FramePacker(), Unpacker()
    with file.open("rb") as opened:
        whole = [frame for frame in frames(opened) if isinstance(frame, Frame)]
    content = MAGIC + packer.head(whole[0].content)
    for frame in whole[1:]:
        record = msgspec.msgpack.decode(unpacker.cycle(frame), type=CycleRecord)
        if record.cycle == cycle:
            assert record.outcome is not None
            outcome = changes["outcome"] if "outcome" in changes else msgspec.structs.replace(record.outcome, **changes)
            record = msgspec.structs.replace(record, outcome=outcome)
        content += packer.cycle(msgspec.msgpack.encode(record))
    to.write_bytes(content)
    return to


def planned(cycle: RecordedCycle, engine: str) -> FleetPlan:
    """Return a cycle, decided again, as a plan."""
    replayed = Replayer(engine).replay(with_machines(cycle))
    assert replayed.decision is not None, replayed.error
    return plan_of(replayed.recorded, replayed.decision)


# ---- all cycles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["columnar", "reference"])
def test_every_cycle_is_decided_as_it_was_recorded(file: Path, engine: str) -> None:
    lines = answer(file, "--engine", engine).splitlines()
    count = len(cycles_of(file))
    assert lines[0].startswith("shard-0, epoch 7, bigfleet 0.1.0, every 100th decision checked; started ")
    assert lines[1].split()[:4] == ["CYCLE", "TIME", "ROWS", "MACHINES"]
    (preempting,) = [line.split() for line in lines if line.split()[0] == str(PREEMPTING)]
    # Rows, machines, bound, made, reclaimed, preempted, released, short.
    assert preempting[2:10] == ["2", "6", "1", "3", "0", "1", "0", "1"]
    assert preempting[-1] == "same"
    assert len(lines) == count + 3
    assert lines[-1] == f"{count} cycles: every one decided as it was recorded."


def test_a_document_has_every_cycle_with_its_whole_digest(file: Path) -> None:
    document = json.loads(answer(file, "--output", "json"))
    cycles = cycles_of(file)
    assert (document["count"], document["verdict"]) == (len(cycles), "same")
    for told, cycle in zip(document["cycles"], cycles, strict=True):
        assert cycle.outcome is not None
        assert (told["cycle"], told["digest"]) == (cycle.cycle, digest_text(cycle.outcome))
        assert (told["machines"], told["rows"], told["verdict"]) == (6, len(cycle.demand), "same")


def test_a_decision_that_differs_is_named_with_its_first_difference_and_exit_1(file: Path, tmp_path: Path) -> None:
    cycle = next(one for one in cycles_of(file) if one.cycle == PREEMPTING)
    assert cycle.outcome is not None
    other = bytearray(cycle.outcome.machines)
    other[0:4] = (1).to_bytes(4, "little")
    wrong = altered(file, tmp_path / "wrong", PREEMPTING, machines=bytes(other))

    lines = answer(wrong, code=1).splitlines()
    told = f"  cycle {PREEMPTING}: action 1: recorded Bootstrap m1 for c2, row 1, taken from c1; now Bootstrap m5 "
    assert any(line.startswith(told) for line in lines)
    assert lines[-1].endswith(f"cycles: 1 is DIFFERENT ({PREEMPTING}); --cycle {PREEMPTING} shows the decision.")

    shown = answer(wrong, "--cycle", PREEMPTING, code=1)
    assert "Only recorded: 1 action\n  Bootstrap m1 for c2" in shown
    assert "Only now: 1 action\n  Bootstrap m5 for c2" in shown
    document = json.loads(answer(wrong, "--cycle", PREEMPTING, "--output", "json", code=1))
    assert [len(document["differing"][side]) for side in ("only_recorded", "only_now")] == [1, 1]
    assert json.loads(answer(wrong, "--output", "json", code=1))["verdict"] == "different"


def test_of_what_rows_got_the_part_that_differs_is_named(file: Path, tmp_path: Path) -> None:
    cycle = next(one for one in cycles_of(file) if one.cycle == PREEMPTING)
    assert cycle.outcome is not None
    digests = list(cycle.outcome.digests)
    digests[2] = bytes(16)
    wrong = altered(file, tmp_path / "wrong", PREEMPTING, digests=tuple(digests))
    assert "the actions are the same; not the same is which machines rows hold" in answer(wrong, code=1)


def test_an_engine_that_failed_then_or_fails_now_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = altered(file, tmp_path / "failed", PREEMPTING, outcome=None)
    assert "the engine failed then and decides now" in answer(failed, code=1)

    def fails(*_arguments: object) -> Decision:
        raise ZeroDivisionError("of a sort")

    monkeypatch.setattr(reference, "decide", fails)
    told = answer(file, "--engine", "reference", code=1)
    assert "the engine decided then and fails now (ZeroDivisionError: of a sort)" in told
    told = answer(failed, "--engine", "reference", "--cycle", PREEMPTING)
    assert f"Cycle {PREEMPTING}: the engine failed then and fails now (ZeroDivisionError: of a sort)." in told


def test_changed_settings_show_what_they_would_have_changed(file: Path) -> None:
    """What idles is released at once: a difference of the settings, and no difference of the decisions."""
    text = answer(file, "--hold", "spot=0.001s", "--hold", "on-demand=1ms", "--weight", "priority=0", "--drain", "5s")
    lines = text.splitlines()
    assert lines[1] == "changed: weight priority 0, hold spot 0.001s, hold on-demand 0.001s, drain 5s"
    assert lines[-2].endswith("every one decided as it was recorded.")
    assert lines[-1].startswith("The change would have changed ")
    document = json.loads(answer(file, "--hold", "spot=0.001s", "--output", "json"))
    told = [cycle["what_if"] for cycle in document["cycles"]]
    released = [what_if for what_if in told if what_if["actions_added"]]
    assert released
    for what_if in released:
        assert what_if["actions"]["delete"] == what_if["actions_added"]
        assert what_if["changed_cost_after_usd_per_hour"] < what_if["cost_after_usd_per_hour"]
    assert "The change would have changed no action of any cycle." in answer(file, "--drain", "31s")


# ---- one cycle ---------------------------------------------------------------------------------------------------


def test_one_cycle_is_shown_as_a_plan_is(file: Path) -> None:
    text = answer(file, "--cycle", PREEMPTING)
    assert f"Cycle {PREEMPTING}: same decision (digest " in text
    assert f"Decision of cycle {PREEMPTING}" in text
    assert "In all: 1 to bind, 3 to make, 0 to reclaim, 1 to preempt, 0 to release." in text
    assert "waits until m1 has drained." in text


def test_the_costs_of_the_table_are_those_of_the_plan(file: Path) -> None:
    for cycle in cycles_of(file):
        plan = planned(cycle, "columnar")
        assert cost_usd_per_hour(cycle.view) == pytest.approx(plan.before.total_usd_per_hour)
        assert cost_usd_per_hour(cycle.view, cycle.outcome) == pytest.approx(plan.after.total_usd_per_hour)


def test_explanations_are_those_of_the_decision_that_was_made(recorded: tuple[Path, dict[int, Decision]]) -> None:
    """Machine by machine and row by row, as the shard itself and `bigfleet plan` explain them."""
    file, decisions = recorded
    cycle = next(one for one in cycles_of(file) if one.cycle == PREEMPTING)
    plan, made = planned(cycle, "columnar"), decisions[PREEMPTING]
    for number in range(6):
        told = json.loads(answer(file, "--cycle", PREEMPTING, "--explain", f"m{number}", "--output", "json"))
        expected = sentences(explain_decision(made, MachineId(f"m{number}")), row_name=plan.row_name)
        assert told["explanation"]["sentences"] == expected
    for name, row in plan.needs_by_id.items():
        told = json.loads(answer(file, "--cycle", PREEMPTING, "--explain", name, "--output", "json"))
        assert told["explanation"]["sentences"] == sentences(explain_decision(made, row.key), row_name=plan.row_name)
    shown = answer(file, "--cycle", PREEMPTING, "--explain", "c2/")
    assert "Why c2/" in shown
    assert "Of 2 machines of lower priority it preempts 1." in shown


def test_a_cycle_as_files_of_a_plan_gives_the_same_plan(file: Path) -> None:
    """Nothing that decides is lost on the way into a plan's input."""
    for cycle in cycles_of(file):
        plan = planned(cycle, "reference")
        again = make_plan(replace(plan.given, removed_clusters=cycle.options.reported))
        assert again.decision == plan.decision
        assert outcome_of(plan.decision, cycle.view, cycle.demand) == cycle.outcome


def test_patches_and_settings_show_what_they_change(file: Path, tmp_path: Path) -> None:
    """Two cheap machines take the place of one that is made and one that is preempted."""
    patches = tmp_path / "what-if.yaml"
    cheap = {"instance_type": "t4", "zone": "za", "capacity_type": "OnDemand", "price_per_hour": 0.2}
    patches.write_text(yaml.safe_dump([{"add_machines": {**cheap, "allocatable": {"cpu": "4"}, "count": 2}}]))
    for engine in ("columnar", "reference"):
        arguments = ("--cycle", PREEMPTING, "--what-if", patches, "--engine", engine)
        text = answer(file, *arguments, "--weight", "priority=3")
        assert "Done only with the change:" in text
        assert "added-000, added-001" in text
        assert "Changed: weight priority 3." in text
        document = json.loads(answer(file, *arguments, "--output", "json"))["what_if"]
        assert [action["kind"] for action in document["actions_dropped"]] == ["Provision", "Preempt"]
        assert [action["machine"] for action in document["actions_added"]] == ["added-000", "added-001"]
    patches.write_text(yaml.safe_dump([{"remove_cluster": "c2"}]))
    assert "does not exist after the change" in refusal(
        file, "--cycle", PREEMPTING, "--what-if", patches, "--explain", "c2/"
    )
    patches.write_text(yaml.safe_dump([{"remove_cluster": "c9"}]))
    assert "neither the demand nor the machines" in refusal(file, "--cycle", PREEMPTING, "--what-if", patches)


# ---- files and calls ---------------------------------------------------------------------------------------------


def test_two_processes_in_one_file_are_told_apart_by_their_epoch(file: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    packer, unpacker = FramePacker(), Unpacker()
    with file.open("rb") as opened:
        whole = [frame for frame in frames(opened) if isinstance(frame, Frame)]
    second = packer.head(msgspec.msgpack.encode(msgspec.structs.replace(head(), epoch=8)))
    second += packer.cycle(unpacker.cycle(whole[1]))
    both.write_bytes(file.read_bytes() + second)

    text = answer(both)
    assert [line.partition(",")[0] for line in text.splitlines() if "epoch" in line] == ["shard-0", "shard-0"]
    assert len(json.loads(answer(both, "--output", "json", "--epoch", "8"))["cycles"]) == 1
    assert json.loads(answer(both, "--cycle", "1", "--epoch", "7", "--output", "json"))["cycle"]["epoch"] == 7
    result = CliRunner().invoke(app, ["replay", str(both), "--cycle", "1"])
    assert "cycle 1 is that of epoch 8; --epoch shows that of 7" in result.stderr
    assert "no whole cycle of epoch 9" in refusal(both, "--epoch", "9")


def test_a_torn_end_is_told_and_the_rest_is_replayed(file: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(file.read_bytes()[:-10])
    result = CliRunner().invoke(app, ["replay", str(torn)])
    assert result.exit_code == 0
    assert "the last record is not whole" in result.stderr
    assert "its process was killed or is writing just now; it is read up to cycle" in result.stderr
    assert f"{len(cycles_of(file)) - 1} cycles: every one decided" in result.stdout


def test_a_damaged_file_shows_what_is_good_and_says_what_to_do(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", str(damaged)])
    assert isinstance(result.exception, UsageFault)
    assert "every one decided as it was recorded" in result.stdout
    line = str(result.exception)
    assert line.startswith(f"{damaged}: damaged at byte ")
    assert "it is good" in line
    assert "restore the file from a copy, or replay another one of the recording" in line
    document = CliRunner().invoke(app, ["replay", str(damaged), "--output", "json"]).stdout
    assert json.loads(document)["verdict"] == "same"


def test_a_cycle_before_the_damage_is_shown(file: Path, tmp_path: Path) -> None:
    """As the message says: up to there the file is good. A cycle that was not found is refused for the damage."""
    damaged = tmp_path / "damaged"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", str(damaged), "--cycle", str(PREEMPTING)])
    assert result.exit_code == 0
    assert f"Cycle {PREEMPTING}: same decision (digest " in result.stdout
    assert result.stderr.startswith(f"bigfleet: {damaged}: damaged at byte ")
    assert "damaged at byte " in refusal(damaged, "--cycle", cycles_of(file)[-1].cycle)


@pytest.mark.parametrize("which", [(), ("--cycle", str(PREEMPTING))], ids=["all", "one"])
def test_a_reader_that_has_gone_ends_it_quietly(file: Path, which: tuple[str, ...]) -> None:
    """As `get` does in `… | head`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = bigfleet("replay", str(file), *which, "--output", "json")
    with os.fdopen(writing, "wb") as pipe:
        finished = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


WRONG_FILES = {
    "empty": (b"", "the file is empty"),
    "foreign": (b"{}\n", "no recording of a shard: name a file"),
    "newer": (b"bigfleet recording 2\n", "a recording of format 2, this version reads 1"),
    "fresh": (MAGIC, "no whole cycle to replay"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_that_cannot_be_replayed_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, told = WRONG_FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert told in refusal(path)
    assert refusal(path).startswith(str(path))


def test_wrong_calls_are_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    last = cycles_of(file)[-1].cycle
    assert "No such file" in refusal(tmp_path / "none")
    assert "Is a directory" in refusal(tmp_path)
    assert f"has cycles from 1 to {last}; older ones may be in recording.1" in refusal(file, "--cycle", "99")
    assert "--explain applies to one cycle; name it with --cycle N" in refusal(file, "--explain", "m1")
    assert "--what-if applies to one cycle" in refusal(file, "--what-if", "x.yaml")
    assert "no row and no machine 'm77'" in refusal(file, "--cycle", PREEMPTING, "--explain", "m77")
    assert "matches 2 rows: c" in refusal(file, "--cycle", PREEMPTING, "--explain", "c")
    assert "choose one of columnar, reference" in refusal(file, "--engine", "fast")
    assert "choose one of table, json" in refusal(file, "--output", "xml")
    assert "one of priority, drain, interruption, reclamation" in refusal(file, "--weight", "size=1")
    assert "not a number of at least 0" in refusal(file, "--weight", "priority=-1")
    assert "with on-demand or spot" in refusal(file, "--hold", "reserved=1m")
    assert "--hold spot: '1x' is not a duration" in refusal(file, "--hold", "spot=1x")
    assert "--drain: '0s' must be longer than zero" in refusal(file, "--drain", "0s")


def test_cycles_that_were_not_recorded_are_counted(file: Path, tmp_path: Path) -> None:
    """The shard came faster than its recorder: what is there is still whole."""
    packer, unpacker = FramePacker(), Unpacker()
    with file.open("rb") as opened:
        whole = [frame for frame in frames(opened) if isinstance(frame, Frame)]
    first = msgspec.msgpack.decode(unpacker.cycle(whole[1]), type=CycleRecord)
    missed = tmp_path / "missed"
    record = msgspec.msgpack.encode(msgspec.structs.replace(first, missed=3))
    missed.write_bytes(MAGIC + packer.head(whole[0].content) + packer.cycle(record))
    told = answer(missed).splitlines()[-1]
    assert told.startswith("1 cycle (3 more were not recorded: the disk took them too slowly or not at all): ")
