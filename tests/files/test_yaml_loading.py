"""Text that is nested too deeply is rejected in every style, before libyaml parses it."""

import datetime
import math
import subprocess
import sys

import pytest
import yaml

from bigfleet.files.yaml_loading import DEPTH_MAX, AmbiguityError, NestingError, check_nesting, load_yaml

#: By style: text with so many levels.
STYLES = {
    "brackets": lambda depth: "[" * depth + "]" * depth,
    "brackets that stay open": lambda depth: "[" * depth,
    "braces": lambda depth: "{a: " * depth + "1" + "}" * depth,
    "dashes": lambda depth: "- " * depth + "a",
    "dashes in lines": lambda depth: "".join(" " * level + "-\n" for level in range(depth)) + " " * depth + "a",
    "keys": lambda depth: "".join(" " * level + "a:\n" for level in range(depth)) + " " * depth + "b",
    "keys and brackets": lambda depth: "a:\n" + " - " + "[" * (depth - 2) + "]" * (depth - 2),
    "question marks": lambda depth: "? " * depth + "a",
    "brackets behind a text of brackets": lambda depth: (
        "'" + "]" * 1000 + "': " + "[" * (depth - 1) + "]" * (depth - 1)
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_one_level_more_than_allowed_is_refused(style: str) -> None:
    check_nesting(STYLES[style](DEPTH_MAX))
    with pytest.raises(NestingError, match=f"more than {DEPTH_MAX} levels"):
        check_nesting(STYLES[style](DEPTH_MAX + 1))


def test_many_shallow_levels_pass() -> None:
    check_nesting("\n".join(f"- {{a: [{number}], b: {{c: 1}}}}" for number in range(1_000)))
    check_nesting("a: " + "-" * 1_000)


def test_without_the_check_the_process_would_end() -> None:
    """The reason for all of this; when it fails, libyaml has mended it."""
    program = "import yaml; yaml.compose('[' * 1_000_000, yaml.CSafeLoader)"
    if not yaml.__with_libyaml__:
        pytest.skip("PyYAML has no loader in C here")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode != 0


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("a: 1\nb: {c: 1}\na: 2", "line 3: the key 'a' is already in line 1; remove one of the two"),
        ("- x: {c: 1, 'c': 2}", "line 1: the key 'c' is already in line 1"),
        (
            "a: 1\nb: [1:30]",
            "line 2: 1:30 would be read as 90; write text in quotes, and a number without colons, underscores",
        ),
        ("a: 010", "line 1: 010 would be read as 8"),
        ("a: -0_7", "line 1: -0_7 would be read as -7"),
        ("a: 0b11", "line 1: 0b11 would be read as 3"),
        ("a: 1_000", "line 1: 1_000 would be read as 1000"),
        ("a: 1_0.5", "line 1: 1_0.5 would be read as 10.5"),
        ("a: 1:30.5", "line 1: 1:30.5 would be read as 90.5"),
        ("010: a", "line 1: 010 would be read as 8"),
    ],
)
def test_what_is_probably_not_meant_is_refused(text: str, finding: str) -> None:
    with pytest.raises(AmbiguityError, match=finding):
        load_yaml(text)
    load_yaml(text, is_strict=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[0, -1, +2, 10, 0x1f, 1.5, -0.5, 1.0e+3, .inf]", [0, -1, 2, 10, 31, 1.5, -0.5, 1000.0, math.inf]),
        ("['010', \"1:30\", 0o10, 08, 1.2.3, 10.0.0.1:80]", ["010", "1:30", "0o10", "08", "1.2.3", "10.0.0.1:80"]),
        ("2026-01-02", datetime.date(2026, 1, 2)),
        ("2026-01-02 03:04:05", datetime.datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001 - it has no zone
        ("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}", {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}}),
        ("{1: a, '1': b}", {1: "a", "1": "b"}),
    ],
)
def test_what_looks_like_what_it_is_is_read(text: str, value: object) -> None:
    assert load_yaml(text) == value
