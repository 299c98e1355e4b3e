"""Decodes what an API server answers: objects, lists, watch events and errors.

A list or an event is decoded in one pass into structs. Only when that fails is it decoded again, piece by piece, so
that one object that does not fit its type never hides the others. This module does no I/O.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec
import structlog

from bigfleet.operator.kubernetes.api import NO_SUCH_PATH, ApiError, EventType, Page, WatchEvent
from bigfleet.operator.kubernetes.objects import KubernetesObject, ObjectList, ObjectMeta, StatusObject

T = TypeVar("T")

log = structlog.get_logger(__name__)

STATUS_KIND = "Status"
#: What of a body that is no Status is quoted.
_QUOTED_CHARACTERS_MAX = 200
#: A server that asks for more is asked again all the same.
_RETRY_AFTER_SECONDS_MAX = 600.0
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "Timeout",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


#: What decoders raise for bytes that are no JSON, or too deeply nested.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class MalformedAnswer(Exception):
    """An answer is not JSON, or not of the type that the request returns."""


class _WatchFrame(msgspec.Struct, Generic[T], gc=False):
    type: str
    object: T


class _BookmarkMetadata(msgspec.Struct, rename="camel", gc=False):
    resource_version: str = ""


class _Bookmark(msgspec.Struct, gc=False):
    """The object of a bookmark: nothing but its version means anything, so nothing else can spoil it."""

    metadata: _BookmarkMetadata = msgspec.field(default_factory=_BookmarkMetadata)


_STATUS = msgspec.json.Decoder(StatusObject)
_METADATA = msgspec.json.Decoder(KubernetesObject)
_BOOKMARK = msgspec.json.Decoder(_Bookmark)
_RAW_FRAME = msgspec.json.Decoder(_WatchFrame[msgspec.Raw])
_RAW_LIST = msgspec.json.Decoder(ObjectList[msgspec.Raw])
_TYPES = {each.value: each for each in EventType}


class ObjectDecoder(Generic[T]):
    """Decodes single objects and lists of one type; use `of`, which makes one decoder a type."""

    _made: dict[type, "ObjectDecoder[Any]"] = {}  # noqa: RUF012 - a cache of the class

    def __init__(self, of_type: type[T]) -> None:
        self._type = of_type
        self._object = msgspec.json.Decoder(of_type)
        self._page: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(
            cast(Any, ObjectList)[of_type]  # a type that is known only when the program runs
        )

    @classmethod
    def of(cls, of_type: type[T]) -> "ObjectDecoder[T]":
        """Return the decoder of a type."""
        if of_type not in cls._made:
            cls._made[of_type] = cls(of_type)
        return cls._made[of_type]

    def object(self, body: bytes) -> T:
        """Return one object. Raises MalformedAnswer."""
        try:
            found = self._object.decode(body)
        except _UNREADABLE as error:
            raise MalformedAnswer(str(error)) from error
        return _named(found)

    def page(self, body: bytes) -> tuple[Page[T], int]:
        """Return a page, and of how many of its objects nothing but the metadata fits. Raises MalformedAnswer."""
        faults = 0
        try:
            found = self._page.decode(body)
            items = found.items or []
            metadata = found.metadata
        except msgspec.ValidationError:
            raw = self._raw_list(body)
            metadata = raw.metadata
            pairs = [self.object_or_metadata(bytes(each)) for each in raw.items or ()]
            items = [item for item, _ in pairs]
            faults = sum(not is_whole for _, is_whole in pairs)
        except _UNREADABLE as error:
            raise MalformedAnswer(str(error)) from error
        if not metadata.resource_version:
            # Any JSON object would be an empty list, and everything in memory would vanish.
            raise MalformedAnswer("it is no list: metadata.resourceVersion is absent")
        page = Page(items=items, resource_version=metadata.resource_version, continue_token=metadata.continue_token)
        return page, faults

    def _raw_list(self, body: bytes) -> ObjectList[msgspec.Raw]:
        try:
            return _RAW_LIST.decode(body)
        except _UNREADABLE as error:
            raise MalformedAnswer(str(error)) from error

    def object_or_metadata(self, body: bytes) -> tuple[T, bool]:
        """Return one object, and whether it fits its type; else it holds its metadata alone. Raises MalformedAnswer."""
        try:
            return self._object.decode(body), True
        except _UNREADABLE as fault:
            if not issubclass(self._type, KubernetesObject):
                raise MalformedAnswer(str(fault)) from fault
            try:
                metadata: ObjectMeta = _METADATA.decode(body).metadata
            except _UNREADABLE as error:
                raise MalformedAnswer(str(error)) from error
            log.warning(
                "operator.object_malformed",
                kind=self._type.__name__,
                namespace=metadata.namespace,
                name=metadata.name,
                error=str(fault),
                advice="everything but its metadata is ignored: correct or delete the object",
            )
            return self._type(metadata=metadata), False


class WatchDecoder(Generic[T]):
    """Decodes the lines of a watch of one type; use `of`, which makes one decoder a type."""

    _made: dict[type, "WatchDecoder[Any]"] = {}  # noqa: RUF012 - a cache of the class

    def __init__(self, of_type: type[T]) -> None:
        self._objects = ObjectDecoder.of(of_type)
        self._frame: msgspec.json.Decoder[_WatchFrame[T]] = msgspec.json.Decoder(cast(Any, _WatchFrame)[of_type])

    @classmethod
    def of(cls, of_type: type[T]) -> "WatchDecoder[T]":
        """Return the decoder of a type."""
        if of_type not in cls._made:
            cls._made[of_type] = cls(of_type)
        return cls._made[of_type]

    def event(self, what: str, line: bytes) -> tuple[WatchEvent[T], bool]:
        """Return the event of a line, and whether its object fits its type.

        Raises ApiError for an ERROR event, MalformedAnswer for a line that is no event. `what` names the request.
        """
        is_whole = True
        try:
            frame = self._frame.decode(line)
            name, found = frame.type, frame.object
        except msgspec.ValidationError:
            raw = _raw_frame(line)
            name = raw.type
            if name == "ERROR":
                raise _in_stream(what, bytes(raw.object)) from None
            if name == EventType.BOOKMARK.value:
                # Its object is empty, and an API server writes null where one of the kind must have a list.
                return WatchEvent(EventType.BOOKMARK, None, _version_of(bytes(raw.object))), True
            found, is_whole = self._objects.object_or_metadata(bytes(raw.object))
        except _UNREADABLE as error:
            raise MalformedAnswer(str(error)) from error
        kind = _TYPES.get(name)
        if kind is None:
            if name == "ERROR":
                raise _in_stream(what, bytes(_raw_frame(line).object))
            raise MalformedAnswer(f"unknown type of event {name!r}")
        version = cast(KubernetesObject, found).metadata.resource_version
        if kind is EventType.BOOKMARK:
            return WatchEvent(kind, None, version), True
        return WatchEvent(kind, _named(found), version), is_whole


def _named(found: T) -> T:
    """Return an object that has a name, or is of a kind without one. Raises MalformedAnswer: any JSON would fit."""
    if isinstance(found, KubernetesObject) and not found.metadata.name:
        raise MalformedAnswer("it is no object: metadata.name is absent")
    return found


def _raw_frame(line: bytes) -> _WatchFrame[msgspec.Raw]:
    try:
        return _RAW_FRAME.decode(line)
    except _UNREADABLE as error:
        raise MalformedAnswer(str(error)) from error


def _version_of(body: bytes) -> str:
    try:
        return _BOOKMARK.decode(body).metadata.resource_version
    except _UNREADABLE as error:
        raise MalformedAnswer(str(error)) from error


def _in_stream(what: str, body: bytes) -> ApiError:
    return error_of(what, 0, {}, body)


def error_of(what: str, http_status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Return the error of a refused request: from a Status where the body is one, else from the HTTP status."""
    try:
        status = _STATUS.decode(body)
    except _UNREADABLE:
        status = StatusObject()
    code = http_status or status.code or 500
    text = status.message or body.decode("utf-8", "replace").strip()[:_QUOTED_CHARACTERS_MAX] or "no reason given"
    reason = status.reason or _REASONS.get(code, "Unknown")
    if code == 404 and status.kind != STATUS_KIND:
        reason = NO_SUCH_PATH
    details = status.details
    seconds = _seconds(headers.get("Retry-After", ""))
    if seconds is None and details is not None and details.retry_after_seconds:
        seconds = float(details.retry_after_seconds)
    return ApiError(
        code,
        reason,
        f"{what}: {text} (HTTP {code})",
        causes=tuple(cause.reason for cause in (details.causes if details else None) or ()),
        retry_after_seconds=None if seconds is None else min(seconds, _RETRY_AFTER_SECONDS_MAX),
    )


def _seconds(text: str) -> float | None:
    """Return the seconds of a Retry-After header; a date is not understood, as API servers send none."""
    return float(text) if text.isascii() and text.isdigit() else None
