"""Takes the program of an earlier release out of the history of this repository."""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.unpacking import filtered

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Release:
    """A commit that fleets were started from, and what its files are."""

    commit: str
    #: Of the state file of each role.
    schemas: Mapping[str, int]


#: Commits that stand for releases until there is a tag: the last one whose state files are as today, and the last one
#: with files of an earlier schema. Each is used for as long as upgrades from it are promised (docs/upgrading.md).
SAME_SCHEMA = Release("89b476642b225368cb776079b2f42dd7b8f7c641", {"shard": 4, "coordinator": 2, "provider": 3})
EARLIER_SCHEMA = Release("ae18a93c64da8e42a1160d23f6fe4257f6921a7f", {"shard": 3, "coordinator": 1, "provider": 2})


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)


def last_release() -> str:
    """Return the newest tag of a version that this commit descends from, else the commit that stands for it."""
    found = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^")
    tag = found.stdout.decode().strip()
    return tag if found.returncode == 0 and re.fullmatch(r"v\d+(\.\d+)*", tag) else SAME_SCHEMA.commit


def program_of(revision: str, folder: Path) -> Path:
    """Unpack the sources of a revision below a folder and return where its packages are; skip without the history."""
    if git("cat-file", "-e", f"{revision}^{{commit}}").returncode != 0:
        pytest.skip(f"this repository has no commit {revision}, as after a shallow clone: git fetch --unshallow")
    archive = git("archive", "--format=tar", revision, "src")
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
        filtered(sources, "data").extractall(folder)
    return folder / "src"


def own_program() -> Path:
    """Return where the packages of this checkout are."""
    return ROOT / "src"


def words_of(*arguments: str) -> list[str]:
    """Return a command of whichever program the environment names."""
    return [sys.executable, "-m", "bigfleet.cli.main", *arguments]


def environment_of(program: Path) -> dict[str, str]:
    """Return the environment in which a program is the one that runs."""
    return {**os.environ, "PYTHONPATH": str(program), "COLUMNS": "200", "NO_COLOR": "1"}
