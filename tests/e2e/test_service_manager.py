"""Real processes report to a service manager: each when it is ready, at a reload, and when it stops."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from tests.deploy.systemd_units import command_line, settings
from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, free_port

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


class NotifiedProcess:
    """A process of ours, and the socket to which it reports."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.log = folder / f"{words[0]}.log"
        address = f"bigfleet-e2e-{os.getpid()}-{words[0]}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Abstract, as the path of a test's folder may be longer than a socket's may be.
        self._socket.bind(f"\0{address}")
        self._socket.settimeout(PATIENCE_SECONDS)
        environment = {**os.environ, "NOTIFY_SOCKET": f"@{address}", "WATCHDOG_USEC": "60000000"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(bigfleet(*words), env=environment, stdout=output, stderr=output)

    def wait_for(self, line: str) -> list[str]:
        """Return all lines up to and with the first datagram that holds one."""
        seen: list[str] = []
        while line not in seen:
            try:
                seen += self._socket.recv(65536).decode().split("\n")
            except TimeoutError:
                raise AssertionError(f"{line} did not come, but {seen}:\n{self.log.read_text()}") from None
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        self._socket.close()


@contextmanager
def notified(name: str, folder: Path, *more: str) -> Iterator[NotifiedProcess]:
    """Run a command, and `more` flags, with a service manager's socket while the context lasts."""
    made = NotifiedProcess([word.format(folder=folder) for word in (*COMMANDS[name], *more)], folder)
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
        started.process.send_signal(signal.SIGHUP)
        began = started.wait_for("RELOADING=1")
        ended = started.wait_for("READY=1")

    assert "READY=1" not in began
    assert any(line.startswith("MONOTONIC_USEC=") for line in began)
    assert "STOPPING=1" not in ended


def test_a_shard_reports_a_reload_of_its_policies(tmp_path: Path) -> None:
    """It ends when the file was read, also when it is refused."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("clusters: {}\n")
    with notified("shard", tmp_path, f"--cluster-policy={policy}") as started:
        started.wait_for("READY=1")
        policy.write_text("not: [a policy\n")
        started.process.send_signal(signal.SIGHUP)
        began = started.wait_for("RELOADING=1")
        started.wait_for("READY=1")
        log = started.log.read_text()

    assert "READY=1" not in began
    assert "policy.rejected" in log


def test_the_services_of_a_host_become_ready_as_their_units_start_them(tmp_path: Path) -> None:
    """Coordinator, provider and shard, with the certificates of `bigfleet certs dev`, and directories of the test."""
    made = CliRunner().invoke(app, ["certs", "dev", str(tmp_path / "tls")])
    assert made.exit_code == 0, made.output
    port, ports = free_port(), "--metrics-addr=off --{}=127.0.0.1:0"
    services = {
        "bigfleet-coordinator.service": {"STORE": f"sqlite://{tmp_path}/c.db", "ARGS": ports.format("listen")},
        "bigfleet-provider@simulated.service": {
            "BACKEND": "simulated --calm",
            "ARGS": f"--metrics-addr=off --addr=127.0.0.1:{port}",
        },
        "bigfleet-shard@shard-0.service": {"PROVIDER_ADDR": f"127.0.0.1:{port}", "ARGS": ports.format("listen")},
    }
    with ExitStack() as stack:
        started = []
        for service, environment in services.items():
            process = NotifiedProcess(unit_command(service, tmp_path, environment), tmp_path)
            stack.enter_context(closing(process))
            process.wait_for("READY=1")
            started.append(process)
        for process in reversed(started):
            process.process.send_signal(signal.SIGTERM)
            process.wait_for("STOPPING=1")
        codes = [process.process.wait(PATIENCE_SECONDS) for process in started]

    assert codes == [0, 0, 0]


def unit_command(service: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the words after the program that a unit starts, with directories and credentials as systemd makes them."""
    instance = service.removesuffix(".service").partition("@")[2]
    credentials = folder / f"credentials-{service}"
    credentials.mkdir()
    for value in settings(service)["LoadCredential"]:
        name, _colon, path = value.replace("%i", instance).partition(":")
        shutil.copy(folder / "tls" / Path(path).name, credentials / name)
    places = {"%i": instance, "%d": str(credentials), "%S": str(folder / "lib"), "%L": str(folder / "log")}
    for name, place in (("StateDirectory", "%S"), ("LogsDirectory", "%L")):
        for directory in settings(service).get(name, ()):
            (Path(places[place]) / directory.replace("%i", instance)).mkdir(parents=True)
    return command_line(service, places, environment)[1:]
