"""How the installed programs start: Ctrl-C during the imports ends them quietly."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPTS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]

#: Runs a program and sends it SIGINT when it imports a module. `ignored` is how the parent left the signal.
INTERRUPTED_AT_IMPORT = """
import os, signal, sys
from importlib import import_module

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = ["program", "--help"]
module, _colon, function = {script!r}.partition(":")
getattr(import_module(module), function)()
"""


def interrupted(script: str, at: str, *, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """Run an installed program that gets SIGINT when it imports a module."""
    code = INTERRUPTED_AT_IMPORT.format(script=SCRIPTS[script], at=at, ignored=ignored)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("script", "at"),
    [
        ("bigfleet", "typer"),
        ("bigfleet", "bigfleet.rpc.security.tls_floor"),
        ("hail-dedicated", "argparse"),
        ("hail-dedicated", "bigfleet.partition.answer"),
    ],
)
def test_an_interrupt_during_the_imports_ends_a_program_quietly(script: str, at: str) -> None:
    """The traceback of an import says nothing to a user who pressed Ctrl-C."""
    done = interrupted(script, at)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A shell starts the commands of its background so."""
    done = interrupted("bigfleet", "typer", ignored=True)

    assert done.returncode == 0
    assert "Usage" in done.stdout
