"""The house rules that no linter holds: room sizes, docstrings, and edges to rooms that may not even exist yet."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bigfleet"
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
#: `shard` must decide the same with no coordinator in the world (docs/architecture.md).
FORBIDDEN_EDGES = [("shard", "bigfleet.coordinator"), ("shard", "bigfleet.link")]


def _is_generated(path: Path) -> bool:
    return path.is_relative_to(SOURCE / "rpc" / "gen")


def modules() -> list[Path]:
    """Return every hand-written module of the package, its tools and its benchmarks."""
    roots = (SOURCE, ROOT / "tools", ROOT / "bench")
    return sorted(path for root in roots for path in root.rglob("*.py") if not _is_generated(path))


def parsed(path: Path) -> ast.Module:
    """Return the module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    """Return the path as a test's id."""
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_a_small_room_with_a_story(path: Path) -> None:
    """A module has a docstring and at most 600 lines; a function at most 70."""
    text = path.read_text(encoding="utf-8")
    tree = parsed(path)
    long_functions = {
        f"{node.name} (line {node.lineno})": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in functions(tree)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    }

    assert ast.get_docstring(tree), "the module does not say what it decides"
    assert text.count("\n") <= MODULE_LINES_MAX, "the module is too big to live in"
    assert long_functions == {}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=name_of)
def test_public_names_have_docstrings(path: Path) -> None:
    """Each public class and function at the top of a module states its facts."""
    if _is_generated(path):
        return
    missing = [
        node.name
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]

    assert missing == []


@pytest.mark.parametrize(("package", "target"), FORBIDDEN_EDGES)
def test_forbidden_edges_do_not_exist(package: str, target: str) -> None:
    """The edge is absent from the imports of every module of the package."""
    offenders = []
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            if any(name == target or name.startswith(target + ".") for name in names):
                offenders.append(name_of(path))

    assert offenders == []


def test_no_empty_package() -> None:
    """A package exists when it has content."""
    packages = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
    empty = [name_of(folder) for folder in packages if len(list(folder.glob("*.py"))) == 1 and folder != SOURCE]

    assert empty == []
