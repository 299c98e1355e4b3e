"""What msgspec says of a bad field, as a path and a sentence."""

from typing import Any

import msgspec
import pytest

from bigfleet.files.field_faults import field_fault


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    size: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    parts: tuple[_Part, ...] = ()
    named: dict[str, _Part] = {}


def _error(body: Any) -> msgspec.ValidationError:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, _File)
    return caught.value


@pytest.mark.parametrize(
    ("body", "section", "text"),
    [
        ({"colour": 1}, "", "colour: unknown key"),
        ({"parts": [{}]}, "parts[0]", "parts[0].size: is missing"),
        ({"parts": [{"size": 1, "colour": 1}]}, "parts[0]", "parts[0].colour: unknown key"),
        ({"parts": [{"size": "a"}]}, "parts[0].size", "parts[0].size: Expected `int`, got `str`"),
        ({"named": {"a": {}}}, "named.*", "named.*.size: is missing"),
        ({"named": {"a": {"size": "a"}}}, "named.*.size", "named.*.size: Expected `int`, got `str`"),
        ([], "", "Expected `object`, got `array`"),
    ],
)
def test_a_bad_field_has_a_path_and_a_sentence(body: Any, section: str, text: str) -> None:
    fault = field_fault(_error(body))
    assert (fault.section, str(fault)) == (section, text)
    assert fault.is_unknown_key is text.endswith("unknown key")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"colour": 1}, "hosts.h.colour: unknown key"),
        ({"parts": [{}]}, "hosts.h.parts[0].size: is missing"),
        ([], "hosts.h: Expected `object`, got `array`"),
    ],
)
def test_a_path_starts_where_the_converted_part_is(body: Any, text: str) -> None:
    assert str(field_fault(_error(body), root="hosts.h")) == text
