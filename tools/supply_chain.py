"""Says what a BigFleet installation consists of: bill of materials, licences, known vulnerabilities.

All of it follows from requirements-image.lock: what the image runs with, `bigfleet provider aws` included.

    python -m tools.supply_chain licences > docs/licences.md
    python -m tools.supply_chain sbom build/bigfleet.cdx.json
    python -m tools.supply_chain audit pip-audit

`audit` ends with 0 when every package was looked up and none is vulnerable, with 1 when one is, and with 2 when the
packages could not be looked up: pip-audit itself reports "no known vulnerabilities" for packages that it skipped.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.bill_of_materials import SPECIFICATION, bill_of_materials, known_licences, python_component

LOCK: Final = Path(__file__).parents[1] / "requirements-image.lock"
#: A requirement of the lock file: name, version, the marker of where it is needed, and the lines of its hashes.
_REQUIREMENT: Final = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?:\s*;\s*(?P<marker>.*?))?\s*\\?\n"
    r"(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64}\s*\\?\n)*)",
    re.MULTILINE,
)
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")

#: Licences that set no conditions on a program under Apache-2.0 that uses the package, by what packages call them.
PERMITTED: Final = {
    "0BSD": "0BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache-2.0": "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception": "Apache-2.0 WITH LLVM-exception",
    "BSD": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD-2-Clause": "BSD-2-Clause",
    "BSD-3-Clause": "BSD-3-Clause",
    "CC0-1.0": "CC0-1.0",
    "ISC License": "ISC",
    "MIT": "MIT",
    "MIT License": "MIT",
    "MIT-0": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "PSF-2.0": "PSF-2.0",
    "Zlib": "Zlib",
}
#: Packages whose metadata name no licence; these stand in the licence files that they bring.
READ: Final = {"python-dateutil": "Apache-2.0 OR BSD-3-Clause"}


@dataclass(frozen=True, slots=True)
class Package:
    """One line of the lock file."""

    name: str
    version: str
    #: Where it is needed, as an environment marker; "" is everywhere.
    marker: str
    #: SHA-256 of each file in which it is published.
    hashes: tuple[str, ...]


class SupplyChainFault(Exception):
    """Something about the packages is wrong or unknown; the message says what, and what to do."""


def locked(lock: Path = LOCK) -> list[Package]:
    """Return the packages of the lock file in its order."""
    return [
        Package(match["name"], match["version"], match["marker"] or "", tuple(_HASH.findall(match["hashes"])))
        for match in _REQUIREMENT.finditer(lock.read_text(encoding="utf-8"))
    ]


# ---- licences ----------------------------------------------------------------------------------------------------


def licence_of(metadata: Mapping[str, Any], classifiers: Sequence[str]) -> str:
    """Return the SPDX expression of a package. Raises SupplyChainFault for a licence that is not permitted."""
    if metadata["Name"] in READ:
        return READ[metadata["Name"]]
    said = metadata.get("License-Expression") or metadata.get("License") or ""
    if not said:
        said = " AND ".join(each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: "))
    parts = re.split(r"\s+(AND|OR)\s+", said)
    unknown = [part for part in parts[::2] if part not in PERMITTED]
    if unknown:
        raise SupplyChainFault(
            f"{metadata['Name']}: the licence {unknown[0] or 'of its metadata'!r} is not in tools/supply_chain.py;"
            " read it, and add it there or do without the package"
        )
    return " ".join(PERMITTED.get(part, part) for part in parts)


def licences(packages: Sequence[Package]) -> Iterator[tuple[Package, str]]:
    """Yield each package that is installed here with its licence; packages of other platforms are left out."""
    for package in packages:
        try:
            metadata = importlib.metadata.metadata(package.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if metadata["Version"] == package.version:
            named = {key: metadata[key] for key in ("Name", "License-Expression", "License") if key in metadata}
            yield package, licence_of(named, metadata.get_all("Classifier") or [])


def licences_page(packages: Sequence[Package]) -> str:
    """Return docs/licences.md."""
    rows = "".join(f"| {package.name} | {licence} |\n" for package, licence in licences(packages))
    return f"""# Licences of the packages that BigFleet installs

