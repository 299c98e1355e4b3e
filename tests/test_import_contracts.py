"""The import contracts bite: what a shard must not know is refused by import-linter itself (docs/architecture.md).

A tree of a few empty modules is linted with the project's own contract, taken from pyproject.toml.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NAME = "shard knows no coordinator and no link"
#: What the tree is made of when nothing is wrong with it.
SOUND: Mapping[str, str] = {
    "__init__.py": "",
    "model/__init__.py": "",
    "shard/__init__.py": "import bigfleet.model",
}
FUTURE: Mapping[str, str] = {
    "coordinator/__init__.py": "import bigfleet.model",
    "link/__init__.py": "import bigfleet.shard",
}


def contract() -> dict[str, Any]:
    """Return the project's contract of that name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = [each for each in contracts if each["name"] == NAME]
    return dict(found)


def lint(tree: Path, modules: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Write the modules of a package `bigfleet` and lint it with the project's contract alone."""
    for name, text in modules.items():
        path = tree / "bigfleet" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    # JSON's strings and arrays are TOML's.
    lines = [f"{key} = {json.dumps(value)}" for key, value in contract().items()]
    settings = ["[tool.importlinter]", 'root_package = "bigfleet"', "[[tool.importlinter.contracts]]", *lines]
    (tree / "pyproject.toml").write_text("\n".join(settings) + "\n")
    program = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.rule("shard 16/7")
@pytest.mark.parametrize("future", [{}, FUTURE], ids=["packages to come", "packages that exist"])
def test_a_shard_that_keeps_to_itself_passes(tmp_path: Path, future: Mapping[str, str]) -> None:
    """Before there is a coordinator or a link, and when the link imports the shard."""
    linted = lint(tmp_path, {**SOUND, **future})

    assert (linted.returncode, f"{NAME} KEPT" in linted.stdout) == (0, True), linted.stdout + linted.stderr


@pytest.mark.rule("shard 1/12", "shard 16/7")
@pytest.mark.parametrize("target", ["coordinator", "link"])
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("shard/cycle.py", "from bigfleet.{target} import something"),
        ("shard/cycle.py", "def later():\n    import bigfleet.{target}"),
        ("model/values.py", "import bigfleet.{target}"),
    ],
    ids=["at the top", "inside a function", "by way of another package"],
)
def test_a_shard_that_imports_its_future_neighbours_breaks_the_contract(
    tmp_path: Path, target: str, place: str, text: str
) -> None:
    """Wherever the import stands; the contract is named, and so is the line."""
    wrong = {place: text.format(target=target), "shard/uses.py": "import bigfleet.model.values"}
    values = {"model/values.py": ""}
    linted = lint(tmp_path, {**SOUND, f"{target}/__init__.py": "something = 1", **values, **wrong})

    assert linted.returncode == 1, linted.stdout + linted.stderr
    assert f"{NAME} BROKEN" in linted.stdout
    assert f"bigfleet.shard is not allowed to import bigfleet.{target}" in linted.stdout


def test_the_contract_is_part_of_lint() -> None:
    """`make lint` asks import-linter for all contracts."""
    assert "\t$(BIN)/lint-imports\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
