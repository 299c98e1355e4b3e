"""`bigfleet get` against a real shard: what it lists, in every form, and what it says when there is nothing."""

import json
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.rpc.clients.shardread import ShardReader
from bigfleet.rpc.wire.gen import shardread_pb2
from tests.cli.live_fleet import ABSENT_TYPE, LiveFleet, live_fleet
from tests.commands import run_here
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, serving

EVERYTHING = ("machines", "needs", "shortfalls", "clusters", "actions", "sessions")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_fleet(tmp_path_factory.mktemp("get")) as running:
        yield running


@pytest.mark.parametrize("what", EVERYTHING)
def test_each_form_says_the_same(fleet: LiveFleet, what: str) -> None:
    """JSON and YAML hold as many records as the table has lines below its heads, with the same names in each."""
    table = fleet.run("get", what)
    records = fleet.records("get", what)
    listed = yaml.safe_load(fleet.run("get", what, "-o", "yaml").stdout)

    assert table.returncode == 0
    assert len(table.stdout.splitlines()) == 1 + len(records)
    assert {frozenset(record) for record in records} == {frozenset(record) for record in listed}
    assert len({frozenset(record) for record in records}) == 1


def test_machines_are_filtered_by_all_that_is_given(fleet: LiveFleet) -> None:
    """Every filter narrows the list; names of states and types are taken in any case, lists with commas too."""
    everything = fleet.records("get", "machines")
    spots = fleet.records("get", "machines", "--capacity-type", "spot", "--zone", "sim-1a")
    bound = fleet.records("get", "machines", "-c", "blue")
    resting = fleet.records("get", "machines", "--state", "idle,SPECULATIVE")

    ids = [machine["id"] for machine in everything]
    assert ids == sorted(ids)
    assert spots == [one for one in everything if (one["capacityType"], one["zone"]) == ("Spot", "sim-1a")]
    assert [(one["cluster"], one["state"], one["priority"]) for one in bound] == [("blue", "Configured", 1000)]
    assert {one["state"] for one in resting} == {"Idle", "Speculative"}
    assert fleet.records("get", "machines", "--type", bound[0]["instanceType"], "--flag", "held") == []


def test_machines_come_page_by_page_and_none_twice(fleet: LiveFleet) -> None:
    """A page of seven at a time gives what one page gives."""
    with ShardReader(fleet.shard) as reader:
        paged = reader.machines(shardread_pb2.ListMachinesRequest(page_size=7))
        ids = [view.machine.id for view in paged.entries]
        whole = [view.machine.id for view in reader.machines(shardread_pb2.ListMachinesRequest()).entries]

    assert (ids, paged.total) == (whole, len(whole))
    assert len(whole) > 2 * 7


def test_needs_are_listed_by_urgency_and_say_what_is_missing(fleet: LiveFleet) -> None:
    rows = fleet.records("get", "needs")

    assert [(row["cluster"], row["priority"], row["class"]) for row in rows] == [
        ("blue", 2_000_000, "critical"),
        ("blue", 1000, "service"),
        ("green", 200, "batch"),
    ]
    assert [row["missing"] for row in rows] == [{"cpu": "2", "memory": "4Gi"}, {}, {}]
    assert rows[2]["group"] == "gang-1"
    assert fleet.records("get", "needs", "--limit", "1")[0]["need"] == rows[0]["need"]


def test_shortfalls_are_the_rows_that_nothing_covers(fleet: LiveFleet) -> None:
    (short,) = fleet.records("get", "shortfalls")

    assert (short["cluster"], short["reason"]) == ("blue", "no_matching_supply")
    assert short["requirements"][0]["values"] == [ABSENT_TYPE]
    assert short["unmetCycles"] >= 1
    assert fleet.records("get", "shortfalls", "-c", "green") == []


def test_clusters_are_added_up(fleet: LiveFleet) -> None:
    blue, green = fleet.records("get", "clusters")

    assert (blue["cluster"], blue["rows"], blue["rowsShort"], blue["shortPriority"]) == ("blue", 2, 1, 2_000_000)
    assert blue["wanted"] == {"cpu": "8", "memory": "8Gi"}
    assert blue["missing"] == {"cpu": "2", "memory": "4Gi"}
    assert (green["cluster"], green["rowsShort"], green["machines"]["configured"]) == ("green", 0, 1)


def test_actions_are_filtered(fleet: LiveFleet) -> None:
    bound = fleet.records(
        "get", "actions", "--kind", "bootstrap", "--outcome", "success", "-c", "blue", "--since", "1h"
    )

    assert [(action["kind"], action["cluster"]) for action in bound] == [("Bootstrap", "blue")]
    assert fleet.records("get", "actions", "-m", bound[0]["machine"], "--since", "1h") == bound
    assert fleet.records("get", "actions", "--outcome", "running,fenced") == []


