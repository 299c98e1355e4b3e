"""Runs the real `bigfleet` command for tests: a run in the background, and one call to its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_SECONDS, wait_until


def run_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `bigfleet` to its end without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "bigfleet.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=cwd,
        check=False,
        stdin=subprocess.DEVNULL,
    )


class UpProcess:
    """A run of `bigfleet up` in a directory of the test; use it as a context."""

    def __init__(self, state_dir: Path, *arguments: str) -> None:
        self.state_dir = state_dir
        self.report_file = state_dir.with_name(f"{state_dir.name}-report.json")
        self._output_file = state_dir.with_name(f"{state_dir.name}-output.txt")
        self._output = self._output_file.open("w")
        command = [sys.executable, "-m", "bigfleet.cli.main", "up", "--state-dir", str(state_dir)]
        self._process = subprocess.Popen(
            [*command, "--report", str(self.report_file), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> "UpProcess":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process.poll() is None:
            # The children see their parent end and follow.
            self._process.kill()
            self._process.wait()
        self._output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output_file.read_text()

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Return once something holds; fail with the output when the run ends first or patience does."""

        def is_over() -> bool:
            if is_so():
                return True
            assert self._process.poll() is None, f"ended before {what}:\n{self.output}"
            return False

        wait_until(is_over, lambda: f"still waiting for {what}:\n{self.output}")

    def child(self, name: str) -> int | None:
        """Return a child's process id, None while there is none."""
        try:
            text = (self.state_dir / f"{name}.pid").read_text()
        except FileNotFoundError:
            return None
        return int(text) if text.strip() else None

    def kill_child(self, name: str) -> None:
        """Kill a child as a power cut would, and wait until another has taken its place."""
        self.wait_until(lambda: self.child(name) is not None, f"the {name}")
        former = self.child(name)
        assert former is not None
        os.kill(former, signal.SIGKILL)
        self.wait_until(lambda: self.child(name) not in (None, former), f"a new {name}")

    def samples(self) -> int:
        """Return how many points of the timeline are kept so far."""
        return len(self.progress().get("timeline", []))

    def progress(self) -> dict[str, Any]:
        try:
            progress: dict[str, Any] = json.loads((self.state_dir / "progress.json").read_text())
        except FileNotFoundError:
            return {}
        return progress

    def ends(self) -> str:
        """Return the last of what was shown, and of what each child wrote: why it is not as it should be."""
        written = {path.name: path.read_text("utf-8", "replace") for path in self.state_dir.glob("logs/*.log")}
        return "\n".join(f"{name}:\n{text[-3000:]}" for name, text in {"shown": self.output, **written}.items())

    def log(self, name: str) -> list[dict[str, Any]]:
        """Return a child's log lines that are JSON, oldest first."""
        lines = (self.state_dir / "logs" / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def finish(self) -> dict[str, Any]:
        """Wait for a clean end and return the report."""
        code = self._process.wait(PATIENCE_SECONDS)
        assert code == 0, self.output
        report: dict[str, Any] = json.loads(self.report_file.read_text())
        return report
