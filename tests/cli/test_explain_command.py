"""`bigfleet explain` against a real shard: it finds the row that is meant, and tells the shard's own reasons."""

from collections.abc import Iterator

import pytest
import yaml

from bigfleet.cli.explain.command import _row_meant
from bigfleet.cli.explain.page import ALIKE_MAX, _lines
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.rpc.clients.shardread import ShardReader
from tests.cli.live_fleet import ABSENT_TYPE, LiveFleet, live_fleet
from tests.commands import run_here
from tests.processes import free_port


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_fleet(tmp_path_factory.mktemp("explain")) as running:
        yield running


@pytest.fixture(scope="module")
def short(fleet: LiveFleet) -> str:
    """The id of the row that no machine matches."""
    (row,) = fleet.records("get", "shortfalls")
    return str(row["need"])


def test_a_need_is_explained_by_what_the_shard_looked_at(fleet: LiveFleet, short: str) -> None:
    """The beginning of its id is enough; the page says what is missing and why every machine was passed over."""
    page = fleet.run("explain", "need", "blue", short[:6])

    assert (page.returncode, page.stderr) == (0, "")
    assert "short: no_matching_supply" in page.stdout
    assert f"wanted is In {ABSENT_TYPE}" in " ".join(page.stdout.split())
    assert "more machines were passed over as idle candidates for the same reason" in page.stdout
    assert all(line == line.rstrip() for line in page.stdout.splitlines())


def test_a_program_gets_every_event(fleet: LiveFleet, short: str) -> None:
    """JSON and YAML name every machine that was looked at, and the row as `get needs` shows it."""
    told = fleet.records("explain", "need", "blue", short)
    listed = yaml.safe_load(fleet.run("explain", "need", "blue", short, "-o", "yaml").stdout)
    machines = {machine["id"] for machine in fleet.records("get", "machines")}

    assert told["need"]["need"] == short
    assert {event["machine"] for event in told["events"] if event["machine"]} == machines
    assert [event["kind"] for event in listed["events"]] == [event["kind"] for event in told["events"]]
    assert not told["truncated"]


def test_a_machine_is_explained_with_what_was_done_to_it(fleet: LiveFleet) -> None:
    (bound,) = fleet.records("get", "machines", "-c", "green")

    page = fleet.run("explain", "machine", bound["id"])
    told = fleet.records("explain", "machine", bound["id"])

    assert (page.returncode, page.stderr) == (0, "")
    assert "stays with green" in page.stdout
    assert "Bootstrap" in page.stdout
    assert told["machine"] == bound
    assert [action["kind"] for action in told["actions"]] == ["Bootstrap"]
    assert "machine_kept" in [event["kind"] for event in told["events"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("need", "blue", "zzzz"), 1, "had no row of cluster 'blue' whose id begins with 'zzzz'; bigfleet get needs"),
        (("need", "purple", "0"), 1, "had no row of cluster 'purple'"),
        (("need", "blue", ""), 2, "must not be empty"),
        (("need", "a b", "0"), 2, "--cluster"),
        (("machine", "nope"), 1, "had no machine with the id 'nope'; bigfleet get machines lists them"),
        (("machine", ""), 2, "rejects the request: machine_id"),
        (("machine", "m", "-o", "xml"), 2, "--output: 'xml' is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_not_there_is_told_in_one_line(
    fleet: LiveFleet, arguments: tuple[str, ...], code: int, said: str
) -> None:
    finished = fleet.run("explain", *arguments)

    assert (finished.returncode, finished.stdout) == (code, "")
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_beginning_that_is_not_one_rows_alone_is_a_wrong_call(
    fleet: LiveFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that it could mean are named."""
    monkeypatch.setattr("bigfleet.cli.get.records.need_id", lambda fingerprint, _group: f"ab{len(fingerprint):06d}")
    with ShardReader(fleet.shard) as reader, pytest.raises(UsageFault, match=r"'ab' matches 2 rows"):
        _row_meant(reader, "blue", "ab")


def test_a_shard_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    finished = run_here("explain", "machine", "m", "--addr", address)

    assert (finished.returncode, finished.stdout) == (1, "")
    assert f"cannot reach a shard at {address}: connection refused" in finished.stderr


def test_machines_passed_over_alike_are_counted() -> None:
    """A few are named, the others counted where they stood; other events keep their place."""
    rejected = [
        {
            "kind": "candidate_rejected",
            "text": f"m{number} is too small.",
            "attributes": {"stage": "idle", "reason": "min_unit"},
        }
        for number in range(ALIKE_MAX + 7)
    ]
    last = {"kind": "row_finished", "text": "That was all.", "attributes": {}}

    lines = _lines([*rejected, last])

    assert lines[:ALIKE_MAX] == [f"m{number} is too small." for number in range(ALIKE_MAX)]
    assert lines[ALIKE_MAX].startswith("7 more machines were passed over as idle candidates for the same reason")
    assert lines[ALIKE_MAX + 1 :] == ["That was all."]
