"""Defines why a call is rejected: a closed set of codes, and a sentence (docs/spec/provider.md §3).

The codes carry the names of the gRPC status codes, so that a transport maps them by name. A refusal must never carry
a blob or a metadata value.
"""

from enum import Enum


class Code(Enum):
    """The status codes that a provider answers with."""

    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    #: The fence, and nothing else on this service.
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    ABORTED = "ABORTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"


class Refused(Exception):
    """A call that was not accepted."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NotReady(Refused):
    """A mutating call that was not accepted because no call is accepted now: nothing of it happened."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


class StoreDown(Exception):
    """A commit failed: nothing of it happened, and nothing was published."""


class ChangeRefused(Exception):
    """A change holds a value that cannot be written: nothing of it happened, and no retry helps."""


class HostShared(ChangeRefused):
    """A change gives a machine a host that is another machine's already."""


class StartRefused(Exception):
    """The provider cannot start; the message names the flag or file and the fault."""


class OfferingsRefused(StartRefused):
    """The offerings of a first start are wrong, which is the caller's mistake."""
