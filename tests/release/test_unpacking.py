"""Tar archives are unpacked with every supported Python; before 3.11.4 `tarfile` has no extraction filters."""

import ast
import io
import tarfile
from pathlib import Path

import pytest

from tests.syntax_trees import ROOT
from tools.unpacking import filtered

has_filters = hasattr(tarfile, "data_filter")


def _archive(name: str) -> io.BytesIO:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"text"))
    content.seek(0)
    return content


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    with tarfile.open(fileobj=_archive("folder/file")) as archive:
        filtered(archive, "data").extractall(tmp_path)

    assert (tmp_path / "folder" / "file").read_bytes() == b"text"


@pytest.mark.skipif(not has_filters, reason="this Python has no extraction filters")
def test_the_filter_is_applied(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    with tarfile.open(fileobj=_archive("../file")) as archive, pytest.raises(tarfile.FilterError):
        filtered(archive, "data").extractall(inside)

    assert not (tmp_path / "file").exists()


def test_an_archive_is_unpacked_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with tarfile.open(fileobj=_archive("file")) as archive:
        filtered(archive, "data").extractall(tmp_path)

    assert (tmp_path / "file").read_bytes() == b"text"


def _extractions_with_a_filter(text: str) -> list[int]:
    """Return the lines that call `extract` or `extractall` with an argument `filter`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("extract", "extractall")
        and any(keyword.arg == "filter" for keyword in node.keywords)
    ]


def test_no_module_gives_a_filter_by_argument() -> None:
    """Python before 3.11.4 raises TypeError: `tools.unpacking.filtered` is for this."""
    paths = (path for folder in ("bench", "src", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    # To parse all 1,700 modules takes 5 s of processor time.
    found = {name: _extractions_with_a_filter(text) for name, text in texts.items() if "extract" in text}

    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_planted_filter_by_argument_is_found() -> None:
    assert _extractions_with_a_filter('archive.extractall(folder, filter="data")') == [1]
