"""Defines what flows may ask of a cluster's API server, as a Protocol, and the errors that it raises.

`bigfleet.operator.kubernetes.http` implements it over HTTP, the simulation in memory. Objects are typed when they are
read (`Resource.type`) and plain JSON values when they are written. This module does no I/O.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

#: A value that JSON can express.
Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource(Generic[T]):
    """One kind of object of an API server, and the type that its objects are decoded into."""

    #: "" is the core group.
    group: str
    version: str
    #: The name in the path, such as `pods`.
    plural: str
    kind: str
    namespaced: bool
    type: type[T]
    #: The subresource that is meant, such as `status`; "" is the object itself.
    subresource: str = ""

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects, such as `v1` or `policy/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def status(self) -> "Resource[T]":
        """The status subresource."""
        return replace(self, subresource="status")

    @property
    def label(self) -> str:
        """The name in messages, such as `capacityrequests.bigfleet.lucy.sh/status`."""
        name = f"{self.plural}.{self.group}" if self.group else self.plural
        return f"{name}/{self.subresource}" if self.subresource else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """One page of a list."""

    items: list[T]
    resource_version: str
    #: Asks for the next page; "" on the last.
    continue_token: str = ""


class EventType(Enum):
    """What a watch event says of its object. ERROR events are raised as ApiError."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    #: The object holds nothing but a resource version: everything before it has been sent.
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """One event of a watch."""

    type: EventType
    #: None for a bookmark.
    object: T | None
    resource_version: str


class PatchKind(Enum):
    """How a patch is written; the values are content types."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    #: Each value of the body is replaced as a whole; the body is a list of operations.
    JSON = "application/json-patch+json"


#: Reason of an ApiError with status 0: a watch carried nothing for longer than a server is ever quiet.
SILENT = "Silent"
#: Reason of an ApiError with status 0: an answer came that is not one of an API server.
INVALID_RESPONSE = "InvalidResponse"
#: Reason of an ApiError with status 404 whose answer names no object: the server serves no such kind, or what answered
#: is no API server, such as a load balancer without one behind it.
NO_SUCH_PATH = "NoSuchPath"

#: What API servers refuse for good, until the request or somebody's rights change.
_FINAL = frozenset({400, 403, 405, 409, 410, 413, 415, 422})


class ApiError(Exception):
    """A request that the API server refused, or that never reached it.

    `status` is the HTTP status, 0 when there was no answer. The message says which request failed and why.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        causes: tuple[str, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        #: The `reason` of a Kubernetes Status, such as `NotFound`, `Expired`, `Unreachable`.
        self.reason = reason
        #: The reasons of `details.causes`, such as `DisruptionBudget`.
        self.causes = causes
        #: From the Retry-After header; None when the server sent none.
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_not_found(self) -> bool:
        """Return whether the object does not exist, on the word of an API server that serves its kind."""
        return self.status == 404 and self.reason != NO_SUCH_PATH

    @property
    def is_kind_unserved(self) -> bool:
        """Return whether nothing is served at the path of the request."""
        return self.status == 404 and self.reason == NO_SUCH_PATH

    @property
    def is_conflict(self) -> bool:
        """Return whether the object has changed, exists already, or has another UID."""
        return self.status == 409

    @property
    def is_forbidden(self) -> bool:
        """Return whether a right is missing."""
        return self.status == 403

    @property
    def is_expired(self) -> bool:
        """Return whether a resource version or a continue token is too old: list again."""
        return self.status == 410

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed later, without anybody's doing.

        So are refusals that say nothing about the request itself: no answer, 429, a server error; 401, with which an
        API server that has lost its storage refuses valid tokens; a redirect or a missing path, with which a load
        balancer answers while no API server is behind it.
        """
        return not (self.is_not_found or self.status in _FINAL)


class KubernetesApi(Protocol):
    """The API server of one cluster. Each method raises ApiError."""

    async def list_page(
        self,
        resource: Resource[T],
        *,
        namespace: str = "",
        limit: int = 500,
        continue_token: str = "",
        resource_version: str = "",
        label_selector: str = "",
        field_selector: str = "",
    ) -> Page[T]:
        """Return one page of the objects, of all namespaces when `namespace` is ""."""
        ...

    def watch(
        self,
        resource: Resource[T],
        *,
        resource_version: str,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent[T]]]:
        """Open a watch with bookmarks; the iterator ends when the server closes it.

        Raises ApiError with status 410 when the version is too old, also in the middle of the stream, and with status 0
        when the connection is lost or silent for too long.
        """
        ...

    async def get(self, resource: Resource[T], name: str, *, namespace: str = "") -> T:
        """Return one object."""
        ...

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        """Create an object, or a subresource (`resource.subresource`) of the object `name`; return what was stored."""
        ...

    async def replace(self, resource: Resource[T], name: str, body: JsonObject, *, namespace: str = "") -> T:
        """Replace an object; 409 when `metadata.resourceVersion` of the body is not the current one."""
        ...

    async def apply(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject,
        *,
        namespace: str = "",
        field_manager: str,
        force: bool = True,
    ) -> T:
        """Apply server-side: the object is created if it is absent, and has afterwards the fields of the body."""
        ...

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject | list[JsonObject],
        *,
        namespace: str = "",
        kind: PatchKind = PatchKind.MERGE,
    ) -> T:
        """Patch an object; 404 when it is absent."""
        ...

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        """Delete an object; 404 when it is absent, 409 when `uid` is given and the object has another one."""
        ...
