"""Runs `bigfleet operator` or `bigfleet pod-controller` on a simulated API server in its own process.

python -m tests.alerts.simulated_cluster FOLDER operator|pod-controller FLAGS

The process is the real one apart from its connection to the API server. `cluster.json` in the folder says how many pods
and CapacityRequests there are, which rights are revoked, and which calls fail (verbs by resource); it is read
again several times a second.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bigfleet.cli import main as program
from bigfleet.cli.operator import process
from bigfleet.cli.runtime import kubernetes
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, PODS
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.faults import ApiCall
from bigfleet.sim.kubernetes.server import InMemoryApiServer

_LOOK_SECONDS = 0.2
_CONTAINER = {"name": "main", "resources": {"requests": {"cpu": "1"}}}


class LimitedApi(InMemoryApi):
    """A client whose rights may be revoked and whose calls may fail while it is used."""

    def __init__(self, cluster: "SimulatedCluster", on_forbidden: Callable[[], None]) -> None:
        super().__init__(cluster.server, rights=cluster)
        self._on_forbidden = on_forbidden
        self.faults.refuse = cluster.refuse

    def _check_right(self, *asked: Any) -> None:
        try:
            super()._check_right(*asked)
        except ApiError:
            self._on_forbidden()
            raise


class SimulatedCluster:
    """One API server with a few objects, and what is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "cluster.json"
        self.server = InMemoryApiServer(LoopClock())
        self.wanted: dict[str, Any] = {}
        self._following: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def connect(
        self, *_endpoint: Any, on_forbidden: Callable[[], None], **_limits: Any
    ) -> AsyncIterator[InMemoryApi]:
        """Connect a client, as `HttpKubernetesApi` does."""
        if self._following is None:
            self._follow_once()
            self._following = asyncio.get_running_loop().create_task(self._follow())
        yield LimitedApi(self, on_forbidden)

    def allow(self, verb: str, _group: str, resource: str, *_place: str) -> bool:
        """Return whether a right was not revoked."""
        return verb not in self.wanted.get("revoked", {}).get(resource, ())

    def refuse(self, call: ApiCall) -> ApiError | None:
        """Fail what the file says."""
        is_failing = call.verb in self.wanted.get("failing", {}).get(re.split(r"[./]", call.resource)[0], ())
        return ApiError(500, "InternalError", f"{call} failed") if is_failing else None

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._follow_once()

    def _follow_once(self) -> None:
        former, self.wanted = self.wanted, json.loads(self._path.read_text(encoding="utf-8"))
        if former == self.wanted:
            return
        for number in range(former.get("pods", 0), self.wanted.get("pods", 0)):
            pod = {"metadata": {"name": f"pod-{number}", "namespace": "shop"}, "spec": {"containers": [_CONTAINER]}}
            self.server.put(PODS, pod)
        for number in range(former.get("requests", 0), self.wanted.get("requests", 0)):
            spec = {"priority": 100, "resources": {"cpu": "7"}}
            self.server.put(CAPACITY_REQUESTS, {"metadata": {"name": f"r-{number}", "namespace": "shop"}, "spec": spec})
        # Watches that are open would not see that they are forbidden.
        self.server.drop_watches()


def run(folder: Path, *words: str) -> None:
    """Be the program."""
    cluster = SimulatedCluster(folder)
    endpoint = ApiEndpoint(server="http://simulated", source="the simulation")
    # The only seam: where a client of the API server is made.
    for module, name, value in (
        (kubernetes, "HttpKubernetesApi", cluster.connect),
        (kubernetes, "find_endpoint", lambda *_: endpoint),
        (process, "find_endpoint", lambda *_: endpoint),
    ):
        setattr(module, name, value)
    sys.argv = ["bigfleet", *words]
    program.main()


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:])
