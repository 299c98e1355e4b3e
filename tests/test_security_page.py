"""docs/security.md states the limits that the code has, names every one of the wire, and cites tests that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LIMIT = re.compile(r"^\| [^|]+ \| ([\d,]+)(?: (\w+))? \| `([\w.]+)\.(\w+)` \|$", re.MULTILINE)
UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "s": 1}
#: Modules that read what comes over the wire; bounds of answers are none of inputs.
OF_THE_WIRE = ("rpc/wire", "rpc/servers")
OF_ANSWERS = {"bigfleet.rpc.servers.provider.SEND_BYTES_MAX", "bigfleet.rpc.wire.convert_explain.LISTED_MAX"}
CITED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize(("number", "unit", "module", "name"), LIMIT.findall(PAGE))
def test_a_limit_is_that_of_the_code(number: str, unit: str, module: str, name: str) -> None:
    stated = int(number.replace(",", "")) * UNITS[unit]

    assert stated == getattr(importlib.import_module(module), name)


def test_every_row_of_limits_is_read() -> None:
    """A row that the pattern does not match would not be checked."""
    table = PAGE.partition("## Limits of inputs")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]

    assert len(LIMIT.findall(table)) == len(rows) - 2


def test_every_limit_of_the_wire_is_on_the_page() -> None:
    """Public bounds of the modules that read messages."""
    stated = {f"{module}.{name}" for _number, _unit, module, name in LIMIT.findall(PAGE)}
    package = ROOT / "src" / "bigfleet"
    bounds = {
        ".".join(("bigfleet", *file.relative_to(package).with_suffix("").parts, name))
        for folder in OF_THE_WIRE
        for file in (package / folder).glob("*.py")
        for name in re.findall(r"^([A-Z]\w*_MAX)\b.* = ", file.read_text(encoding="utf-8"), re.MULTILINE)
    }

    assert bounds
    assert bounds - stated - OF_ANSWERS == set()


@pytest.mark.parametrize(("file", "test"), sorted(set(CITED.findall(PAGE))))
def test_a_cited_test_exists(file: str, test: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")

    assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE)
