"""What templates can do, what they cannot, and that every value survives the shell, JSON and YAML."""

import base64
import json
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.bootstrap.rendering import OUTPUT_BYTES_MAX, RenderingFault, render

#: Everything that a label, a taint or an id could hold: control characters, quotes, letters of all planes.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SHELL_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)

ECHO = "set -eu\n{% for value in values %}printf '%s\\000' {{ value|quote }}\n{% endfor %}"


@given(st.lists(SHELL_TEXTS, min_size=1, max_size=20))
def test_every_quoted_value_arrives_in_a_shell_as_it_is(values: list[str]) -> None:
    script = render(ECHO, "t", {"values": values})

    done = subprocess.run(["sh"], input=script.encode(), capture_output=True, check=True)

    assert done.stdout == b"".join(value.encode() + b"\0" for value in values)
    assert done.stderr == b""


@given(st.lists(TEXTS, max_size=20), st.dictionaries(TEXTS, TEXTS, max_size=5))
def test_every_value_arrives_in_yaml_and_json_as_it_is(values: list[str], labels: dict[str, str]) -> None:
    text = render(
        "values: {{ values|tojson }}\nlabels: {{ labels|tojson }}\n", "t", {"values": values, "labels": labels}
    )

    assert yaml.safe_load(text) == {"values": values, "labels": labels}
    assert json.loads(render("{{ labels|tojson }}", "t", {"labels": labels})) == labels


@given(TEXTS)
def test_json_never_ends_a_quotation_of_a_shell_or_a_line(value: str) -> None:
    text = render("{{ value|tojson }}", "t", {"value": value})

    assert not set(text) & set("'\n\r<>&")


@given(TEXTS)
def test_base64_gives_back_the_value(value: str) -> None:
    assert base64.b64decode(render("{{ value|b64encode }}", "t", {"value": value})).decode() == value


@pytest.mark.parametrize(
    ("template", "line", "text"),
    [
        ("a\n{{ nothing }}\n", 2, "'nothing' is undefined"),
        ("{{ nothing|tojson }}", 1, "'nothing' is undefined"),
        ("{{ [nothing]|tojson }}", 1, "'nothing' is undefined"),
        ("{{ nothing|quote }}", 1, "'nothing' is undefined"),
        ("{{ nothing|b64encode }}", 1, "'nothing' is undefined"),
        ("{{ namespace()|tojson }}", 1, "a value of type Namespace is no JSON"),
        ("a\n\n{% if %}", 3, "Expected an expression"),
        ("{{ token.length_of }}", 1, "no attribute 'length_of'"),
        ("{{ zone|no_such_filter }}", 1, "No filter named 'no_such_filter'"),
        ("{% include 'other' %}", 1, "no loader"),
        ("\n{{ ''.__class__.__mro__ }}", 2, "unsafe"),
        ("\n{{ labels.__init__.__globals__ }}", 2, "unsafe"),
        ("{{ labels.clear() }}", 1, "unsafe"),
        ("{{ lipsum() }}", 1, "'lipsum' is undefined"),
        ("{{ [1, 2]|random }}", 1, "No filter named 'random'"),
        ("{{ range(10 ** 9) }}", 1, "Range too big"),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("{{ ('a' ~ nul)|quote }}", 1, "NUL"),
    ],
)
def test_a_template_that_does_wrong_is_named_by_line_and_cause(template: str, line: int, text: str) -> None:
    with pytest.raises(RenderingFault) as caught:
        render(template, "t", {"token": "", "zone": "z", "labels": {"a": "b"}, "nul": "\0"})

    assert caught.value.line == line
    assert text in caught.value.text


def test_output_beyond_a_mebibyte_is_an_error_and_up_to_it_is_not() -> None:
    assert len(render("{{ 'a' * size }}", "t", {"size": OUTPUT_BYTES_MAX})) == OUTPUT_BYTES_MAX
    with pytest.raises(RenderingFault, match="larger than 1048576 bytes"):
        render("{{ 'a' * size }}b", "t", {"size": OUTPUT_BYTES_MAX})
    with pytest.raises(RenderingFault, match="larger"):
        render("{% for i in range(90000) %}{{ 'ä' * 100 }}{% endfor %}", "t", {})


def test_the_last_newline_stays() -> None:
    assert render("a\n", "t", {}) == "a\n"


TOKEN = "abcdef.s3cr3ts3cr3t1234"


@pytest.mark.parametrize(
    "template",
    [
        "{{ {}[token] }}",
        "{{ {}[token|upper] }}",
        "{{ {}[token[7:]] }}",
        "{{ {}[token|b64encode] }}",
        "{{ token.x }}",
        "{{ none + token }}",
        # Fails for this token alone, so a placeholder shows nothing.
        "{% if token[0] == 'a' %}{{ {}[token] }}{% endif %}",
    ],
)
def test_no_error_says_anything_of_the_token(template: str) -> None:
    with pytest.raises(RenderingFault) as caught:
        render(template, "t", {"token": TOKEN})

    said = caught.value.text.lower()
    for secret in (TOKEN, TOKEN[7:], base64.b64encode(TOKEN.encode()).decode()[:12]):
        assert secret.lower() not in said
    assert caught.value.line == 1
