"""docs/bare-metal.md is true: its commands are run in order, with stubs in place of ipmitool and kubectl."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.provider.bmc_stubs import executable, write_stubs
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, wait_until_serving

PAGE = Path(__file__).parents[3] / "docs" / "bare-metal.md"
ADDRESS = re.compile(r"127\.0\.0\.1:(\d+)")


class Terminal:
    """Runs commands of the page in a folder, each fixed port replaced by a free one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        (self.folder / "team-a.kubeconfig").write_text("")
        executable(folder / "bin" / "bigfleet", f'#!/bin/sh\nexec {shlex.join(bigfleet())} "$@"\n')
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, **write_stubs(folder), "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
        self._ports: dict[str, int] = {}

    def here(self, command: str) -> str:
        """Return the command with ports of this run."""
        return ADDRESS.sub(lambda found: f"127.0.0.1:{self._ports.setdefault(found[1], free_port())}", command)

    def run(self, command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            ["/bin/sh", "-euc", self.here(command)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, command: str, flag: str) -> Iterator[None]:
        """Run a command while the context lasts, from the moment the address of that flag serves."""
        words = shlex.split(self.here(command))
        log = self.folder / f"{words[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=output, stderr=output)
        try:
            wait_until_serving(words[words.index(flag) + 1], process, log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)


def blocks() -> list[tuple[str, str]]:
    """Return language and content of each block that is run, in order."""
    return re.findall(r"^```(sh|console)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def turns(console: str) -> list[tuple[str, str]]:
    """Return each command of a console with what it prints."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    terminal, run = Terminal(tmp_path), iter(blocks())
    for language, content in run:
        if content.startswith("bigfleet provider exec"):
            break
        if language == "sh":
            terminal.run(content)
            continue
        for command, printed in turns(content):
            assert terminal.run(command) == printed
    # No host is on, and no cloud-init data is left, before the provider starts.
    assert list((tmp_path / "power").iterdir()) == []
    assert list(terminal.folder.rglob("user-data")) == []
    commands = [content for _language, content in run]
    assert [each.split()[1] for each in commands] == ["provider", "shard", "get"]
    status, shard, machines = commands
    with terminal.serving(content, "--addr"):
        assert re.search(r"SPECULATIVE\W+3\b", terminal.run(status), re.IGNORECASE)
        with terminal.serving(shard, "--listen"):
            names = ("r640-01", "r640-02", "r740-01")
            wait_until(lambda: all(name in terminal.run(machines) for name in names), "the shard lists no hosts")