def test_sessions_are_listed_by_cluster(fleet: LiveFleet) -> None:
    """Who is connected since when, and what it asks for; one cluster alone; a stranger is told to be one."""
    blue, green = fleet.records("get", "sessions")
    stranger = fleet.run("get", "sessions", "-c", "purple")

    assert [(one["cluster"], one["state"], one["rows"]) for one in (blue, green)] == [
        ("blue", "connected", 2),
        ("green", "connected", 1),
    ]
    assert blue["since"] <= blue["lastRollup"]
    assert (blue["rollupHeld"], blue["outboxFrames"], blue["outboxDropped"], blue["capabilities"]) == (False, 0, 0, [])
    assert fleet.records("get", "sessions", "-c", "green") == [green]
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert "has no session of cluster 'purple' and expects none" in stranger.stderr


def test_sessions_are_counted(fleet: LiveFleet) -> None:
    figures = fleet.records("get", "sessions", "--totals")
    counts = {(figure["name"], figure["event"]): figure["count"] for figure in figures}

    assert counts[("active_sessions", None)] == 2
    assert counts[("session_lifecycle", "installed")] == 2
    assert counts[("rollups", "accepted")] == 2


def test_nothing_found_is_told_beside_the_output(fleet: LiveFleet) -> None:
    """Standard output stays empty, or an empty list; the exit code is 0."""
    table = fleet.run("get", "machines", "--state", "Failed")

    assert (table.returncode, table.stdout, table.stderr) == (0, "", "no machines found\n")
    assert fleet.run("get", "machines", "--state", "Failed", "-o", "json").stdout == "[]\n"
    assert fleet.run("get", "machines", "--state", "Failed", "-o", "yaml").stdout == "[]\n"


@pytest.mark.parametrize("what", ["machines", "needs", "shortfalls", "clusters", "actions"])
def test_an_unknown_cluster_is_not_an_empty_one(fleet: LiveFleet, what: str) -> None:
    finished = fleet.run("get", what, "-c", "purple")

    assert (finished.returncode, finished.stdout) == (1, "")
    assert "knows no cluster 'purple'" in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("machines", "--state", "asleep"), "--state: 'asleep' is unknown; choose from Speculative"),
        (("machines", "--capacity-type", "free"), "--capacity-type: 'free' is unknown"),
        (("machines", "--flag", "red"), "--flag: 'red' is unknown; choose from pending"),
        (("machines", "-c", "a b"), "--cluster"),
        (("machines", "--interval", "3s"), "--interval needs --watch; add --watch"),
        (("machines", "-w", "--interval", "0s"), "--interval: '0s' must be longer than zero"),
        (("machines", "-o", "xml"), "--output: 'xml' is unknown; choose one of table, json, yaml"),
        (("machines", "--addr", "shard"), "--addr: 'shard' is not an address"),
        (("machines", "--addr", "h:" + "9" * 5_000), "is not an address; write HOST:PORT"),
        (("machines", "--addr", "shard:0"), "has port 0"),
        (("machines", "--tls-cert", "a.pem"), "--tls-key and --tls-ca missing"),
        (("needs", "--limit", "-1"), "--limit"),
        (("actions", "--kind", "nap"), "--kind: 'nap' is unknown; choose from Bootstrap"),
        (("actions", "--outcome", "fine"), "--outcome: 'fine' is unknown; choose from success"),
        (("actions", "--since", "soon"), "--since: 'soon' is not a duration"),
        (("sessions", "--totals", "--metrics-addr", "8780"), "--metrics-addr: '8780' is not an address"),
        (("sessions", "--metrics-addr", "127.0.0.1:8780"), "--metrics-addr needs --totals; add --totals"),
        (("sessions", "--totals", "-c", "blue"), "--totals shows totals over all clusters"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_a_wrong_call_is_told_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    finished = run_here("get", *arguments)

    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize("asked", [*EVERYTHING, "sessions --totals"])
def test_a_shard_that_is_not_there_is_named_with_what_to_check(asked: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    flag = "--metrics-addr" if "--totals" in asked else "--addr"

    finished = run_here("get", *asked.split(), flag, address)

    assert (finished.returncode, finished.stdout) == (1, "")
    assert address in finished.stderr
    assert "connection refused; check that the shard runs" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_the_wrong_port_of_a_shard_is_told(fleet: LiveFleet) -> None:
    """Metrics where gRPC should be, gRPC where metrics should be, and a provider in a shard's place."""
    metrics = run_here("get", "machines", "--addr", fleet.metrics)
    grpc = run_here("get", "sessions", "--totals", "--metrics-addr", fleet.shard)
    provider = run_here("get", "machines", "--addr", fleet.provider)

    assert [one.returncode for one in (metrics, grpc, provider)] == [1, 1, 1]
    assert "speaks no gRPC" in metrics.stderr
    assert "there is no http server" in grpc.stderr
    assert "is not a shard" in provider.stderr


def test_the_address_may_come_from_the_environment(fleet: LiveFleet) -> None:
    environment = {**os.environ, "BIGFLEET_SHARD_ADDR": fleet.shard}
    command = bigfleet("get", "clusters", "-o=json")

    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)

    assert [cluster["cluster"] for cluster in json.loads(finished.stdout)] == ["blue", "green"]


def test_a_shard_without_its_provider_is_not_ready(tmp_path: Path) -> None:
    """An unread inventory is not an empty one."""
    shard = f"127.0.0.1:{free_port()}"
    flags = ("--listen", shard, "--provider-addr", f"127.0.0.1:{free_port()}", "--data-dir", str(tmp_path))
    with serving(shard, tmp_path / "shard.log", "shard", *flags, "--metrics-addr", "off"):
        said = {what: run_here("get", what, "--addr", shard) for what in ("machines", "needs", "clusters")}
        explained = run_here("explain", "machine", "m", "--addr", shard)

    assert {(one.returncode, one.stdout) for one in (*said.values(), explained)} == {(1, "")}
    assert all("is not ready yet: it has finished no cycle" in one.stderr for one in said.values())
    assert "no cycle has finished yet" in explained.stderr


def test_a_reader_that_has_enough_ends_it_quietly(fleet: LiveFleet) -> None:
    """As in `… | head -1`."""
    command = " ".join(bigfleet("get", "machines", "-o", "json", "--addr", fleet.shard))
    script = f"set -o pipefail; {command} | head -1"

    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "[\n", "")


