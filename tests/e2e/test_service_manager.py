"""Real processes report to a service manager: each when it is ready, at a reload, and when it stops."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from tests.cli.provider.bmc_stubs import write_stubs
from tests.deploy.notified import NotifiedProcess, services_of_a_host, unit_environment, unit_words
from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, free_port, run_bigfleet

pytestmark = pytest.mark.slow

#: The commands that serve, each with what it needs to become ready without another process.
COMMANDS = {
    "coordinator": ("coordinator", "--store=sqlite://{folder}/c.db", "--listen=127.0.0.1:0", "--metrics-addr=off"),
    "provider": (
        "provider",
        "simulated",
        "--calm",
        "--state={folder}/p.db",
        "--addr=127.0.0.1:0",
        "--metrics-addr=off",
    ),
    "shard": (
        "shard",
        "--fake-provider=4",
        "--data-dir={folder}",
        "--listen=127.0.0.1:0",
        "--metrics-addr=off",
        "--audit-log={folder}/audit.jsonl",
    ),
}


@contextmanager
def notified(name: str, folder: Path, *more: str) -> Iterator[NotifiedProcess]:
    """Run a command, and `more` flags, with a service manager's socket while the context lasts."""
    made = NotifiedProcess(bigfleet(*(word.format(folder=folder) for word in (*COMMANDS[name], *more))), name, folder)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_reports_its_start_and_its_stop(tmp_path: Path, name: str) -> None:
    with notified(name, tmp_path) as started:
        begun = started.wait_for("READY=1")
        alive = started.wait_for("WATCHDOG=1")
        started.process.send_signal(signal.SIGTERM)
        stopped = started.wait_for("STOPPING=1")
        code = started.process.wait(PATIENCE_SECONDS)

    assert {line.partition("=")[0] for line in begun} <= {"READY", "STATUS", "WATCHDOG", "EXTEND_TIMEOUT_USEC"}
    assert "READY=1" not in alive + stopped
    assert code == 0, started.log.read_text()


@pytest.mark.parametrize("name", ["provider", "shard"])
def test_a_process_reports_a_reload(tmp_path: Path, name: str) -> None:
    with notified(name, tmp_path) as started:
        started.wait_for("READY=1")
        reported = started.reload()

    assert any(line.startswith("MONOTONIC_USEC=") for line in reported)
    assert "STOPPING=1" not in reported


def test_a_shard_reports_a_reload_of_its_policies(tmp_path: Path) -> None:
    """It ends when the file was read, also when it is refused."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("clusters: {}\n")
    with notified("shard", tmp_path, f"--cluster-policy={policy}") as started:
        started.wait_for("READY=1")
        policy.write_text("not: [a policy\n")
        started.reload()
        log = started.log.read_text()

    assert "policy.rejected" in log


def test_the_services_of_a_host_become_ready_as_their_units_start_them(tmp_path: Path) -> None:
    """Coordinator, provider and shard, with the certificates of `bigfleet certs dev`, and directories of the test."""
    made = CliRunner().invoke(app, ["certs", "dev", str(tmp_path / "tls")])
    assert made.exit_code == 0, made.output
    with services_of_a_host(tmp_path, bigfleet()) as started:
        assert [process.process.poll() for process in started] == [None] * 3


def test_a_provider_over_a_program_becomes_ready_with_the_drop_in_of_the_examples(tmp_path: Path) -> None:
    """With programs in place of ipmitool and kubectl; the drop-in names each file that the program reads and writes."""
    service = "bigfleet-provider@rack.service"
    for words in (
        ["certs", "dev", "tls", "--provider=rack"],
        ["provider", "new", "--kind=exec", "rack", "--example=ipmi.sh"],
    ):
        done = run_bigfleet(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (tmp_path / "rack" / "hosts").write_text("r640-01 10.0.7.1 r640 row-1 62 500Gi\n")
    (tmp_path / "rack" / "password").write_text("the password\n")
    (tmp_path / "srv").mkdir()
    environment = {**os.environ, **unit_environment(service, tmp_path), **write_stubs(tmp_path)}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    program = f"exec --program={tmp_path / 'rack' / 'ipmi.sh'}"
    variables = {"BACKEND": program, "ARGS": f"--addr=127.0.0.1:{free_port()} --metrics-addr=off"}
    words = [*bigfleet(), *unit_words(service, tmp_path, variables)]
    with closing(NotifiedProcess(words, "rack", tmp_path, environment)) as rack:
        rack.wait_for("READY=1")

    # The program makes both where it is allowed to write, and nothing where it is.
    assert (tmp_path / "lib" / "bigfleet-provider-rack" / "claims").is_dir()
    assert (tmp_path / "srv" / "bigfleet-seeds").is_dir()
    assert sorted(path.name for path in (tmp_path / "rack").iterdir()) == ["hosts", "ipmi.sh", "password"]
