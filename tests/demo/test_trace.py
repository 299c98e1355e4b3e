"""Reading a trace, what its pods ask for, and the demand at a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.demo.fleet import instance_type_of, trace_fleet
from bigfleet.demo.trace import (
    TraceFault,
    TraceNode,
    TracePod,
    TraceReplay,
    capacity_request,
    cluster_of,
    read_nodes,
    read_pods,
)
from bigfleet.model import labels
from bigfleet.model.profile import Operator, Requirement

SAMPLE = Path(__file__).parent.parent / "cases" / "trace"
NODE_HEADER = "sn,cpu_milli,memory_mib,gpu,model\n"
POD_HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time\n"


def pod(name: str = "p", **fields: object) -> TracePod:
    shape: dict[str, object] = {
        "cpu_milli": 1000,
        "memory_mib": 512,
        "gpus": 0,
        "gpu_milli": 0,
        "gpu_models": (),
        "qos": "LS",
        "creation_second": 0,
        "deletion_second": 10,
    }
    return TracePod(name=name, **{**shape, **fields})  # type: ignore[arg-type]


def test_the_sample_reads_whole() -> None:
    nodes, pods = read_nodes(SAMPLE / "nodes.csv"), read_pods(SAMPLE / "pods.csv")

    assert (len(nodes), len(pods)) == (12, 60)
    assert {p.qos for p in pods} == {"LS", "Guaranteed", "Burstable", "BE"}
    assert sum(not p.lives for p in pods) == 2
    assert sum(p.deletion_second is None for p in pods) == 2


def test_extra_columns_in_any_order_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("model,rack,gpu,sn,memory_mib,cpu_milli\nT4,r1,2,n1,1024,4000\n", encoding="utf-8")

    assert read_nodes(path) == (TraceNode(name="n1", cpu_milli=4000, memory_mib=1024, gpus=2, gpu_model="T4"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("sn,cpu_milli,memory_mib,gpu\nn,1,1,0\n", "line 1: column model is missing"),
        (NODE_HEADER, "no nodes after the header"),
        (NODE_HEADER + "n,1000,1024,0\n", "line 2: 4 cells where the header has 5"),
        (NODE_HEADER + "n,1000,1024,0,,\n", "line 2: 6 cells"),
        (NODE_HEADER + "n,1000,1024,0,\nm,x,1024,0,\n", "line 3, column cpu_milli: 'x' is no whole number"),
        (NODE_HEADER + "n,1000,-1,0,\n", "line 2, column memory_mib: '-1' is no whole number"),
        (NODE_HEADER + "n,0,1024,0,\n", "line 2, column cpu_milli: 0 is out of range; write a number from 1"),
        (NODE_HEADER + f"n,{'9' * 5000},1024,0,\n", "column cpu_milli: 99999999999999999999 is out of range"),
        (NODE_HEADER + "n,1000,1024,2,\n", "line 2, column model: the node has 2 GPUs and no model"),
        (NODE_HEADER + ",1000,1024,0,\n", "line 2, column sn: is empty"),
        (NODE_HEADER + "n,1000,1024,0,\n\nn,1000,1024,0,\n", "line 4, column sn: 'n' is on line 2 already"),
        (NODE_HEADER + '"n,1000,1024,0,\n', "not CSV"),
        (NODE_HEADER + "n,1000,1\x00024,0,\n", "line 2"),
        (NODE_HEADER + "n,1000,\uff11\uff12,0,\n", "line 2, column memory_mib"),
    ],
)
def test_a_bad_node_file_is_named_with_line_column_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceFault) as caught:
        read_nodes(path)

    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("p,1000,1024,0,0,,Gold,0,5", "line 2, column qos: 'Gold' is unknown; write one of LS, Guaranteed"),
        ("p,1000,1024,1,1000,T4||P100,LS,0,5", "line 2, column gpu_spec: 'T4||P100' has an empty model"),
        ("p,1000,1024,1.5,1000,,LS,0,5", "line 2, column num_gpu: '1.5' is no whole number"),
        ("p,1000,1024,0,0,,LS,,5", "line 2, column creation_time: '' is no whole number"),
        ("p,1000,1024,0,0,,LS,0,soon", "line 2, column deletion_time: 'soon' is no whole number"),
        ("p,1000,1024,0,0,,LS,5,5", "no pod that lives"),
    ],
)
def test_a_bad_pod_row_is_named_with_line_column_and_remedy(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(POD_HEADER + row + "\n", encoding="utf-8")
    with pytest.raises(TraceFault) as caught:
        read_pods(path)

    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


@pytest.mark.parametrize("read", [read_nodes, read_pods])
def test_what_is_no_text_or_no_file_is_said_in_one_line(tmp_path: Path, read: Callable[[Path], object]) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\x89PNG\r\n\xff\xfe\x00")
    for path in (binary, tmp_path / "absent.csv", tmp_path):
        with pytest.raises(TraceFault) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_pod_asks_for_its_share_of_gpus() -> None:
    asked = capacity_request(pod(gpus=2, gpu_milli=500, gpu_models=("V100", "T4"), qos="Burstable"))

    assert asked.resources == {"cpu": "1000m", "memory": "512Mi", "gpu-milli": "1000"}
    assert asked.requirements == (Requirement(labels.GPU_PRODUCT, Operator.IN, ("T4", "V100")),)
    assert asked.priority == 500


def test_a_gpu_pod_without_a_model_still_keeps_apart_from_cpu_pods() -> None:
    assert capacity_request(pod(gpus=1, gpu_milli=100)).requirements == (
        Requirement(labels.GPU_PRODUCT, Operator.EXISTS),
    )
    assert capacity_request(pod()).requirements == ()
    assert "gpu-milli" not in capacity_request(pod()).resources


@pytest.mark.parametrize(("qos", "priority"), [("LS", 1000), ("Guaranteed", 1000), ("Burstable", 500), ("BE", 100)])
def test_priority_follows_the_quality_of_service(qos: str, priority: int) -> None:
    assert capacity_request(pod(qos=qos)).priority == priority


def test_a_pod_s_cluster_never_changes() -> None:
    """The expected ones were computed with `printf NAME | sha256sum | cut -c1-16`."""
    clusters = [f"cluster-{number}" for number in range(4)]

    assert [cluster_of(f"openb-pod-{n:04d}", clusters) for n in range(6)] == [
        "cluster-2",
        "cluster-3",
        "cluster-0",
        "cluster-0",
        "cluster-1",
        "cluster-1",
    ]


_TIMES = st.tuples(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 25)))


@settings(max_examples=80, deadline=None)
@given(st.lists(_TIMES, min_size=1, max_size=12), st.lists(st.integers(0, 30), max_size=8))
def test_the_demand_of_a_second_is_every_pod_that_lives_then(
    times: list[tuple[int, int | None]], seconds: list[int]
) -> None:
    pods = [pod("always", deletion_second=None)] + [
        pod(f"p{number}", creation_second=start, deletion_second=end) for number, (start, end) in enumerate(times)
    ]
    replay = TraceReplay(pods, ["a", "b"])
    alive: dict[str, set[str]] = {"a": set(), "b": set()}
    for second in sorted(seconds):
        for cluster, (came, went) in replay.advance(second).items():
            assert set(went) <= alive[cluster]
            alive[cluster] -= set(went)
            alive[cluster] |= {request.id for request in came}

        expected = {
            p.name
            for p in pods
            if p.creation_second <= second and (p.deletion_second is None or second < p.deletion_second)
        }
        assert alive["a"] | alive["b"] == expected


def test_a_trace_begins_with_its_first_pod_and_ends_with_its_last_event() -> None:
    replay = TraceReplay(
        [
            pod("a", creation_second=5, deletion_second=9),
            pod("b", creation_second=7, deletion_second=None),
            pod("dead", creation_second=0, deletion_second=0),
        ],
        ["c"],
    )

    assert (replay.start_second, replay.end_second) == (5, 9)


def test_nodes_become_fixed_bare_metal_spread_over_zones() -> None:
    fleet = trace_fleet(read_nodes(SAMPLE / "nodes.csv"))

    assert sum(pool["count"] for pool in fleet.pools) == 12
    assert (fleet.cpu_machines, fleet.gpu_machines) == (3, 9)
    assert {pool["zone"] for pool in fleet.pools} == {"sim-1a", "sim-1b", "sim-1c"}
    g2 = next(pool for pool in fleet.pools if pool["instance_type"] == "gpu-g2-8x-96c-384g")
    assert g2["allocatable"] == {"cpu": "96000m", "memory": "393216Mi", "gpu-milli": "8000"}
    assert g2["labels"][labels.GPU_PRODUCT] == "G2"
    assert (g2["capacity_type"], g2["fixed"], g2["price_per_hour"]) == ("bare_metal", True, 0.0)


def test_shapes_that_differ_have_names_that_differ() -> None:
    assert instance_type_of(model="", gpus=0, cpu_milli=1500, memory_mib=1000) == "cpu-1500m-1000mi"
    assert instance_type_of(model="V100M16", gpus=4, cpu_milli=32000, memory_mib=131072) == "gpu-v100m16-4x-32c-128g"
