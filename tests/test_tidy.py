"""The house rules that no linter holds: room sizes, docstrings, and edges to rooms that may not even exist yet."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax_trees import (
    ROOT,
    SOURCE,
    TESTS,
    functions,
    is_generated,
    modules,
    name_of,
    nodes_of,
    of_each,
    parsed,
    sources,
    tree_of,
)

#: Modules of a folder, its __init__ among them: more are not taken in at one look.
FOLDER_FILES_MAX = 20
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
#: `shard` must decide the same with no coordinator in the world (docs/architecture.md).
FORBIDDEN_EDGES = [("shard", "bigfleet.coordinator"), ("shard", "bigfleet.link")]


@of_each(modules())
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


#: A plain sentence about a module begins with its verb: "Detects transitions that never finish".
VERB = re.compile(r"[A-Z][a-z]+s,?")


@of_each(sources())
def test_a_module_docstring_says_what_the_module_does(path: Path) -> None:
    """The subject is the module; "What ...", "How ..." and a bare noun are titles, not sentences."""
    if path == SOURCE / "__init__.py":
        return
    first = (ast.get_docstring(parsed(path)) or "").split()[0]

    assert VERB.fullmatch(first), f"begin with a verb in the third person in place of {first!r}"


@of_each(sorted(SOURCE.rglob("*.py")))
def test_public_names_have_docstrings(path: Path) -> None:
    """Each public class and function at the top of a module states its facts."""
    if is_generated(path):
        return
    missing = [
        node.name
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]

    assert missing == []


@pytest.mark.rule("shard 1/12")
@pytest.mark.parametrize(("package", "target"), FORBIDDEN_EDGES)
def test_forbidden_edges_do_not_exist(package: str, target: str) -> None:
    """The edge is absent from the imports of every module of the package."""
    offenders = []
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in nodes_of(parsed(path)):
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


def folders() -> list[Path]:
    """Return every folder of the package that holds hand-written modules."""
    return sorted({path.parent for path in sources()})


@of_each(sorted(TESTS.rglob("*.py")))
def test_a_module_of_tests_is_small_as_well(path: Path) -> None:
    """What takes more than 600 lines is about more than one thing: split it, and say in each what it is about."""
    assert path.read_text(encoding="utf-8").count("\n") <= MODULE_LINES_MAX


@of_each([*folders(), *sorted({path.parent for path in TESTS.rglob("*.py")})])
def test_a_folder_holds_at_most_twenty_modules(folder: Path) -> None:
    """A larger folder has no shape: split it into sub-packages (docs/architecture.md)."""
    assert len(list(folder.glob("*.py"))) <= FOLDER_FILES_MAX


@of_each(folders())
def test_a_folder_is_a_package(folder: Path) -> None:
    """A folder without __init__.py is not installed, and says nowhere what it is for."""
    assert (folder / "__init__.py").exists()


# ---- imports ---------------------------------------------------------------------------------------------------


def imports_of(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of ours that a module imports, wherever it does: at its top, in a function, for types."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module or ""}
            # What is taken of the package itself, beside its modules.
            if not inner <= known:
                found.add(node.module or "")
    return (found & known) - {name}


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, each sorted."""
    found = []
    reached = {name: _reached(name, imports) for name in imports}
    left = set(imports)
    while left:
        name = min(left)
        group = {name} | {each for each in reached[name] if name in reached[each]}
        left -= group
        if len(group) > 1:
            found.append(sorted(group))
    return found


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for each in imports.get(waiting.pop(), ()):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return seen


def test_no_import_cycle() -> None:
    """No module imports itself by way of others, also not inside functions or for types alone."""
    paths = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    names = {path: name.removesuffix(".__init__") for path, name in paths.items() if not is_generated(path)}
    known = set(names.values())
    found = cycles({name: imports_of(name, parsed(path), known) for path, name in names.items()})

    assert found == [], "move what they share into a module below them, or hand it over as an argument"


def test_a_planted_cycle_is_found() -> None:
    """At the top, in a function and under TYPE_CHECKING alike."""
    known = {"a", "b", "c", "d"}
    sources = {
        "a": "from b import f",
        "b": "def f():\n    import c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import A",
        "d": "import a",
    }

    assert cycles({name: imports_of(name, ast.parse(text), known) for name, text in sources.items()}) == [
        ["a", "b", "c"]
    ]


def test_no_empty_package() -> None:
    """A package exists when it has content."""
    packages = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
    empty = [name_of(folder) for folder in packages if len(list(folder.glob("*.py"))) == 1 and folder != SOURCE]

    assert empty == []


# ---- names -------------------------------------------------------------------------------------------------------


def public_classes(tree: ast.Module) -> list[str]:
    """Return the names of the public classes at the top of a module."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def defined_twice(modules_by_name: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public class names that several modules define, each with these modules."""
    homes: dict[str, list[str]] = {}
    for module, tree in sorted(modules_by_name.items()):
        for name in public_classes(tree):
            homes.setdefault(name, []).append(module)
    return {name: found for name, found in sorted(homes.items()) if len(found) > 1}


