"""The preflight of a voluntary reclaim: what it accepts can be placed; refusals name the pod and the reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.nodes import placement, preflight
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.placement import NodeRoom
from bigfleet.operator.nodes.pod_index import PodsByNode
from bigfleet.operator.nodes.preflight import PROMISE_SECONDS, Preflight
from bigfleet.operator.nodes.topology_rules import PodRules
from bigfleet.operator.pod_reduction import PodReduction
from bigfleet.operator.work_queue import WorkQueue
from tests.operator.nodes.node_world import node_body, pod_body
from tests.operator.nodes.scheduler_rules import cluster_fault

HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


class StoppedClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def monotonic_seconds(self) -> float:
        return self.now_seconds

    def unix_nanos(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a preflight waits for nothing")


class Bench:
    """A preflight and the caches that it reads."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> None:
        self.clock = StoppedClock()
        self.matcher = NodeMatcher(
            api=None,  # type: ignore[arg-type]
            queue=WorkQueue(clock=self.clock, rng=None),  # type: ignore[arg-type]
            clock=self.clock,
        )
        self.pods = PodsByNode()
        self._reduce = PodReduction()
        self.preflight = Preflight(nodes=self.matcher, pods=self.pods, clock=self.clock)
        for body in nodes:
            self.matcher.put(msgspec.convert(body, NodeObject), None)
        for body in pods:
            self.put(body)

    def put(self, body: Mapping[str, Any]) -> PodObject:
        """Put a pod as it is stored: replicas share labels and parts of their specs."""
        pod = msgspec.convert(body, PodObject)
        pod.metadata.uid = f"uid-{pod.metadata.name}"
        pod = self._reduce(pod)
        self.pods.put(pod, None)
        return pod

    def node(self, name: str, *, uid: str = "", **fields: Any) -> None:
        """Put a Node, in place of the one with its name."""
        stored = msgspec.convert(node_body(name, **fields), NodeObject)
        stored.metadata.uid = uid
        self.matcher.put(stored, self.matcher.node(name))

    def refusal(self, node: str, *leaving: str) -> str | None:
        found = self.matcher.node(node)
        assert found is not None
        return self.preflight.refusal(f"m-{node}", found, leaving={*leaving, node})


