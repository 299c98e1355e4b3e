"""Defines the parts of Kubernetes objects that the operator and the pod controller read, as msgspec structs.

Field names are Kubernetes' own, in camel case on the wire. Fields that are not read are absent here: decoding skips
them. An object that is missing a part decodes to the default of that part. What is written is plain JSON and does not
come from these structs. Sources: the Kubernetes API reference v1.37; docs/spec/operator.md §2 for our own kinds.
"""

from typing import Annotated, Generic, TypeVar

import msgspec

T = TypeVar("T")

#: What API servers store; a longer number would be decoded, and could not be encoded again.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Quantity = str | Int | float
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
#: A condition of a pod that leaves its node for a reason outside of it; what made the pod makes another one at once.
_DISRUPTION_TARGET = "DisruptionTarget"


class _Struct(msgspec.Struct, rename="camel", omit_defaults=True, gc=False):
    """Base of all structs: camel case on the wire. None is changed after decoding: caches share them.

    Not tracked by the garbage collector, because no struct refers to itself: a cluster may have 50,000 of them.
    """


class OwnerReference(_Struct):
    """`metadata.ownerReferences[]`."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class ObjectMeta(_Struct):
    """`metadata`."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    #: None in bookmarks, and on objects that no server stores; servers before Kubernetes 1.34 write it as null.
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name): unique among the objects of one kind at one time."""
        return (self.namespace, self.name)


class KubernetesObject(_Struct):
    """What every object has."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


class ListMeta(_Struct):
    """`metadata` of a list."""

    resource_version: str = ""
    continue_token: str = msgspec.field(name="continue", default="")  # A keyword of Python.


class ObjectList(_Struct, Generic[T]):
    """One page of a list."""

    metadata: ListMeta = msgspec.field(default_factory=ListMeta)
    # Some servers write null for no items.
    items: list[T] | None = None


class StatusCause(_Struct):
    """`details.causes[]` of a Status."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(_Struct):
    """`details` of a Status."""

    causes: list[StatusCause] | None = None
    retry_after_seconds: Int | None = None


class StatusObject(_Struct):
    """The answer of a failed request, of an eviction and of a deletion."""

    kind: str = ""
    status: str = ""
    message: str = ""
    reason: str = ""
    code: Int = 0
    details: StatusDetails | None = None


class Condition(_Struct):
    """A standard condition; for pods and nodes as well, whose conditions lack some of the fields."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: Int | None = None
    last_transition_time: str | None = None


class LabelSelectorRequirement(_Struct):
    """`matchExpressions[]` of a label selector, and of a node selector term."""

    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class LabelSelectorObject(_Struct):
    """A label selector."""

    match_labels: dict[str, str] | None = None
    match_expressions: list[LabelSelectorRequirement] | None = None


# ---- pods -------------------------------------------------------------------------------------------------------


class ResourceClaim(_Struct):
    """`resourceClaims[]` of a pod, and `resources.claims[]` of a container."""

    name: str = ""


class ResourceRequirements(_Struct):
    """`resources` of a container."""

    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None
    # Kubernetes' dynamic resource allocation: named here so that a pod that uses it is recognised.
    claims: list[ResourceClaim] | None = None


class ContainerPort(_Struct):
    """`ports[]` of a container: two pods that want one port of a host cannot share a node."""

    host_port: Int = 0
    host_ip: str = msgspec.field(name="hostIP", default="")
    protocol: str = ""


class Container(_Struct):
    """A container or an init container."""

    name: str = ""
    resources: ResourceRequirements = msgspec.field(default_factory=ResourceRequirements)
    ports: list[ContainerPort] | None = None
    #: `Always` makes an init container a sidecar.
    restart_policy: str | None = None


class NodeSelectorTerm(_Struct):
    """One alternative of a node selector; its parts must all match."""

    match_expressions: list[LabelSelectorRequirement] | None = None
    match_fields: list[LabelSelectorRequirement] | None = None


class NodeSelector(_Struct):
    """Terms of which one must match."""

    node_selector_terms: list[NodeSelectorTerm] | None = None


class NodeAffinity(_Struct):
    """`affinity.nodeAffinity`; preferences are not read."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class PodAffinityTerm(_Struct):
    """A required term of pod affinity or anti-affinity."""

    label_selector: LabelSelectorObject | None = None
    topology_key: str = ""
    namespaces: list[str] | None = None
    namespace_selector: LabelSelectorObject | None = None
    match_label_keys: list[str] | None = None
    mismatch_label_keys: list[str] | None = None


class PodAffinity(_Struct):
    """`affinity.podAffinity` and `affinity.podAntiAffinity`; preferences are not read."""

    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | None = None


class Affinity(_Struct):
    """`spec.affinity`."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpreadConstraint(_Struct):
    """`spec.topologySpreadConstraints[]`."""

    max_skew: Int = 1
    topology_key: str = ""
    when_unsatisfiable: str = ""
    label_selector: LabelSelectorObject | None = None
    min_domains: Int | None = None
    match_label_keys: list[str] | None = None


