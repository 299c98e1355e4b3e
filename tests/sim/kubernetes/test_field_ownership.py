"""Server-side apply in the simulated API server, compared with a plain model over any history of applications."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.sim.kubernetes.field_ownership import (
    FieldManager,
    FieldOwners,
    ItemKey,
    after_update,
    apply_configuration,
    fields_of,
    path_text,
)

_PATHS: list[tuple[Any, ...]] = [
    ("spec", "a"),
    ("spec", "b", "c"),
    ("spec", "b", "d"),
    ("status", "conditions", ItemKey("type", "Ready"), "status"),
    ("status", "conditions", ItemKey("type", "Drained"), "status"),
]
_CONFIGURATIONS = st.dictionaries(st.sampled_from(_PATHS), st.sampled_from(["1", "2"]))
_MANAGERS = st.sampled_from(["one", "two", "three"])


def body_of(fields: dict[Any, str]) -> dict[str, Any]:
    """Return a configuration with these fields; a condition has its type beside them."""
    body: dict[str, Any] = {}
    for path, value in fields.items():
        if "conditions" in path:
            conditions = body.setdefault("status", {}).setdefault("conditions", [])
            conditions.append({"type": path[2].value, "status": value})
        elif len(path) == 2:
            body.setdefault("spec", {})["a"] = value
        else:
            body.setdefault("spec", {}).setdefault("b", {})[path[2]] = value
    return body


@given(st.lists(st.tuples(_MANAGERS, _CONFIGURATIONS), max_size=12))
def test_a_field_lives_as_long_as_somebody_applies_it(history: list[tuple[str, dict[Any, str]]]) -> None:
    """With the value of the last one who applied it; force takes it from those who want another value."""
    stored: dict[str, Any] = {}
    owners: FieldOwners = {}
    wanted: dict[str, dict[Any, str]] = {}
    for name, fields in history:
        manager = FieldManager(name, True, "")
        stored, owners = apply_configuration(stored, owners, body_of(fields), manager, force=True)
        for other in wanted.values():
            for path in [path for path, value in other.items() if fields.get(path, value) != value]:
                del other[path]
        wanted[name] = dict(fields)
        live = {path: value for path, value in fields_of(stored).items() if path[-1] != "type"}

        assert live == {path: value for each in wanted.values() for path, value in each.items()}
        assert fields_of(stored).keys() == frozenset().union(*owners.values())
        assert apply_configuration(stored, owners, body_of(fields), manager, force=False) == (stored, owners)


def test_who_changes_a_field_owns_it_alone() -> None:
    """Those who applied it before have lost it, and what is removed has no owner."""
    one, two = FieldManager("one", True, ""), FieldManager("two", False, "")
    stored, owners = apply_configuration({}, {}, {"spec": {"a": "1", "b": "1"}}, one, force=False)
    owners = after_update(owners, stored, {"spec": {"a": "2"}}, two)

    assert owners == {two: frozenset({("spec", "a")})}


def test_a_path_is_written_as_messages_write_it() -> None:
    """With the key of a list's item."""
    assert path_text(_PATHS[3]) == '.status.conditions[type="Ready"].status'
