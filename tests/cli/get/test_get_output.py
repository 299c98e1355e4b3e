"""How `bigfleet get` writes: widths, columns that give way, text that no terminal obeys, streams, and watches."""

import json
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bigfleet.cli.get import output
from bigfleet.cli.get.columns import (
    MACHINES,
    NEEDS,
    SHORTFALLS,
    TableColumn,
    age_text,
    amounts,
    plain,
    requirements_text,
)
from bigfleet.cli.get.output import TableWriter, write_json, write_yaml
from bigfleet.cli.get.records import Record, machine_record, need_id, need_record, time_text, unix_seconds
from bigfleet.cli.get.watching import Shown, watch
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shardread_pb2

NOW_SECONDS = 1_800_000_000.0


def machine(number: int, **changes: Any) -> Record:
    """Return a bound machine's record, changed as asked."""
    view = shardread_pb2.MachineView(
        machine=provider_pb2.Machine(
            id=f"cloud/m-{number:05d}",
            state=provider_pb2.MACHINE_STATE_CONFIGURED,
            instance_type="std.8x32",
            zone="zone-a",
            capacity_type=provider_pb2.CAPACITY_TYPE_ON_DEMAND,
            price_per_hour=0.4,
            cluster="blue",
        ),
        assigned_priority=1000,
        assigned_need_fingerprint="p=1000",
        state_since_unix_nanos=int((NOW_SECONDS - 192) * 1e9),
    )
    return machine_record(view) | changes


def table_lines(records: list[Record], *, width: int | None, columns: Any = MACHINES) -> list[str]:
    """Return what a terminal of a width shows, or a file when it is None."""
    to = StringIO()
    console = Console(file=to, width=width, force_terminal=width is not None, color_system=None, highlight=False)
    TableWriter(console, columns, now_seconds=NOW_SECONDS).write(records)
    return to.getvalue().splitlines()


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    """What says nothing goes first, then price, capacity type, zone and type; id, state and age stay."""
    lines = table_lines([machine(1)], width=80)

    assert lines[0].split() == ["MACHINE", "STATE", "AGE", "CLUSTER", "TYPE", "ZONE", "PRIORITY"]
    assert lines[1].split() == ["cloud/m-00001", "Configured", "3m12s", "blue", "std.8x32", "zone-a", "1000"]


def test_an_error_pushes_other_columns_out_of_a_narrow_terminal() -> None:
    lines = table_lines([machine(1, state="Failed", lastError="node did not join: " + "x" * 200)], width=80)

    assert lines[0].split() == ["MACHINE", "STATE", "AGE", "CLUSTER", "PRIORITY", "ERROR"]
    assert lines[1].endswith("…")
    assert cell_len(lines[1]) <= 80


def test_a_file_gets_every_column_and_whole_cells() -> None:
    error = "node did not join: " + "x" * 200
    lines = table_lines([machine(1, lastError=error)], width=None)

    assert lines[0].split() == [column.head for column in MACHINES]
    assert lines[1].endswith(error)
    assert all(line == line.rstrip() for line in lines)


@given(st.text(max_size=60), st.sampled_from([80, 120, 160]))
def test_no_text_of_others_moves_a_terminal(text: str, width: int) -> None:
    """One line per record, none longer than the terminal, and nothing that it could take for an order."""
    lines = table_lines([machine(1, lastError=text, state="Failed"), machine(2)], width=width)

    assert len(lines) == 3
    assert all(char.isprintable() for line in lines for char in line)
    assert all(cell_len(line) <= width for line in lines)


