"""Observes the clients of a simulated API server: the caller of each call, and the owner of each change.

It must never change what a call does.
"""

from collections.abc import Callable
from typing import Any

from bigfleet.operator.kubernetes.api import Resource
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.faults import ApiCall
from bigfleet.sim.kubernetes.server import InMemoryApiServer

_WRITES = frozenset({"create", "update", "patch", "delete"})
#: Leases are how leaders are found, and Events may still be on their way when a leader ends.
_BY_ANYBODY = frozenset({"leases", "events"})


class WatchedApiServer(InMemoryApiServer):
    """An API server that knows whose call it carries out."""

    #: The user whose call has an effect at this moment; "" for the parts of the cluster that are simulated.
    caller = ""


class WatchedApi(InMemoryApi):
    """One client of a watched server."""

    def __init__(self, server: WatchedApiServer, *, user: str, on_write: Callable[[ApiCall], None]) -> None:
        """`on_write` is called as a write leaves its process."""
        super().__init__(server, user=user)
        self._watched = server
        self._on_write = on_write

    async def _begin(self, verb: str, resource: Resource[Any], namespace: str, name: str) -> ApiCall:
        if verb in _WRITES and resource.plural not in _BY_ANYBODY:
            self._on_write(ApiCall(verb, resource.label, namespace, name))
        call = await super()._begin(verb, resource, namespace, name)
        # What the call does follows without another wait.
        self._watched.caller = self.user
        return call
