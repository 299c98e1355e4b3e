"""Runs the programs that a build of the image needs."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.image.faults import ImageFault

#: How much of a program's words a failure repeats.
_TAIL_LINES: Final = 10


def run(
    command: Sequence[str | Path], advice: str = "", *, folder: Path | None = None, environment: Mapping[str, str]
) -> str:
    """Run a program to its end and return what it printed. Raises ImageFault with its last words and the advice."""
    try:
        done = subprocess.run(  # noqa: S603 - arguments of ours, no shell
            [str(word) for word in command],
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise ImageFault(f"{command[0]} is not on the PATH{_and(advice)}") from None
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:]) or "it said nothing"
        words = " ".join(str(word) for word in command[:4])
        raise ImageFault(f"{words} … ended with {done.returncode}{_and(advice)}:\n{said}")
    return done.stdout


def _and(advice: str) -> str:
    return f"; {advice}" if advice else ""
