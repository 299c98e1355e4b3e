"""Log lines have a maximum length for every input of a peer (docs/spec/wire.md §2)."""

import io
import json
import logging
from contextlib import redirect_stderr

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.cli.runtime.log_lines import FIELD_BYTES_MAX, LINE_BYTES_MAX, TRACEBACK_BYTES_MAX, encode_line
from bigfleet.cli.runtime.system import configure_logging

VALUES = st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text(max_size=20), max_size=5))


def test_a_short_event_is_unchanged() -> None:
    """Numbers stay numbers."""
    event = {"event": "session.opened", "cluster": "c1", "capabilities": ["node-status"], "rows": 3}
    assert json.loads(encode_line(event)) == event


@pytest.mark.parametrize(
    "value", ["x" * 300_000, "\0" * 300_000, "é" * 300_000, ["node-status"] * 240_000, {"k": "v" * 9_999}]
)
def test_a_long_field_is_cut(value: object) -> None:
    """The other fields of the line stay; escapes count as what they take."""
    line = json.loads(encode_line({"event": "session.opened", "value": value, "cluster": "c1"}))
    assert (line["event"], line["cluster"]) == ("session.opened", "c1")
    assert FIELD_BYTES_MAX // 2 < len(json.dumps(line["value"], ensure_ascii=False).encode()) <= FIELD_BYTES_MAX + 2
    assert line["value"].endswith("…")


def test_of_a_long_traceback_the_end_is_kept() -> None:
    """It names the error."""
    line = json.loads(encode_line({"event": "e", "exception": "  File x\n" * 5_000 + "ValueError: bad"}))
    assert line["exception"].endswith("ValueError: bad")
    assert TRACEBACK_BYTES_MAX // 2 < len(line["exception"]) <= TRACEBACK_BYTES_MAX


def test_a_line_of_many_fields_names_how_many_were_left_out() -> None:
    """The event and the short fields stay."""
    event: dict[str, object] = {f"field{number}": "x" * 500 for number in range(200)}
    encoded = encode_line(event | {"event": "e", "time": "t", "level": "info", "cluster": "c1"})
    line = json.loads(encoded)
    assert len(encoded.encode()) <= LINE_BYTES_MAX
    assert (line["event"], line["level"], line["cluster"]) == ("e", "info", "c1")
    assert line["fields_left_out"] == 204 - (len(line) - 1)


@given(st.dictionaries(st.text(max_size=10), st.one_of(VALUES, VALUES.map(lambda it: [it] * 500)), max_size=30))
def test_no_line_is_longer_than_its_bound(event: dict[str, object]) -> None:
    """And each is JSON."""
    line = encode_line(event)
    assert len(line.encode()) <= LINE_BYTES_MAX
    json.loads(line)


def test_the_log_of_a_process_has_bounded_lines() -> None:
    """As configured by every command."""
    written = io.StringIO()
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with redirect_stderr(written):
        try:
            configure_logging("shard")
            structlog.get_logger("x").warning("e", capabilities=["x" * 950] * 240_000)
        finally:
            structlog.configure(**before)
            structlog.contextvars.clear_contextvars()
            root.handlers[:] = handlers
            root.setLevel(level)
    (line,) = written.getvalue().splitlines()
    assert len(line.encode()) <= LINE_BYTES_MAX
