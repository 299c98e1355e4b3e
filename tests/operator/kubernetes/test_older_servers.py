"""What API servers of Kubernetes 1.31 to 1.33 answer: they write null where a moment, a list or a map is absent.

Servers from 1.34 on leave such a creation time out, and the control plane of the other tests is newer than that.
"""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.operator.demand.overheads import overhead_of
from bigfleet.operator.kubernetes.api import EventType
from bigfleet.operator.kubernetes.decoding import ObjectDecoder, WatchDecoder
from bigfleet.operator.kubernetes.objects import (
    AccessReview,
    DaemonSet,
    DisruptionBudget,
    KubernetesObject,
    NodeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    PodObject,
    TokenRequest,
)
from bigfleet.operator.kubernetes.pod_requests import requested_by

DAEMON_SETS = b"""
{"kind":"DaemonSetList","apiVersion":"apps/v1","metadata":{"resourceVersion":"3844"},"items":[
 {"metadata":{"name":"kube-proxy","namespace":"kube-system","uid":"0b8f1c3e-6d0c-4f57-9a51-0d1c4f9f6f11",
   "resourceVersion":"441","generation":1,"creationTimestamp":"2025-03-04T09:11:27Z",
   "labels":{"k8s-app":"kube-proxy"},"annotations":{"deprecated.daemonset.template.generation":"1"}},
  "spec":{"selector":{"matchLabels":{"k8s-app":"kube-proxy"}},
   "template":{"metadata":{"creationTimestamp":null,"labels":{"k8s-app":"kube-proxy"}},
    "spec":{"volumes":[{"name":"kube-proxy","configMap":{"name":"kube-proxy","defaultMode":420}},
      {"name":"lib-modules","hostPath":{"path":"/lib/modules","type":""}}],
     "containers":[{"name":"kube-proxy","image":"registry.k8s.io/kube-proxy:v1.31.4",
      "command":["/usr/local/bin/kube-proxy","--config=/var/lib/kube-proxy/config.conf"],
      "resources":{"requests":{"cpu":"100m"}},"securityContext":{"privileged":true}}],
     "restartPolicy":"Always","terminationGracePeriodSeconds":30,"dnsPolicy":"ClusterFirst",
     "nodeSelector":{"kubernetes.io/os":"linux"},"serviceAccountName":"kube-proxy","hostNetwork":true,
     "securityContext":{},"schedulerName":"default-scheduler","tolerations":[{"operator":"Exists"}],
     "priorityClassName":"system-node-critical"}},
   "updateStrategy":{"type":"RollingUpdate","rollingUpdate":{"maxUnavailable":1,"maxSurge":0}},
   "revisionHistoryLimit":10},
  "status":{"currentNumberScheduled":2,"numberMisscheduled":0,"desiredNumberScheduled":2,"numberReady":2}}]}
"""

POD = b"""
{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1",
 "metadata":{"name":"web-5d9c","namespace":"shop","uid":"9f0f3d55-2f0a-4a0e-8c39-1a2b3c4d5e6f",
  "resourceVersion":"3840","creationTimestamp":"2025-03-04T09:20:00Z","labels":null,"annotations":null,
  "ownerReferences":null},
 "spec":{"volumes":null,"initContainers":null,"containers":[{"name":"web","image":"web:1","ports":null,
   "resources":{"requests":{"cpu":"250m","memory":"64Mi"},"limits":null}}],
  "nodeSelector":null,"tolerations":null,"topologySpreadConstraints":null,"schedulingGates":null,"overhead":null,
  "affinity":{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[
   {"labelSelector":{"matchLabels":null,"matchExpressions":null},"namespaces":null,"topologyKey":"zone"}]}}},
 "status":{"phase":"Pending","startTime":null,"conditions":[{"type":"PodScheduled","status":"False",
  "lastProbeTime":null,"lastTransitionTime":null,"reason":"Unschedulable","message":"0/3 nodes are available"}],
  "qosClass":"Burstable"}}}
"""

BUDGETS = b"""
{"kind":"PodDisruptionBudgetList","apiVersion":"policy/v1","metadata":{"resourceVersion":"3850"},"items":null}
"""

TOKEN = b"""
{"kind":"TokenRequest","apiVersion":"authentication.k8s.io/v1",
 "metadata":{"name":"joiner","namespace":"bigfleet","creationTimestamp":null},
 "spec":{"audiences":["https://kubernetes.default.svc"],"expirationSeconds":3600,"boundObjectRef":null},
 "status":{"token":"eyJhbGciOi","expirationTimestamp":"2025-03-04T10:20:00Z"}}
"""

