"""Runs `bigfleet provider libvirt` so that it kills itself at one of its effects on a host.

    python -m tests.libvirt.killed_provider N before|after COUNTER ARGUMENTS…

Effects are counted from the start of the process; COUNTER is a file with their names, in order. N of -1 kills nothing.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigfleet.cli.main import main
from bigfleet.provider.backends.libvirt import binding
from bigfleet.provider.backends.libvirt.hypervisor import Hypervisor

EFFECTS = (
    "define",
    "start",
    "destroy",
    "undefine",
    "write_record",
    "make_overlay",
    "write_volume",
    "delete_volume",
)


class Killing:
    """A hypervisor whose effects are counted."""

    def __init__(self, hypervisor: Hypervisor, kill_at: int, is_after: bool, counter: Path) -> None:
        self._hypervisor = hypervisor
        self._kill_at = kill_at
        self._is_after = is_after
        self._counter = counter
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._hypervisor, name)
        return self._counted(name, method) if name in EFFECTS else method

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            number, self._count = self._count, self._count + 1
            with self._counter.open("a") as file:
                file.write(f"{name}\n")
            if number == self._kill_at and not self._is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = method(*arguments, **options)
            if number == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call


def run() -> None:
    """Run the command with a hypervisor that kills it."""
    kill_at, when, counter = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    connect = binding.connect

    def killing(uri: str, on_change: Callable[[str], None]) -> Any:
        return Killing(connect(uri, on_change), kill_at, when == "after", counter)

    binding.connect = killing
    sys.argv = ["bigfleet", *sys.argv[4:]]
    main()


if __name__ == "__main__":
    run()