This page lists the packages that BigFleet runs with (requirements-image.lock, on Linux with Python 3.11), and their
licences. BigFleet itself is licensed under Apache-2.0. `python -m tools.supply_chain licences` writes this page;
`make sbom` writes a CycloneDX bill of materials with the versions and hashes.

| package | licence |
|---|---|
{rows}"""


# ---- bill of materials -------------------------------------------------------------------------------------------


def sbom(packages: Sequence[Package]) -> bytes:
    """Return a bill of materials of packages of the lock file. Equal lock files give equal bytes."""
    licences = known_licences()
    return bill_of_materials(python_component(each.name, each.version, each.hashes, licences) for each in packages)


def write_sbom(target: Path) -> int:
    """Write the bill of materials of the lock file and return its number of packages.

    Raises SupplyChainFault when it is not what CycloneDX specifies.
    """
    packages = locked()
    content = sbom(packages)
    check_cyclonedx(content)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return len(packages)


def check_cyclonedx(content: bytes) -> None:
    """Raise SupplyChainFault unless a bill of materials is what CycloneDX specifies, as its own library says."""
    # Only the environment of `make sbom` has it.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    fault = JsonStrictValidator(SchemaVersion.from_version(SPECIFICATION)).validate_str(content.decode())
    if fault is not None:
        raise SupplyChainFault(f"the bill of materials is not CycloneDX {SPECIFICATION}: {fault}")


# ---- vulnerabilities ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """What is known of the packages."""

    #: One line for each vulnerability.
    vulnerable: tuple[str, ...]
    audited: int
    #: Packages that were not looked up, with the reason.
    skipped: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 for a vulnerability, 2 when something was not looked up, else 0."""
        return 1 if self.vulnerable else 2 if self.skipped or not self.audited else 0


def read_audit(report: str) -> Audit:
    """Return what a report of `pip-audit --format json` says."""
    vulnerable, skipped, audited = [], [], 0
    for each in json.loads(report)["dependencies"]:
        if "skip_reason" in each:
            skipped.append(each["skip_reason"])
            continue
        audited += 1
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version"
            vulnerable.append(f"{each['name']} {each['version']}: {found['id']}, fixed in {fixed}")
    return Audit(tuple(vulnerable), audited, tuple(skipped))


def audit(program: str) -> Audit:
    """Look the packages up. Raises SupplyChainFault when there is no report, as without a network."""
    ran = subprocess.run(  # noqa: S603 - the Makefile names the program
        [program, "--require-hashes", "--disable-pip", "--requirement", str(LOCK), "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return read_audit(ran.stdout)
    except (ValueError, KeyError):
        raise SupplyChainFault(
            f"NOT AUDITED: no answer from the vulnerability service ({_last_line(ran.stderr)});"
            " run it where the network reaches pypi.org"
        ) from None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    try:
        match list(arguments):
            case ["licences"]:
                sys.stdout.write(licences_page(locked()))
            case ["sbom", target]:
                sys.stdout.write(f"{target}: {write_sbom(Path(target))} packages\n")
            case ["audit", program]:
                found = audit(program)
                sys.stdout.write("".join(f"{line}\n" for line in found.vulnerable))
                if found.skipped:
                    sys.stderr.write(f"NOT AUDITED: {len(found.skipped)} packages, such as: {found.skipped[0]}\n")
                sys.stdout.write(f"{found.audited} packages looked up, {len(found.vulnerable)} vulnerabilities\n")
                return found.exit_code
            case _:
                sys.stderr.write(__doc__ or "")
                return 2
    except SupplyChainFault as fault:
        sys.stderr.write(f"{fault}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
