"""Lists the rights that the operator and the pod controller need, with each option (docs/spec/operator.md §12).

The manifests in deploy/kubernetes grant exactly these, and a process checks each at start
(`bigfleet.operator.kubernetes.access`). A right must never be added for convenience: a leaked token of the operator has
all of them.
"""

from typing import Final

from bigfleet.operator.kubernetes.access import Right
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    DAEMON_SETS,
    DISRUPTION_BUDGETS,
    EVENTS,
    EVICTIONS,
    LEASES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    PRIORITY_CLASSES,
    SECRETS,
    TOKEN_REQUESTS,
    UPCOMING_NODES,
)

#: Where bootstrap tokens are Secrets.
TOKEN_SECRET_NAMESPACE: Final = "kube-system"  # noqa: S105 - a name

#: What a Reflector needs.
_FOLLOW: Final = ("list", "watch")

#: What the operator needs in every mode, but for its Lease. A server-side apply is a patch, and a create if it is new.
OPERATOR_RIGHTS: Final = (
    Right(resource=CAPACITY_REQUESTS, verbs=_FOLLOW),
    Right(resource=CAPACITY_REQUESTS.status, verbs=("patch",)),
    Right(resource=UPCOMING_NODES, verbs=(*_FOLLOW, "create", "patch", "delete")),
    Right(resource=UPCOMING_NODES.status, verbs=("patch",)),
    Right(resource=AVAILABLE_CAPACITIES, verbs=(*_FOLLOW, "create", "patch", "delete")),
    Right(resource=AVAILABLE_CAPACITIES.status, verbs=("patch",)),
    # A drain reads its Node before it cordons it.
    Right(resource=NODES, verbs=("get", *_FOLLOW, "patch")),
    Right(resource=PODS, verbs=_FOLLOW),
    Right(resource=EVICTIONS, verbs=("create",)),
    # What a budget wants is compared with its pods before each eviction.
    Right(resource=DISRUPTION_BUDGETS, verbs=("list",)),
    # What DaemonSets take of each node.
    Right(resource=DAEMON_SETS, verbs=_FOLLOW),
    Right(resource=EVENTS, verbs=("create",)),
)
#: With --drain-force.
DRAIN_FORCE_RIGHTS: Final = (Right(resource=PODS, verbs=("delete",)),)
#: With --bootstrap-token secret.
TOKEN_SECRET_RIGHTS: Final = (
    Right(resource=SECRETS, verbs=("create", "delete", "list"), namespace=TOKEN_SECRET_NAMESPACE),
)
#: What the pod controller needs, but for its Lease.
POD_CONTROLLER_RIGHTS: Final = (
    # Before a request is deleted the server is asked for its pod.
    Right(resource=PODS, verbs=("get", *_FOLLOW)),
    Right(resource=CAPACITY_REQUESTS, verbs=(*_FOLLOW, "create", "patch", "delete")),
    Right(resource=CAPACITY_REQUESTS.status, verbs=("patch",)),
    # Read once, at start.
    Right(resource=PRIORITY_CLASSES, verbs=("list",)),
    # Where a pod's volumes are decides where it can run.
    Right(resource=PERSISTENT_VOLUMES, verbs=_FOLLOW),
    Right(resource=PERSISTENT_VOLUME_CLAIMS, verbs=_FOLLOW),
    # Pods on Nodes that BigFleet did not provide have no request; the server is asked for the Node before a deletion.
    Right(resource=NODES, verbs=("get", *_FOLLOW)),
    Right(resource=UPCOMING_NODES, verbs=_FOLLOW),
    Right(resource=EVENTS, verbs=("create",)),
)


def lease_rights(namespace: str) -> tuple[Right, ...]:
    """Return what the election of a leader needs in the process's own namespace."""
    return (Right(resource=LEASES, verbs=("get", "create", "update"), namespace=namespace),)


def token_request_rights(namespace: str, name: str) -> tuple[Right, ...]:
    """Return what --bootstrap-token tokenrequest needs for its service account."""
    return (Right(resource=TOKEN_REQUESTS, verbs=("create",), namespace=namespace, name=name),)


def operator_rights(
    namespace: str,
    *,
    drain_force: bool = False,
    token_secret: bool = False,
    token_service_account: tuple[str, str] | None = None,
) -> tuple[Right, ...]:
    """Return all that an operator in `namespace` needs with these options; the account is (namespace, name)."""
    return (
        *OPERATOR_RIGHTS,
        *lease_rights(namespace),
        *(DRAIN_FORCE_RIGHTS if drain_force else ()),
        *(TOKEN_SECRET_RIGHTS if token_secret else ()),
        *(token_request_rights(*token_service_account) if token_service_account is not None else ()),
    )


def pod_controller_rights(namespace: str) -> tuple[Right, ...]:
    """Return all that a pod controller in `namespace` needs."""
    return (*POD_CONTROLLER_RIGHTS, *lease_rights(namespace))