def term(app: str, key: str) -> dict[str, Any]:
    return {"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"requiredDuringSchedulingIgnoredDuringExecution": list(terms)}


def spread(app: str, key: str, skew: int = 1) -> dict[str, Any]:
    return {**term(app, key), "maxSkew": skew, "whenUnsatisfiable": "DoNotSchedule"}


# ---- what is judged ----------------------------------------------------------------------------------------------


def test_pods_with_room_elsewhere_are_accepted_and_promised_it() -> None:
    bench = Bench([node_body("a"), node_body("b")], [pod_body("p", "a", cpu="4"), pod_body("q", "b", cpu="4")])

    assert bench.refusal("a") is None
    assert bench.preflight.promised("m-a") == {("d", "p"): "b"}


def test_a_refusal_names_the_pod_and_counts_the_reasons() -> None:
    tainted = node_body("t", taints=[{"key": "gpu", "effect": "NoSchedule"}])
    bench = Bench([node_body("a"), node_body("b"), tainted], [pod_body("p", "a", cpu="4"), pod_body("q", "b", cpu="5")])

    assert bench.refusal("a") == (
        "pod d/p fits on no other node: it requests cpu 4; of 2 other nodes: "
        "1 taint gpu not tolerated; 1 too little cpu"
    )


def test_a_last_node_has_nowhere_to_send_its_pods() -> None:
    bench = Bench([node_body("a")], [pod_body("p", "a")])

    assert "no other node is schedulable and Ready" in (bench.refusal("a") or "")


def test_an_empty_node_always_fits() -> None:
    assert Bench([node_body("a")], []).refusal("a") is None


@pytest.mark.parametrize(
    "pod",
    [
        pod_body("p", "a", owner="DaemonSet"),
        pod_body("p", "a", annotations={"kubernetes.io/config.mirror": "x"}),
        pod_body("p", "a", phase="Succeeded"),
        pod_body("p", "a", phase="Failed"),
        {**pod_body("p", "a"), "metadata": {**pod_body("p")["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
    ids=["daemon", "mirror", "succeeded", "failed", "terminating"],
)
def test_pods_that_do_not_move_need_no_room(pod: dict[str, Any]) -> None:
    assert Bench([node_body("a")], [pod]).refusal("a") is None


def bare_pod(name: str, node: str, **annotations: str) -> dict[str, Any]:
    """Return a pod that no controller made."""
    body = pod_body(name, node, annotations=annotations)
    return {**body, "metadata": {**body["metadata"], "ownerReferences": []}}


SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (bare_pod("p", "a"), "it has no controller that would replace it"),
        (pod_body("p", "a", annotations={SAFE_TO_EVICT: "false"}), f"it has the annotation {SAFE_TO_EVICT}: false"),
        (
            pod_body("p", "a", annotations={"karpenter.sh/do-not-disrupt": "true"}),
            "it has the annotation karpenter.sh/do-not-disrupt: true",
        ),
    ],
    ids=["bare", "not safe to evict", "do not disrupt"],
)
def test_a_pod_that_must_not_be_moved_is_refused_although_there_is_room(pod: dict[str, Any], reason: str) -> None:
    refusal = Bench([node_body("a"), node_body("b")], [pod]).refusal("a") or ""

    assert refusal.startswith(f"pod d/p must not be evicted by a voluntary drain: {reason}")


@pytest.mark.parametrize(
    "pod",
    [
        bare_pod("p", "a", **{SAFE_TO_EVICT: "true"}),
        pod_body("p", "a", annotations={"karpenter.sh/do-not-disrupt": "false"}),
        pod_body("p", "a", annotations={SAFE_TO_EVICT: "true"}),
        {**bare_pod("p", "a"), "status": {"phase": "Succeeded"}},
        pod_body("p", "a", owner="DaemonSet", annotations={SAFE_TO_EVICT: "false"}),
    ],
    ids=["bare and safe", "not marked", "safe", "finished", "daemon"],
)
def test_a_pod_that_may_be_moved_or_does_not_move_is_accepted(pod: dict[str, Any]) -> None:
    assert Bench([node_body("a"), node_body("b")], [pod]).refusal("a") is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (node_body("b", unschedulable=True), "schedulable"),
        (node_body("b", ready=False), "schedulable"),
        (node_body("b", annotations={"bigfleet.lucy.sh/reclaim": "{}"}), "schedulable"),
        (node_body("b", allocatable={"cpu": "8", "pods": "0"}), "too little pods"),
        (node_body("b", allocatable={"cpu": "500m", "pods": "9"}), "too little cpu"),
        (node_body("b", allocatable={"cpu": "x", "pods": "9"}), "too little cpu"),
        (node_body("b", taints=[{"key": "t", "effect": "NoExecute"}]), "taint t"),
    ],
)
def test_a_node_that_would_not_take_the_pod_offers_no_room(other: dict[str, Any], reason: str) -> None:
    assert reason in (Bench([node_body("a"), other], [pod_body("p", "a")]).refusal("a") or "")


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"tolerations": [{"key": "t", "operator": "Exists"}]}, True),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "t", "value": "v"}]}, True),
        ({"tolerations": [{"key": "t", "value": "v", "effect": "NoSchedule"}]}, True),
        ({"tolerations": [{"key": "t", "value": "w"}]}, False),
        ({"tolerations": [{"key": "u", "operator": "Exists"}]}, False),
        ({"tolerations": [{"key": "t", "operator": "Exists", "effect": "NoExecute"}]}, False),
        ({"tolerations": [{"operator": "Equal", "value": "v"}]}, False),
        ({}, False),
    ],
)
def test_taints_and_tolerations_are_those_of_kubernetes(spec: dict[str, Any], fits: bool) -> None:
    other = node_body("b", taints=[{"key": "t", "value": "v", "effect": "NoSchedule"}])
    bench = Bench([node_body("a"), other], [pod_body("p", "a", **spec)])

    assert (bench.refusal("a") is None) == fits


