"""Nobody who puts a frame into an outbox waits: no worker, not the cycle, not reconcile (docs/spec/shard.md §10.4)."""

import ast
import inspect
from pathlib import Path

import pytest

import bigfleet.shard
from bigfleet.shard.sessions.outbox import Outbox


@pytest.mark.rule("shard 10.4/1", "shard 16/5")
def test_no_module_of_the_shard_awaits_an_outbox() -> None:
    """Only the writer of a stream does, and that is not here."""
    modules = sorted(Path(bigfleet.shard.__file__).parent.rglob("*.py"))
    awaits = [
        f"{path.name}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Await) and "outbox." in ast.unparse(node)
    ]

    assert len(modules) > 50
    assert awaits == []


@pytest.mark.rule("shard 10.4/1")
def test_putting_a_frame_in_is_no_coroutine() -> None:
    """Nor is asking for a resync or closing."""
    assert [
        name for name in ("put", "start_resync", "close") if inspect.iscoroutinefunction(getattr(Outbox, name))
    ] == []
