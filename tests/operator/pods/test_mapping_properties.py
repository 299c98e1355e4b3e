"""What holds of any pod: requests equal an independent model, nothing raises, the order of maps changes nothing."""

import copy
import json
import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.quantity import parse_quantity
from bigfleet.operator.kubernetes.objects import CapacityRequestSpec, PersistentVolume, PersistentVolumeClaim, PodObject
from bigfleet.operator.pods.arithmetic import requested_resources
from bigfleet.operator.pods.mapping import map_pod, request_body, standing_of
from tests.operator.pods.pod_cases import CaseVolumes
from tests.operator.pods.request_schema import schema_faults, spec_schema

NAMES = ("cpu", "memory", "nvidia.com/gpu", "hugepages-2Mi")
QUANTITIES = st.one_of(
    st.integers(0, 5000).map(lambda n: f"{n}m"),
    st.integers(0, 64).map(lambda n: f"{n}Gi"),
    st.integers(0, 9),
    st.sampled_from(["1.5", "0.25", "2e3", "0"]),
)
REQUESTS = st.dictionaries(st.sampled_from(NAMES), QUANTITIES, max_size=4)


def containers(names: str = "c") -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda requests: {"name": names, "resources": {"requests": requests}}, REQUESTS)


INIT_CONTAINERS = st.builds(
    lambda container, always: container | ({"restartPolicy": "Always"} if always else {}), containers(), st.booleans()
)
RESOURCE_PODS = st.fixed_dictionaries(
    {"containers": st.lists(containers(), min_size=1, max_size=4)},
    optional={
        "initContainers": st.lists(INIT_CONTAINERS, max_size=5),
        "overhead": REQUESTS,
        "resources": st.fixed_dictionaries({"requests": REQUESTS}),
    },
)


def amounts(container: dict[str, Any]) -> dict[str, int]:
    return {name: parse_quantity(str(text)) for name, text in container["resources"]["requests"].items()}


def slow_requests(spec: dict[str, Any]) -> dict[str, int]:
    """Play the pod's life moment by moment, and take the most that runs at once; then pod level, then overhead."""
    needed = {}
    for name in NAMES:
        moments = []
        sidecars: list[int] = []
        for container in spec.get("initContainers", []):
            amount = amounts(container).get(name, 0)
            if container.get("restartPolicy") == "Always":
                sidecars.append(amount)
                moments.append(sum(sidecars))
            else:
                moments.append(sum([*sidecars, amount]))
        moments.append(sum([*sidecars, *(amounts(container).get(name, 0) for container in spec["containers"])]))
        needed[name] = max(moments)
        level = spec.get("resources", {}).get("requests", {})
        if name in level and (name in ("cpu", "memory") or name.startswith("hugepages-")):
            needed[name] = parse_quantity(str(level[name]))
        needed[name] += parse_quantity(str(spec.get("overhead", {}).get(name, 0)))
    return {name: amount for name, amount in needed.items() if amount}


@given(RESOURCE_PODS)
def test_requests_are_those_of_the_moment_that_takes_most(spec: dict[str, Any]) -> None:
    requests, findings = requested_resources(decoded({"spec": spec}).spec)

    assert {name: parse_quantity(text) for name, text in requests.items()} == slow_requests(spec)
    assert findings == []


