"""The house rules that no linter holds: room sizes, docstrings, and edges to rooms that may not even exist yet."""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "bigfleet"
#: Modules of a folder, its __init__ among them: more are not taken in at one look.
FOLDER_FILES_MAX = 20
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
#: The least time that a wait in a test may be granted.
PATIENCE_SECONDS_MIN = 60
#: The first two bound waits and compare nothing; the second is a program that imports nothing of the tests. The third
#: divides the processor time of one input by that of half of it.
CLOCK_READERS = {TESTS / "patience.py", TESTS / "e2e" / "wire_client.py", TESTS / "fuzzing" / "test_fuzzing.py"}
STOPWATCHES = {"monotonic", "perf_counter", "process_time", "thread_time"}
#: What a test writes beside a timeout that is meant to expire.
EXPIRES = "# expires"
#: `shard` must decide the same with no coordinator in the world (docs/architecture.md).
FORBIDDEN_EDGES = [("shard", "bigfleet.coordinator"), ("shard", "bigfleet.link")]


def _is_generated(path: Path) -> bool:
    return path.is_relative_to(SOURCE / "rpc" / "wire" / "gen")


def sources() -> list[Path]:
    """Return every hand-written module of the package."""
    return sorted(path for path in SOURCE.rglob("*.py") if not _is_generated(path))


def modules() -> list[Path]:
    """Return every hand-written module of the package, its tools and its benchmarks."""
    roots = (SOURCE, ROOT / "tools", ROOT / "bench")
    return sorted(path for root in roots for path in root.rglob("*.py") if not _is_generated(path))


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
    return sorted({path.parent for path in SOURCE.rglob("*.py") if not _is_generated(path)})


@of_each(folders())
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
    names = {path: name.removesuffix(".__init__") for path, name in paths.items() if not _is_generated(path)}
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
    return {name_of(path): parsed(path) for path in sorted(SOURCE.rglob("*.py")) if not _is_generated(path)}


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
        if not _is_generated(path)
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


# ---- tests that hold on a busy machine ---------------------------------------------------------------------------


@functools.cache
def called(node: ast.Call) -> str:
    """Return the dotted name of what is called, as it is written."""
    return ast.unparse(node.func)


def finite_deadlines(source: str) -> list[str]:
    """Return the calls that give Hypothesis a deadline, or another profile than that of tests/conftest.py."""
    found = []
    for node in nodes_of(tree_of(source)):
        if not isinstance(node, ast.Call):
            continue
        name = called(node).rpartition(".")[2]
        is_bounded = any(
            keyword.arg == "deadline" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
            for keyword in node.keywords
        )
        if (is_bounded and name in {"settings", "register_profile"}) or name in {"load_profile", "get_profile"}:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def clock_readings(source: str) -> list[str]:
    """Return where a test reads a clock to measure: a stopwatch of `time`, or a difference of the time of day."""
    found = []
    for node in nodes_of(tree_of(source)):
        stopwatch = (
            isinstance(node, ast.Attribute)
            and node.attr.removesuffix("_ns") in STOPWATCHES
            and ast.unparse(node.value) == "time"
        )
        imported = isinstance(node, ast.ImportFrom) and node.module in {"time", "timeit"}
        difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and "time.time" in ast.unparse(node)
        if stopwatch or imported or difference:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def _on_virtual_time(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that run on virtual time, on which a short wait takes no time."""
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    marks = [each.value for each in assigned if any("pytestmark" in ast.unparse(name) for name in each.targets)]
    is_all = any("virtual_time" in ast.unparse(each) for each in marks)
    return [
        node
        for node in functions(tree)
        if is_all or any("virtual_time" in ast.unparse(each) for each in node.decorator_list)
    ]


def short_waits(source: str) -> list[str]:
    """Return the waits on a real clock that are granted less than a minute and are not said to expire on purpose."""
    tree, lines = tree_of(source), source.splitlines()
    numbers = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    virtual = {id(inner) for node in _on_virtual_time(tree) for inner in ast.walk(node)}
    # `while not event.wait(0.02)` looks again and again: a poll.
    polls = {id(inner) for node in nodes_of(tree) if isinstance(node, ast.While) for inner in ast.walk(node.test)}
    found = []
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call) or id(node) in virtual | polls:
            continue
        granted = [each.value for each in node.keywords if each.arg == "timeout"]
        name = called(node)
        if name.endswith((".wait", ".join", "asyncio.timeout")):
            granted += node.args[:1]
        elif name == "asyncio.wait_for":
            granted += node.args[1:2]
        values = [
            numbers.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None) for each in granted
        ]
        is_short = any(isinstance(value, int | float) and value < PATIENCE_SECONDS_MIN for value in values)
        if is_short and EXPIRES not in "".join(lines[node.lineno - 1 : node.end_lineno]):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


#: Each check, the files that it spares, and code that it must find.
RULES: list[tuple[Callable[[str], list[str]], set[Path], list[str]]] = [
    (
        finite_deadlines,
        {TESTS / "conftest.py"},
        [
            "@settings(max_examples=5, deadline=200)\ndef test() -> None: ...",
            "QUICK = hypothesis.settings(deadline=timedelta(seconds=1))",
            "settings.register_profile('few', deadline=LIMIT)",
            "USUAL = settings(settings.get_profile('default'), max_examples=5)",
            "settings.load_profile('default')",
        ],
    ),
    (
        clock_readings,
        CLOCK_READERS,
        [
            "began = time.monotonic()\nwork()\nassert time.monotonic() - began < 1.0",
            "assert time.perf_counter_ns() < limit",
            "from time import monotonic",
            "assert time.time() - began < 1.0",
        ],
    ),
    (
        short_waits,
        set(),
        [
            "process.wait(10)",
            "stub.Check(request, timeout=1)",
            "LIMIT = 2.0\nsubprocess.run(command, timeout=LIMIT)",
            "async def test() -> None:\n    async with asyncio.timeout(5):\n        await work()",
            "async def test() -> None:\n    await asyncio.wait_for(work(), 30)",
        ],
    ),
]


def test_the_loaded_profile_of_hypothesis_has_no_deadline() -> None:
    """An example may take any time, also in a test that sets nothing itself."""
    assert settings().deadline is None


@of_each(sorted(TESTS.rglob("*.py")))
def test_no_test_depends_on_how_fast_the_machine_is(path: Path) -> None:
    """No deadline of examples, no stopwatch, no short wait on a real clock."""
    source = path.read_text(encoding="utf-8")
    found = [each for check, spared, _planted in RULES if path not in spared for each in check(source)]

    assert found == []


@pytest.mark.parametrize(("check", "planted"), [(check, each) for check, _spared, planted in RULES for each in planted])
def test_a_planted_dependence_on_speed_is_found(check: Callable[[str], list[str]], planted: str) -> None:
    assert len(check(planted)) >= 1


@pytest.mark.parametrize(
    "sound",
    [
        "@settings(max_examples=5, deadline=None)\ndef test() -> None: ...",
        "call(timestamp_unix_nanos=time.time_ns())",
        "process.wait(PATIENCE_SECONDS)\nprocess.wait()",
        "call(timeout=0.05)  # expires",
        "while not ends.wait(0.02): look()",
        "@pytest.mark.virtual_time\nasync def test() -> None:\n    async with asyncio.timeout(5): ...",
    ],
)
def test_what_depends_on_no_speed_is_let_be(sound: str) -> None:
    assert [found for check, _spared, _planted in RULES for found in check(sound)] == []


def test_patience_is_generous() -> None:
    assert PATIENCE_SECONDS >= PATIENCE_SECONDS_MIN
