"""The scheduler's rules on labels and taints."""

from typing import Any

import pytest

from bigfleet.operator.kubernetes.scheduling_rules import admits, repelling_taint
from tests.operator.demand.objects import node, pod


def _affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": required}}


def _term(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


_TAINTS = [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}, {"key": "soft", "effect": "PreferNoSchedule"}]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, False),
        ({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]}, False),
        ({"tolerations": [{"key": "other", "operator": "Exists"}]}, False),
    ],
)
def test_a_taint_must_be_tolerated(spec: dict[str, Any], expected: bool) -> None:
    assert (repelling_taint(node(taints=_TAINTS).spec.taints, pod(**spec).spec.tolerations) is None) is expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        (_affinity(_term("zone", "In", "a", "b")), True),
        (_affinity(_term("zone", "NotIn", "a")), False),
        (_affinity(_term("zone", "NotIn", "a"), _term("rack", "DoesNotExist")), True),
        (_affinity(_term("zone", "Exists"), _term("rack", "Exists")), True),
        (_affinity(_term("cores", "Gt", "7")), True),
        (_affinity(_term("cores", "Gt", "8")), False),
        (_affinity(_term("cores", "Lt", "9")), True),
        (_affinity(_term("zone", "Gt", "1")), False),
        (_affinity(), False),
        (_affinity({}), False),
        (_affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}), True),
        (_affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}), False),
        (_affinity({"matchFields": [{"key": "spec.other", "operator": "NotIn", "values": ["m"]}]}), False),
    ],
)
def test_labels_must_suit_the_pod(spec: dict[str, Any], expected: bool) -> None:
    assert admits(node("n", labels={"zone": "a", "cores": "8"}), pod(**spec).spec) is expected
