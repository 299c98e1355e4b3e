"""Metadata: the durable stamps, key by key (docs/spec/model.md §4)."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import decode_metadata, dollars_text, encode_metadata
from bigfleet.model.states import MachineState
from tests.strategies import HOST

KEYS = {
    "bigfleet.lucy.sh/assigned-priority",
    "bigfleet.lucy.sh/assigned-interruption-penalty-dollars",
    "bigfleet.lucy.sh/assigned-reclamation-penalty-dollars",
    "bigfleet.lucy.sh/assigned-need-fingerprint",
    "bigfleet.lucy.sh/assigned-group",
}
BOUND = Machine(id=MachineId("m"), state=MachineState.CONFIGURED, host=HOST, cluster=ClusterId("c1"))
amounts = st.floats(min_value=0.0, allow_nan=False)


@given(st.integers(-(2**31), 2**31 - 1), amounts, amounts, st.text(), st.text())
def test_stamps_survive_the_provider(
    priority: int, interruption: float, reclamation: float, fingerprint: str, group: str
) -> None:
    machine = replace(
        BOUND,
        assigned_priority=priority,
        assigned_interruption_penalty_dollars=interruption,
        assigned_reclamation_penalty_dollars=reclamation,
        assigned_need_fingerprint=Fingerprint(fingerprint),
        assigned_group=group,
    )

    metadata = encode_metadata(machine)

    assert set(metadata) == KEYS
    assert decode_metadata(BOUND, metadata) == (machine, [])


@given(amounts)
def test_dollars_have_no_exponent_and_read_back_equal(amount: float) -> None:
    text = dollars_text(amount)

    assert float(text) == amount
    assert text == "+Inf" or set(text) <= set("0123456789.-")


@pytest.mark.parametrize(
    ("amount", "text"), [(0.0, "0"), (0.5, "0.5"), (8388608.0, "8388608"), (1e21, "1" + "0" * 21), (math.inf, "+Inf")]
)
def test_dollars_are_written_as_short_as_they_can_be(amount: float, text: str) -> None:
    assert dollars_text(amount) == text


@pytest.mark.parametrize("text", ["", "NaN", "-1", "-Inf", "1_0", " 1", "1 ", "abc", "٣"])
def test_malformed_dollars_are_reported_and_change_nothing(text: str) -> None:
    stamped = replace(BOUND, assigned_interruption_penalty_dollars=7.0)

    machine, malformed = decode_metadata(stamped, {labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: text})

    assert machine == stamped
    assert malformed == [labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS]


@pytest.mark.parametrize("text", ["", "1.0", "1e3", "2147483648", "-2147483649", "٣", "--1", "9" * 5000])
def test_a_malformed_priority_is_reported_and_the_others_still_apply(text: str) -> None:
    metadata = {labels.ASSIGNED_PRIORITY: text, labels.ASSIGNED_GROUP: "g"}

    machine, malformed = decode_metadata(BOUND, metadata)

    assert machine == replace(BOUND, assigned_group="g")
    assert malformed == [labels.ASSIGNED_PRIORITY]


@given(st.dictionaries(st.text(), st.text()))
def test_unknown_keys_are_ignored(metadata: dict[str, str]) -> None:
    known = {key: value for key, value in metadata.items() if key not in KEYS}

    assert decode_metadata(BOUND, known) == (BOUND, [])


@pytest.mark.parametrize("text", ["1e6", "1.048576E+06", "inf", "Infinity", "+Inf"])
def test_exponents_and_infinity_are_accepted(text: str) -> None:
    machine, malformed = decode_metadata(BOUND, {labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS: text})

    assert malformed == []
    assert machine.assigned_reclamation_penalty_dollars == float(text)
