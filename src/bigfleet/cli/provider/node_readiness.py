"""Asks API servers whether nodes are Ready, with one kubeconfig file for each cluster.

docs/spec/libvirt-provider.md §6. A cluster without a file, or whose API server does not answer, has no Ready node. The
provider only reads nodes.
"""

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

import structlog

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.kubeconfig import KubeconfigError, load_endpoint
from bigfleet.operator.kubernetes.resources import NODES

_log = structlog.get_logger("bigfleet.cli.provider.node_readiness")

SUFFIX: Final = ".kubeconfig"


class KubeconfigNodes:
    """Implements `NodeReadiness` over a directory of kubeconfig files. A file that changes is read again."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        #: By cluster: the file's time of change, and the client that was made of it.
        self._clients: dict[str, tuple[int, HttpKubernetesApi]] = {}
        #: What was last logged of a cluster that cannot be asked.
        self._faults: dict[str, str] = {}

    def path(self, cluster: str) -> Path:
        """Return the file of a cluster."""
        return self._directory / f"{quote(cluster, safe='')}{SUFFIX}"

    async def is_ready(self, cluster: str, node_name: str) -> bool:
        """Return whether the node is there and Ready."""
        try:
            node = await (await self._client(cluster)).get(NODES, node_name)
        except ApiError as error:
            if not error.is_not_found:
                self._note(cluster, str(error))
                return False
            self._faults.pop(cluster, None)
            return False
        except (OSError, KubeconfigError) as error:
            self._note(cluster, str(error))
            return False
        self._faults.pop(cluster, None)
        return node.is_ready

    async def _client(self, cluster: str) -> HttpKubernetesApi:
        path = self.path(cluster)
        changed_nanos = path.stat().st_mtime_ns
        known = self._clients.get(cluster)
        if known is not None and known[0] == changed_nanos:
            return known[1]
        endpoint = load_endpoint(clock=self._clock, environment=os.environ, kubeconfig=path)
        client = HttpKubernetesApi(endpoint, clock=self._clock, user_agent="bigfleet-provider")
        self._clients[cluster] = (changed_nanos, client)
        if known is not None:
            await known[1].aclose()
        return client

    def _note(self, cluster: str, text: str) -> None:
        if self._faults.get(cluster) != text:
            self._faults[cluster] = text
            advice = "nodes of this cluster count as not Ready until the file can be used"
            _log.warning("cluster.not_asked", cluster=cluster, path=str(self.path(cluster)), error=text, advice=advice)

    async def aclose(self) -> None:
        """Close all connections."""
        clients, self._clients = self._clients, {}
        for _changed_nanos, client in clients.values():
            await client.aclose()
