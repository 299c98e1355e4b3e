"""What a pod requests, by the scheduler's arithmetic."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.objects import Container, PodSpec, ResourceRequirements
from bigfleet.operator.kubernetes.pod_requests import UnreadableRequest, pod_requests

GI = 2**30 * 1000


def container(name: str = "c", *, sidecar: bool = False, **requests: str | int | float) -> Container:
    return Container(
        name=name, resources=ResourceRequirements(requests=requests), restart_policy="Always" if sidecar else None
    )


def test_containers_add_up() -> None:
    spec = PodSpec(containers=[container(cpu="500m", memory="1Gi"), container(cpu=2)])

    assert pod_requests(spec) == {"cpu": 2500, "memory": GI}


def test_a_pod_without_requests_requests_nothing() -> None:
    assert pod_requests(PodSpec(containers=[container(), container(cpu="0")])) == {}


def test_init_containers_run_one_after_the_other_so_that_the_largest_counts() -> None:
    spec = PodSpec(
        containers=[container(cpu=1, memory="2Gi")],
        init_containers=[container(cpu=3), container(cpu=2, memory="1Gi")],
    )

    assert pod_requests(spec) == {"cpu": 3000, "memory": 2 * GI}


def test_a_sidecar_counts_beside_the_containers() -> None:
    spec = PodSpec(containers=[container(cpu=1)], init_containers=[container(cpu=1, sidecar=True)])

    assert pod_requests(spec) == {"cpu": 2000}


@pytest.mark.parametrize(
    ("init_containers", "cpu"),
    [
        # The sidecar runs already when the init container does.
        ([container(cpu=2, sidecar=True), container(cpu=3)], 5000),
        # It does not yet run when the init container before it does.
        ([container(cpu=3), container(cpu=2, sidecar=True)], 3000),
        ([container(cpu=1, sidecar=True), container(cpu=3), container(cpu=1, sidecar=True), container(cpu=3)], 5000),
    ],
)
def test_a_sidecar_counts_beside_the_init_containers_after_it(init_containers: list[Container], cpu: int) -> None:
    spec = PodSpec(containers=[container(cpu=1)], init_containers=init_containers)

    assert pod_requests(spec) == {"cpu": cpu}


def test_overhead_comes_on_top() -> None:
    spec = PodSpec(containers=[container(cpu=1)], init_containers=[container(cpu=4)], overhead={"cpu": "250m"})

    assert pod_requests(spec) == {"cpu": 4250}


def test_requests_of_the_pod_as_a_whole_take_the_place_of_the_containers() -> None:
    """Only of the resources that they name; the overhead comes on top all the same."""
    spec = PodSpec(
        containers=[container(cpu=1, memory="1Gi", gpu=1), container(cpu=1)],
        resources=ResourceRequirements(requests={"cpu": "1500m"}),
        overhead={"cpu": "100m"},
    )

    assert pod_requests(spec) == {"cpu": 1600, "memory": GI, "gpu": 1000}


def test_a_limit_of_the_pod_as_a_whole_stands_in_where_nothing_is_requested() -> None:
    whole = ResourceRequirements(limits={"cpu": "4", "memory": "1Gi"})

    assert pod_requests(PodSpec(containers=[container(cpu=1)], resources=whole)) == {"cpu": 1000, "memory": GI}


def test_a_limit_without_a_request_is_the_request() -> None:
    """The API server writes it so into pods; templates of workloads are read as they are written."""
    limited = Container(resources=ResourceRequirements(requests={"cpu": "1"}, limits={"cpu": "4", "memory": "1Gi"}))

    assert pod_requests(PodSpec(containers=[limited])) == {"cpu": 1000, "memory": GI}


def test_sums_are_exact() -> None:
    spec = PodSpec(containers=[container(cpu="0.1"), container(cpu=0.2), container(memory="1e3")])

    assert pod_requests(spec) == {"cpu": 300, "memory": 1_000_000}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            PodSpec(containers=[container("web", cpu="much")]),
            r"containers\[0\]\.resources\.requests\.cpu: 'much'",
        ),
        (PodSpec(init_containers=[container("init", cpu="-1")]), r"spec\.initContainers\[0\].*'-1' is negative"),
        (PodSpec(overhead={"cpu": "x"}), r"spec\.overhead\.cpu: 'x'"),
    ],
)
def test_a_quantity_that_cannot_be_read_is_refused(spec: PodSpec, message: str) -> None:
    with pytest.raises(UnreadableRequest, match=message):
        pod_requests(spec)


_CONTAINERS = st.lists(
    st.builds(
        lambda cpu, memory, sidecar: container(cpu=cpu, memory=memory, sidecar=sidecar),
        st.integers(0, 5),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=5,
)


@given(_CONTAINERS, _CONTAINERS)
def test_no_moment_of_a_pods_life_uses_more_than_it_requests(
    containers: list[Container], init_containers: list[Container]
) -> None:
    """And some moment uses all of it, in each resource."""

    def asked(of: Container) -> Mapping[str, int]:
        return {name: int(quantity) * 1000 for name, quantity in (of.resources.requests or {}).items()}

    moments: list[list[Container]] = []
    sidecars: list[Container] = []
    for each in init_containers:
        moments.append([*sidecars, each])
        if each.restart_policy == "Always":
            sidecars.append(each)
    moments.append([*sidecars, *containers])
    used = {name: max(sum(asked(c)[name] for c in moment) for moment in moments) for name in ("cpu", "memory")}

    requests = pod_requests(PodSpec(containers=containers, init_containers=init_containers))

    assert requests == {name: milli for name, milli in used.items() if milli}
