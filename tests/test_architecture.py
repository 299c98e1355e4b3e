"""Checks docs/architecture.md: its table of imports equals the contracts, and the modules that it names exist."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bigfleet"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
#: The rows of the table of imports: a package, and what it may import.
ROWS = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)


def allowed(text: str) -> set[str]:
    """Return the packages that a row of the table allows."""
    named = set(re.findall(r"`(\w+)`", text))
    return PACKAGES - named if text.startswith("everything") else named


def forbidden_to(package: str) -> set[str]:
    """Return the packages that the contracts forbid a package as a whole, directly and through others."""
    found: set[str] = set()
    for contract in CONTRACTS:
        if contract["type"] == "forbidden" and f"bigfleet.{package}" in contract["source_modules"]:
            found |= {each.removeprefix("bigfleet.") for each in contract["forbidden_modules"]} & PACKAGES
        if contract["type"] == "layers":
            layers = [each.strip("()") for each in contract["layers"]]
            if package in layers:
                found |= set(layers[: layers.index(package)])
    return found


def test_every_package_has_a_row() -> None:
    assert {package for package, _ in ROWS} == PACKAGES


@pytest.mark.parametrize(("package", "text"), ROWS, ids=[package for package, _ in ROWS])
def test_the_table_of_imports_equals_the_contracts(package: str, text: str) -> None:
    """What the table does not allow, a contract forbids, and the reverse."""
    assert forbidden_to(package) == PACKAGES - allowed(text) - {package}


def test_every_module_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", PAGE)) - {
        "tests/test_tidy.py",
        "tests/test_architecture.py",
        "tests/test_wiring.py",
    }

    assert len(named) > 10
    assert {each for each in named if not (SOURCE / each).exists()} == set()
