"""What is installed is listed, permitted and looked up; what was not looked up is never called sound."""

import json
from pathlib import Path

import pytest

from tools.supply_chain import LOCK, SupplyChainFault, audit, licence_of, licences_page, locked, main, read_audit

PAGE = LOCK.with_name("docs") / "licences.md"


def test_the_page_of_licences_lists_every_package() -> None:
    """A licence that is not in the list fails here, and the message says where to add it."""
    assert PAGE.read_text(encoding="utf-8") == licences_page(locked()), "run: python -m tools.supply_chain licences"


def test_the_lock_file_is_read_whole() -> None:
    text = LOCK.read_text(encoding="utf-8")
    packages = locked()

    assert len(packages) == text.count("\n    # via") > 40
    assert {"numpy", "grpcio", "aiohttp"} <= {package.name for package in packages}


@pytest.mark.parametrize(
    ("metadata", "classifiers", "found"),
    [
        ({"License-Expression": "Apache-2.0 OR BSD-2-Clause"}, [], "Apache-2.0 OR BSD-2-Clause"),
        ({"License": "ISC License"}, [], "ISC"),
        ({}, ["License :: OSI Approved :: MIT License"], "MIT"),
    ],
)
def test_a_licence_is_an_spdx_expression(metadata: dict[str, str], classifiers: list[str], found: str) -> None:
    assert licence_of({"Name": "x"} | metadata, classifiers) == found


@pytest.mark.parametrize("metadata", [{}, {"License": "proprietary"}, {"License-Expression": "MIT AND AGPL-3.0-only"}])
def test_an_unknown_licence_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(SupplyChainFault, match="x: the licence"):
        licence_of({"Name": "x"} | metadata, [])


def program(folder: Path, *, prints: str = "", complains: str = "", code: int = 0) -> str:
    """Return the path of a program that stands for pip-audit."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\ncat >&2 <<'END'\n{complains}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


SOUND = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (1)"}
VULNERABLE = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        ([SOUND], 0, "1 packages looked up, 0 vulnerabilities"),
        ([SOUND, VULNERABLE], 1, "c 2: CVE-1, fixed in 2.1"),
        ([SOUND, SKIPPED], 2, "NOT AUDITED: 1 packages"),
        ([SKIPPED, VULNERABLE], 1, "NOT AUDITED: 1 packages"),
        ([], 2, "0 packages looked up"),
    ],
)
def test_only_what_was_looked_up_counts_as_sound(
    found: list[object], code: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = program(tmp_path, prints=json.dumps({"dependencies": found, "fixes": []}))
    assert main(["audit", path]) == code
    assert says in "".join(capfd.readouterr())


def test_without_a_network_the_audit_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = program(tmp_path, complains="Traceback\nConnectionError: Failed to resolve 'pypi.org'", code=1)
    with pytest.raises(SupplyChainFault, match=r"NOT AUDITED: .*Failed to resolve"):
        audit(path)
    assert main(["audit", path]) == 2
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_report_is_read() -> None:
    report = read_audit(json.dumps({"dependencies": [SOUND, VULNERABLE]}))
    assert (report.audited, len(report.vulnerable), report.skipped) == (2, 1, ())
