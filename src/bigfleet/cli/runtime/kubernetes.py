"""Connects a process to its API server: credentials, clients, checks at start, leader election.

Faults of the cluster or of the credentials are reported here, before anything is written.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from bigfleet.cli.runtime.failures import RunFault, UsageFault, one_line
from bigfleet.cli.runtime.system import SystemIds, system_rng
from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.access import ADVICE, Right, missing_rights
from bigfleet.operator.kubernetes.api import INVALID_RESPONSE, ApiError, KubernetesApi, Resource
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.kubeconfig import KubeconfigError, load_endpoint
from bigfleet.operator.kubernetes.lease import LeaderElector

#: Distinguish the requests of the other clients in the API server's log.
ELECTION_SUFFIX: Final = "/leader-election"
TOKENS_SUFFIX: Final = "/tokens"
#: A process that starts while its API server is away waits for it so long: one that ended at once would be started
#: again with growing pauses, and would not be there when the API server is back.
AWAY_SECONDS_MAX: Final = 120.0
#: An API server that was restarted forbids everything until it has read its roles.
_FORBIDDEN_SECONDS_MAX: Final = 20.0
_RETRY_SECONDS: Final = 2.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConnection:
    """The clients of one process."""

    endpoint: ApiEndpoint
    api: KubernetesApi
    #: For the Lease alone: a backlog of other requests delays no renewal.
    election_api: KubernetesApi
    #: For the tokens of machines that join: each is awaited for 25 s, and evictions may fill a queue for longer.
    token_api: KubernetesApi
    clock: Clock
    #: Set when a request was refused for want of a right.
    forbidden: asyncio.Event = field(default_factory=asyncio.Event)

    def elector(self, *, namespace: str, lease_name: str) -> LeaderElector:
        """Return the elector of this process among the others of the Lease."""
        return LeaderElector(
            self.election_api,
            namespace=namespace,
            name=lease_name,
            host=socket.gethostname(),
            ids=SystemIds(),
            clock=self.clock,
            rng=system_rng(),
        )

    async def check(self, rights: Iterable[Right], definitions: Iterable[Resource[Any]]) -> None:
        """Look for rights and custom resources that are missing. Raises RunFault, naming all missing rights."""
        wanted = tuple(rights)
        missing = await self.ask(lambda: missing_rights(self.api, wanted))
        if missing:
            raise RunFault(f"RBAC: missing rights: {'; '.join(missing)}; {ADVICE}")
        for definition in definitions:
            if not await self.ask(partial(self._is_served, definition)):
                raise RunFault(
                    f"API server of {self.endpoint.source}: it does not know {definition.label};"
                    " install the custom resources of BigFleet (deploy/crds)"
                )

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Return the API server's answer to what a process must know at start; wait for a server that is away.

        Raises RunFault when it refuses, or is away for longer than `AWAY_SECONDS_MAX`.
        """
        started_seconds = self.clock.monotonic_seconds()
        while True:
            try:
                return await question()
            except ApiError as error:
                delay_seconds = max(error.retry_after_seconds or 0.0, _RETRY_SECONDS)
                seconds_max = AWAY_SECONDS_MAX if error.is_transient else 0.0
                if error.is_forbidden:
                    seconds_max = _FORBIDDEN_SECONDS_MAX
                if self.clock.monotonic_seconds() + delay_seconds - started_seconds >= seconds_max:
                    raise self.fault(error) from error
                _log.warning("operator.start_delayed", error=str(error), retry_seconds=delay_seconds)
                await self.clock.sleep(delay_seconds)

    async def _is_served(self, resource: Resource[Any]) -> bool:
        try:
            await self.api.list_page(resource, limit=1)
        except ApiError as error:
            if not error.is_kind_unserved:
                raise
            return False
        return True

    def fault(self, error: ApiError) -> RunFault:
        """Return the failure of a process whose API server answered with an error."""
        is_foreign = error.reason == INVALID_RESPONSE
        advice = f"; check that an API server answers at {self.endpoint.server}" if is_foreign else ""
        return RunFault(f"API server of {self.endpoint.source}: {one_line(error)}{advice}")


def find_endpoint(kubeconfig: Path | None, clock: Clock, environment: Mapping[str, str] = os.environ) -> ApiEndpoint:
    """Return where the API server is, and the credentials for it. Raises UsageFault naming the file."""
    try:
        return load_endpoint(clock=clock, environment=environment, kubeconfig=kubeconfig)
    except KubeconfigError as fault:
        raise UsageFault(str(fault)) from fault


@asynccontextmanager
async def connect_cluster(
    endpoint: ApiEndpoint, *, clock: Clock, user_agent: str, qps: float, burst: int
) -> AsyncIterator[ClusterConnection]:
    """Have clients of the API server while the context lasts; `qps` of 0 is no limit."""
    forbidden = asyncio.Event()
    async with (
        HttpKubernetesApi(
            endpoint, clock=clock, user_agent=user_agent, qps=qps, burst=burst, on_forbidden=forbidden.set
        ) as api,
        HttpKubernetesApi(
            endpoint, clock=clock, user_agent=user_agent + ELECTION_SUFFIX, on_forbidden=forbidden.set
        ) as election_api,
        HttpKubernetesApi(
            endpoint, clock=clock, user_agent=user_agent + TOKENS_SUFFIX, on_forbidden=forbidden.set
        ) as token_api,
    ):
        yield ClusterConnection(
            endpoint=endpoint,
            api=api,
            election_api=election_api,
            token_api=token_api,
            clock=clock,
            forbidden=forbidden,
        )
