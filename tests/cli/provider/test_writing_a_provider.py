"""docs/writing-a-provider.md is true: its blocks make a provider that runs, survives a kill, and is certified."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.conformance.certifications import certification_of
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port, wait_until_serving

PAGE = Path(__file__).parents[3] / "docs" / "writing-a-provider.md"
TOY = "files_provider.py"
TOY_LINES_MAX = 99
MACHINE = "files-007"


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the code blocks of a language in order: the name beside it, and what is in it."""
    return re.findall(rf"^```{language}(?: (\S+))?\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def program(name: str) -> str:
    """Return the program that the blocks of that name make together."""
    return "".join(content for title, content in blocks("python") if title == name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that holds the page's programs."""
    for name in (TOY, "drive.py"):
        (tmp_path / name).write_text(program(name))
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `python` and `bigfleet` are those of this run."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "FILES_FOLDER": str(folder / "machines"), "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"}


@contextmanager
def toy(folder: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run the page's provider; yield its address and its process, and end what is left of it."""
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    command = [sys.executable, TOY, "--addr", address, "--state", "files.db", "--metrics-addr", "off", *flags]
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=output, stderr=output)
    try:
        wait_until_serving(address, process, log)
        yield address, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)


def until(is_true: Callable[[], bool]) -> None:
    """Return once it is true."""
    wait_until(is_true, "it never became true")


def state_of(provider: CapacityProviderStub, machine_id: str = MACHINE) -> str:
    return pb.MachineState.Name(provider.Get(pb.MachineRef(id=machine_id)).state).removeprefix("MACHINE_STATE_")


def test_the_provider_is_under_a_hundred_lines() -> None:
    assert "under 100 lines" in PAGE.read_text("utf-8")
    assert 50 < program(TOY).count("\n") <= TOY_LINES_MAX


@pytest.mark.slow
def test_the_provider_satisfies_the_strict_type_checker(folder: Path, pytestconfig: pytest.Config) -> None:
    cache = pytestconfig.cache
    assert cache is not None
    command = ["-m", "mypy", "--strict", "--cache-dir", str(cache.mkdir("mypy-of-projects")), TOY]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stdout


def test_it_takes_a_machine_through_its_life_as_the_page_shows(folder: Path) -> None:
    (shown,) = (content for _title, content in blocks("console") if "drive.py" in content)
    told = [line.split() for line in shown.splitlines()[1:]]
    with toy(folder) as (address, _process):
        done = subprocess.run(
            [sys.executable, "drive.py", address, MACHINE], cwd=folder, capture_output=True, text=True, check=False
        )

    assert done.returncode == 0, done.stderr
    seen = [line.split() for line in done.stdout.splitlines()]
    resting = [line for line in seen if not line[0].endswith("ING")]
    assert [line[0] for line in resting] == [line[0] for line in told if not line[0].endswith("ING")]
    # The operation's id differs from run to run, its length does not.
    assert [[len(word) for word in line] for line in resting] == [
        [len(word) for word in line] for line in told if not line[0].endswith("ING")
    ]
    assert {line[0] for line in seen} <= {line[0] for line in told}
    assert list((folder / "machines").iterdir()) == []


def test_a_kill_takes_nothing_back(folder: Path) -> None:
    with toy(folder) as (address, process), grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        provider.Create(pb.CreateRequest(machine_id=MACHINE))
        until(lambda: state_of(provider) == "IDLE")
        request = pb.ConfigureRequest(machine_id=MACHINE, cluster_id="team-a", shard_metadata={"why": "me"})
        operation_id = provider.Configure(request).operation_id
        until(lambda: state_of(provider) == "CONFIGURED")
        before = provider.Get(pb.MachineRef(id=MACHINE))
        process.kill()
    with toy(folder) as (address, _process), grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)

        assert provider.Get(pb.MachineRef(id=MACHINE)) == before
        assert provider.Configure(request).operation_id == operation_id
        provider.Drain(pb.DrainRequest(machine_id=MACHINE))
        until(lambda: state_of(provider) == "IDLE")
        assert "cluster" not in json.loads((folder / "machines" / f"{MACHINE}.json").read_text())


@pytest.mark.slow
def test_what_happens_to_files_by_hand_is_seen(folder: Path) -> None:
    with (
        toy(folder, "--reconcile-interval=100ms", "--failed-hold=10s") as (address, _process),
        grpc.insecure_channel(address) as channel,
    ):
        provider = CapacityProviderStub(channel)
        provider.Create(pb.CreateRequest(machine_id=MACHINE))
        until(lambda: state_of(provider) == "IDLE")
        (folder / "machines" / f"{MACHINE}.json").unlink()
        until(lambda: state_of(provider) == "FAILED")
        assert provider.Get(pb.MachineRef(id=MACHINE)).last_error.startswith("HOST_LOST: ")
        until(lambda: state_of(provider) == "SPECULATIVE")
        (folder / "machines" / "stray.json").write_text('{"ref": "someone-elses"}')
        until(lambda: any(machine.id == "stray" for machine in provider.List(pb.ListFilter()).machines))
        assert state_of(provider, "stray") == "IDLE"
        provider.Delete(pb.DeleteRequest(machine_id="stray"))
        until(lambda: not (folder / "machines" / "stray.json").exists())


@pytest.mark.slow
def test_the_tests_of_the_page_pass_and_satisfy_the_strict_type_checker(
    folder: Path, pytestconfig: pytest.Config
) -> None:
    """Its state machine runs a few examples here; the page leaves their number to the profile."""
    name = "test_files_provider.py"
    (folder / name).write_text(program(name))
    (folder / "conftest.py").write_text(
        "from hypothesis import settings\n"
        "settings.register_profile('few', max_examples=5, stateful_step_count=15, deadline=None)\n"
        "settings.load_profile('few')\n"
    )
    cache = pytestconfig.cache
    assert cache is not None
    checking = ["-m", "mypy", "--strict", "--cache-dir", str(cache.mkdir("mypy-of-projects")), name]
    for command, last in (
        (["-m", "pytest", "-q", "-p", "no:cacheprovider", name], "2 passed"),
        (checking, "Success: no issues found in 1 source file"),
    ):
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].startswith(last)


@pytest.mark.slow
def test_it_is_certified_as_the_page_says(folder: Path, request: pytest.FixtureRequest) -> None:
    certification = certification_of(request)
    (line,) = (content for _title, content in blocks("sh") if content.startswith("bigfleet conformance"))
    command = shlex.split(line.replace("\\\n", " "))
    assert command[2:4] == ["--profile", certification.flag]
    done = subprocess.run(
        [*command, "--out", "report"], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    certification.expect_report(folder / "report")
