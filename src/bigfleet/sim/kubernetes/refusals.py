"""Builds the errors with which an API server refuses a request, with the texts of a real one."""

from typing import Any

from bigfleet.operator.kubernetes.api import NO_SUCH_PATH, ApiError, Resource

AnyResource = Resource[Any]


def base_label(resource: AnyResource) -> str:
    """Return the name of a resource in messages, without its subresource: `capacityrequests.bigfleet.lucy.sh`."""
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural


def not_found(resource: AnyResource, name: str) -> ApiError:
    """Say that an object is absent."""
    return ApiError(404, "NotFound", f'{base_label(resource)} "{name}" not found')


def kind_not_found() -> ApiError:
    """Say that the server serves no such kind."""
    return ApiError(404, NO_SUCH_PATH, "404 page not found")


def already_exists(resource: AnyResource, name: str) -> ApiError:
    """Say that an object of that name exists."""
    return ApiError(409, "AlreadyExists", f'{base_label(resource)} "{name}" already exists')


def conflict(resource: AnyResource, name: str, why: str = "") -> ApiError:
    """Say that an object has changed since it was read, or is another one."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    return ApiError(409, "Conflict", f'Operation cannot be fulfilled on {base_label(resource)} "{name}": {why}')


def invalid(resource: AnyResource, name: str, why: str) -> ApiError:
    """Say that an object breaks a rule; `why` names the field."""
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {why}')


def bad_request(why: str) -> ApiError:
    """Say that a request cannot be read."""
    return ApiError(400, "BadRequest", why)


def expired(why: str) -> ApiError:
    """Say that a resource version or a continue token is too old."""
    return ApiError(410, "Expired", why)


def forbidden(resource: AnyResource, name: str, user: str, verb: str, namespace: str) -> ApiError:
    """Say that a user lacks a right."""
    path = f"{resource.plural}/{resource.subresource}" if resource.subresource else resource.plural
    subject = f'{base_label(resource)} "{name}"' if name else base_label(resource)
    place = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    text = (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{path}" in API group "{resource.group}" {place}'
    )
    return ApiError(403, "Forbidden", text)


def unreachable(what: str, why: str) -> ApiError:
    """Say that a request got no answer."""
    return ApiError(0, "Unreachable", f"{what}: {why}")
