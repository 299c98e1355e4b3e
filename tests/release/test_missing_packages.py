"""Messages about a missing package name the package with the bounds of pyproject.toml, never BigFleet on an index."""

import tomllib

import pytest

from tests.syntax_trees import ROOT, SOURCE

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("extra", "file"),
    [
        ("aws", "src/bigfleet/cli/provider/aws.py"),
        ("libvirt", "src/bigfleet/cli/provider/libvirt_hosts.py"),
        ("bound", "src/bigfleet/cli/plan/bound.py"),
        ("parquet", "src/bigfleet/cli/plan/parquet.py"),
        ("testkit", "src/bigfleet/provider/testing/__init__.py"),
        ("testkit", "src/bigfleet/cli/provider/templates/README.md.tmpl"),
        ("aws", "docs/aws-provider.md"),
        ("bound", "docs/planning.md"),
        ("parquet", "docs/planning.md"),
        ("testkit", "docs/writing-a-provider.md"),
    ],
)
def test_what_is_to_be_installed_is_what_the_extra_has(extra: str, file: str) -> None:
    (requirement,) = EXTRAS[extra]

    assert f"pip install '{requirement}'" in " ".join((ROOT / file).read_text(encoding="utf-8").split()).replace(
        "pip install -e . ", "pip install "
    )


def test_nothing_tells_a_user_to_install_bigfleet_by_its_name() -> None:
    """No public index has it: a stranger could publish a package of that name."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *SOURCE.rglob("*.py"), *SOURCE.rglob("*.tmpl")]
    found = [path.name for path in pages if "install 'bigfleet[" in path.read_text(encoding="utf-8")]

    # With an index of one's own.
    assert found == ["installing.md"]