def own_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every hand-written module of the package, by its path."""
    return {name_of(path): parsed(path) for path in sorted(SOURCE.rglob("*.py")) if not is_generated(path)}


def test_a_public_class_name_is_defined_once() -> None:
    """A name that means two things cannot be searched for, and an import does not say which one it is."""
    found = defined_twice(own_modules())

    assert found == {}, "name each after what it is, share one class, or prefix what one module alone uses with _"


def test_a_planted_duplicate_is_found() -> None:
    """In another module and in the same one; names with an underscore and inner classes do not count."""
    sources = {
        "a": "class Report: ...\nclass _Row: ...\nclass Outer:\n    class Inner: ...",
        "b": "class Report: ...\nclass _Row: ...\nclass Inner: ...",
        "c": "class Once: ...\nif True:\n    class Report: ...\nclass Twice: ...\nclass Twice: ...",
    }

    assert defined_twice({name: ast.parse(text) for name, text in sources.items()}) == {
        "Report": ["a", "b"],
        "Twice": ["c", "c"],
    }


#: Words that names and first sentences do without, each with its replacement. docs/glossary.md lists the terms that
#: stay, such as earmark, credit, fold and parked.
RETIRED_WORDS = {
    "telling": "publishing",
    "tell": "publish, report, emit or log",
    "tells": "publishes, reports, emits or logs",
    "told": "reported, published or known",
    "retell": "replay",
    "retold": "replayed",
    "squaring": "ownership reconciliation",
    "square": "reconcile",
    "squares": "reconciles",
    "kept": "retained, stored or reserved, or the name of the record",
    "grounds": "handover host",
    "walk": "scan",
    "walks": "scans",
    "walked": "scanned",
    "census": "counts or queries",
    "soft": "ephemeral",
    "belonging": "ownership filter",
    "giving": "donor selection, or releasing",
    "laps": "phase timer",
    "posture": "mode",
    "strike": "back-off, or remove",
    "strikes": "back-off",
    "rails": "safety limits",
    "booking": "quota transfer",
    "aftermath": "effects",
    "neighbourhood": "peer views",
    "anew": "again",
    "nobody": "the subject that is meant: no shard, no row, no caller",
    "whoever": "the subject that is meant: the caller, the reader, the owner",
}
#: They are nouns in names; in a sentence "hands them to a decision" is a plain verb.
RETIRED_IN_NAMES = RETIRED_WORDS | {
    "door": "fence",
    "doors": "fence",
    "hands": "actuators",
    "lie": "faulty response",
    "lies": "faulty responses",
}
#: Names that say so on purpose: the kind of an explanation's record on the wire is made of its class name, attributes
#: of a record are its fields' names, and a trace of the simulation stores the fields of its plan.
EXEMPT_NAMES = {"MachineKept", "last_kept", "posture"}
#: What no page says anywhere: the field has a plain word for each.
RETIRED_IN_PAGES = {word: RETIRED_WORDS[word] for word in ("anew", "nobody", "whoever", "telling", "retell", "squares")}
_NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def public_definitions(nodes: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of the public classes, functions, methods, fields and constants of a module."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_"))


def retired_words(module: str, tree: ast.Module) -> list[str]:
    """Return where a module's name, its public names or the first sentence of its docstring use a retired word."""
    found = [
        f"{name}: {word!r} is retired, write {RETIRED_IN_NAMES[word]}"
        for name in (module, *public_definitions(tree.body))
        for word in map(str.lower, _NAME_WORD.findall(name))
        if word in RETIRED_IN_NAMES and name not in EXEMPT_NAMES
    ]
    sentence = re.split(r"(?<=\.)\s", ast.get_docstring(tree) or "", maxsplit=1)[0]
    return found + [
        f"docstring: {word!r} is retired, write {RETIRED_WORDS[word]}"
        for word in re.findall(r"[a-z]+", sentence.lower())
        if word in RETIRED_WORDS
    ]


@of_each(sources())
def test_names_and_first_sentences_use_the_terms_of_the_glossary(path: Path) -> None:
    """Words that only this project used are retired; the failure names what to write."""
    module = path.parent.name if path.name == "__init__.py" else path.stem

    assert retired_words(module, parsed(path)) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("squaring", ""),
        ("a", "class MachineStrikes: ..."),
        ("a", "def tell_again() -> None: ..."),
        ("a", "class A:\n    async def is_as_told(self) -> bool: ..."),
        ("a", "class A:\n    def _tell(self) -> None: ...\n    def HANDS(self) -> None: ..."),
        ("a", '"""Keeps what a shard\nis told. More."""'),
        ("a", "class A:\n    kept: int"),
        ("a", "DOORS_MAX = 3"),
    ],
)
def test_a_planted_retired_word_is_found(module: str, text: str) -> None:
    assert len(retired_words(module, ast.parse(text))) == 1


def test_terms_that_stay_are_let_be() -> None:
    """Private names, parts of other words, later sentences, and terms of the glossary."""
    text = (
        '"""Hands a row on. It is told."""\n'
        "class Earmarks:\n    _kept = 1\n    def _tell(self): ...\ndef retail_software(): ..."
    )

    assert retired_words("parked_gangs", ast.parse(text)) == []


