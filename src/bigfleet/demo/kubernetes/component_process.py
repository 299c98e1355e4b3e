"""Runs one component of a control plane as a child process: starts, kills, pauses and restarts it.

It is not bound to an event loop, so one loop may start it and another one kill it. A component never outlives the
process that started it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Makes our program end when its standard input is closed (tools/controlplane/main.go).
EXIT_WITH_STDIN: Final = "CONTROLPLANE_EXIT_WITH_STDIN"
_TAIL_BYTES: Final = 16 * 1024
_TAIL_LINES: Final = 12
_LINE_CHARACTERS_MAX: Final = 500


class ComponentProcess:
    """One component over its lives. Its output is appended to one log."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = tuple(command)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process, 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        """Return whether the process has been started and has not ended; a paused one runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. Raises OSError when the program cannot be run, RuntimeError when it runs already."""
        if self.is_running:
            raise RuntimeError(f"{self.command[1]} runs already, as process {self.pid}")
        self._close_input()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - arguments of ours, no shell
                self.command,
                # The kernel closes our end when this process ends in any way, and the component follows.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self.log.parent,
                # Nothing of the caller's environment, such as a proxy or KUBECONFIG, changes what a component does.
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.log.parent), EXIT_WITH_STDIN: "1"},
                # Ctrl-C on a terminal reaches the whole group; the plane must outlive those that stop in order.
                start_new_session=True,
            )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, such as SIGSTOP and SIGCONT; nothing happens when it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End the process at once (SIGKILL) and wait for its end; nothing happens when it does not run."""
        process = self._process
        if process is None:
            return
        process.kill()
        await asyncio.to_thread(process.wait)
        self._close_input()

    def describe_exit(self) -> str:
        """Return how the process ended, such as `exit 1` or `SIGKILL`, or that it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return "it runs" if self._process is not None else "it was never started"
        return f"exit {code}" if code >= 0 else signal.Signals(-code).name

    def log_tail(self) -> str:
        """Return the last lines of the log, cut to what fits a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return "there is no log"
        return "\n".join(line[:_LINE_CHARACTERS_MAX] for line in lines[-_TAIL_LINES:]) or "the log is empty"

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
