"""Builds the Kubernetes objects of the operator's benchmark by arithmetic on indices: nodes, pods, their requests.

Pods run on the nodes and have their CapacityRequest, as the pod controller makes it and with the status that an
operator has written: a cluster at rest. Nothing here is random.
"""

from typing import Any

import msgspec

from bigfleet.operator.conditions import wording
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import MACHINE_ID
from bigfleet.operator.pods.mapping import map_pod, request_body

Object = dict[str, Any]

#: Needs that differ: each is a row of the roll-up.
WORKLOADS = 100
#: Sizes of pods in one row.
SIZES = 8
NAMESPACES = 50
_MOMENT = "2026-01-01T00:00:00Z"


def _uid(kind: int, index: int) -> str:
    return f"{kind:08x}-0000-4000-8000-{index:012x}"


def node(index: int) -> Object:
    """Return a Ready node of a machine."""
    name = f"node-{index:05}"
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "110"}
    return {
        "metadata": {
            "name": name,
            "uid": _uid(1, index),
            "creationTimestamp": _MOMENT,
            "labels": {
                MACHINE_ID: machine_id(index),
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": "abc"[index % 3],
                "pool": f"pool-{index % WORKLOADS}",
            },
            "annotations": {MACHINE_ID: machine_id(index)},
        },
        "spec": {"providerID": f"bench:///{machine_id(index)}"},
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": _MOMENT}
            ],
        },
    }


def machine_id(index: int) -> str:
    """Return the id of a node's machine."""
    return f"machine-{index:05}"


def pod(index: int, nodes: int) -> Object:
    """Return a pod that runs on one of so many nodes; with 0 one that the scheduler found no place for."""
    workload, size = index % WORKLOADS, index // WORKLOADS % SIZES
    spec: Object = {
        "containers": [_container(index, size)],
        "nodeSelector": {"pool": f"pool-{workload}"},
        "priority": 1_000 * (workload % 7),
        "schedulerName": "default-scheduler",
        "serviceAccountName": "default",
        "tolerations": [
            {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
        ],
        "volumes": [{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
    }
    if nodes:
        spec["nodeName"] = f"node-{index % nodes:05}"
    return {
        "metadata": {
            "name": f"service-{workload}-{index:06}",
            "namespace": f"team-{workload % NAMESPACES}",
            "uid": _uid(2, index),
            "creationTimestamp": _MOMENT,
            "labels": {"app": f"service-{workload}", "pod-template-hash": "5d8f9c7b6d"},
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": f"service-{workload}-5d8f9c7b6d",
                    "uid": _uid(3, workload),
                    "controller": True,
                }
            ],
            "managedFields": _managed_fields("kubelet", 8),
        },
        "spec": spec,
        "status": _running(index) if nodes else _waiting(),
    }


def _container(index: int, size: int) -> Object:
    """Return the container of a pod."""
    return {
        "name": "main",
        "image": "registry.example/team/service:1.2.3",
        "args": ["serve", "--listen=:8080", f"--shard={index}"],
        "env": [{"name": f"SETTING_{place}", "value": f"value-{place}"} for place in range(12)],
        "ports": [{"containerPort": 8080, "name": "http", "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": f"{100 + 50 * size}m", "memory": f"{256 + 64 * size}Mi"},
            "limits": {"memory": f"{512 + 64 * size}Mi"},
        },
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 10},
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
    }


def _running(index: int) -> Object:
    """Return the status of a pod that serves."""
    return {
        "phase": "Running",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": _MOMENT}
            for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
        ],
        "podIP": f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}",
        "startTime": _MOMENT,
        "containerStatuses": [
            {
                "name": "main",
                "image": "registry.example/team/service:1.2.3",
                "imageID": f"registry.example/team/service@sha256:{index:064x}",
                "containerID": f"containerd://{index:064x}",
                "ready": True,
                "restartCount": 0,
                "started": True,
                "state": {"running": {"startedAt": _MOMENT}},
            }
        ],
        "qosClass": "Burstable",
    }


def _waiting() -> Object:
    """Return the status of a pod that the scheduler found no place for."""
    return {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1000 nodes are available: 1000 Insufficient cpu.",
                "lastTransitionTime": _MOMENT,
            }
        ],
    }


def _managed_fields(manager: str, fields: int) -> list[Object]:
    return [
        {
            "manager": manager,
            "operation": "Apply",
            "apiVersion": "v1",
            "time": _MOMENT,
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:status": {f"f:field{place}": {} for place in range(fields)}},
        }
    ]


def request(index: int, nodes: int) -> Object:
    """Return the request of `pod(index, nodes)`, acknowledged and judged as met; 1.1 to 1.3 KB of JSON."""
    its_pod = msgspec.convert(pod(index, nodes), PodObject)
    mapping = map_pod(its_pod)
    assert mapping.spec is not None, mapping.why_none
    found: Object = dict(request_body(its_pod, mapping.spec))
    found["metadata"] |= {"uid": _uid(4, index), "generation": 1, "creationTimestamp": _MOMENT}
    found["status"] = {
        "phase": "Acknowledged",
        "observedGeneration": 1,
        "acknowledgedAt": _MOMENT,
        "conditions": [
            {
                "type": kind,
                "status": value.status,
                "reason": value.reason,
                "message": value.message,
                "observedGeneration": 1,
                "lastTransitionTime": _MOMENT,
            }
            for kind, value in (
                (wording.ACCEPTED, wording.IN_ROLLUP),
                (wording.SATISFIED, wording.MET.satisfied),
                (wording.SHORTFALL, wording.MET.shortfall),
            )
        ],
    }
    return found


def daemon_set(index: int) -> Object:
    """Return a DaemonSet on all nodes."""
    return {
        "metadata": {"name": f"agent-{index}", "namespace": "kube-system", "uid": _uid(5, index)},
        "spec": {
            "template": {
                "spec": {
                    "containers": [{"name": "agent", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}],
                    "nodeSelector": {"kubernetes.io/os": "linux"},
                }
            }
        },
    }