# ---- on a terminal -----------------------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own; use it as a context."""

    def __init__(self, columns: int, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            bigfleet(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._said = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def read_until(self, *texts: str) -> str:
        """Return all that it said, without orders to the terminal, once it has said these; without texts at its end."""

        def is_said() -> bool:
            if texts and all(text in self.text for text in texts):
                return True
            if not select.select([self._ours], [], [], 0)[0]:
                return False
            try:
                content = os.read(self._ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                content = b""
            self._said += content
            return not content

        wait_until(is_said, lambda: self.text, poll_seconds=0.01)
        assert all(text in self.text for text in texts), self.text
        return self.text

    @property
    def text(self) -> str:
        return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", self._said).decode()


@pytest.mark.parametrize(
    ("what", "columns"),
    [
        ("machines", 80),
        ("needs", 160),
        pytest.param("clusters", 80, marks=pytest.mark.slow),
        pytest.param("actions", 160, marks=pytest.mark.slow),
        pytest.param("sessions", 160, marks=pytest.mark.slow),
    ],
)
def test_a_table_fits_its_terminal(fleet: LiveFleet, what: str, columns: int) -> None:
    """No line is longer; columns that had no room are named below."""
    with Terminal(columns, "get", what, "--addr", fleet.shard) as terminal:
        lines = terminal.read_until().splitlines()
        code = terminal.process.wait(PATIENCE_SECONDS)

    assert code == 0
    assert max(map(len, lines)) <= columns
    assert ("no room for" in " ".join(lines)) == (columns == 80)


def test_a_watch_draws_a_screen_until_it_is_interrupted(fleet: LiveFleet) -> None:
    with Terminal(120, "get", "machines", "-w", "--interval", "100ms", "--addr", fleet.shard) as terminal:
        terminal.read_until("MACHINE", "below the edge")
        terminal.process.send_signal(signal.SIGINT)
        text = terminal.read_until()
        code = terminal.process.wait(PATIENCE_SECONDS)

    assert code == 0
    assert "Traceback" not in text


def test_a_watch_for_a_program_writes_a_document_per_change(fleet: LiveFleet, tmp_path: Path) -> None:
    """What does not change is written once; the rows' ages in cycles do change."""
    still, moving = tmp_path / "still", tmp_path / "moving"
    flags = ("-o", "json", "-w", "--interval", "100ms", "--addr", fleet.shard)
    with ExitStack() as stack:
        first, second = stack.enter_context(still.open("w")), stack.enter_context(moving.open("w"))
        processes = [
            subprocess.Popen(bigfleet("get", "machines", "-c", "green", *flags), stdout=first),
            subprocess.Popen(bigfleet("get", "shortfalls", *flags), stdout=second),
        ]
        for process in processes:
            stack.callback(process.kill)
        wait_until(
            lambda: len(documents(moving)) >= 3 and documents(still),
            lambda: f"{len(documents(moving))} and {len(documents(still))} documents were written",
        )
        for process in processes:
            process.send_signal(signal.SIGINT)
        ends = [process.wait(PATIENCE_SECONDS) for process in processes]

    assert ends == [0, 0]
    assert len(documents(still)) == 1
    ages = [document[0]["unmetCycles"] for document in documents(moving)]
    assert len(ages) >= 3
    assert ages == sorted(set(ages))


def documents(path: Path) -> list[Any]:
    """Return the whole documents of a file."""
    return [json.loads(text + "\n]") for text in path.read_text().split("\n]\n")[:-1]]