def affinity(*expressions: dict[str, Any]) -> dict[str, Any]:
    terms = [{"matchExpressions": list(expressions)}]
    required_terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required_terms}}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"nodeSelector": {"disk": "ssd"}}, True),
        ({"nodeSelector": {"disk": "hdd"}}, False),
        (affinity({"key": "disk", "operator": "In", "values": ["ssd", "nvme"]}), True),
        (affinity({"key": "disk", "operator": "NotIn", "values": ["ssd"]}), False),
        (affinity({"key": "absent", "operator": "NotIn", "values": ["ssd"]}), True),
        (affinity({"key": "disk", "operator": "Exists"}), True),
        (affinity({"key": "disk", "operator": "DoesNotExist"}), False),
        (affinity({"key": "size", "operator": "Gt", "values": ["4"]}), True),
        (affinity({"key": "size", "operator": "Lt", "values": ["4"]}), False),
        (affinity({"key": "disk", "operator": "Gt", "values": ["4"]}), False),
        (affinity({"key": "disk", "operator": "Unheard"}), False),
        (affinity(), False),
    ],
)
def test_node_selectors_and_affinity_are_those_of_kubernetes(spec: dict[str, Any], fits: bool) -> None:
    other = node_body("b", labels={"disk": "ssd", "size": "8"})
    bench = Bench([node_body("a"), other], [pod_body("p", "a", **spec)])

    assert (bench.refusal("a") is None) == fits


def test_terms_of_node_affinity_are_alternatives_and_fields_name_the_node() -> None:
    field = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}
    terms = [{"matchExpressions": [{"key": "absent", "operator": "Exists"}]}, field]
    spec: dict[str, Any] = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }
    pods = [pod_body("p", "a", **spec)]

    assert Bench([node_body("a"), node_body("b")], pods).refusal("a") is None
    assert Bench([node_body("a"), node_body("c")], pods).refusal("a") is not None


@pytest.mark.parametrize("of_mover", [True, False])
def test_anti_affinity_binds_both_sides(of_mover: bool) -> None:
    keeps_away: dict[str, Any] = {"affinity": {"podAntiAffinity": required(term("x", HOSTNAME))}}
    mover = pod_body("p", "a", labels={"app": "x"}, **(keeps_away if of_mover else {}))
    resident = pod_body("q", "b", labels={"app": "x"}, **({} if of_mover else keeps_away))

    assert "anti-affinity" in (Bench([node_body("a"), node_body("b")], [mover, resident]).refusal("a") or "")
    assert Bench([node_body("a"), node_body("b"), node_body("c")], [mover, resident]).refusal("a") is None


def test_pods_that_exclude_each_other_are_not_sent_to_one_node() -> None:
    spec: dict[str, Any] = {"labels": {"app": "x"}, "affinity": {"podAntiAffinity": required(term("x", HOSTNAME))}}
    pods = [pod_body("p", "a", **spec), pod_body("q", "a", **spec)]

    assert Bench([node_body("a"), node_body("b")], pods).refusal("a") is not None
    assert Bench([node_body("a"), node_body("b"), node_body("c")], pods).refusal("a") is None


def test_a_spread_over_hostnames_counts_the_nodes_that_stay() -> None:
    spec: dict[str, Any] = {"labels": {"app": "x"}, "topologySpreadConstraints": [spread("x", HOSTNAME)]}
    pods = [pod_body("p", "a", **spec), pod_body("q", "b", **spec), pod_body("r", "c", **spec)]
    uneven = [*pods, pod_body("s", "b", **spec), pod_body("t", "b", **spec)]

    assert Bench([node_body(name) for name in "abc"], pods).refusal("a") is None
    narrow = [node_body("a"), node_body("b"), node_body("c", allocatable={"cpu": "1", "pods": "9"})]
    assert "spread" in (Bench(narrow, uneven).refusal("a") or "")


def test_a_zone_that_was_full_for_a_spread_takes_pods_again_when_the_others_have_as_many() -> None:
    spec: dict[str, Any] = {"labels": {"app": "x"}, "topologySpreadConstraints": [spread("x", ZONE)]}
    nodes = [node_body(name, labels={ZONE: zone}) for name, zone in (("a", "1"), ("b", "1"), ("c", "2"))]
    bench = Bench(nodes, [pod_body(f"p{number}", "a", **spec) for number in range(3)])

    assert bench.refusal("a") is None
    assert sorted(bench.preflight.promised("m-a").values()) == ["b", "b", "c"]


