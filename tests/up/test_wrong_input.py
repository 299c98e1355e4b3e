"""What a person gets for a mistake: exit 2, or 1 for a run that cannot go on, and one line that says where."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from bigfleet.cli.main import main
from tests.up.up_process import run_command

NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time\n"
GOOD_NODES = NODES + "n,1000,1024,0,\n"
GOOD_POD = "p,100,64,0,0,,LS,0,9\n"

FLAGS: list[tuple[str, str]] = [
    ("nope", "nope"),
    ("--nope", "--nope"),
    ("up --nope", "--nope"),
    ("up extra", "extra"),
    ("up --for", "--for"),
    ("up --for soon", "--for"),
    ("up --for 0s", "--for"),
    ("up --for -5", "--for"),
    ("up --for 5parsecs", "--for"),
    ("up --speed fast", "--speed"),
    ("up --speed 0", "--speed"),
    ("up --speed nan", "--speed"),
    ("up --speed inf", "--speed"),
    ("up --clusters 0", "--clusters"),
    ("up --clusters 1000", "--clusters"),
    ("up --clusters three", "--clusters"),
    ("up --machines 3", "--machines"),
    ("up --machines 1000000", "--machines"),
    ("up --shards 0", "--shards"),
    ("up --shards 9", "--shards: 9 must be from 1 to 8"),
    ("up --shards three", "--shards"),
    ("up --shards 3 --clusters 2", "--clusters: 2 must be from 3 for 3 shards"),
    ("up --shards 3 --store paper", "--store: 'paper' is unknown; choose one of sqlite, etcd"),
    ("up --store sqlite", "--store: one shard has no coordinator"),
    ("up --shards 2 --nodes good-nodes.csv --pods good-pods.csv", "--shards: one shard replays a trace"),
    ("up --seed -1", "--seed"),
    ("up --seed x", "--seed"),
    ("up --nodes n.csv", "--pods"),
    ("up --pods p.csv", "--nodes"),
    ("up --nodes absent.csv --pods absent.csv", "absent.csv"),
    ("up --nodes good-nodes.csv --pods good-pods.csv --machines 40", "--machines"),
    ("up --report .", "--report"),
    ("up --report no/such/dir/report.json", "--report"),
    ("up --state-dir good-nodes.csv", "--state-dir"),
    ("up --state-dir foreign", "foreign"),
    ("up --state-dir foreign --fresh", "foreign"),
    ("shard", "--provider-addr"),
    ("shard --provider-addr nowhere", "--provider-addr"),
    ("shard --provider-addr 127.0.0.1:99999", "--provider-addr"),
    ("shard --provider-addr 127.0.0.1:1 --id a/b --id=", "--id"),
    ("shard --provider-addr 127.0.0.1:1 --listen here", "--listen"),
    ("shard --provider-addr 127.0.0.1:1 --cycle-interval 0", "--cycle-interval"),
    ("shard --provider-addr 127.0.0.1:1 --reclaim-cap-fraction 7", "--reclaim-cap-fraction"),
    ("shard --provider-addr 127.0.0.1:1 --join-gate maybe", "--join-gate: 'maybe' is unknown"),
    ("shard --provider-addr 127.0.0.1:1 --join-deadline 0s", "--join-deadline"),
    ("shard --provider-addr 127.0.0.1:1 --cluster-silence-alert soon", "--cluster-silence-alert"),
    ("shard --provider-addr 127.0.0.1:1 --reclaim-without-session no", "--reclaim-without-session"),
    ("shard --provider-addr 127.0.0.1:1 --available-capacity-interval often", "--available-capacity-interval"),
    ("shard --provider-addr 127.0.0.1:1 --execute-concurrency many", "--execute-concurrency"),
    ("provider nope", "nope"),
    ("provider simulated", "--state"),
    ("provider simulated --state s.db --addr here", "--addr"),
    ("provider simulated --state s.db --time-scale 0", "--time-scale"),
    ("provider simulated --state s.db --world absent.yaml", "absent.yaml"),
    ("provider simulated --state s.db --world wrong.yaml", "no_such_key"),
    ("provider simulated --state s.db --catalog wrong.yaml", "wrong.yaml"),
]
FILES: list[tuple[str, str, str]] = [
    ("", PODS + GOOD_POD, "nodes.csv"),
    (NODES, PODS + GOOD_POD, "nodes.csv"),
    ("sn,cpu_milli\nn,1\n", PODS + GOOD_POD, "column memory_mib is missing"),
    (NODES + "n,many,1024,0,\n", PODS + GOOD_POD, "line 2, column cpu_milli: 'many'"),
    (NODES + "n,1000,1024,1,\n", PODS + GOOD_POD, "line 2, column model"),
    (GOOD_NODES + "n,1000,1024,0,\n", PODS + GOOD_POD, "line 3, column sn"),
    (GOOD_NODES, "", "pods.csv"),
    (GOOD_NODES, PODS, "nothing to replay"),
    (GOOD_NODES, PODS + GOOD_POD + "q,100,64,0,0,,Gold,0,9\n", "line 3, column qos: 'Gold'"),
    (GOOD_NODES, PODS + "p,100,64,1,0,A||B,LS,0,9\n", "line 2, column gpu_spec"),
    (GOOD_NODES, PODS + "p,100,64,0,0,,LS,yesterday,9\n", "line 2, column creation_time: 'yesterday'"),
    (GOOD_NODES, PODS + "p,100,64,0,0,,LS\n", "line 2: 7 cells"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the flags above name."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "good-nodes.csv").write_text(GOOD_NODES)
    (folder / "good-pods.csv").write_text(PODS + GOOD_POD)
    (folder / "wrong.yaml").write_text("no_such_key: 1\n")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "thesis.tex").write_text("years of work")
    return folder


Call = Callable[[list[str], Path], "tuple[int, str, str]"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """The command in this process: what is wrong is found before anything starts, and a process takes two seconds."""

    def run(arguments: list[str], cwd: Path) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["bigfleet", *arguments])
        logging = structlog.get_config()
        with pytest.raises(SystemExit) as end:
            main()
        structlog.configure(**logging)
        return (int(end.value.code or 0), *capfd.readouterr())

    return run


def run_apart(arguments: list[str], cwd: Path) -> tuple[int, str, str]:
    """The command in a process of its own."""
    done = run_command(*arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def assert_is_one_clear_line(call: Call, arguments: list[str], said: str, cwd: Path, code: int = 2) -> None:
    exit_code, output, errors = call(arguments, cwd)
    lines = [line for line in errors.splitlines() if line.strip()]

    assert (exit_code, len(lines)) == (code, 1), errors
    assert said in lines[0]
    assert lines[0].startswith("bigfleet")
    assert "Traceback" not in output + errors


@pytest.mark.parametrize(("line", "said"), FLAGS, ids=[line for line, _said in FLAGS])
def test_a_wrong_call_is_told_in_one_line(call: Call, place: Path, line: str, said: str) -> None:
    assert_is_one_clear_line(call, line.split(), said, place)


@pytest.mark.parametrize(("line", "said"), FLAGS[2::18], ids=[line for line, _said in FLAGS[2::18]])
def test_a_process_of_its_own_says_the_same(place: Path, line: str, said: str) -> None:
    assert_is_one_clear_line(run_apart, line.split(), said, place)


@pytest.mark.parametrize(("nodes", "pods", "said"), FILES, ids=[said for _nodes, _pods, said in FILES])
def test_a_wrong_trace_is_told_with_its_place(call: Call, tmp_path: Path, nodes: str, pods: str, said: str) -> None:
    (tmp_path / "nodes.csv").write_text(nodes)
    (tmp_path / "pods.csv").write_text(pods)

    assert_is_one_clear_line(call, ["up", "--nodes", "nodes.csv", "--pods", "pods.csv"], said, tmp_path)
    assert not (tmp_path / ".bigfleet").exists()


def test_a_foreign_directory_keeps_its_files(place: Path) -> None:
    run_command("up", "--state-dir", "foreign", "--fresh", cwd=place)

    assert [entry.name for entry in (place / "foreign").iterdir()] == ["thesis.tex"]


def _shard(port: int) -> list[str]:
    return ["shard", "--provider-addr", "127.0.0.1:1", "--metrics-addr", "off", "--listen", f"127.0.0.1:{port}"]


def _provider(port: int) -> list[str]:
    return ["provider", "simulated", "--state", "p.db", "--metrics-addr", "off", "--addr", f"127.0.0.1:{port}"]


@pytest.mark.parametrize("command", [_shard, _provider])
def test_a_port_in_use_is_a_failed_run(tmp_path: Path, command: Callable[[int], list[str]]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        assert_is_one_clear_line(run_apart, command(port), str(port), tmp_path, code=1)
