"""No test depends on how fast the machine is: no deadline of examples, no stopwatch, no short wait."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.patience import PATIENCE_SECONDS
from tests.syntax_trees import TESTS, functions, nodes_of, of_each, tree_of

#: The least time that a wait in a test may be granted.
PATIENCE_SECONDS_MIN = 60
#: The first two bound waits and compare nothing; the second is a program that imports nothing of the tests. The third
#: divides the processor time of one input by that of half of it.
CLOCK_READERS = {TESTS / "patience.py", TESTS / "e2e" / "wire_client.py", TESTS / "fuzzing" / "test_fuzzing.py"}
STOPWATCHES = {"monotonic", "perf_counter", "process_time", "thread_time"}
#: What a test writes beside a timeout that is meant to expire.
EXPIRES = "# expires"


@functools.cache
def called(node: ast.Call) -> str:
    """Return the dotted name of what is called; it begins with a dot if its first part is no name."""
    parts, each = [], node.func
    while isinstance(each, ast.Attribute):
        parts.append(each.attr)
        each = each.value
    return ".".join([each.id if isinstance(each, ast.Name) else "", *reversed(parts)])


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