def test_a_spread_counts_no_pods_that_terminate_beside_others_that_are_alike() -> None:
    spec: dict[str, Any] = {"labels": {"app": "x"}, "topologySpreadConstraints": [spread("x", ZONE)]}
    nodes = [node_body(name, labels={ZONE: zone}) for name, zone in (("a", "1"), ("b", "1"), ("c", "2"))]
    ending = pod_body("q", "b", **spec)
    ending = {**ending, "metadata": {**ending["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    full = pod_body("full", "c", cpu="8")
    mover = pod_body("p", "a", **spec)

    assert Bench(nodes, [mover, ending, full]).refusal("a") is None
    assert "spread" in (Bench(nodes, [mover, pod_body("q", "b", **spec), full]).refusal("a") or "")
    assert "spread" in (Bench(nodes, [mover, ending, pod_body("r", "b", **spec), full]).refusal("a") or "")


def test_the_zones_of_a_spread_are_those_of_the_nodes_that_the_pod_may_use() -> None:
    nodes = [
        node_body(name, labels={ZONE: zone, "disk": disk})
        for name, zone, disk in (("a", "1", "ssd"), ("b", "1", "ssd"), ("c", "2", "hdd"))
    ]
    anywhere = pod_body("large", "a", cpu="4", labels={"app": "x"}, topologySpreadConstraints=[spread("x", ZONE)])
    for rules in ({"nodeSelector": {"disk": "ssd"}}, affinity({"key": "disk", "operator": "In", "values": ["ssd"]})):
        spec: dict[str, Any] = {"labels": {"app": "y"}, "topologySpreadConstraints": [spread("y", ZONE)], **rules}
        bench = Bench(nodes, [anywhere, *(pod_body(f"p{number}", "a", **spec) for number in range(3))])

        assert bench.refusal("a") is None
        assert sorted(bench.preflight.promised("m-a").values()) == ["b", "b", "b", "b"]


def test_pods_with_equal_labels_keep_others_away_by_their_own_rules() -> None:
    residents = [
        pod_body(name, node, cpu=cpu, labels={"app": "y"}, affinity={"podAntiAffinity": required(term(app, HOSTNAME))})
        for name, node, app, cpu in (("q", "b", "z", "8"), ("r", "c", "x", "1"))
    ]
    bench = Bench([node_body(name) for name in "abc"], [pod_body("p", "a", labels={"app": "x"}), *residents])

    assert "1 excluded by anti-affinity" in (bench.refusal("a") or "")


def test_a_pod_stays_with_the_pods_of_its_affinity() -> None:
    spec: dict[str, Any] = {"labels": {"app": "x"}, "affinity": {"podAffinity": required(term("x", ZONE))}}
    nodes = [node_body(name, labels={ZONE: zone}) for name, zone in (("a", "1"), ("b", "1"), ("c", "2"))]
    bench = Bench(nodes, [pod_body("p", "a", **spec), pod_body("q", "b", **spec), pod_body("full", "b", cpu="7")])

    assert "affinity" in (bench.refusal("a") or "")
    alone = Bench(nodes, [pod_body("p", "a", **spec)])
    assert alone.refusal("a") is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"resourceClaims": [{"name": "gpu"}]}, "resource claims"),
        ({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1Q"}}}]}, "cannot be read"),
    ],
)
def test_a_pod_that_cannot_be_judged_fits_nowhere(spec: dict[str, Any], reason: str) -> None:
    assert reason in (Bench([node_body("a"), node_body("b")], [pod_body("p", "a", **spec)]).refusal("a") or "")


# ---- several drains ----------------------------------------------------------------------------------------------


def test_room_is_promised_once_until_the_pod_has_moved() -> None:
    nodes = [node_body(name) for name in "abc"]
    bench = Bench(nodes, [pod_body("p", "a", cpu="5"), pod_body("q", "b", cpu="5")])
    assert bench.refusal("a", "b") is None
    assert bench.refusal("b", "a") is not None

    bench.pods.remove(bench.put(pod_body("p", "a", cpu="5")))
    assert bench.refusal("b", "a") is not None
    bench.clock.now_seconds += PROMISE_SECONDS
    assert bench.refusal("b", "a") is None


def test_a_withdrawn_drain_gives_its_room_back() -> None:
    bench = Bench([node_body(name) for name in "abc"], [pod_body("p", "a", cpu="5"), pod_body("q", "b", cpu="5")])
    assert bench.refusal("a", "b") is None
    bench.preflight.release("m-a")

    assert bench.refusal("b") is None


def test_pods_that_were_to_come_to_a_node_need_another_place_when_it_is_drained() -> None:
    bench = Bench([node_body("a"), node_body("b")], [pod_body("p", "a", cpu="5")])
    assert bench.refusal("a") is None
    assert "pod d/p" in (bench.refusal("b", "a") or "")

    more = Bench([node_body(name) for name in "abc"], [pod_body("p", "a", cpu="5")])
    assert more.refusal("a") is None
    assert more.refusal("b", "a") is None
    assert more.preflight.promised("m-a") == {("d", "p"): "c"}


def test_a_promise_that_leaned_on_a_pod_is_made_again_when_that_pod_has_to_leave() -> None:
    follows: dict[str, Any] = {"labels": {"app": "y"}, "affinity": {"podAffinity": required(term("x", ZONE))}}
    zones = {"a": "1", "b": "1", "c": "1", "d": "2"}
    nodes = [
        node_body(name, labels={ZONE: zone}, allocatable={"cpu": "2" if name == "c" else "4", "pods": "9"})
        for name, zone in zones.items()
    ]
    bench = Bench(nodes, [pod_body("p", "a", **follows), pod_body("full", "b", cpu="1", labels={"app": "x"})])
    assert bench.refusal("a") is None
    before = bench.preflight.promised("m-a")
    assert bench.refusal("b", "a") is None

    assert before == {("d", "p"): "b"}
    places = {**bench.preflight.promised("m-a"), **bench.preflight.promised("m-b")}
    assert len({zones[node] for node in places.values()}) == 1


# ---- any cluster -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A small cluster, and the nodes that are to be drained in turn."""

    nodes: tuple[dict[str, Any], ...]
    pods: tuple[dict[str, Any], ...]
    drained: tuple[str, ...]


NAMES = "abcde"
APPS = ("x", "y")
keys = st.sampled_from([HOSTNAME, ZONE])
apps = st.sampled_from(APPS)


@st.composite
def node_bodies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    zone = draw(st.sampled_from(["1", "2", None]))
    taints = [{"key": "t", "effect": draw(st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"]))}]
    return node_body(
        name,
        ready=draw(st.integers(0, 9)) > 0,
        unschedulable=draw(st.integers(0, 9)) == 0,
        labels={**({ZONE: zone} if zone else {}), "disk": draw(st.sampled_from(["ssd", "hdd"]))},
        taints=taints if draw(st.integers(0, 4)) == 0 else None,
        allocatable={
            "cpu": str(draw(st.integers(2, 6))), "memory": str(draw(st.integers(2, 9))),
            "pods": str(draw(st.integers(1, 5))),
        },
    )  # fmt: skip


@st.composite
def pod_bodies(draw: st.DrawFn, name: str, node: str) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        rules["podAntiAffinity"] = required(term(draw(apps), draw(keys)))
    if draw(st.integers(0, 5)) == 0:
        rules["podAffinity"] = required(*(term(draw(apps), draw(keys)) for _ in range(draw(st.integers(1, 2)))))
    if draw(st.integers(0, 5)) == 0:
        expression = {"key": "disk", "operator": draw(st.sampled_from(["In", "NotIn"])), "values": ["ssd"]}
        rules["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [expression]}]
            }
        }
    if rules:
        spec["affinity"] = rules
    if draw(st.integers(0, 5)) == 0:
        spec["topologySpreadConstraints"] = [spread(draw(apps), draw(keys), draw(st.integers(1, 2)))]
    if draw(st.integers(0, 5)) == 0:
        spec["nodeSelector"] = {"disk": draw(st.sampled_from(["ssd", "hdd"]))}
    if draw(st.integers(0, 5)) == 0:
        spec["tolerations"] = [{"key": "t", "operator": "Exists"}]
    body = pod_body(
        name, node, labels={"app": draw(apps)}, owner=draw(st.sampled_from(["ReplicaSet"] * 9 + ["DaemonSet"])), **spec
    )
    requests = {"cpu": str(draw(st.integers(1, 2))), "memory": str(draw(st.integers(0, 3)))}
    body["spec"]["containers"][0]["resources"]["requests"] = requests
    if draw(st.integers(0, 3)) == 0:
        ip = draw(st.sampled_from([{}, {"hostIP": "10.0.0.1"}, {"hostIP": "10.0.0.2"}]))
        body["spec"]["containers"][0]["ports"] = [{"hostPort": draw(st.sampled_from([80, 81])), **ip}]
    return body


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = NAMES[: draw(st.integers(2, 5))]
    nodes = tuple(draw(node_bodies(name)) for name in names)
    pods = tuple(
        draw(pod_bodies(f"p{number}", draw(st.sampled_from(names)))) for number in range(draw(st.integers(1, 6)))
    )
    drained = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return Case(nodes, pods, tuple(drained))


def accepted_together(case: Case) -> tuple[list[str], dict[str, str]]:
    """Return which nodes a preflight accepts, one after the other, and where it promises their pods room."""
    bench = Bench(case.nodes, case.pods)
    accepted: list[str] = []
    for name in case.drained:
        if bench.refusal(name, *accepted) is None:
            accepted.append(name)
    promised = {}
    for name in accepted:
        promised.update({pod: target for (_, pod), target in bench.preflight.promised(f"m-{name}").items()})
    return accepted, promised


def judge(case: Case) -> str | None:
    """Say what is wrong with what a preflight accepts, by rules that share no code with it."""
    accepted, promised = accepted_together(case)
    nodes = {body["metadata"]["name"]: body for body in case.nodes if body["metadata"]["name"] not in accepted}
    staying, moves = [], []
    for pod in case.pods:
        name, source = pod["metadata"]["name"], pod["spec"]["nodeName"]
        if source in nodes:
            staying.append((pod, nodes[source]))
        elif pod["metadata"]["ownerReferences"][0]["kind"] != "DaemonSet":
            if name not in promised:
                return f"{name} was promised nothing"
            if promised[name] not in nodes:
                return f"{name} was promised a node that goes"
            moves.append((pod, nodes[promised[name]]))
    return cluster_fault(list(nodes.values()), staying, moves)


#: A case is small as it is; making it smaller takes minutes.
NOT_SHRUNK = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])


@NOT_SHRUNK
@given(cases())
def test_what_is_accepted_can_be_placed_by_the_schedulers_rules(case: Case) -> None:
    assert judge(case) is None


@pytest.mark.slow
@NOT_SHRUNK
@given(cases())
def test_a_single_pod_is_refused_only_if_no_node_takes_it(case: Case) -> None:
    name = case.drained[0]
    moving = [p for p in case.pods if p["spec"]["nodeName"] == name][:1]
    pods = [*moving, *(p for p in case.pods if p["spec"]["nodeName"] != name)]
    if not moving or moving[0]["metadata"]["ownerReferences"][0]["kind"] == "DaemonSet":
        return
    nodes = [body for body in case.nodes if body["metadata"]["name"] != name]
    by_name = {body["metadata"]["name"]: body for body in nodes}
    staying = [(p, by_name[p["spec"]["nodeName"]]) for p in pods[1:]]
    takers = [node for node in nodes if cluster_fault(nodes, staying, [(moving[0], node)]) is None]

    assert (Bench(case.nodes, pods).refusal(name) is None) == bool(takers)


DEFECTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "taints are ignored": (placement, "repelling_taint", lambda taints, tolerations: None),
    "selectors are ignored": (placement, "admits", lambda node, spec: True),
    "resources and the pods limit are ignored": (NodeRoom, "lacks", lambda self, requests: None),
    "a placed pod takes no room": (NodeRoom, "take", lambda self, requests, ports: None),
    "host ports are ignored": (placement, "taken_port", lambda wanted, taken: None),
    "other pods are ignored": (PodRules, "fault", lambda self, node: None),
    "placed pods keep no pod away": (PodRules, "place", lambda self, pods: None),
    "residents keep no pod away": (PodRules, "_keep_away", lambda self, pods: None),
    "cordoned and unready nodes are used": (preflight, "_takes_pods", lambda node: True),
    "promises are forgotten": (Preflight, "_all_promises", lambda self: ()),
    "DaemonSets alone move": (preflight, "moves_in_a_drain", lambda pod: False),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_judge_finds_a_planted_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = DEFECTS[defect]
    monkeypatch.setattr(owner, name, broken)

    found = find(
        cases(),
        lambda case: judge(case) is not None,
        # Which case it is does not matter: none is made smaller.
        settings=settings(max_examples=3000, database=None, derandomize=True, deadline=None, phases=[Phase.generate]),
    )

    assert judge(found) is not None
