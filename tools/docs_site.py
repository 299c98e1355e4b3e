"""Checks the links of the documentation and stages its pages for the site; `make docs` runs it.

The Markdown files in the repository are the only source. `broken_links` checks every relative link and picture, every
anchor and every mention of a page such as `docs/limits.md`. `stage` copies the pages to one folder: the README becomes
the start page, and links are rewritten to the places of the copies. Nothing here uses the network; links to other hosts
are not checked.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")
#: Pages outside docs/, and their place on the site.
PLACES = {
    PurePosixPath("README.md"): PurePosixPath("index.md"),
    PurePosixPath("CONTRIBUTING.md"): PurePosixPath("contributing.md"),
    PurePosixPath("CHANGELOG.md"): PurePosixPath("changelog.md"),
    PurePosixPath("bench/README.md"): PurePosixPath("benchmarks.md"),
}
_HTML_LINK = re.compile(r"""\b(?:href|src|srcset)=["']([^"']+)["']""")
_HTML_ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")
_MENTION = re.compile(r"\bdocs/[\w./-]*\w\.md\b")
#: Blocks that may follow a paragraph without a blank line on GitHub.
BLOCKS = ("bullet_list_open", "ordered_list_open", "table_open")
_PARSER = MarkdownIt("commonmark").enable("table")


class Link(NamedTuple):
    """A link, a picture or a mention of a page, and the line of its paragraph."""

    line: int
    target: str


def pages(root: Path) -> list[PurePosixPath]:
    """Return the pages of the documentation, relative to the repository."""
    found = [PurePosixPath(path.relative_to(root).as_posix()) for path in sorted((root / DOCS).rglob("*.md"))]
    return [*(page for page in PLACES if (root / page).exists()), *found]


@cache
def _parsed(text: str) -> list[Token]:
    return _PARSER.parse(text)


def _tokens(text: str) -> Iterator[tuple[int, Token]]:
    """Yield every token, those inside paragraphs too, with its line."""
    for token in _parsed(text):
        line = token.map[0] + 1 if token.map else 0
        yield line, token
        for child in token.children or ():
            yield line, child


def links(text: str) -> list[Link]:
    """Return the links of a page in their order."""
    found = []
    for line, token in _tokens(text):
        if token.type == "link_open":
            found.append(Link(line, str(token.attrs["href"])))
        elif token.type == "image":
            found.append(Link(line, str(token.attrs["src"])))
        elif token.type in ("html_block", "html_inline"):
            found += [Link(line, target) for target in _HTML_LINK.findall(token.content)]
    return found


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings, and ids in its HTML."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    tokens = _parsed(text)
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            parts = tokens[index + 1].children or []
            base = slug("".join(part.content for part in parts if part.type in ("text", "code_inline")))
            count = seen.get(base, 0)
            seen[base] = count + 1
            found.add(f"{base}-{count}" if count else base)
    for _, token in _tokens(text):
        if token.type in ("html_block", "html_inline"):
            found.update(_HTML_ANCHOR.findall(token.content))
    return found


def _is_elsewhere(target: str) -> bool:
    parts = urlsplit(target)
    return bool(parts.scheme or parts.netloc)


def _resolve(page: PurePosixPath, path: str) -> PurePosixPath:
    """Return what a relative path on a page names, relative to the repository."""
    return PurePosixPath(os.path.normpath(page.parent / unquote(path)))


def _fault(root: Path, page: PurePosixPath, target: str) -> str | None:
    """Return what is wrong with a link, or None."""
    parts = urlsplit(target)
    named = _resolve(page, parts.path) if parts.path else page
    if parts.path.startswith("/") or named.parts[:1] == ("..",):
        return "leaves the repository"
    if not (root / named).exists():
        return f"{named} does not exist"
    if not parts.fragment or named.suffix != ".md":
        return None
    known = anchors((root / named).read_text(encoding="utf-8"))
    return None if unquote(parts.fragment) in known else f"{named} has no heading #{parts.fragment}"


def broken_links(root: Path) -> list[str]:
    """Return the faults of every page, each with file and line."""
    found = []
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        for line, target in links(text):
            fault = None if _is_elsewhere(target) else _fault(root, page, target)
            if fault:
                found.append(f"{page}:{line}: link to {target}: {fault}")
        for number, content in enumerate(text.splitlines(), 1):
            for mention in _MENTION.findall(content):
                if not (root / mention).exists():
                    found.append(f"{page}:{number}: {mention} does not exist")
    return found


def place(page: PurePosixPath) -> PurePosixPath | None:
    """Return where a file of the repository stands on the site; None for a file that is not on it."""
    if page.is_relative_to(DOCS):
        return page.relative_to(DOCS)
    return PLACES.get(page)


def rewritten(page: PurePosixPath, text: str) -> str:
    """Return a page with its links turned to the places on the site; links to other files become plain text."""
    here = place(page)
    if here is None:
        raise ValueError(f"{page} has no place on the site")
    for _, target in links(text):
        parts = urlsplit(target)
        if _is_elsewhere(target) or not parts.path:
            continue
        there = place(_resolve(page, parts.path))
        if there is None:
            text = re.sub(rf"\[([^\]]*)\]\({re.escape(target)}\)", r"\1", text)
            continue
        new = os.path.relpath(there, here.parent) + (f"#{parts.fragment}" if parts.fragment else "")
        text = text.replace(f"]({target})", f"]({new})")
        for quote in ('"', "'"):
            text = text.replace(f"={quote}{target}{quote}", f"={quote}{new}{quote}")
    return text


def separated(text: str) -> str:
    """Return a page with a blank line before each list and table: the site's parser needs it, GitHub's does not."""
    lines = text.splitlines(keepends=True)
    for token in reversed(_parsed(text)):
        if token.type in BLOCKS and token.level == 0 and token.map and token.map[0]:
            lines.insert(token.map[0], "\n")
    return "".join(lines)


def stage(root: Path, folder: Path) -> int:
    """Copy the pages and their pictures to a folder, which is emptied first; return the number of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / DOCS, folder, ignore=shutil.ignore_patterns("*.md"))
    staged = pages(root)
    for page in staged:
        target = folder / str(place(page))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (root / page).read_text(encoding="utf-8")
        target.write_text(separated(rewritten(page, text)), encoding="utf-8")
    return len(staged)


def main() -> int:
    """Check the links; stage the pages if a folder is given and no link is broken."""
    faults = broken_links(ROOT)
    for fault in faults:
        sys.stderr.write(fault + "\n")
    if faults:
        sys.stderr.write(f"{len(faults)} faults in the documentation\n")
        return 1
    for folder in sys.argv[1:]:
        sys.stdout.write(f"{stage(ROOT, Path(folder))} pages, no broken link\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
