"""Tracks which manager owns which fields of an object, and applies configurations server-side.

A field is a path to a value that is no mapping. Lists are one field each, but for those with a key (conditions, owner
references), whose items are addressed by it.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.sim.kubernetes.kinds import Stored, copy_of


class FieldManager(NamedTuple):
    """Who owns fields: a name, whether by applying, and through which subresource."""

    name: str
    applies: bool
    subresource: str


class ItemKey(NamedTuple):
    """The part of a path that addresses an item of a list by the value of its key."""

    key: str
    value: str


FieldPath = tuple[str | ItemKey, ...]
#: The fields of each manager. Never changed in place.
FieldOwners = Mapping[FieldManager, frozenset[FieldPath]]

_LIST_KEYS = {"conditions": "type", "ownerReferences": "uid"}
#: Set by the server, or the object's address: no manager owns them.
_UNOWNED: frozenset[FieldPath] = frozenset(
    {("apiVersion",), ("kind",)}
    | {
        ("metadata", name)
        for name in (
            "name",
            "namespace",
            "uid",
            "resourceVersion",
            "generation",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "managedFields",
        )
    }
)


def fields_of(stored: Stored) -> dict[FieldPath, Any]:
    """Return the fields that can be owned, with their values."""
    return {path: value for path, value in _leaves(stored, ()) if path not in _UNOWNED}


def after_update(owners: FieldOwners, former: Stored, stored: Stored, manager: FieldManager) -> FieldOwners:
    """Return the owners after a manager changed an object otherwise than by applying.

    It owns what it changed; what it removed has no owner.
    """
    before, after = fields_of(former), fields_of(stored)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = before.keys() - after.keys()
    left = {each: fields - changed - gone for each, fields in owners.items()}
    left[manager] = left.get(manager, frozenset()) | changed
    return {each: fields for each, fields in left.items() if fields}


def apply_configuration(
    stored: Stored, owners: FieldOwners, body: Stored, manager: FieldManager, *, force: bool
) -> tuple[Stored, FieldOwners]:
    """Return an object, and its owners, after a manager applied a configuration.

    A field that the manager applied before and does not name any more is removed unless another manager owns it.
    Raises ApiError 409 naming managers and fields when another one owns a field with another value, unless forced.
    """
    live, applied = fields_of(stored), fields_of(body)
    contested = {
        path: [other for other, fields in owners.items() if other != manager and _touches(path, fields)]
        for path, value in applied.items()
        # An empty mapping takes nothing away from those who own entries of it.
        if value != {} and live.get(path) != value
    }
    conflicts = [(other, path) for path, others in contested.items() for other in others]
    if conflicts and not force:
        texts = [f'conflict with "{other.name}": {path_text(path)}' for other, path in conflicts]
        plural = "conflict" if len(texts) == 1 else "conflicts"
        raise ApiError(
            409,
            "Conflict",
            f"Apply failed with {len(texts)} {plural}: {'; '.join(texts)}",
            causes=("FieldManagerConflict",) * len(texts),
        )
    left = dict(owners)
    for other, path in conflicts:
        left[other] = frozenset(each for each in left[other] if not _overlaps(each, path))
    dropped = owners.get(manager, frozenset()) - applied.keys()
    left[manager] = frozenset(applied)
    owned_by_any = frozenset().union(*left.values())
    result = copy_of(stored)
    for path in sorted((path for path in dropped if path not in owned_by_any), key=_keys_last):
        _remove(result, path)
    for path, value in sorted(applied.items(), key=lambda item: _order(item[0])):
        _put(result, path, value)
    return result, {each: fields for each, fields in left.items() if fields}


def path_text(path: FieldPath) -> str:
    """Return a path as messages write it: `.status.conditions[type="Ready"].status`."""
    return "".join(f'[{part.key}="{part.value}"]' if isinstance(part, ItemKey) else f".{part}" for part in path)


def _leaves(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
    key = _LIST_KEYS.get(path[-1]) if path and isinstance(path[-1], str) else None
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(each, (*path, name))
    elif isinstance(value, list) and value and key is not None:
        for each in value:
            yield from _leaves(each, (*path, ItemKey(key, each[key])))
    elif path:
        yield path, value


def _overlaps(one: FieldPath, other: FieldPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _touches(path: FieldPath, fields: frozenset[FieldPath]) -> bool:
    return path in fields or any(_overlaps(path, each) for each in fields)


def _keys_last(path: FieldPath) -> tuple[bool, tuple[str, ...]]:
    return any(isinstance(part, ItemKey) and path[-1] == part.key for part in path), _order(path)


def _order(path: FieldPath) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def _put(target: Stored, path: FieldPath, value: Any) -> None:
    holder: Any = target
    for part, following in pairwise(path):
        if isinstance(part, ItemKey):
            holder = _item(holder, part)
            continue
        expected: Any = [] if isinstance(following, ItemKey) else {}
        if type(holder.get(part)) is not type(expected):
            holder[part] = expected
        holder = holder[part]
    if value != {} or not isinstance(holder.get(path[-1]), dict):
        holder[path[-1]] = value


def _item(items: list[Any], part: ItemKey) -> Any:
    for item in items:
        if item.get(part.key) == part.value:
            return item
    items.append({part.key: part.value})
    return items[-1]


def _remove(target: Any, path: FieldPath) -> None:
    """Remove a field, and the mappings and lists that it leaves empty."""
    part, rest = path[0], path[1:]
    if isinstance(part, ItemKey):
        found = next((item for item in target if item.get(part.key) == part.value), None)
        # The key goes last, and with it the item: while there is anything else in it, the item needs its key.
        if found is not None and not (rest == (part.key,) and found.keys() != {part.key}):
            _remove(found, rest)
            if not found:
                target.remove(found)
        return
    if not isinstance(target, dict) or part not in target:
        return
    if not rest:
        del target[part]
        return
    _remove(target[part], rest)
    if not target[part]:
        del target[part]
