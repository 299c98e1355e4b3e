"""JSON is read as the standard library reads it, but for text that UTF-8 cannot hold."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.files.json_loading import load_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_was_written_is_read(value: object, is_ascii: bool) -> None:
    assert load_json(json.dumps(value, ensure_ascii=is_ascii)) == value


@given(st.text(st.characters(categories=["Cs", "Lu", "So"], include_characters='\\u"d8'), max_size=6))
def test_a_text_is_read_exactly_when_utf_8_can_hold_it(text: str) -> None:
    written = json.dumps(text)
    try:
        json.loads(written).encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            load_json(written)
    else:
        assert load_json(written) == json.loads(written)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ('{"a": 1,\n "\\ud800b": 2}', r"\\ud800 is half of a surrogate pair: line 2 column 3"),
        ('["\\uDfFf\\ud800"]', r"\\uDfFf is half"),
        ('["\\\\\\ud800"]', "half"),
        ("[" * 100_000, "too deeply nested"),
        ('{"a": 1, "b": {"c": 1,\n "c": 2}}', "the key 'c' is given twice in an object; .*: line 1 column 15"),
        ('[{"a": 1},\n {"a": 1, "a": 1}]', "the key 'a' is given twice in an object; .*: line 2 column 2"),
        ("", "Expecting value: line 1 column 1"),
    ],
)
def test_other_text_is_refused_with_its_place(text: str, finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        load_json(text)


def test_an_escaped_backslash_is_no_escape() -> None:
    assert load_json('["\\\\ud800", "\\ud83d\\ude00"]') == ["\\ud800", "\U0001f600"]