class Toleration(_Struct):
    """`spec.tolerations[]`."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PersistentVolumeClaimSource(_Struct):
    """`persistentVolumeClaim` of a volume."""

    claim_name: str = ""


class EphemeralVolumeSource(_Struct):
    """`ephemeral` of a volume: a claim named `<pod>-<volume>` is made for it."""


class Volume(_Struct):
    """`spec.volumes[]`; only claims are read."""

    name: str = ""
    persistent_volume_claim: PersistentVolumeClaimSource | None = None
    ephemeral: EphemeralVolumeSource | None = None


class PodSchedulingGate(_Struct):
    """`spec.schedulingGates[]`."""

    name: str = ""


class PodSpec(_Struct):
    """`spec` of a pod."""

    node_name: str = ""
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[Toleration] | None = None
    topology_spread_constraints: list[TopologySpreadConstraint] | None = None
    containers: list[Container] = msgspec.field(default_factory=list)
    init_containers: list[Container] | None = None
    #: Requests of the pod as a whole (pod-level resources).
    resources: ResourceRequirements | None = None
    overhead: dict[str, Quantity] | None = None
    priority: Int | None = None
    priority_class_name: str = ""
    scheduler_name: str = ""
    scheduling_gates: list[PodSchedulingGate] | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[ResourceClaim] | None = None
    termination_grace_period_seconds: Int | None = None


class PodStatus(_Struct):
    """`status` of a pod."""

    phase: str = ""
    conditions: list[Condition] | None = None
    start_time: str | None = None


class PodObject(KubernetesObject):
    """A pod."""

    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def is_finished(self) -> bool:
        """Return whether the pod has run to its end and requests nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def is_terminating(self) -> bool:
        """Return whether the pod is being deleted."""
        return self.metadata.deletion_timestamp is not None

    @property
    def is_displaced(self) -> bool:
        """Return whether the pod is deleted because it must leave its node: evicted, preempted or tainted away."""
        wanted = (_DISRUPTION_TARGET, "True")
        return self.is_terminating and any((c.type, c.status) == wanted for c in self.status.conditions or ())

    @property
    def is_mirror(self) -> bool:
        """Return whether the pod stands for one that a node runs from a file of its own."""
        return MIRROR_ANNOTATION in (self.metadata.annotations or {})

    @property
    def is_of_daemon_set(self) -> bool:
        """Return whether a DaemonSet made the pod for its node."""
        return any(each.controller and each.kind == "DaemonSet" for each in self.metadata.owner_references or ())


# ---- other kinds of Kubernetes ----------------------------------------------------------------------------------


class NodeTaint(_Struct):
    """`spec.taints[]` of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(_Struct):
    """`spec` of a node."""

    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool = False
    taints: list[NodeTaint] | None = None


class NodeObjectStatus(_Struct):
    """`status` of a node."""

    allocatable: dict[str, Quantity] | None = None
    capacity: dict[str, Quantity] | None = None
    conditions: list[Condition] | None = None


class NodeObject(KubernetesObject):
    """A node."""

    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeObjectStatus = msgspec.field(default_factory=NodeObjectStatus)

    @property
    def is_ready(self) -> bool:
        """Return whether its condition Ready is True."""
        return any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())


class PodTemplate(_Struct):
    """`spec.template` of a workload; its metadata is not read."""

    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class DaemonSetSpec(_Struct):
    """`spec` of a DaemonSet."""

    template: PodTemplate = msgspec.field(default_factory=PodTemplate)


class DaemonSet(KubernetesObject):
    """A DaemonSet."""

    spec: DaemonSetSpec = msgspec.field(default_factory=DaemonSetSpec)


class DisruptionBudgetSpec(_Struct):
    """`spec` of a PodDisruptionBudget."""

    selector: LabelSelectorObject | None = None


class DisruptionBudgetStatus(_Struct):
    """`status` of a PodDisruptionBudget, as its controller last wrote it."""

    desired_healthy: Int = 0
    expected_pods: Int = 0
    disruptions_allowed: Int = 0


class DisruptionBudget(KubernetesObject):
    """A PodDisruptionBudget."""

    spec: DisruptionBudgetSpec = msgspec.field(default_factory=DisruptionBudgetSpec)
    status: DisruptionBudgetStatus = msgspec.field(default_factory=DisruptionBudgetStatus)


class PriorityClass(KubernetesObject):
    """A PriorityClass."""

    value: Int = 0
    global_default: bool = False


class PersistentVolumeClaimSpec(_Struct):
    """`spec` of a claim."""

    volume_name: str = ""
    storage_class_name: str | None = None


class PersistentVolumeClaim(KubernetesObject):
    """A PersistentVolumeClaim."""

    spec: PersistentVolumeClaimSpec = msgspec.field(default_factory=PersistentVolumeClaimSpec)


class VolumeNodeAffinity(_Struct):
    """`spec.nodeAffinity` of a volume."""

    required: NodeSelector | None = None


class PersistentVolumeSpec(_Struct):
    """`spec` of a volume."""

    node_affinity: VolumeNodeAffinity | None = None


class PersistentVolume(KubernetesObject):
    """A PersistentVolume."""

    spec: PersistentVolumeSpec = msgspec.field(default_factory=PersistentVolumeSpec)


class LeaseSpec(_Struct):
    """`spec` of a Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: Int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: Int | None = None


