"""Runs the commands of a guide of the documentation in order, as its reader would."""

import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, free_port, wait_until_serving

DOCS = Path(__file__).parents[1] / "docs"
ADDRESS = re.compile(r"127\.0\.0\.1:(\d+)")


class Terminal:
    """Runs commands of a page in a folder, each fixed port replaced by a free one."""

    def __init__(self, folder: Path, environment: Mapping[str, str], replaced: Mapping[str, str] | None = None) -> None:
        """Programs in the folder's `bin` come before those of this host. `replaced` are texts of the page."""
        self.folder = folder / "work"
        self.folder.mkdir()
        executable(folder / "bin" / "bigfleet", f'#!/bin/sh\nexec {shlex.join(bigfleet())} "$@"\n')
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, **environment, "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
        self._replaced = replaced or {}
        self._ports: dict[str, int] = {}

    def here(self, command: str) -> str:
        """Return the command with ports and texts of this run."""
        command = ADDRESS.sub(lambda found: f"127.0.0.1:{self._ports.setdefault(found[1], free_port())}", command)
        for text, other in self._replaced.items():
            command = command.replace(text, other)
        return command

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
        words = shlex.split(self.here(command.replace("\\\n", "")))
        log = self.folder / f"{words[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=output, stderr=output)
        try:
            wait_until_serving(words[words.index(flag) + 1], process, log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return language and content of each block of a page that is run, in order."""
    return re.findall(r"^```(sh|console)\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def turns(console: str) -> list[tuple[str, str]]:
    """Return each command of a console with what it prints."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)


def executable(path: Path, content: str) -> Path:
    """Write a program and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
