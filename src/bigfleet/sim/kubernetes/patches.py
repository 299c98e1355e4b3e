"""Applies merge patches, strategic merge patches and JSON patches to stored objects; none is changed in place."""

from typing import Any

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.sim.kubernetes.kinds import Stored, copy_of
from bigfleet.sim.kubernetes.refusals import bad_request

#: Lists that a strategic merge patch merges by a key, by their field name. All others are replaced as a whole.
_MERGE_KEYS = {
    "conditions": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "addresses": "type",
}
_DIRECTIVE = "$patch"


def merge_patch(target: Any, patch: Any) -> Any:
    """Return a target after a merge patch (RFC 7386): null removes, mappings merge, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge_patch(target: Any, patch: Any) -> Any:
    """Return a target after a strategic merge patch: as a merge patch, but lists with a merge key merge by it.

    An item with `$patch: delete` removes the one of its key; a mapping or list with `$patch: replace` replaces.
    """
    if not isinstance(patch, dict):
        return patch
    if patch.get(_DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != _DIRECTIVE}
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif key.startswith("$setElementOrder/"):
            continue
        elif isinstance(value, list) and key in _MERGE_KEYS:
            merged[key] = _merge_lists(merged.get(key) or [], value, _MERGE_KEYS[key])
        else:
            merged[key] = strategic_merge_patch(merged.get(key), value)
    return merged


def _merge_lists(target: list[Any], patch: list[Any], merge_key: str) -> list[Any]:
    if any(item.get(_DIRECTIVE) == "replace" for item in patch):
        return [item for item in patch if _DIRECTIVE not in item]
    items = {item.get(merge_key): item for item in target}
    for item in patch:
        if merge_key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {merge_key}")
        if item.get(_DIRECTIVE) == "delete":
            items.pop(item[merge_key], None)
        else:
            items[item[merge_key]] = strategic_merge_patch(items.get(item[merge_key]), item)
    return list(items.values())


def json_patch(target: Stored, operations: list[Any]) -> Stored:
    """Return a target after the operations add, replace, remove and test of a JSON patch (RFC 6902), all or none.

    Raises ApiError 422 when a path is absent or a test fails, 400 for an operation that cannot be read.
    """
    patched = copy_of(target)
    for operation in operations:
        if not isinstance(operation, dict) or not {"op", "path"} <= operation.keys():
            raise bad_request(f"a JSON patch operation has op and path, not {operation!r}")
        _operate(patched, operation)
    return patched


def _operate(document: Stored, operation: dict[str, Any]) -> None:
    name, path = operation["op"], operation["path"]
    if not path.startswith("/"):
        raise bad_request(f"a JSON pointer begins with a slash, not {path!r}")
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
    holder: Any = document
    for part in parents:
        holder = _child(holder, part, path)
    match name:
        case "add":
            if isinstance(holder, list):
                holder.insert(len(holder) if last == "-" else int(last), operation["value"])
            else:
                holder[last] = operation["value"]
        case "replace":
            _child(holder, last, path)
            holder[int(last) if isinstance(holder, list) else last] = operation["value"]
        case "remove":
            _child(holder, last, path)
            del holder[int(last) if isinstance(holder, list) else last]
        case "test":
            if _child(holder, last, path) != operation["value"]:
                raise _unprocessable(f"testing value {path} failed: test failed")
        case _:
            raise bad_request(f"Unexpected kind: {name}")


def _child(holder: Any, part: str, path: str) -> Any:
    try:
        return holder[int(part)] if isinstance(holder, list) else holder[part]
    except (KeyError, IndexError, TypeError, ValueError):
        raise _unprocessable(f"operation does not apply: doc is missing path: {path}") from None


def _unprocessable(why: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")
