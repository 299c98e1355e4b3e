"""Lists the resources of an API server that the operator and the pod controller use, and label keys.

RBAC rules (docs/spec/operator.md §12) are about these and no others.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from bigfleet.model import labels
from bigfleet.operator.kubernetes import objects
from bigfleet.operator.kubernetes.api import Resource

GROUP = "bigfleet.lucy.sh"
VERSION = "v1alpha1"

#: On Nodes, UpcomingNodes and in bootstrap data: `label(machine_id)` as a label, the raw id as an annotation.
MACHINE_ID = f"{GROUP}/machine-id"
#: On Nodes that are being drained: what a new leader needs to resume (docs/spec/operator.md §7.2).
RECLAIM_ANNOTATION = f"{GROUP}/reclaim"
#: On CapacityRequests that the pod controller made: the UID of the pod.
OWNED_BY_POD = f"{GROUP}/owned-by-pod"
INTERRUPTION_PENALTY_ANNOTATION = f"{GROUP}/interruption-penalty"
RECLAMATION_PENALTY_ANNOTATION = f"{GROUP}/reclamation-penalty"
#: Labels of nodes that machines have only if their provider says so.
HOSTNAME = "kubernetes.io/hostname"
OPERATING_SYSTEM = "kubernetes.io/os"
#: Labels that only nodes have, or that are deprecated, by the label of machines that has the same values.
LABEL_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "topology.ebs.csi.aws.com/zone": labels.ZONE,
        "topology.gke.io/zone": labels.ZONE,
        "topology.disk.csi.azure.com/zone": labels.ZONE,
        "topology.cinder.csi.openstack.org/zone": labels.ZONE,
        "topology.csi.vmware.com/k8s-zone": labels.ZONE,
        "topology.csi.vmware.com/k8s-region": labels.REGION,
        "topology.csi.vmware.com/openshift-zone": labels.ZONE,
        "topology.csi.vmware.com/openshift-region": labels.REGION,
        "topology.diskplugin.csi.alibabacloud.com/zone": labels.ZONE,
        # Its regions, of which the zones of nodes are parts.
        "csi.hetzner.cloud/location": labels.REGION,
        "failure-domain.beta.kubernetes.io/zone": labels.ZONE,
        "failure-domain.beta.kubernetes.io/region": labels.REGION,
        "beta.kubernetes.io/instance-type": labels.INSTANCE_TYPE,
        "beta.kubernetes.io/arch": labels.ARCH,
        "beta.kubernetes.io/os": OPERATING_SYSTEM,
    }
)
MANAGED_BY = "app.kubernetes.io/managed-by"
FIELD_MANAGER = "bigfleet-operator"
POD_CONTROLLER_FIELD_MANAGER = "bigfleet-pod-controller"

PODS = Resource(group="", version="v1", plural="pods", kind="Pod", namespaced=True, type=objects.PodObject)
#: Answered with a Status by API servers.
EVICTIONS = Resource(
    group="",
    version="v1",
    plural="pods",
    kind="Eviction",
    namespaced=True,
    type=objects.StatusObject,
    subresource="eviction",
)
DISRUPTION_BUDGETS = Resource(
    group="policy",
    version="v1",
    plural="poddisruptionbudgets",
    kind="PodDisruptionBudget",
    namespaced=True,
    type=objects.DisruptionBudget,
)
NODES = Resource(group="", version="v1", plural="nodes", kind="Node", namespaced=False, type=objects.NodeObject)
SECRETS = Resource(group="", version="v1", plural="secrets", kind="Secret", namespaced=True, type=objects.Secret)
EVENTS = Resource(group="", version="v1", plural="events", kind="Event", namespaced=True, type=objects.EventObject)
PERSISTENT_VOLUMES = Resource(
    group="",
    version="v1",
    plural="persistentvolumes",
    kind="PersistentVolume",
    namespaced=False,
    type=objects.PersistentVolume,
)
PERSISTENT_VOLUME_CLAIMS = Resource(
    group="",
    version="v1",
    plural="persistentvolumeclaims",
    kind="PersistentVolumeClaim",
    namespaced=True,
    type=objects.PersistentVolumeClaim,
)
TOKEN_REQUESTS = Resource(
    group="",
    version="v1",
    plural="serviceaccounts",
    kind="TokenRequest",
    namespaced=True,
    type=objects.TokenRequest,
    subresource="token",
)
DAEMON_SETS = Resource(
    group="apps", version="v1", plural="daemonsets", kind="DaemonSet", namespaced=True, type=objects.DaemonSet
)
PRIORITY_CLASSES = Resource(
    group="scheduling.k8s.io",
    version="v1",
    plural="priorityclasses",
    kind="PriorityClass",
    namespaced=False,
    type=objects.PriorityClass,
)
LEASES = Resource(
    group="coordination.k8s.io", version="v1", plural="leases", kind="Lease", namespaced=True, type=objects.LeaseObject
)
ACCESS_REVIEWS = Resource(
    group="authorization.k8s.io",
    version="v1",
    plural="selfsubjectaccessreviews",
    kind="SelfSubjectAccessReview",
    namespaced=False,
    type=objects.AccessReview,
)
CAPACITY_REQUESTS = Resource(
    group=GROUP,
    version=VERSION,
    plural="capacityrequests",
    kind="CapacityRequest",
    namespaced=True,
    type=objects.CapacityRequestObject,
)
UPCOMING_NODES = Resource(
    group=GROUP,
    version=VERSION,
    plural="upcomingnodes",
    kind="UpcomingNode",
    namespaced=False,
    type=objects.UpcomingNode,
)
AVAILABLE_CAPACITIES = Resource(
    group=GROUP,
    version=VERSION,
    plural="availablecapacities",
    kind="AvailableCapacity",
    namespaced=False,
    type=objects.AvailableCapacityObject,
)