# ---- any pod ----------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["app", "tier", "zone", "kubernetes.io/hostname", "topology.kubernetes.io/zone"])
ODD_KEYS = st.one_of(KEYS, st.just(""))
VALUES = st.sampled_from(["a", "b", "", "web"])
OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Same", ""])
LABELS = st.dictionaries(KEYS, VALUES, max_size=3)
EXPRESSIONS = st.fixed_dictionaries(
    {"key": ODD_KEYS, "operator": OPERATORS}, optional={"values": st.lists(VALUES, max_size=3)}
)
SELECTORS = st.fixed_dictionaries(
    {}, optional={"matchLabels": LABELS, "matchExpressions": st.lists(EXPRESSIONS, max_size=2)}
)
NODE_TERMS = st.fixed_dictionaries(
    {},
    optional={"matchExpressions": st.lists(EXPRESSIONS, max_size=3), "matchFields": st.lists(EXPRESSIONS, max_size=1)},
)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
POD_TERMS = st.fixed_dictionaries(
    {"topologyKey": KEYS},
    optional={
        "labelSelector": SELECTORS,
        "namespaces": st.lists(st.sampled_from(["shop", "bank"]), max_size=2),
        "namespaceSelector": SELECTORS,
        "matchLabelKeys": st.lists(KEYS, max_size=2),
        "mismatchLabelKeys": st.lists(KEYS, max_size=2),
    },
)
POD_AFFINITY = st.fixed_dictionaries({}, optional={REQUIRED: st.lists(POD_TERMS, max_size=3)})
SPREADS = st.fixed_dictionaries(
    {
        "maxSkew": st.integers(-1, 2**31 - 1),
        "topologyKey": KEYS,
        "whenUnsatisfiable": st.sampled_from(["DoNotSchedule", "ScheduleAnyway"]),
    },
    optional={
        "labelSelector": SELECTORS,
        "minDomains": st.integers(1, 5),
        "matchLabelKeys": st.lists(KEYS, max_size=2),
    },
)
ODD_QUANTITIES = st.one_of(QUANTITIES, st.sampled_from(["lots", "-3", "1e999", "", "9" * 70]), st.floats())
ODD_REQUESTS = st.dictionaries(st.sampled_from([*NAMES, "x"]), ODD_QUANTITIES, max_size=3)
ODD_CONTAINERS = st.fixed_dictionaries(
    {},
    optional={
        "restartPolicy": st.sampled_from(["Always", "Never"]),
        "resources": st.fixed_dictionaries({"requests": ODD_REQUESTS}),
        "ports": st.lists(st.fixed_dictionaries({"hostPort": st.integers(0, 3)}), max_size=2),
    },
)
VOLUMES = st.lists(
    st.one_of(
        st.builds(lambda n: {"name": "v", "persistentVolumeClaim": {"claimName": n}}, st.sampled_from(["c0", "c1"])),
        st.just({"name": "scratch", "ephemeral": {}}),
        st.just({"name": "tmp", "emptyDir": {}}),
    ),
    max_size=3,
)
SPECS = st.fixed_dictionaries(
    {"containers": st.lists(ODD_CONTAINERS, max_size=3)},
    optional={
        "initContainers": st.lists(ODD_CONTAINERS, max_size=3),
        "overhead": ODD_REQUESTS,
        "resources": st.fixed_dictionaries({"requests": ODD_REQUESTS}),
        "nodeName": st.just("n1"),
        "nodeSelector": LABELS,
        "affinity": st.fixed_dictionaries(
            {},
            optional={
                "nodeAffinity": st.fixed_dictionaries(
                    {},
                    optional={REQUIRED: st.fixed_dictionaries({"nodeSelectorTerms": st.lists(NODE_TERMS, max_size=3)})},
                ),
                "podAffinity": POD_AFFINITY,
                "podAntiAffinity": POD_AFFINITY,
            },
        ),
        "topologySpreadConstraints": st.lists(SPREADS, max_size=10),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "priorityClassName": st.sampled_from(["high", ""]),
        "schedulingGates": st.lists(st.just({"name": "g"}), max_size=1),
        "resourceClaims": st.lists(st.just({"name": "gpu"}), max_size=1),
        "volumes": VOLUMES,
    },
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"name": st.just("p"), "namespace": st.just("shop"), "uid": st.just("u")},
            optional={
                "labels": LABELS,
                "annotations": st.dictionaries(
                    st.sampled_from(["bigfleet.lucy.sh/interruption-penalty", "bigfleet.lucy.sh/reclamation-penalty"]),
                    st.sampled_from(["1", "0", "-1", "x", "", "1e400"]),
                ),
            },
        ),
        "spec": SPECS,
    }
)
CLUSTER_VOLUMES = CaseVolumes(
    msgspec.convert(
        [
            {"metadata": {"name": "c0", "namespace": "shop"}, "spec": {"volumeName": "v0"}},
            {"metadata": {"name": "c1", "namespace": "shop"}, "spec": {"volumeName": "absent"}},
            {"metadata": {"name": "p-scratch", "namespace": "shop"}, "spec": {"volumeName": "v0"}},
        ],
        list[PersistentVolumeClaim],
    ),
    msgspec.convert(
        [
            {
                "metadata": {"name": "v0"},
                "spec": {
                    "nodeAffinity": {
                        "required": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                            ]
                        }
                    }
                },
            }
        ],
        list[PersistentVolume],
    ),
)