def test_columns_stay_in_line_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later block may widen a column, and never narrows one."""
    monkeypatch.setattr(output, "BLOCK_ROWS_MAX", 2)
    lines = table_lines([machine(number) for number in (1, 2, 3)] + [machine(100_000)], width=None)

    assert len({line.index("Configured") for line in lines[1:3]}) == 1
    assert lines[4].split()[0] == "cloud/m-100000"
    assert sum("MACHINE" in line for line in lines) == 1


def test_a_stream_is_written_while_it_arrives() -> None:
    """No form holds more than a block of records."""
    for write in (write_json, write_yaml, lambda records, to: _write_table(records, to)):
        to = StringIO()
        seen: list[int] = []

        def records(to: StringIO = to, seen: list[int] = seen) -> Iterator[Record]:
            for number in range(3 * output.BLOCK_ROWS_MAX):
                yield machine(number)
                seen.append(len(to.getvalue()))

        write(records(), to)

        assert seen[output.BLOCK_ROWS_MAX + 1] > 0


def _write_table(records: Iterator[Record], to: StringIO) -> int:
    console = Console(file=to, force_terminal=False)
    return TableWriter(console, MACHINES, now_seconds=NOW_SECONDS).write(records)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=3)))
def test_json_and_yaml_are_read_back_as_they_were(records: list[Record]) -> None:
    in_json, in_yaml = StringIO(), StringIO()

    assert write_json(records, in_json) == len(records)
    assert write_yaml(records, in_yaml) == len(records)
    assert json.loads(in_json.getvalue()) == records
    assert yaml.safe_load(in_yaml.getvalue()) == records


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (192, "3m12s"),
        (7800, "2h10m"),
        (442_800, "5d3h"),
        (86400, "1d"),
    ],
)
def test_ages_are_written_as_kubectl_does(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_amounts_are_short() -> None:
    assert amounts({"cpu": "12500m", "memory": "96Gi", "nvidia.com/gpu": "4"}) == "cpu 12.5, memory 96.0GiB, gpu 4"
    assert amounts({}) == "-"


def test_requirements_read_like_a_sentence() -> None:
    asked = [
        {"key": "topology.kubernetes.io/zone", "operator": "Same", "values": []},
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64", "amd64"]},
        {"key": "spot", "operator": "DoesNotExist", "values": []},
        {"key": "type", "operator": "NotIn", "values": ["t1"]},
    ]

    assert requirements_text(asked) == "zone same, arch in arm64|amd64, no spot, type!=t1"
    assert requirements_text([]) == "any machine"


@given(st.integers(min_value=1, max_value=4_000_000_000_000_000_000))
def test_times_are_read_back_to_the_millisecond(unix_nanos: int) -> None:
    text = time_text(unix_nanos)

    assert text is not None
    assert abs(unix_seconds(text) - unix_nanos / 1e9) <= 0.001


def test_a_machine_that_is_not_reclaimed_yet_says_why() -> None:
    """The sentence behind the reason is in the JSON; the table has the reason."""
    held = machine(1, reclaimDelayedReason="would_not_fit: 3 pods have no room elsewhere")

    assert "reclaim-delayed:would_not_fit" in table_lines([held], width=None)[1].split()
    assert not any("reclaim-delayed" in line for line in table_lines([machine(1)], width=None))


def test_values_that_json_has_not_are_null() -> None:
    """A provider may declare any double, and a newer shard any reason."""
    odd = shardread_pb2.MachineView(
        machine=provider_pb2.Machine(id="m", price_per_hour=float("nan"), cluster="c"),
        assigned_interruption_penalty_dollars=float("inf"),
    )
    new = shardread_pb2.NeedView(need=capacity_pb2.CapacityNeed(priority=5))
    new.MergeFromString(b"\x78\x63")  # field 15, unmet_reason = 99

    record = machine_record(odd)
    assert (record["priceUsdPerHour"], record["interruptionPenaltyUsd"]) == (None, "pinned")
    assert need_record(new)["reason"] == "reason_99"
    json.dumps(record, allow_nan=False)


def test_a_needs_id_tells_fingerprint_and_group_apart() -> None:
    assert len({need_id("a", ""), need_id("a", "b"), need_id("ab", ""), need_id("", "ab")}) == 4


@pytest.mark.parametrize("columns", [MACHINES, NEEDS, SHORTFALLS])
def test_at_most_the_last_column_is_flexible(columns: tuple[TableColumn, ...]) -> None:
    assert [column.flexible for column in columns] == [False] * (len(columns) - 1) + [True]


def test_plain_text_has_one_line() -> None:
    assert plain("a\n b\x1b[31m\tc") == "a b\N{REPLACEMENT CHARACTER}[31m c"
    assert plain(None) == plain(" ") == "-"


class OutOfAnswers(Exception):
    """The script is over."""


class Looks:
    """A shard whose answers are scripted; after them OutOfAnswers is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[list[Record] | Exception]) -> None:
        self._answers = iter(answers)
        self._left = len(answers)
        monkeypatch.setattr("bigfleet.cli.get.watching.time.sleep", self._sleep)

    def _sleep(self, _seconds: float) -> None:
        if not self._left:
            raise OutOfAnswers

    def __call__(self) -> Iterator[Record]:
        self._left -= 1
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        yield from answer


def watched(looks: Looks, form: str) -> None:
    shown = Shown(look=looks, columns=MACHINES, noun="machine", form=form)
    with suppress(OutOfAnswers):
        watch(shown, Console(force_terminal=False), interval_seconds=1.0)


@pytest.mark.parametrize(("form", "separator"), [("json", "]\n"), ("yaml", "---\n"), ("table", "# ")])
def test_a_shard_that_goes_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str, separator: str
) -> None:
    """It is told once that it is away; what is the same after that is no change."""
    away = RunFault("cannot reach a shard")
    watched(Looks(monkeypatch, [[machine(1)], away, away, [machine(1)], [machine(2)]]), form)
    told = capsys.readouterr()

    assert told.err == "bigfleet: cannot reach a shard; looking again\n"
    assert told.out.count(separator) == 2
    assert told.out.count("cloud/m-00001") == told.out.count("cloud/m-00002") == 1


def test_a_watch_whose_first_look_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFault, match="cannot reach"):
        watched(Looks(monkeypatch, [RunFault("cannot reach a shard")]), "json")


def test_an_answer_that_breaks_off_is_no_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an array is never written by a watch."""

    def breaking() -> Iterator[Record]:
        yield machine(1)
        raise RunFault("the stream broke")

    monkeypatch.setattr("bigfleet.cli.get.watching.time.sleep", lambda _seconds: None)
    with pytest.raises(RunFault, match="broke"):
        watch(
            Shown(look=breaking, columns=MACHINES, noun="machine", form="json"),
            Console(force_terminal=False),
            interval_seconds=1.0,
        )

    assert capsys.readouterr().out == ""
