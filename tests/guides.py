"""Follows a page of the documentation: reads its blocks, and runs its commands with ports of this run."""

import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, free_port, wait_until_serving

_ADDRESS = re.compile(r"127\.0\.0\.1:(\d+)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, languages: Sequence[str]) -> list[tuple[str, str]]:
    """Return language and content of each block in one of the languages, in order."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(page.read_text("utf-8")) if found[1] in languages]


def turns(console: str) -> list[tuple[str, str]]:
    """Return each command of a console with what it prints."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)


def differs(printed: str, shown: str) -> str:
    """Return both texts when what was printed is not what a page shows, else "".

    On the page, `…` stands for any text of a line, and as a line for any lines. Widths of columns are free.
    """
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else rf"{_line_pattern(line)}\n" for line in shown.rstrip().splitlines()
    )
    lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
    return "" if re.fullmatch(pattern, lines) else f"printed:\n{printed}\nshown:\n{shown}"


def _line_pattern(line: str) -> str:
    return r"\s*" + r"[ \t]+".join(re.escape(word).replace("…", ".*") for word in line.split())


def executable(path: Path, content: str) -> Path:
    """Write a program and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Terminal:
    """Runs commands of a page in a folder, each fixed port replaced by a free one."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], here: Callable[[str], str] = lambda text: text
    ) -> None:
        """Take variables beside those of the tests; `here` turns text of the page into what holds on this machine.

        Programs in `bin` of the folder come first.
        """
        self.folder = folder / "work"
        self.folder.mkdir()
        executable(folder / "bin" / "bigfleet", f'#!/bin/sh\nexec {shlex.join(bigfleet())} "$@"\n')
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, **environment, "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
        self._here = here
        self._ports: dict[str, int] = {}

    def here(self, command: str) -> str:
        """Return the command with ports of this run."""
        text = self._here(command)
        return _ADDRESS.sub(lambda found: f"127.0.0.1:{self._ports.setdefault(found[1], free_port())}", text)

    def run(self, command: str, **variables: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            ["/bin/sh", "-euc", self.here(command)],
            cwd=self.folder,
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, command: str, flag: str) -> Iterator[str]:
        """Run a command while the context lasts, from when the address of a flag serves; return the address."""
        words = shlex.split(self.here(command).replace("\\\n", ""))
        log = self.folder / f"{words[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=output, stderr=output)
        address = words[words.index(flag) + 1]
        try:
            wait_until_serving(address, process, log)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