def decoded(manifest: dict[str, Any]) -> PodObject:
    """Return the pod as it is read from the API server; JSON has no NaN."""
    return msgspec.json.decode(json.dumps(_finite(manifest)), type=PodObject)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value if not isinstance(value, float) or value - value == 0 else "NaN"


@given(PODS)
def test_no_pod_breaks_the_mapping_and_every_request_obeys_the_schema(manifest: dict[str, Any]) -> None:
    pod = decoded(manifest)
    standing_of(pod)
    mapping = map_pod(pod, volumes=CLUSTER_VOLUMES)

    assert (mapping.spec is None) == bool(mapping.why_none)
    if mapping.spec is None:
        assert mapping.findings
        return
    json.dumps(request_body(pod, mapping.spec), allow_nan=False)
    assert list(schema_faults(mapping.spec, spec_schema())) == []
    spec = msgspec.convert(mapping.spec, CapacityRequestSpec)
    assert 1 <= len(spec.resources) <= 32
    assert all(parse_quantity(str(quantity)) >= 0 for quantity in spec.resources.values())
    assert 1 <= len(spec.requirements or ()) <= 64
    for requirement in spec.requirements or ():
        assert requirement.key
        assert requirement.operator in ("In", "NotIn", "Exists", "DoesNotExist")
        assert (requirement.operator in ("In", "NotIn")) == bool(requirement.values)
    assert len(spec.topology_spread or ()) <= 8
    for spread in spec.topology_spread or ():
        assert spread.topology_key
        assert 1 <= spread.max_skew < 2**31
        assert spread.when_unsatisfiable in ("DoNotSchedule", "ScheduleAnyway")
    assert spec.co_location is None or spec.co_location.topology_key
    assert spec.exclusion is None or (spec.exclusion.group and 1 <= spec.exclusion.max_per_machine < 2**31)
    for penalty in (spec.interruption_penalty, spec.reclamation_penalty):
        assert penalty is None or parse_quantity(str(penalty)) >= 0


def _shuffled(value: Any, rng: random.Random) -> Any:
    """Return the same JSON with its maps in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled(value[key], rng) for key in keys}
    return [_shuffled(inner, rng) for inner in value] if isinstance(value, list) else value


@given(PODS, st.integers(0, 2**32))
def test_equal_pods_have_equal_requests_whatever_the_order_of_their_maps(manifest: dict[str, Any], seed: int) -> None:
    other = _shuffled(copy.deepcopy(manifest), random.Random(seed))
    first, second = (map_pod(decoded(each), volumes=CLUSTER_VOLUMES) for each in (manifest, other))

    assert json.dumps(first.spec) == json.dumps(second.spec)
    assert first.findings == second.findings


@given(PODS)
def test_a_rule_between_pods_is_expressed_or_reported(manifest: dict[str, Any]) -> None:
    """One anti-affinity group may go without an Event: the one that is the exclusion. Each other term is named."""
    affinity = manifest["spec"].get("affinity", {}).get("podAntiAffinity", {})
    pod = decoded(manifest)
    mapping = map_pod(pod, volumes=CLUSTER_VOLUMES)
    if mapping.spec is None:
        return
    exclusion = mapping.spec.get("exclusion")
    messages = " ".join(finding.message for finding in mapping.findings)
    for position, term in enumerate(affinity.get(REQUIRED, [])):
        if "labelSelector" in term and f"podAntiAffinity.{REQUIRED}[{position}]" not in messages:
            assert isinstance(exclusion, dict)
            assert exclusion["maxPerMachine"] == 1
            assert term["topologyKey"] == "kubernetes.io/hostname"
