"""What is installed is listed, permitted and looked up; what was not looked up is never called sound."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.supply_chain import LOCK, SupplyChainFault, audit, licence_of, licences_page, locked, main, read_audit, sbom

PAGE = LOCK.with_name("docs") / "licences.md"


def test_the_page_of_licences_lists_every_package() -> None:
    """A licence that is not in the list fails here, and the message says where to add it."""
    assert PAGE.read_text(encoding="utf-8") == licences_page(locked()), "run: python -m tools.supply_chain licences"


def test_the_lock_file_is_read_whole() -> None:
    text = LOCK.read_text(encoding="utf-8")
    packages = locked()

    assert len(packages) == text.count("\n    # via") > 40
    assert {"numpy", "grpcio", "aiohttp"} <= {package.name for package in packages}


# ---- bill of materials -------------------------------------------------------------------------------------------


def test_the_bill_of_materials_lists_every_package_with_version_hashes_and_licence() -> None:
    listed = {(each["name"], each["version"]): each for each in json.loads(sbom(locked()))["components"]}
    text = LOCK.read_text(encoding="utf-8")
    hashes = {digest for package in locked() for digest in package.hashes}

    assert set(listed) == {(package.name, package.version) for package in locked()}
    assert len(listed) == len(locked())
    for package in locked():
        found = listed[package.name, package.version]
        assert found["purl"] == f"pkg:pypi/{package.name}@{package.version}"
        assert hashes_of(found) == set(package.hashes) != set()
    assert hashes == set(re.findall("sha256:([0-9a-f]{64})", text))
    assert [name for (name, _version), each in listed.items() if "licenses" not in each] == ["colorama"]
    assert listed["xxhash", version_of("xxhash")]["licenses"] == [{"license": {"id": "BSD-2-Clause"}}]
    assert listed["python-dateutil", version_of("python-dateutil")]["licenses"] == [
        {"expression": "Apache-2.0 OR BSD-3-Clause"}
    ]


def hashes_of(component: dict[str, Any]) -> set[str]:
    """Return the digests of a component: of its only file, or of those that are published."""
    files = [component, *component.get("externalReferences", ())]
    return {hashed["content"] for file in files for hashed in file.get("hashes", ())}


def version_of(name: str) -> str:
    (found,) = [package.version for package in locked() if package.name == name]
    return found


def test_equal_lock_files_give_equal_bills_of_materials_wherever_they_are(tmp_path: Path) -> None:
    """The order of the lines is not that of the packages."""
    blocks = re.split(r"^(?=[a-z])", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (tmp_path / "reversed.lock").write_text("".join(reversed(blocks)))
    (tmp_path / "shorter.lock").write_text("".join(blocks[:-1]))

    assert sbom(locked(tmp_path / "reversed.lock")) == sbom(locked())
    assert sbom(locked(tmp_path / "shorter.lock")) != sbom(locked())


# ---- licences ----------------------------------------------------------------------------------------------------


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
