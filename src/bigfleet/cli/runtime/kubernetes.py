"""Connects a process to its API server: credentials, clients, a check at start, the election of a leader.

What is wrong with the cluster or with the credentials is said to a person here, before anything is written.
"""

import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bigfleet.cli.runtime.failures import RunFault, UsageFault, one_line
from bigfleet.cli.runtime.system import SystemIds, system_rng
from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.access import Right, missing_rights
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi, Resource
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.kubeconfig import KubeconfigError, load_endpoint
from bigfleet.operator.kubernetes.lease import LeaderElector

#: Distinguishes the requests of the second client in the API server's log.
ELECTION_SUFFIX: Final = "/leader-election"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConnection:
    """The clients of one process."""

    endpoint: ApiEndpoint
    api: KubernetesApi
    #: For the Lease alone: a backlog of other requests delays no renewal.
    election_api: KubernetesApi

    def elector(self, *, namespace: str, lease_name: str, clock: Clock) -> LeaderElector:
        """Return what elects this process among the others of the Lease."""
        return LeaderElector(
            self.election_api,
            namespace=namespace,
            name=lease_name,
            host=socket.gethostname(),
            ids=SystemIds(),
            clock=clock,
            rng=system_rng(),
        )

    async def check(self, rights: Iterable[Right], definitions: Iterable[Resource[Any]]) -> None:
        """Look for rights and custom resources that are missing. Raises RunFault, naming all missing rights."""
        try:
            missing = await missing_rights(self.api, rights)
            if missing:
                raise RunFault(
                    f"RBAC: missing rights: {'; '.join(missing)}; grant the account of this process"
                    " the rights of deploy/kubernetes"
                )
            for definition in definitions:
                if not await self._is_served(definition):
                    raise RunFault(
                        f"API server of {self.endpoint.source}: it does not know {definition.label};"
                        " install the custom resources of BigFleet (deploy/crds)"
                    )
        except ApiError as error:
            raise self.fault(error) from error

    async def _is_served(self, resource: Resource[Any]) -> bool:
        try:
            await self.api.list_page(resource, limit=1)
        except ApiError as error:
            if not error.is_not_found:
                raise
            return False
        return True

    def fault(self, error: ApiError) -> RunFault:
        """Return the failure of a process whose API server answered with an error."""
        return RunFault(f"API server of {self.endpoint.source}: {one_line(error)}")


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
    async with (
        HttpKubernetesApi(endpoint, clock=clock, user_agent=user_agent, qps=qps, burst=burst) as api,
        HttpKubernetesApi(endpoint, clock=clock, user_agent=user_agent + ELECTION_SUFFIX) as election_api,
    ):
        yield ClusterConnection(endpoint=endpoint, api=api, election_api=election_api)
