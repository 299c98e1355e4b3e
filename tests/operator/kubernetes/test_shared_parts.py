"""Sharing equal parts of requests changes no request."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes import shared_parts
from bigfleet.operator.kubernetes.objects import CapacityRequestObject
from bigfleet.operator.kubernetes.shared_parts import SharedRequestParts


def stored(name: str, cpu: str | int | float, *messages: str) -> CapacityRequestObject:
    body: dict[str, Any] = {"metadata": {"name": name, "generation": 1}, "spec": {"resources": {"cpu": cpu}}}
    if messages:
        body["status"] = {"phase": "Acknowledged", "conditions": [{"type": "Accepted", "message": m} for m in messages]}
    return msgspec.convert(body, CapacityRequestObject)


def test_requests_that_ask_for_the_same_share_what_they_ask_for_and_their_conditions() -> None:
    parts = SharedRequestParts()
    one, other = (parts.of(stored(name, "1", "in the roll-up")) for name in "ab")

    assert one.spec is other.spec
    assert one.status.conditions is not None
    assert other.status.conditions is not None
    assert one.status.conditions[0] is other.status.conditions[0]


_REQUESTS = st.lists(
    st.builds(
        stored,
        st.sampled_from("abc"),
        st.sampled_from(["1", 1, 1.0, "1.0", "2"]),
        st.sampled_from(["", "x", "y"]),
    )
    | st.builds(stored, st.sampled_from("abc"), st.sampled_from(["1", 1]))
)


@given(_REQUESTS)
@pytest.mark.parametrize("parts_max", [1, 100])
def test_a_request_stays_what_it_was_written_as(parts_max: int, requests: list[CapacityRequestObject]) -> None:
    parts = SharedRequestParts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_parts, "PARTS_MAX", parts_max)
        for request in requests:
            # Encoded: 1 and 1.0 are equal and not the same.
            assert msgspec.json.encode(parts.of(request)) == msgspec.json.encode(request)
