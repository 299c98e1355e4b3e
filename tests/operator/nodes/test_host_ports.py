"""The preflight and host ports: a pod fits on no node where a pod has one of its ports."""

from typing import Any

import pytest

from tests.operator.nodes.node_world import node_body, pod_body
from tests.operator.nodes.test_preflight import Bench


def on_ports(body: dict[str, Any], *ports: dict[str, Any], as_init: str | None = None) -> dict[str, Any]:
    """Return the pod with ports; `as_init` is the restart policy of an init container that has them."""
    spec = body["spec"]
    if as_init is not None:
        extra: dict[str, Any] = {"initContainers": [{"name": "init", "restartPolicy": as_init, "ports": list(ports)}]}
    else:
        extra = {"containers": [{**spec["containers"][0], "ports": list(ports)}]}
    return {**body, "spec": {**spec, **extra}}


EVERY_IP: dict[str, Any] = {"hostPort": 8080, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("port", "other", "fits"),
    [
        (EVERY_IP, EVERY_IP, False),
        (EVERY_IP, {"hostPort": 8080}, False),
        (EVERY_IP, {**EVERY_IP, "hostIP": "0.0.0.0"}, False),
        (EVERY_IP, {**EVERY_IP, "hostIP": "10.0.0.1"}, False),
        ({**EVERY_IP, "hostIP": "10.0.0.1"}, EVERY_IP, False),
        ({**EVERY_IP, "hostIP": "10.0.0.1"}, {**EVERY_IP, "hostIP": "10.0.0.1"}, False),
        ({**EVERY_IP, "hostIP": "10.0.0.1"}, {**EVERY_IP, "hostIP": "10.0.0.2"}, True),
        (EVERY_IP, {"hostPort": 8080, "protocol": "UDP"}, True),
        (EVERY_IP, {"hostPort": 8081, "protocol": "TCP"}, True),
        (EVERY_IP, {"containerPort": 8080, "protocol": "TCP"}, True),
    ],
)
def test_host_ports_conflict_as_in_kubernetes(port: dict[str, Any], other: dict[str, Any], fits: bool) -> None:
    pods = [on_ports(pod_body("p", "a"), port), on_ports(pod_body("q", "b"), other)]
    refusal = Bench([node_body("a"), node_body("b")], pods).refusal("a")

    assert (refusal is None) == fits
    if refusal is not None:
        assert "1 host port 8080/TCP taken" in refusal


@pytest.mark.parametrize(
    ("restart_policy", "owner", "fits"),
    [("Always", "ReplicaSet", False), (None, "DaemonSet", False), ("OnFailure", "ReplicaSet", True)],
)
def test_host_ports_of_sidecars_and_daemon_pods_count_and_those_of_other_init_containers_do_not(
    restart_policy: str | None, owner: str, fits: bool
) -> None:
    there = on_ports(pod_body("q", "b", owner=owner), EVERY_IP, as_init=restart_policy)
    bench = Bench([node_body("a"), node_body("b")], [on_ports(pod_body("p", "a"), EVERY_IP), there])

    assert (bench.refusal("a") is None) == fits


def test_pods_with_one_host_port_are_not_sent_to_one_node() -> None:
    pods = [on_ports(pod_body(name, "a", cpu=cpu), EVERY_IP) for name, cpu in (("p", "1"), ("q", "2"))]

    assert "pod d/p" in (Bench([node_body("a"), node_body("b")], pods).refusal("a") or "")
    assert Bench([node_body(name) for name in "abc"], pods).refusal("a") is None


def test_a_host_port_that_is_promised_is_taken() -> None:
    pods = [on_ports(pod_body(f"p-{name}", name, cpu=cpu), EVERY_IP) for name, cpu in (("a", "1"), ("b", "2"))]
    bench = Bench([node_body(name) for name in "abc"], pods)

    assert bench.refusal("a", "b") is None
    assert "host port 8080/TCP taken" in (bench.refusal("b", "a") or "")


def test_a_host_port_is_free_again_when_its_pod_has_gone() -> None:
    bench = Bench([node_body("a"), node_body("b")], [on_ports(pod_body("p", "a"), EVERY_IP)])
    there = bench.put(on_ports(pod_body("q", "b"), EVERY_IP))
    assert bench.refusal("a") is not None
    bench.pods.remove(there)

    assert bench.refusal("a") is None
