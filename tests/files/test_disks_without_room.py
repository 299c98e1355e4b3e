"""State files on a real disk that is full or mounted read-only: the start says so, and nothing is lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files.stored import STATE_FILES, Stored

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Mounts a disk of its own, which ends with the namespace; writes, fills the disk, writes, makes room, and reads.
PROGRAM = """
import os, pathlib, subprocess, sys
from tests.files.stored import STATE_FILES

stored, place = STATE_FILES[int(sys.argv[1])], pathlib.Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], check=True)
path = stored.path(place)
stored.write(path, 3)
state = stored.read(path)[1]


def refusal(work):
    try:
        work()
    except stored.refusal as refused:
        return str(refused)
    return "nothing was refused"


with (place / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
print("full:", refusal(lambda: stored.write(path, 40)))
(place / "filler").unlink()
assert stored.read(path)[1] == state, "a refused start changed the state"
subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
print("read-only:", refusal(lambda: stored.read(path)))
subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
assert stored.read(path)[1] == state, "a refused start changed the state"
"""
#: A namespace of its own, in which every user may mount.
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def can_mount() -> bool:
    """Return whether this host lets its users make namespaces."""
    return shutil.which("unshare") is not None and subprocess.run([*NAMESPACE, "true"], check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no namespace can be made here")
@pytest.mark.parametrize("stored", STATE_FILES, ids=lambda stored: stored.name)
def test_a_start_on_a_full_or_read_only_disk_names_file_and_disk(tmp_path: Path, stored: Stored) -> None:
    """It is no damage: no backup is asked for while the disk is the reason."""
    arguments = ("-c", PROGRAM, str(STATE_FILES.index(stored)), str(tmp_path))
    done = subprocess.run(
        [*NAMESPACE, sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    full, read_only = (line for line in done.stdout.splitlines() if line.startswith(("full:", "read-only:")))

    assert str(stored.path(tmp_path)) in full
    assert "make room on its disk" in full
    assert str(tmp_path) in read_only
    assert "Read-only file system" in read_only
