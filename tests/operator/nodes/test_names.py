"""Names and labels that Kubernetes takes, for any machine id."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.nodes.names import (
    available_capacity_name,
    is_hashed_label,
    machine_label,
    upcoming_node_name,
)

LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@pytest.mark.parametrize(("machine_id", "label", "name"), [("m-1.x", "m-1.x", "un-m-1.x"), ("A_b", "A_b", None)])
def test_an_id_that_fits_is_its_own_name(machine_id: str, label: str, name: str | None) -> None:
    assert machine_label(machine_id) == label
    if name is not None:
        assert upcoming_node_name(machine_id) == name


@given(st.text(min_size=1, max_size=300))
def test_every_id_has_a_valid_label_and_a_valid_name(machine_id: str) -> None:
    label, name = machine_label(machine_id), upcoming_node_name(machine_id)

    assert LABEL.fullmatch(label)
    assert len(label) <= 63
    assert label == machine_id or is_hashed_label(label)
    assert SUBDOMAIN.fullmatch(name)
    assert len(name) <= 253


@given(st.text(max_size=50), st.text(max_size=50))
def test_hints_of_different_keys_have_different_names(one: str, other: str) -> None:
    names = available_capacity_name(one), available_capacity_name(other)

    assert (names[0] == names[1]) == (one == other)
    assert all(SUBDOMAIN.fullmatch(name) for name in names)