REVIEW = b"""
{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","metadata":{"creationTimestamp":null},
 "spec":{"resourceAttributes":{"verb":"list","resource":"pods"}},"status":{"allowed":true,"reason":""}}
"""

BOOKMARKS: list[tuple[type[KubernetesObject], bytes]] = [
    (
        PodObject,
        b"""{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1",
        "metadata":{"resourceVersion":"3845","creationTimestamp":null},"spec":{"containers":null},"status":{}}}""",
    ),
    (
        NodeObject,
        b"""{"type":"BOOKMARK","object":{"kind":"Node","apiVersion":"v1",
        "metadata":{"resourceVersion":"3845","creationTimestamp":null},"spec":{},
        "status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":0}},"nodeInfo":{"machineID":"","systemUUID":""}}}}""",
    ),
    (
        DaemonSet,
        b"""{"type":"BOOKMARK","object":{"kind":"DaemonSet","apiVersion":"apps/v1",
        "metadata":{"resourceVersion":"3845","creationTimestamp":null,
        "annotations":{"k8s.io/initial-events-end":"true"}},
        "spec":{"selector":null,"template":{"metadata":{"creationTimestamp":null},"spec":{"containers":null}},
        "updateStrategy":{}},"status":{"currentNumberScheduled":0,"numberMisscheduled":0}}}""",
    ),
    (
        PersistentVolumeClaim,
        b"""{"type":"BOOKMARK","object":{"kind":"PersistentVolumeClaim","apiVersion":"v1",
        "metadata":{"resourceVersion":"3845","creationTimestamp":null},"spec":{"resources":{}},"status":{}}}""",
    ),
    (
        PersistentVolume,
        b"""{"type":"BOOKMARK","object":{"kind":"PersistentVolume","apiVersion":"v1",
        "metadata":{"resourceVersion":"3845","creationTimestamp":null},"spec":{},"status":{}}}""",
    ),
]


@pytest.mark.parametrize(("of_type", "line"), BOOKMARKS, ids=[of_type.__name__ for of_type, _ in BOOKMARKS])
def test_a_bookmark_of_each_kind_is_a_version_and_nothing_is_logged(
    of_type: type[KubernetesObject], line: bytes
) -> None:
    """A bookmark that cannot be read ends its watch, and the whole kind is listed again each minute."""
    with capture_logs() as logs:
        event, is_whole = WatchDecoder.of(of_type).event("watch", line)

    assert (event.type, event.object, event.resource_version, is_whole) == (EventType.BOOKMARK, None, "3845", True)
    assert logs == []


@pytest.mark.parametrize("rest", [{"labels": 3}, {"creationTimestamp": 7}, {"ownerReferences": "none"}])
def test_nothing_of_a_bookmark_but_its_version_is_read(rest: dict[str, Any]) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "90", **rest}}}

    event, _ = WatchDecoder.of(PodObject).event("watch pods", json.dumps(bookmark).encode())

    assert (event.type, event.resource_version) == (EventType.BOOKMARK, "90")


def test_a_daemon_set_whose_template_has_no_creation_time_is_read_with_what_it_requests() -> None:
    """Otherwise it counts as one that requests nothing of any node, and machines come that are too small."""
    with capture_logs() as logs:
        page, faults = ObjectDecoder.of(DaemonSet).page(DAEMON_SETS)

    overhead = overhead_of(page.items[0])
    assert (faults, logs) == (0, [])
    assert overhead is not None
    assert (dict(overhead.resources), len(overhead.requirements)) == ({"cpu": 100, "pods": 1000}, 1)


def test_a_pod_with_null_for_each_absent_part_is_read_whole() -> None:
    with capture_logs() as logs:
        event, is_whole = WatchDecoder.of(PodObject).event("watch pods", POD)

    assert (is_whole, logs) == (True, [])
    assert event.object is not None
    assert dict(requested_by(event.object.spec)) == {"cpu": 250, "memory": 64 * 2**20 * 1000}


def test_null_for_no_items_is_an_empty_list() -> None:
    page, faults = ObjectDecoder.of(DisruptionBudget).page(BUDGETS)

    assert (page.items, page.resource_version, faults) == ([], "3850", 0)


def test_answers_that_are_not_stored_have_no_creation_time() -> None:
    assert ObjectDecoder.of(TokenRequest).object(TOKEN).status.token == "eyJhbGciOi"
    assert ObjectDecoder.of(AccessReview).object(REVIEW).status.allowed