class LeaseObject(KubernetesObject):
    """A Lease of coordination.k8s.io."""

    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)


class Secret(KubernetesObject):
    """A Secret; its data is never read."""


class EventObject(KubernetesObject):
    """An Event; what was written is never read again."""


class TokenRequestStatus(_Struct):
    """`status` of a TokenRequest."""

    token: str = ""
    expiration_timestamp: str = ""


class TokenRequest(KubernetesObject):
    """A token of a service account."""

    status: TokenRequestStatus = msgspec.field(default_factory=TokenRequestStatus)


class AccessReviewStatus(_Struct):
    """`status` of a SelfSubjectAccessReview. An answer without `allowed` is no review and refuses nothing."""

    allowed: bool


class AccessReview(_Struct):
    """The answer to a SelfSubjectAccessReview, which has no name."""

    status: AccessReviewStatus


# ---- our own kinds (docs/spec/operator.md §2) -------------------------------------------------------------------


class CapacitySpread(_Struct):
    """`spec.topologySpread[]` of a CapacityRequest."""

    max_skew: Int = 1
    topology_key: str = ""
    when_unsatisfiable: str = ""


class CapacityCoLocation(_Struct):
    """`spec.coLocation` of a CapacityRequest."""

    topology_key: str = ""
    label_selector: LabelSelectorObject | None = None


class CapacityExclusion(_Struct):
    """`spec.exclusion` of a CapacityRequest: the group of requests of which one machine hosts only so many."""

    #: Requests of one namespace with equal groups exclude each other.
    group: str = ""
    max_per_machine: Int = 1


class CapacityRequestSpec(_Struct):
    """`spec` of a CapacityRequest."""

    priority: Int = 0
    resources: dict[str, Quantity] = msgspec.field(default_factory=dict)
    requirements: list[LabelSelectorRequirement] | None = None
    topology_spread: list[CapacitySpread] | None = None
    co_location: CapacityCoLocation | None = None
    exclusion: CapacityExclusion | None = None
    interruption_penalty: Quantity | None = None
    reclamation_penalty: Quantity | None = None


class CapacityRequestStatus(_Struct):
    """`status` of a CapacityRequest."""

    phase: str = ""
    acknowledged_at: str | None = None
    observed_generation: Int | None = None
    conditions: list[Condition] | None = None


class CapacityRequestObject(KubernetesObject):
    """A CapacityRequest as stored in the cluster; `bigfleet.operator.requests.CapacityRequest` is its meaning."""

    spec: CapacityRequestSpec = msgspec.field(default_factory=CapacityRequestSpec)
    status: CapacityRequestStatus = msgspec.field(default_factory=CapacityRequestStatus)


class ObjectReference(_Struct):
    """A reference to another object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class UpcomingNodeSpec(_Struct):
    """`spec` of an UpcomingNode."""

    machine_id: str = msgspec.field(name="machineID", default="")
    resources: dict[str, Quantity] = msgspec.field(default_factory=dict)
    labels: dict[str, str] | None = None
    taints: list[NodeTaint] | None = None


class UpcomingNodeStatus(_Struct):
    """`status` of an UpcomingNode."""

    phase: str = ""
    node_ref: ObjectReference | None = None
    provider_id: str = msgspec.field(name="providerID", default="")
    provisioning_start_time: str | None = None
    estimated_ready_time: str | None = None
    last_error: str | None = None
    conditions: list[Condition] | None = None


class UpcomingNode(KubernetesObject):
    """An UpcomingNode."""

    spec: UpcomingNodeSpec = msgspec.field(default_factory=UpcomingNodeSpec)
    status: UpcomingNodeStatus = msgspec.field(default_factory=UpcomingNodeStatus)


class AvailableCapacitySpec(_Struct):
    """`spec` of an AvailableCapacity."""

    availability: str = ""
    available_count: Int = 0
    cost: Quantity = "0"
    resources: dict[str, Quantity] = msgspec.field(default_factory=dict)
    requirements: list[LabelSelectorRequirement] | None = None


class AvailableCapacityStatus(_Struct):
    """`status` of an AvailableCapacity."""

    last_updated: str | None = None
    expires_at: str | None = None


class AvailableCapacityObject(KubernetesObject):
    """An AvailableCapacity as stored in the cluster; `bigfleet.model.frames.AvailableCapacity` is its source."""

    spec: AvailableCapacitySpec = msgspec.field(default_factory=AvailableCapacitySpec)
    status: AvailableCapacityStatus = msgspec.field(default_factory=AvailableCapacityStatus)
