"""What DaemonSets take of machines, and that it is never less than what they request."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bigfleet.model.frames import RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import OVERHEADS_MAX, Overhead, canonical_overheads
from bigfleet.model.vector import covers
from bigfleet.operator.demand.overheads import NodeOverheads, fewer_overheads, in_common, overhead_of
from bigfleet.operator.kubernetes.objects import DaemonSet, PodObject
from bigfleet.rpc.wire.amounts import RESOURCE_NAMES_MAX
from bigfleet.rpc.wire.convert_need import ReceivedRollUp, rollup_to_wire
from tests.operator.demand.objects import HandView, daemon_set


def affinity(*terms: list[tuple[str, str, list[str]]], fields: bool = False) -> dict[str, Any]:
    key = "matchFields" if fields else "matchExpressions"
    written = [{key: [{"key": k, "operator": o, "values": v} for k, o, v in term]} for term in terms]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": written}}}


def view_of(*daemon_sets: DaemonSet) -> NodeOverheads:
    objects: HandView[DaemonSet] = HandView()
    overheads = NodeOverheads(objects)
    objects.listeners.append(overheads)
    for each in daemon_sets:
        objects.put(each)
    return overheads


def test_a_daemon_takes_its_request_and_one_pod_of_every_node() -> None:
    assert view_of(daemon_set()).overheads() == (Overhead((), {"cpu": 100, "pods": 1000}),)


def test_daemons_of_equal_requirements_add_up() -> None:
    found = view_of(daemon_set("a"), daemon_set("b", cpu="200m"), daemon_set("c", nodeSelector={"gpu": "yes"}))

    assert found.overheads() == (
        Overhead((), {"cpu": 300, "pods": 2000}),
        Overhead((Requirement("gpu", Operator.IN, ("yes",)),), {"cpu": 100, "pods": 1000}),
    )


def test_overheads_follow_the_daemon_sets() -> None:
    overheads = view_of(daemon_set("a"))
    first = overheads.overheads()
    overheads.put(daemon_set("a"), None)
    assert overheads.overheads() is first

    overheads.put(daemon_set("a", cpu="1"), daemon_set("a"))
    assert overheads.overheads() == (Overhead((), {"cpu": 1000, "pods": 1000}),)
    overheads.remove(daemon_set("a"))
    assert overheads.overheads() == ()


def test_a_daemon_set_that_cannot_be_read_is_left_out_alone() -> None:
    overheads = view_of(daemon_set("bad", cpu="much"), daemon_set("good"))

    assert overheads.overheads() == (Overhead((), {"cpu": 100, "pods": 1000}),)


def _requirements(**spec: Any) -> tuple[Requirement, ...] | None:
    overhead = overhead_of(daemon_set(**spec))
    return overhead.requirements if overhead is not None else None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"nodeSelector": {"a": "1"}, "affinity": affinity([("b", "Exists", [])])},
            [Requirement("a", Operator.IN, ("1",)), Requirement("b", Operator.EXISTS)],
        ),
        # Alternatives: what they have in common.
        (
            {"affinity": affinity([("a", "In", ["1"]), ("b", "Exists", [])], [("a", "In", ["2"])])},
            [Requirement("a", Operator.IN, ("1", "2"))],
        ),
        ({"affinity": affinity([("a", "In", ["1"])], [("b", "In", ["1"])])}, []),
        # Machines cannot be asked for more than a number; every machine will have a host name.
        ({"affinity": affinity([("cores", "Gt", ["8"]), ("a", "Exists", [])])}, [Requirement("a", Operator.EXISTS)]),
        ({"affinity": affinity([("kubernetes.io/hostname", "NotIn", ["x"])])}, []),
        # Machines rarely say their system.
        (
            {"nodeSelector": {"kubernetes.io/os": "linux"}},
            [Requirement("kubernetes.io/os", Operator.NOT_IN, ("windows",))],
        ),
        (
            {"nodeSelector": {"kubernetes.io/os": "windows"}},
            [Requirement("kubernetes.io/os", Operator.IN, ("windows",))],
        ),
        (
            # Nor their architecture.
            {"nodeSelector": {"beta.kubernetes.io/arch": "arm64"}},
            [
                Requirement(
                    "kubernetes.io/arch", Operator.NOT_IN, ("386", "amd64", "arm", "ppc64le", "riscv64", "s390x")
                )
            ],
        ),
    ],
)
def test_selectors_become_requirements(spec: dict[str, Any], expected: list[Requirement]) -> None:
    assert _requirements(**spec) == tuple(expected)


def test_a_machine_that_does_not_say_its_architecture_hosts_the_daemons_of_several() -> None:
    """Such are aws-node and kube-proxy of EKS; no provider of ours labels machines so by itself."""
    linux = ("kubernetes.io/os", "In", ["linux"])
    overhead = overhead_of(daemon_set(affinity=affinity([linux, ("kubernetes.io/arch", "In", ["amd64", "arm64"])])))

    assert overhead is not None
    assert overhead.applies(dict[str, str]().get)
    assert overhead.applies({"kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"}.get)
    assert not overhead.applies({"kubernetes.io/arch": "s390x"}.get)
    assert not overhead.applies({"kubernetes.io/os": "windows"}.get)


def test_alternative_architectures_have_in_common_that_no_third_one_will_do() -> None:
    terms = affinity([("kubernetes.io/arch", "In", ["amd64"])], [("kubernetes.io/arch", "In", ["arm64"])])
    overhead = overhead_of(daemon_set(affinity=terms))

    assert overhead is not None
    assert all(overhead.applies({"kubernetes.io/arch": arch}.get) for arch in ("amd64", "arm64"))
    assert not overhead.applies({"kubernetes.io/arch": "s390x"}.get)


def test_a_daemon_set_of_both_systems_counts_on_both() -> None:
    assert _requirements(affinity=affinity([("kubernetes.io/os", "In", ["windows", "linux"])])) == ()


@pytest.mark.parametrize(
    "terms",
    [
        affinity([("metadata.name", "In", ["n"])], fields=True),
        affinity(),
        affinity([]),
        affinity([("bigfleet.lucy.sh/machine-id", "DoesNotExist", [])]),
    ],
)
def test_a_daemon_set_that_runs_on_no_node_of_a_machine_is_no_overhead(terms: dict[str, Any]) -> None:
    assert _requirements(affinity=terms) is None


_REQUIREMENTS = st.builds(
    Requirement,
    st.sampled_from("ab"),
    st.sampled_from([Operator.IN, Operator.NOT_IN, Operator.EXISTS, Operator.DOES_NOT_EXIST]),
    st.lists(st.sampled_from("xyz"), min_size=1, max_size=2).map(tuple),
)
_TERMS = st.frozensets(_REQUIREMENTS, max_size=3)
_MACHINES = st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz"))


@given(st.lists(_TERMS, min_size=1, max_size=3), _MACHINES)
def test_what_alternatives_have_in_common_holds_where_one_of_them_does(
    terms: list[frozenset[Requirement]], machine: dict[str, str]
) -> None:
    def holds(term: frozenset[Requirement]) -> bool:
        return all(requirement.holds(machine.get(requirement.key)) for requirement in term)

    if any(holds(term) for term in terms):
        assert holds(in_common(terms))


_OVERHEADS = st.lists(
    st.builds(
        lambda requirements, cpu, memory: Overhead(tuple(requirements), {"cpu": cpu, "memory": memory}),
        _TERMS,
        st.integers(1, 5),
        st.integers(1, 5),
    ),
    max_size=12,
)


@given(_OVERHEADS, st.integers(1, 4), _MACHINES)
def test_fewer_overheads_take_no_less_of_any_machine(
    overheads: list[Overhead], overheads_max: int, machine: dict[str, str]
) -> None:
    exact = canonical_overheads(overheads)

    fewer = fewer_overheads(exact, overheads_max)

    assert len(fewer) <= overheads_max
    assert fewer == canonical_overheads(fewer)
    assert covers(_taken(fewer, machine), _taken(exact, machine))


def _taken(overheads: tuple[Overhead, ...], machine: dict[str, str]) -> dict[str, int]:
    taken = {"cpu": 0, "memory": 0}
    for overhead in overheads:
        if overhead.applies(machine.get):
            for name, milli in overhead.resources.items():
                taken[name] += milli
    return taken


def test_up_to_the_bound_overheads_stay_as_they_are() -> None:
    overheads = canonical_overheads(
        Overhead((Requirement("pool", Operator.IN, (str(number),)),), {"cpu": 100}) for number in range(OVERHEADS_MAX)
    )

    assert fewer_overheads(overheads) == overheads


def daemon_set_of(name: str, resources: Iterable[str], **pod_spec: Any) -> DaemonSet:
    """Return a DaemonSet that requests 1 of each resource, and 100m of a CPU."""
    requests = {"cpu": "100m"} | dict.fromkeys(resources, "1")
    return daemon_set(name, containers=[{"name": "c", "resources": {"requests": requests}}], **pod_spec)


def test_a_daemon_set_that_names_too_many_resources_displaces_no_resource_of_another() -> None:
    """An overhead of 33 names would have the roll-up of the whole cluster refused."""
    sprawling = daemon_set_of("sprawling", [f"example.com/r{number:02d}" for number in range(40)])
    other = daemon_set_of("other", ["zzz.example.com/gpu"])

    with capture_logs() as logs:
        (overhead,) = view_of(sprawling, other).overheads()

    assert len(overhead.resources) == RESOURCE_NAMES_MAX
    assert {name: overhead.resources[name] for name in ("cpu", "pods", "zzz.example.com/gpu")} == {
        "cpu": 200,
        "pods": 2000,
        "zzz.example.com/gpu": 1000,
    }
    (entry,) = [each for each in logs if each["event"] == "operator.overhead_resources_left_out"]
    assert (entry["count"], entry["daemon_sets"]) == (11, ["kube-system/sprawling"])


def test_overheads_with_long_requirements_stay_small_and_count_on_more_machines() -> None:
    """A shard ends the session for a roll-up that is too large, and with it the demand of all tenants."""
    long = [("pool", "In", ["a"]), ("host", "NotIn", [f"{number:0250}" for number in range(900)])]
    overheads = view_of(
        *(daemon_set(f"d{number}", nodeSelector={"n": str(number)}, affinity=affinity(long)) for number in range(60))
    ).overheads()
    rollup = RollUp(cluster_id=ClusterId("c"), timestamp_unix_nanos=1, needs=(), overheads=overheads)

    assert len(overheads) == 60
    assert {requirement.key for each in overheads for requirement in each.requirements} == {"n", "pool"}
    assert len(rollup_to_wire(rollup).SerializeToString()) < 100_000


_DAEMON_SETS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 99), max_size=45),
        st.sampled_from([{}, {"nodeSelector": {"pool": "a"}}, {"nodeSelector": {"kubernetes.io/os": "linux"}}]),
    ),
    max_size=6,
)


@given(_DAEMON_SETS)
def test_overheads_of_any_daemon_sets_are_taken_by_the_shard(
    daemon_sets: list[tuple[set[int], dict[str, Any]]],
) -> None:
    """One DaemonSet must not have the demand of everybody in its cluster refused."""
    view = view_of(
        *(
            daemon_set_of(f"d{place}", [f"example.com/r{number}" for number in numbers], **spec)
            for place, (numbers, spec) in enumerate(daemon_sets)
        )
    )
    rollup = RollUp(cluster_id=ClusterId("c"), timestamp_unix_nanos=1, needs=(), overheads=view.overheads())

    received = ReceivedRollUp(rollup_to_wire(rollup)).overheads()

    assert received == view.overheads()
    assert all(each.resources["cpu"] and each.resources["pods"] for each in received)


# ---- pods that request more than their template ------------------------------------------------------------------


def daemon_pod(name: str = "d-1", *, uid: str = "ds-d", phase: str = "Running", **spec: Any) -> PodObject:
    metadata = {
        "name": name,
        "namespace": "kube-system",
        "ownerReferences": [{"kind": "DaemonSet", "name": "d", "uid": uid, "controller": True}],
    }
    fields = {"nodeName": "n", "containers": [{"name": "c", "resources": {"requests": {"cpu": "250m"}}}]} | spec
    return msgspec.convert({"metadata": metadata, "spec": fields, "status": {"phase": phase}}, PodObject)


def test_a_pod_that_a_limit_range_gave_more_counts_until_it_is_gone() -> None:
    overheads = view_of(daemon_set("d", containers=[{"name": "c"}]))
    assert overheads.overheads() == (Overhead((), {"pods": 1000}),)

    overheads.pods.put(daemon_pod(), None)
    assert overheads.overheads() == (Overhead((), {"cpu": 250, "pods": 1000}),)
    overheads.pods.remove(daemon_pod())
    assert overheads.overheads() == (Overhead((), {"pods": 1000}),)


def test_the_overhead_of_a_runtime_class_is_in_the_pods() -> None:
    overheads = view_of(daemon_set("d", cpu="250m"))

    overheads.pods.put(daemon_pod(overhead={"cpu": "100m", "memory": "64Mi"}), None)

    (found,) = overheads.overheads()
    assert (found.resources["cpu"], found.resources["memory"]) == (350, 64 * 2**20 * 1000)


def test_of_each_resource_the_template_or_the_largest_pod_counts() -> None:
    overheads = view_of(daemon_set("d", cpu="300m"))
    overheads.pods.put(daemon_pod("d-1", overhead={"memory": "1Mi"}), None)
    overheads.pods.put(daemon_pod("d-2", overhead={"memory": "2Mi"}), None)

    (found,) = overheads.overheads()
    assert (found.resources["cpu"], found.resources["memory"]) == (300, 2 * 2**20 * 1000)


@pytest.mark.parametrize("pod", [daemon_pod(uid="ds-other"), daemon_pod(phase="Failed")])
def test_a_pod_of_another_daemon_set_or_that_has_ended_counts_for_nothing(pod: PodObject) -> None:
    overheads = view_of(daemon_set("d"))
    overheads.pods.put(pod, None)

    assert overheads.overheads() == (Overhead((), {"cpu": 100, "pods": 1000}),)


def test_an_unchanged_pod_or_one_of_the_same_requests_computes_nothing_again() -> None:
    overheads = view_of(daemon_set("d"))
    overheads.pods.put(daemon_pod("d-1"), None)
    first = overheads.overheads()

    overheads.pods.put(daemon_pod("d-1"), daemon_pod("d-1"))
    overheads.pods.put(daemon_pod("d-2"), None)
    overheads.pods.remove(daemon_pod("d-1"))

    assert overheads.overheads() is first
