"""Defines the flags of processes that work on a Kubernetes cluster."""

import re
from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.runtime.failures import UsageFault

Kubeconfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Kubeconfig; by default $KUBECONFIG, else the cluster that the pod runs in."),
]
Qps = Annotated[float, typer.Option(metavar="N", help="Requests per second to the API server; 0 is no limit.")]
Burst = Annotated[int, typer.Option(min=1, metavar="N", help="Requests that may be sent in one burst.")]
LeaseNamespace = Annotated[
    str, typer.Option(metavar="NAME", help="Namespace of the Lease; by default the namespace of the credentials.")
]
LeaseName = Annotated[str, typer.Option(metavar="NAME", help="Name of the Lease that elects the leader.")]


#: Names of namespaces, and of most other objects, as API servers accept them.
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_OBJECT_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)


def check_kubernetes_flags(qps: float, namespace: str, lease_name: str) -> None:
    """Check the values that Typer does not check. Raises UsageFault naming the flag."""
    if not 0 <= qps < float("inf"):
        raise UsageFault(f"--qps: {qps} is not a rate; write a number of requests per second, 0 for no limit")
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise UsageFault(
            f"--namespace: {namespace!r} is not the name of a namespace; write one such as bigfleet-system"
        )
    if not _OBJECT_NAME.fullmatch(lease_name):
        raise UsageFault(
            f"--lease-name: {lease_name!r} is not the name of a Lease; write one such as bigfleet-operator"
        )
