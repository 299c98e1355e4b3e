"""Which paths of the checkout a container engine gets: those that docs/kubernetes.md copies; they build the program."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.syntax_trees import ROOT

ALLOWED = {"LICENSE", "README.md", "pyproject.toml", "requirements.lock", "src/bigfleet"}
_COPY = re.compile(r"^COPY (.+) \S+$", re.MULTILINE)


def patterns() -> list[str]:
    """Return the patterns of .dockerignore in order."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_sent(path: str) -> bool:
    """Whether a path is part of the build context: of the patterns that match it or a parent, the last decides."""
    parts = PurePosixPath(path).parts
    tried = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    sent = True
    for pattern in patterns():
        kept = pattern.startswith("!")
        plain = pattern.lstrip("!")
        if plain.startswith("**/"):
            found = any(fnmatch.fnmatchcase(part, plain[3:]) for part in parts)
        else:
            found = any(each.count("/") == plain.count("/") and fnmatch.fnmatchcase(each, plain) for each in tried)
        if found:
            sent = kept
    return sent


def copied() -> set[str]:
    """Return the paths that the Dockerfile of the page copies."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (dockerfile,) = re.findall(r"^```dockerfile\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return {word for found in _COPY.findall(dockerfile) for word in found.split()}


def test_the_page_copies_what_the_ignore_file_allows_and_nothing_else() -> None:
    assert copied() == ALLOWED
    assert patterns()[0] == "*"
    assert {pattern[1:] for pattern in patterns() if pattern.startswith("!")} == ALLOWED


@pytest.mark.parametrize(
    "path",
    [
        *("certs/ca.key", "provider.db", "provider.db-wal", "shard/shard.db", "release.key", ".env"),
        *(".git/config", ".venv/bin/python", "build/image/index.json", "deploy/kubernetes/blue/template.j2"),
        *("src/certs/ca.key", "src/bigfleet/model/__pycache__/ids.pyc", "tests/patience.py"),
    ],
)
def test_keys_state_and_history_stay_out(path: str) -> None:
    assert not is_sent(path)


def test_every_file_of_the_program_is_sent() -> None:
    files = [path for path in (ROOT / "src" / "bigfleet").rglob("*") if path.is_file() and path.suffix != ".pyc"]

    assert files
    assert [path for path in files if not is_sent(path.relative_to(ROOT).as_posix())] == []


@pytest.mark.parametrize("path", ["certs/ca.key", "data/shard.db", "shard/shard.db", "provider.db", "provider.db-wal"])
def test_keys_and_state_of_the_commands_of_the_documentation_are_not_committed(path: str) -> None:
    """They are ignored in the root only: a folder `shard` of the source is none of them."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    ask = ["git", "check-ignore", "--quiet", "--no-index"]

    assert subprocess.run([*ask, path], cwd=ROOT, check=False).returncode == 0
    assert subprocess.run([*ask, f"src/bigfleet/{path}"], cwd=ROOT, check=False).returncode == 1


def test_the_program_is_built_from_what_is_copied(tmp_path: Path) -> None:
    """As the Dockerfile does it, without a network and without the rest of the checkout."""
    for name in copied():
        target = tmp_path / "context" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)

    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=tmp_path / "context", env={**os.environ, "PYTHONPATH": ""}, check=True, capture_output=True,
    )  # fmt: skip

    (wheel,) = tmp_path.glob("*.whl")
    built = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("bigfleet/")}
    source = tmp_path / "context" / "src"
    assert built == {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
