"""The pod index: its running sums equal a recount after any events."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.nodes.pod_index import PodsByNode, has_required_anti_affinity
from tests.operator.nodes.node_world import pod_body

AWAY: dict[str, Any] = {
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "h"}]}}
}

states = st.fixed_dictionaries(
    {
        "node": st.sampled_from(["a", "a", "b", ""]),
        "cpu": st.sampled_from(["0", "250m", "1", "2.5", "1Q"]),
        "phase": st.sampled_from(["Running", "Running", "Pending", "Failed"]),
        "away": st.booleans(),
    }
)
steps = st.lists(st.tuples(st.sampled_from("pq"), st.one_of(states, st.none())), min_size=4, max_size=20)


def pod(name: str, state: dict[str, Any]) -> PodObject:
    body = pod_body(name, state["node"], cpu=state["cpu"], phase=state["phase"], **(AWAY if state["away"] else {}))
    return msgspec.convert(body, PodObject)


@given(steps)
def test_sums_that_follow_every_change_equal_a_recount(steps: list[tuple[str, dict[str, Any] | None]]) -> None:
    index, stored = PodsByNode(), dict[str, PodObject]()
    for name, state in steps:
        former = stored.pop(name, None)
        if state is not None:
            stored[name] = pod(name, state)
            index.put(stored[name], former)
        elif former is not None:
            index.remove(former)
    alive = [p for p in stored.values() if p.spec.node_name and not p.is_finished]
    for node in ("a", "b"):
        here = [p for p in alive if p.spec.node_name == node]
        total = sum(requested_by(p.spec).get("cpu", 0) for p in here)
        found = index.on(node)
        assert {key[1] for key in found.pods} == {p.metadata.name for p in here}
        assert found.requested.get("cpu", 0) == total
    assert {p.metadata.name for p in index.anti_affine()} == {
        p.metadata.name for p in alive if has_required_anti_affinity(p)
    }
    assert len(list(index.bound())) == len(alive)


def test_only_nodes_whose_sums_changed_are_named() -> None:
    index = PodsByNode()
    running = {"node": "a", "cpu": "1", "phase": "Running", "away": False}
    first = pod("p", running)
    index.put(first, None)
    assert index.take_changed() == {"a"}
    index.put(pod("p", {**running, "phase": "Pending"}), first)
    assert index.take_changed() == set()
    index.put(pod("p", {**running, "node": "b"}), first)

    assert index.take_changed() == {"a", "b"}