# ---- pages -----------------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Return the pages of the documentation; decisions are history and stay as they were written."""
    folder = ROOT / "docs"
    return sorted([*folder.glob("*.md"), *(folder / "spec").glob("*.md")])


def page_faults(text: str) -> list[str]:
    """Return what is wrong with the words of a page: its first sentence, and retired words outside code."""
    prose = re.sub(r"^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [each for each in prose.split("\n\n") if not each.startswith("#")]
    purpose = re.split(r"(?<=\.)\s", paragraphs[0].strip() if paragraphs else "", maxsplit=1)[0]
    opening = [] if purpose.startswith("This page ") else [f"the first sentence is {purpose!r}, write 'This page ...'"]
    return [
        *opening,
        *(
            f"first sentence: {word!r} is retired, write {RETIRED_WORDS[word]}"
            for word in re.findall(r"[a-z]+", purpose.lower())
            if word in RETIRED_WORDS
        ),
        *(
            f"{word!r} is retired, write {RETIRED_IN_PAGES[word]}"
            for word in re.findall(r"[a-z]+", prose.lower())
            if word in RETIRED_IN_PAGES
        ),
    ]


@of_each(pages())
def test_a_page_says_what_it_is_for_and_uses_plain_words(path: Path) -> None:
    """A reader decides by the first sentence whether to read on, and searches by the words of the field."""
    assert page_faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "# Shards\n\nWhat a shard remembers.",
        "# Shards\n\nThis page lists what a shard\nis told. More.",
        "# Shards\n\nThis page lists shards.\n\n| 2/8 | The file is made anew |",
        "# Shards\n\nThis page lists shards.\n\n## Whoever waits\n",
    ],
)
def test_a_planted_fault_of_a_page_is_found(text: str) -> None:
    assert len(page_faults(text)) == 1


def test_code_on_a_page_is_let_be() -> None:
    text = "# A\n\nThis page lists `nobody`.\n\n    id nobody\n\n```\nuid=nobody\n```\nIt was told."

    assert page_faults(text) == []


# ---- log events -----------------------------------------------------------------------------------------------


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
LOG_NAMES = {"log", "_log", "logger", "_logger"}
LOG_EVENT = re.compile(r"(?P<component>[a-z]+)\.[a-z]+(_[a-z]+)*")


def log_components() -> set[str]:
    """Return the components that CONTRIBUTING.md lists."""
    listed = re.search(r"The components are: ([^.]+)\.", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return set(re.findall("`(.+?)`", listed[1])) if listed else set()


def log_events(source: str) -> list[tuple[int, str]]:
    """Return line and text of each log event; of a condition both texts, of another expression the expression."""
    found = []
    for node in nodes_of(tree_of(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in LOG_METHODS or ast.unparse(node.func.value).rpartition(".")[2] not in LOG_NAMES:
            continue
        event = node.args[0] if node.args else ast.Constant("")
        for each in (event.body, event.orelse) if isinstance(event, ast.IfExp) else (event,):
            is_text = isinstance(each, ast.Constant) and isinstance(each.value, str)
            found.append((node.lineno, str(each.value) if is_text else ast.unparse(each)))  # type: ignore[attr-defined]
    return found


def bad_log_events(source: str) -> list[str]:
    """Return the log events that are not `component.event_happened` with a listed component."""
    return [
        f"line {line}: {event!r}"
        for line, event in log_events(source)
        if not (named := LOG_EVENT.fullmatch(event)) or named["component"] not in log_components()
    ]


@of_each(sources())
def test_log_events_have_one_grammar(path: Path) -> None:
    """One pattern finds every event of a component; a sentence cannot be searched for or alerted on."""
    found = bad_log_events(path.read_text(encoding="utf-8"))

    assert found == [], (
        "name the event component.event_happened, such as store.commit_failed, with a component that CONTRIBUTING.md "
        "lists; put what varies into keywords: error=, reason=, advice="
    )


def test_every_listed_log_component_logs() -> None:
    used = {
        event.partition(".")[0]
        for path in SOURCE.rglob("*.py")
        if not is_generated(path)
        for _line, event in log_events(path.read_text(encoding="utf-8"))
    }

    assert log_components() == used


@pytest.mark.parametrize(
    "planted",
    [
        "_log.warning('report refused', shard=shard)",
        "_log.info('leading')",
        "log.error('store_commit_failed')",
        "self._log.info('Store.CommitFailed')",
        "_log.info('nonsense.happened')",
        "_log.info('store.up!' if is_up else 'store.became_unavailable')",
        "_log.info(f'store.{state}')",
        "_log.info(event='store.commit_failed')",
    ],
)
def test_a_planted_bad_log_event_is_found(planted: str) -> None:
    assert len(bad_log_events(planted)) == 1


def test_a_sound_log_event_is_let_be() -> None:
    assert bad_log_events("_log.info('store.became_available' if is_up else 'store.became_unavailable', a=1)") == []
