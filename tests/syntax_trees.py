"""Reads the syntax trees of our modules, for the tests that hold house rules."""

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "bigfleet"


def is_generated(path: Path) -> bool:
    return path.is_relative_to(SOURCE / "rpc" / "wire" / "gen")


def sources() -> list[Path]:
    """Return every hand-written module of the package."""
    return sorted(path for path in SOURCE.rglob("*.py") if not is_generated(path))


def modules() -> list[Path]:
    """Return every hand-written module of the package, its tools and its benchmarks."""
    roots = (SOURCE, ROOT / "tools", ROOT / "bench")
    return sorted(path for root in roots for path in root.rglob("*.py") if not is_generated(path))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the module's syntax tree."""
    return tree_of(path.read_text(encoding="utf-8"))


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree of a text; several rules look at each."""
    return ast.parse(source)


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module; to find them takes longer than what a rule does with them."""
    return tuple(ast.walk(tree))


def name_of(path: Path) -> str:
    """Return the path as a failure names it."""
    return str(path.relative_to(ROOT))


def of_each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a test of all paths from a check of one; the failure says what is wrong with each path."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            faults = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as fault:
                    faults.append(f"{name_of(path)}: {fault}")
            assert faults == [], "\n".join(faults)

        # Not functools.wraps: pytest would take the path for a fixture.
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a module."""
    return (node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
