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
    node_name: list[list[int] | _Part] = msgspec.field(default_factory=list, name="nodeName")


def _error(body: Any) -> msgspec.ValidationError:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, _File)
    return caught.value


@pytest.mark.parametrize(
    ("body", "section", "text"),
    [
        ({"colour": 1}, "", "colour: unknown key; there are parts, named, nodeName"),
        ({"parts": [{}]}, "parts[0]", "parts[0].size: is missing"),
        ({"parts": [{"size": 1, "colour": 1}]}, "parts[0]", "parts[0].colour: unknown key; there are size"),
        ({"part": []}, "", "part: unknown key; did you mean parts?"),
        ({"node_name": []}, "", "node_name: unknown key; did you mean nodeName?"),
        ({"named": {"a": {"sise": 1}}}, "named.*", "named.*.sise: unknown key; did you mean size?"),
        ({"nodeName": [{"sise": 1}]}, "nodeName[0]", "nodeName[0].sise: unknown key; did you mean size?"),
        ({"parts": [{"size": "a"}]}, "parts[0].size", "parts[0].size: Expected `int`, got `str`"),
        ({"named": {"a": {}}}, "named.*", "named.*.size: is missing"),
        ({"named": {"a": {"size": "a"}}}, "named.*.size", "named.*.size: Expected `int`, got `str`"),
        ([], "", "Expected `object`, got `array`"),
    ],
)
def test_a_bad_field_has_a_path_and_a_sentence(body: Any, section: str, text: str) -> None:
    fault = field_fault(_error(body), _File)
    assert (fault.section, str(fault)) == (section, text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"colour": 1}, "hosts.h.colour: unknown key; there are parts, named, nodeName"),
        ({"parts": [{}]}, "hosts.h.parts[0].size: is missing"),
        ([], "hosts.h: Expected `object`, got `array`"),
    ],
)
def test_a_path_starts_where_the_converted_part_is(body: Any, text: str) -> None:
    assert str(field_fault(_error(body), _File, root="hosts.h")) == text


def test_a_type_that_is_no_struct_has_no_keys_to_name() -> None:
    assert str(field_fault(_error({"colour": 1}), dict[str, Any])) == "colour: unknown key"
