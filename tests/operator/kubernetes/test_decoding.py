"""What becomes of answers of any shape: an object, or an error that says so."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bigfleet.operator.kubernetes.api import ApiError, EventType
from bigfleet.operator.kubernetes.decoding import MalformedAnswer, ObjectDecoder, WatchDecoder, error_of
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject, StatusObject

OBJECT = {
    "metadata": {"name": "a", "namespace": "d", "uid": "u", "resourceVersion": "5", "labels": {"x": "y"}},
    "spec": {"priority": 1, "resources": {"cpu": "1"}, "requirements": [{"key": "k", "operator": "Exists"}]},
    "status": {"phase": "Pending", "conditions": [{"type": "Accepted", "status": "True"}]},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["metadata", "spec", "items", "type", "object", "name", "code"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def spoiled(part: str, field: str, value: Any) -> dict[str, Any]:
    """Return the object with one field replaced."""
    found = json.loads(json.dumps(OBJECT))
    found[part][field] = value
    result: dict[str, Any] = found
    return result


@given(body=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_any_body_is_an_object_a_page_or_malformed(body: bytes) -> None:
    decoder = ObjectDecoder.of(PodObject)
    for decode in (decoder.object, decoder.page):
        try:
            decode(body)
        except MalformedAnswer as error:
            assert str(error)  # noqa: PT017 - either end is right


@given(body=st.fixed_dictionaries({}, optional={"type": JSON, "object": JSON}).map(json.dumps).map(str.encode))
def test_any_line_is_an_event_an_error_or_malformed(body: bytes) -> None:
    try:
        event, _ = WatchDecoder.of(PodObject).event("watch pods", body)
    except (MalformedAnswer, ApiError) as error:
        assert str(error)  # noqa: PT017 - either end is right
    else:
        assert event.type in EventType


@given(part=st.sampled_from(["spec", "status"]), field=st.sampled_from(["priority", "phase", "conditions"]), value=JSON)
def test_a_field_of_the_wrong_type_costs_no_more_than_its_object(part: str, field: str, value: Any) -> None:
    bad = spoiled(part, field, value)
    body = json.dumps({"metadata": {"resourceVersion": "9"}, "items": [OBJECT, bad, OBJECT]}).encode()
    page, faults = ObjectDecoder.of(CapacityRequestObject).page(body)
    whole, found, other = page.items
    assert whole.spec.priority == other.spec.priority == 1
    assert found.metadata.key == ("d", "a")
    assert (found.spec.resources == {}) == (faults == 1)


@given(body=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30), code=st.integers(300, 599))
def test_any_refusal_is_an_error_with_a_status(body: bytes, code: int) -> None:
    error = error_of("get nodes n1", code, {}, body)
    assert str(error).startswith("get nodes n1: ")
    assert error.reason


def test_an_object_without_metadata_of_its_own_is_decoded_whole_or_not_at_all() -> None:
    decoder = ObjectDecoder.of(StatusObject)
    assert decoder.object(b'{"status": "Success"}').status == "Success"
    with pytest.raises(MalformedAnswer, match="status"):
        decoder.object_or_metadata(b'{"status": 3}')


def test_a_bookmark_whose_object_has_null_lists_is_a_bookmark_and_no_malformed_object() -> None:
    """Real API servers write `"containers": null` into the bookmarks of pods."""
    line = b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"90"},"spec":{"containers":null}}}'

    with capture_logs() as logs:
        event, is_whole = WatchDecoder.of(PodObject).event("watch pods", line)

    assert (event.type, event.object, event.resource_version, is_whole) == (EventType.BOOKMARK, None, "90", True)
    assert logs == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": {"name": "a", "resourceVersion": "\xff"}}',
        b'{"metadata": {"resourceVersion": "1"}, "spec": ' + b'{"a":' * 100_000,
        b'{"metadata": {"resourceVersion": "1"}, "items": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    ],
    ids=["not UTF-8", "deep and cut", "deep"],
)
def test_bytes_that_break_a_decoder_are_malformed(body: bytes) -> None:
    """Whatever follows the objects ends with any other exception, and its process with it."""
    decoder = ObjectDecoder.of(PodObject)
    for decode in (decoder.object, decoder.page):
        with pytest.raises(MalformedAnswer):
            decode(body)
    with pytest.raises(MalformedAnswer):
        WatchDecoder.of(PodObject).event("watch pods", b'{"type": "ADDED", "object": ' + body + b"}")


def test_an_event_without_an_object_is_malformed() -> None:
    for line in (b'{"type": "ADDED", "object": {}}', b'{"type": "ADDED", "object": null}', b'{"type": "ADDED"}'):
        with pytest.raises(MalformedAnswer):
            WatchDecoder.of(PodObject).event("watch pods", line)


@pytest.mark.parametrize("spec", [{"priority": 2**70}, {"resources": {"cpu": 2**70}}])
def test_a_number_that_no_server_stores_costs_its_object(spec: dict[str, Any]) -> None:
    """It would be decoded, and end whoever encodes the object."""
    body = json.dumps({"metadata": {"name": "a"}, "spec": spec}).encode()
    found, is_whole = ObjectDecoder.of(CapacityRequestObject).object_or_metadata(body)

    assert (found.metadata.name, found.spec.priority, is_whole) == ("a", 0, False)
