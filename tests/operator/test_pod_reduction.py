"""What is stored of a pod: all that the operator reads, and one object for equal parts."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.demand.daemon_pods import DaemonPods
from bigfleet.operator.demand.waiting import unschedulable_message, unseen_scheduler_message
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.pod_requests import pod_requests
from bigfleet.operator.kubernetes.scheduling_rules import host_ports
from bigfleet.operator.nodes.disruption import comes_back, why_not_disrupted
from bigfleet.operator.nodes.pod_index import has_required_anti_affinity, moves_in_a_drain
from bigfleet.operator.nodes.topology_rules import affinity_terms, anti_affinity_terms, forbidding_spreads
from bigfleet.operator.pod_reduction import PodReduction

_TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "web"}}}
_REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": [_TERM]}
_PORT = {"hostPort": 80, "hostIP": "::1", "protocol": "UDP"}
_CONTAINER: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"name": st.sampled_from("ab"), "resources": st.just({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}})},
    optional={
        "restartPolicy": st.just("Always"),
        "ports": st.just([_PORT]),
    },
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"name": st.sampled_from("pq"), "namespace": st.just("ns"), "uid": st.just("u")},
            optional={
                "resourceVersion": st.just("7"),
                "deletionTimestamp": st.just("2026-01-01T00:00:00Z"),
                "labels": st.just({"app": "web"}),
                "annotations": st.sampled_from(
                    [
                        {"note": "x"},
                        {"kubernetes.io/config.mirror": "h", "note": "x"},
                        {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
                        {"karpenter.sh/do-not-disrupt": "true", "note": "x"},
                    ]
                ),
                "ownerReferences": st.sampled_from(
                    [
                        [{"kind": kind, "name": "o", "uid": "o-1", "controller": is_controller}]
                        for kind in ("DaemonSet", "ReplicaSet")
                        for is_controller in (True, False)
                    ]
                ),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(_CONTAINER, min_size=1, max_size=2)},
            optional={
                "initContainers": st.lists(_CONTAINER, max_size=2),
                "nodeName": st.just("n"),
                "nodeSelector": st.just({"zone": "a"}),
                "affinity": st.sampled_from([{"podAffinity": _REQUIRED}, {"podAntiAffinity": _REQUIRED}]),
                "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
                "topologySpreadConstraints": st.just([{**_TERM, "whenUnsatisfiable": "DoNotSchedule"}]),
                "resources": st.just({"requests": {"cpu": "3"}}),
                "overhead": st.just({"cpu": "100m"}),
                "resourceClaims": st.just([{"name": "gpu"}]),
                "terminationGracePeriodSeconds": st.sampled_from([0, 30]),
                "schedulerName": st.just("other"),
                "volumes": st.just([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]),
                "priorityClassName": st.just("high"),
            },
        ),
        "status": st.fixed_dictionaries(
            {"phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed"])},
            optional={
                "conditions": st.sampled_from(
                    [
                        [
                            {"type": "Ready", "status": "False"},
                            {"type": "PodScheduled", "status": status, "reason": "Unschedulable", "message": "no"},
                        ]
                        for status in ("True", "False")
                    ]
                )
            },
        ),
    }
)


def largest_daemon(pod: PodObject) -> dict[str, int]:
    """Return what the DaemonSet of the fixtures is known to request after this pod."""
    pods = DaemonPods(lambda: None)
    pods.put(pod, None)
    return dict(pods.largest("o-1"))


def read(pod: PodObject) -> tuple[Any, ...]:
    """Return what the parts of the operator read of a pod."""
    metadata, spec = pod.metadata, pod.spec
    return (
        (metadata.key, metadata.uid, metadata.resource_version, metadata.labels),
        (pod.is_finished, pod.is_terminating, pod.is_mirror, pod.is_of_daemon_set, moves_in_a_drain(pod)),
        (spec.node_name, spec.node_selector, spec.affinity, spec.tolerations, spec.topology_spread_constraints),
        (pod_requests(spec), spec.resource_claims, spec.termination_grace_period_seconds),
        host_ports(spec),
        (has_required_anti_affinity(pod), affinity_terms(pod), anti_affinity_terms(pod), forbidding_spreads(pod)),
        (unschedulable_message(pod), unseen_scheduler_message(pod, ()), why_not_disrupted(pod), comes_back(pod)),
        largest_daemon(pod),
    )


@given(st.lists(PODS, min_size=1, max_size=4))
def test_nothing_that_is_read_is_lost(manifests: list[dict[str, Any]]) -> None:
    reduce = PodReduction()
    for manifest in manifests:
        pod = msgspec.convert(manifest, PodObject)
        assert read(reduce(pod)) == read(msgspec.convert(manifest, PodObject))


def test_equal_parts_of_replicas_are_one_object() -> None:
    reduce = PodReduction()

    def replica(name: str) -> PodObject:
        metadata = {"name": name, "namespace": "ns", "labels": {"app": "web"}, "annotations": {"note": "x"}}
        spec = {"containers": [{"resources": {"requests": {"cpu": "1"}}}], "nodeName": f"node-of-{name}"}
        return reduce(msgspec.convert({"metadata": metadata, "spec": spec}, PodObject))

    one, other = replica("a"), replica("b")

    assert one.spec.containers is other.spec.containers
    assert one.metadata.labels is other.metadata.labels
    assert one.metadata.annotations is None
    assert (one.spec.node_name, other.spec.node_name) == ("node-of-a", "node-of-b")
