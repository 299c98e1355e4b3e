"""Checks the links of the documentation, and that the checker finds planted faults."""

import re
from pathlib import Path, PurePosixPath

import pytest

from tools.docs_site import ROOT, anchors, broken_links, pages, place, rewritten, stage


def planted(folder: Path, text: str) -> list[str]:
    """Return the faults of a repository with two pages, one of which holds the text."""
    (folder / "docs" / "spec").mkdir(parents=True)
    (folder / "docs" / "other.md").write_text("# Other\n\n## Known limits\n", encoding="utf-8")
    (folder / "docs" / "spec" / "page.md").write_text(text, encoding="utf-8")
    return broken_links(folder)


def test_the_documentation_has_no_broken_link() -> None:
    assert broken_links(ROOT) == []


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that there are not."""
    missing = []
    for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", text):
        file, _, test = name.partition("::")
        path = ROOT / file
        if not path.is_file() or (test and f"def {test}(" not in path.read_text(encoding="utf-8")):
            missing.append(name)
    return missing


def missing_pages(text: str) -> list[str]:
    """Return the pages that a source file names and that there are not."""
    return [name for name in re.findall(r"docs/[\w/.-]+\.md", text) if not (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", ["src", "proto", "deploy", "bench", "tools"])
def test_every_page_that_a_source_file_names_is_there(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto", ".yaml", ".md")]

    assert files
    assert {str(path.relative_to(ROOT)): found for path in files if (found := missing_pages(path.read_text()))} == {}
    assert missing_pages('"""See docs/gone.md and docs/limits.md."""') == ["docs/gone.md"]


@pytest.mark.parametrize("page", ["attacks.md", "bug-ledger.md", "security.md"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")

    assert missing_tests(text) == []
    assert missing_tests(text + "`tests/test_docs_links.py::test_gone` `tests/gone.py`") == [
        "tests/test_docs_links.py::test_gone",
        "tests/gone.py",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[fine](../other.md)",
        "[fine](../other.md#known-limits)",
        "# Here\n\n[fine](#here)",
        "[fine](https://example.invalid/missing.md#nothing)",
        "```\n[an example](missing.md)\n```",
    ],
)
def test_a_link_that_holds_is_no_fault(tmp_path: Path, text: str) -> None:
    """Links to other hosts are not followed, and code is no link."""
    assert planted(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("One.\n\n[gone](../missing.md)", "docs/spec/page.md:3: link to ../missing.md: docs/missing.md does not exist"),
        ("[gone](../other.md#unknown)", "docs/other.md has no heading #unknown"),
        ("# Here\n\n[gone](#there)", "docs/spec/page.md has no heading #there"),
        ("![gone](../fleet.svg)", "docs/fleet.svg does not exist"),
        ('<img src="../fleet.svg">', "docs/fleet.svg does not exist"),
        ("[gone][1]\n\n[1]: ../missing.md", "docs/missing.md does not exist"),
        ("| a |\n|---|\n| [gone](../missing.md) |", "docs/missing.md does not exist"),
        ("[out](../../../etc/hosts)", "leaves the repository"),
        ("See docs/missing.md.", "docs/spec/page.md:1: docs/missing.md does not exist"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, text: str, fault: str) -> None:
    """Each with file, line and reason."""
    (found,) = planted(tmp_path, text)

    assert found.endswith(fault)


def test_anchors_are_those_of_github() -> None:
    """Punctuation is dropped, equal headings are numbered, and an id in HTML is an anchor too."""
    text = '# `get needs`, twice\n\n## §2.4 A — b\n\n## §2.4 A — b\n\n<a id="own"></a>\n'

    assert anchors(text) == {"get-needs-twice", "24-a--b", "24-a--b-1", "own"}


def test_links_lead_to_the_places_on_the_site() -> None:
    """The README is the start page; a file that is not on the site stays as text."""
    readme = rewritten(PurePosixPath("README.md"), '[a](docs/limits.md#x) [b](LICENSE) <img src="docs/fleet.svg">')
    page = rewritten(PurePosixPath("docs/adr/0101.md"), "[a](../../README.md) [b](../limits.md) [c](https://a.invalid)")

    assert readme == '[a](limits.md#x) b <img src="fleet.svg">'
    assert page == "[a](../index.md) [b](../limits.md) [c](https://a.invalid)"


def test_staged_pages_have_no_broken_link(tmp_path: Path) -> None:
    """Each page of the documentation stands on the site, and its links hold there."""
    count = stage(ROOT, tmp_path / "docs")

    assert count == len(list((tmp_path / "docs").rglob("*.md")))
    assert [fault for fault in broken_links(tmp_path) if "link to" in fault] == []


def test_each_page_has_a_place_in_the_navigation() -> None:
    """Decisions are found on the list of decisions, every other page in the navigation, and nothing else is there."""
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    places = {str(place(page)) for page in pages(ROOT)}

    assert listed == {each for each in places if not re.match(r"adr/\d", each)}
