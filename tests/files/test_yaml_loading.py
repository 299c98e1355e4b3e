"""Text that is nested too deeply is rejected in every style, before libyaml parses it."""

import subprocess
import sys

import pytest
import yaml

from bigfleet.files.yaml_loading import DEPTH_MAX, NestingError, check_nesting

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
