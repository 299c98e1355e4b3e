"""Injects faults into requests to the simulated API server: delays, errors, lost answers, silence.

A server has one set of faults for all its clients, and each client one of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bigfleet.operator.kubernetes.api import ApiError


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request as faults and records see it."""

    #: As RBAC says it: get, list, watch, create, update, patch, delete.
    verb: str
    #: `pods`, `pods/eviction`, `capacityrequests.bigfleet.lucy.sh/status`.
    resource: str
    namespace: str
    name: str

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource} {place}".rstrip()


@dataclass(slots=True)
class ApiFaults:
    """What goes wrong with requests from now on; the defaults are none. Change it at any time."""

    #: How long each request takes to reach the server.
    latency_seconds: float = 0.0
    #: No connection can be made: ApiError with status 0 at once. Open watches break.
    is_down: bool = False
    #: Connections are made and never answered: ApiError with status 0 when the client has waited long enough. Watches
    #: fall silent, and break in the same way.
    is_hanging: bool = False
    #: Returns the error with which a call is refused before it has an effect, None to let it pass.
    refuse: Callable[[ApiCall], ApiError | None] = lambda call: None
    #: Says whether a call takes effect but its answer is lost: ApiError with status 0.
    lose_answer: Callable[[ApiCall], bool] = lambda call: False


def fail_times(
    count: int, error: ApiError, *, verb: str = "", resource: str = ""
) -> Callable[[ApiCall], ApiError | None]:
    """Return a `refuse` that refuses the next `count` calls of a verb and a resource; "" means any."""
    left = count

    def refuse(call: ApiCall) -> ApiError | None:
        nonlocal left
        if left <= 0 or (verb and call.verb != verb) or (resource and call.resource != resource):
            return None
        left -= 1
        return error

    return refuse
