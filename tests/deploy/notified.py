"""Starts commands as systemd does, with a socket to which they report their state."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.deploy.systemd_units import command_line, instance_of, settings
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port

#: How often a process is looked at that reports nothing.
_POLL_SECONDS = 0.5


class NotifiedProcess:
    """A process of ours, and the socket to which it reports."""

    def __init__(
        self, words: Sequence[str], name: str, folder: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Start a command; the name is that of its log in the folder."""
        self.name = name
        self.log = folder / f"{name}.log"
        address = f"bigfleet-e2e-{os.getpid()}-{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Abstract, as the path of a test's folder may be longer than a socket's may be.
        self._socket.bind(f"\0{address}")
        self._socket.settimeout(_POLL_SECONDS)
        notifying = {**environment, "NOTIFY_SOCKET": f"@{address}", "WATCHDOG_USEC": "60000000"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(words, env=notifying, stdout=output, stderr=output)

    def wait_for(self, line: str) -> list[str]:
        """Return all lines up to and with the first datagram that holds one. Raises AssertionError after its end."""
        seen: list[str] = []

        def has_come() -> bool:
            # What it has sent before its end is read first.
            has_ended = self.process.poll() is not None
            try:
                seen.extend(self._socket.recv(65536).decode().split("\n"))
            except TimeoutError:
                assert not has_ended, f"it ended with {self.process.returncode}:\n{self.log.read_text()}"
            return line in seen

        wait_until(has_come, lambda: f"{line} did not come, but {seen}:\n{self.log.read_text()}")
        return seen

    def reload(self) -> list[str]:
        """Have it read its files again, as the units do, and return what it reported until it was ready again."""
        self.process.send_signal(signal.SIGHUP)
        began = self.wait_for("RELOADING=1")
        assert "READY=1" not in began
        return began + self.wait_for("READY=1")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        self._socket.close()


@contextmanager
def services_of_a_host(
    folder: Path, program: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Iterator[list[NotifiedProcess]]:
    """Run coordinator, provider and shard as their units start them, from the moment that each is ready.

    `folder` has certificates of `bigfleet certs dev` in `tls`. The processes report their stop when the context ends.
    """
    port, ports = free_port(), "--metrics-addr=off --{}=127.0.0.1:0"
    services = {
        "bigfleet-coordinator.service": {"STORE": f"sqlite://{folder}/c.db", "ARGS": ports.format("listen")},
        "bigfleet-provider@simulated.service": {
            "BACKEND": "simulated --calm",
            "ARGS": f"--metrics-addr=off --addr=127.0.0.1:{port}",
        },
        "bigfleet-shard@shard-0.service": {"PROVIDER_ADDR": f"127.0.0.1:{port}", "ARGS": ports.format("listen")},
    }
    with ExitStack() as stack:
        started = []
        for service, variables in services.items():
            words = [*program, *unit_words(service, folder, variables)]
            process = NotifiedProcess(words, service.partition(".")[0], folder, environment)
            stack.enter_context(closing(process))
            process.wait_for("READY=1")
            started.append(process)
        yield started
        for process in reversed(started):
            process.process.send_signal(signal.SIGTERM)
            process.wait_for("STOPPING=1")
            assert process.process.wait(PATIENCE_SECONDS) == 0, process.log.read_text()


def unit_words(service: str, folder: Path, variables: Mapping[str, str]) -> list[str]:
    """Return the words after the program that a unit starts, with directories and credentials as systemd makes them.

    A folder of /etc/bigfleet is one of the same name in `folder`.
    """
    places = _places(service, folder)
    credentials = Path(places["%d"])
    credentials.mkdir()
    for value in settings(service)["LoadCredential"]:
        name, _colon, path = value.replace("%i", places["%i"]).partition(":")
        shutil.copy(folder / Path(path).relative_to("/etc/bigfleet"), credentials / name)
    for name, place in (("StateDirectory", "%S"), ("LogsDirectory", "%L")):
        for directory in settings(service).get(name, ()):
            (Path(places[place]) / directory.replace("%i", places["%i"])).mkdir(parents=True)
    return command_line(service, places, variables)[1:]


def unit_environment(service: str, folder: Path) -> dict[str, str]:
    """Return the variables that a unit sets, with places as for `unit_words`."""
    places = {**_places(service, folder), "/etc/bigfleet": str(folder), "/srv": str(folder / "srv")}
    found = {}
    for setting in settings(service).get("Environment", ()):
        name, _equals, value = setting.partition("=")
        for text, place in places.items():
            value = value.replace(text, place)
        found[name] = value
    return found


def _places(service: str, folder: Path) -> dict[str, str]:
    credentials = str(folder / f"credentials-{service}")
    lib, log = str(folder / "lib"), str(folder / "log")
    return {"%i": instance_of(service), "%d": credentials, "%S": lib, "%L": log}
