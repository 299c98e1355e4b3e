"""Reads which commit a release is made of, and what its notes are."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.image.commands import run
from tools.release.faults import ReleaseFault

#: What artefacts are made of.
_PARTS: Final = (
    *("src", "deploy", "proto", "tools", "pyproject.toml", "requirements.lock", "requirements-libvirt.lock"),
    *("CHANGELOG.md", "LICENSE", "README.md"),
)
_SECTION: Final = re.compile(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_UNRELEASED: Final = "Unreleased"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that nothing in the checkout differs from."""

    #: In 40 digits.
    digest: str
    #: Seconds since the epoch.
    timestamp: int
    #: Of the project.
    version: str
    #: Whether it has the tag of its version; others are previews of a release.
    is_tagged: bool


def current_commit(root: Path, environment: Mapping[str, str]) -> Commit:
    """Return the commit of a checkout.

    Raises ReleaseFault when a file that a release is made of differs from it, or it has the tag of another version;
    ImageFault when this is no checkout.
    """

    def git(*words: str) -> str:
        return run(["git", *words], "build from a checkout", folder=root, environment=environment).rstrip("\n")

    parts = [part for part in _PARTS if (root / part).exists()]
    changed = git("status", "--porcelain", "--", *parts).splitlines()
    if changed:
        raise ReleaseFault(f"{changed[0][3:]} differs from the commit; commit it, or build from a clean checkout")
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    tags = [tag for tag in git("tag", "--points-at", "HEAD").splitlines() if re.fullmatch(r"v\d.*", tag)]
    if tags and f"v{version}" not in tags:
        raise ReleaseFault(f"the commit has the tag {tags[0]}, and pyproject.toml has version {version}; make them one")
    return Commit(git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct")), version, is_tagged=bool(tags))


def release_notes(changelog: str, commit: Commit) -> str:
    """Return the notes of a release: the section of its version.

    A commit without a tag has those of its version where there are any, else what is unreleased. Raises ReleaseFault
    for a tag whose version has no section.
    """
    sections = {match[1]: match[2].strip() for match in _SECTION.finditer(changelog)}
    found = sections.get(commit.version)
    if found is None and commit.is_tagged:
        raise ReleaseFault(
            f"CHANGELOG.md has no section '## {commit.version}', and the commit has the tag v{commit.version};"
            " name the section, and set the tag again"
        )
    if found is None:
        found = sections.get(_UNRELEASED, "")
    if not found:
        raise ReleaseFault(f"CHANGELOG.md has nothing in '## {commit.version}' or '## {_UNRELEASED}'; add what changed")
    title = f"# BigFleet {commit.version}" + ("" if commit.is_tagged else " (preview)")
    return f"{title}\n\nCommit {commit.digest}.\n\n{found}\n"
