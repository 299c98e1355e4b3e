"""Checks docs/architecture.md: its table of imports equals the contracts, the modules that it names exist.

Parts are made in the order in which they need each other, and get their listeners when they are made.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax_trees import nodes_of, of_each, parsed, sources

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
    }

    assert len(named) > 10
    assert {each for each in named if not (SOURCE / each).exists()} == set()


# ---- wiring ------------------------------------------------------------------------------------------------------


def _attribute_of_self(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def construction(methods: dict[str, ast.FunctionDef], name: str = "__init__") -> Iterator[ast.stmt]:
    """Yield the statements of a constructor in order; those of a method that one of them calls come before it."""
    for statement in methods.pop(name).body:
        for node in ast.walk(statement):
            called = _attribute_of_self(node.func) if isinstance(node, ast.Call) else None
            if called in methods:
                yield from construction(methods, called)
        yield statement


def forward_lambdas(tree: ast.Module) -> list[str]:
    """Return the lambdas in constructors that read an attribute which a later statement makes."""
    found = []
    for class_ in (node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)):
        if not any(isinstance(node, ast.Lambda) for node in ast.walk(class_)):
            continue
        methods = {each.name: each for each in class_.body if isinstance(each, ast.FunctionDef)}
        statements = list(construction(methods)) if "__init__" in methods else []
        made: dict[str, int] = {}
        for place, statement in enumerate(statements):
            for node in ast.walk(statement):
                name = _attribute_of_self(node)
                if name is not None and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    made.setdefault(name, place)
        for place, statement in enumerate(statements):
            for each in (node for node in ast.walk(statement) if isinstance(node, ast.Lambda)):
                late = [
                    name for node in ast.walk(each) if made.get(name := _attribute_of_self(node) or "", -1) >= place
                ]
                found += [f"{class_.name}, line {each.lineno}: self.{name} is made later" for name in late]
    return found


@of_each(sources())
def test_no_lambda_reaches_forward(path: Path) -> None:
    """Parts are made in the order in which they need each other; what comes back to their owner is its method."""
    assert forward_lambdas(parsed(path)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "def __init__(self):\n        self.a = A(lambda: self.b.c)\n        self.b = B()",
        "def __init__(self):\n        self._make()\n        self.b = B()\n"
        "    def _make(self):\n        self.a = A(on_end=lambda x: f(self.b, x))",
        "def __init__(self):\n        self.b = B(lambda: self.b.c)",
    ],
)
def test_a_planted_forward_lambda_is_found(planted: str) -> None:
    assert len(forward_lambdas(ast.parse(f"class C:\n    {planted}"))) == 1


def test_a_lambda_that_reaches_back_is_let_be() -> None:
    text = "class C:\n    def __init__(self):\n        self.b = B()\n        self.a = A(lambda: self.b, self.later)"

    assert forward_lambdas(ast.parse(text)) == []


#: Attributes of `bigfleet.sim.kubernetes.faults.ApiFaults`: a fault begins and ends at its time, which is its point.
SWITCHES = {"refuse", "lose_answer"}


def _is_callback(value: ast.expr, functions_here: set[str]) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial")):
            return True
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}" in functions_here
        case ast.Name(id=name):
            return name in functions_here
    return False


def _functions_within(body: list[ast.stmt]) -> set[str]:
    return {each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def late_callbacks(tree: ast.Module) -> list[str]:
    """Return the assignments of a lambda, a function or a bound method to an attribute of another part."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes_of(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found: list[str] = []

    def look(node: ast.AST, functions_here: set[str]) -> None:
        if isinstance(node, ast.ClassDef):
            functions_here = functions_here | _methods(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            functions_here = (functions_here - arguments) | _functions_within(node.body)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part, value in _pairs(target, node.value):
                    owner = _owner(part)
                    name = part.attr if isinstance(part, ast.Attribute) else ""
                    if owner and owner not in imported and name not in SWITCHES:
                        found.extend([f"line {node.lineno}: {ast.unparse(part)}"] * _is_callback(value, functions_here))
        for child in ast.iter_child_nodes(node):
            look(child, functions_here)

    look(tree, _functions_within(tree.body))
    return found


def _methods(class_: ast.ClassDef) -> set[str]:
    """Return the methods of a class as its own code names them; a property is none."""
    return {
        f"self.{each.name}"
        for each in class_.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in each.decorator_list)
    }


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment, each with what it gets."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _owner(target: ast.expr) -> str:
    """Return the first name of an attribute of something other than `self`; "" for every other target.

    A method with two underscores on each side is a patch of a class, not a callback.
    """
    if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == "self" or target.attr.startswith("__"):
        return ""
    root: ast.expr = target
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        root = root.func if isinstance(root, ast.Call) else root.value
    return root.id if isinstance(root, ast.Name) else ""


@of_each(sources())
def test_no_callback_is_assigned_to_another_part(path: Path) -> None:
    """A part gets its listeners when it is made, or has a method by which they register; later ones are missed."""
    assert late_callbacks(parsed(path)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "class C:\n    def __init__(self, part):\n        part.on_end = self._ended\n    def _ended(self): ...",
        "class C:\n    def __init__(self):\n        self.part.hold = lambda is_held: None",
        "def make(part):\n    def ended(): ...\n    part.on_end, part.number = ended, 1",
        "def ended(): ...\ndef make(parts):\n    parts['a'].on_end = ended",
        "def make(part):\n    part.on_end: Callable[[], None] = functools.partial(print, 1)",
    ],
)
def test_a_planted_late_callback_is_found(planted: str) -> None:
    assert len(late_callbacks(ast.parse(planted))) == 1


def test_an_own_callback_and_a_plain_value_are_let_be() -> None:
    text = """
import sys
def row(): ...
class C:
    def __init__(self, on_end):
        self.on_end = lambda: None
        self.ended = self.row
    def row(self): ...
    @property
    def head(self): ...
    def put(self, entry, row):
        entry.row, entry.head = row, self.head
        sys.unraisablehook = lambda _fault: None
"""
    assert late_callbacks(ast.parse(text)) == []
