"""Runs one of BigFleet's programs as a process of its own: starts, kills, restarts it, and reads what it logged.

A program never outlives the tests: it ends with our end of its standard input.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.patience import PATIENCE_SECONDS

#: What a line of a log that is no JSON counts as, such as that of a traceback.
_PLAIN = "plain"


class Program:
    """One `bigfleet` command over its lives; all of them write to one log."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Take the words after `bigfleet`, and variables beside those of the tests."""
        self.name = name
        self.words = list(arguments)
        self._environment = {**os.environ, **(environment or {})}
        self.log = log
        self._command = (sys.executable, "-m", "bigfleet.cli.up.child", *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether it is to run until `kill` or `stop`; a test that waits for its end clears it.
        self.is_wanted = False
        self.starts_total = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended by itself though it is wanted."""
        return self.is_wanted and not self.is_running

    def start(self) -> None:
        assert not self.is_running, f"{self.name} runs already"
        self.is_wanted = True
        self.starts_total += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )

    async def kill(self) -> None:
        """End it as a crash does (SIGKILL)."""
        await self._end(lambda process: process.kill())

    async def stop(self) -> None:
        """Stop it in order (SIGTERM), and by force once patience ends."""
        await self._end(lambda process: process.send_signal(signal.SIGTERM))

    async def ended(self) -> int:
        """Return the exit code once it has ended by itself."""
        assert self._process is not None, "the program was started"
        return await asyncio.to_thread(self._process.wait, PATIENCE_SECONDS)

    async def _end(self, how: Callable[[subprocess.Popen[bytes]], None]) -> None:
        self.is_wanted = False
        process = self._process
        if process is None:
            return
        how(process)
        try:
            await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        if process.stdin is not None:
            process.stdin.close()

    # ---- its log

    def lines(self) -> list[dict[str, Any]]:
        """Return what it logged; a line that is no JSON has the level `plain` and its text as `event`."""
        return [_line(text) for text in self.log.read_text(encoding="utf-8").splitlines() if text.strip()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == name]

    def complaints(self) -> list[str]:
        """Return the lines that are warnings, errors or no log lines at all."""
        grave = [line for line in self.lines() if line.get("level") not in ("debug", "info")]
        return [f"{self.name}: {msgspec.json.encode(line).decode()}" for line in grave]


def _line(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"level": _PLAIN, "event": text}
