"""The pods of a simulated cluster: bound where there is room, made anew where they are lost, never more or fewer."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Host, Machine
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.operator.requests import CapacityRequest, CoLocation, LabelSelector
from bigfleet.operator.rollup import RollUpBuilder
from bigfleet.sim.closed_loop.pods import PodCluster, Template


def template(name: str, cpu: str, *, priority: int = 0, instance_type: str = "t", is_gang: bool = False) -> Template:
    request = CapacityRequest(
        id="",
        resources={"cpu": cpu},
        requirements=(Requirement(labels.INSTANCE_TYPE, Operator.IN, (instance_type,)),),
        priority=priority,
        co_location=CoLocation(
            topology_key=labels.RACK, namespace="n", selector=LabelSelector(match_labels={"gang": name})
        )
        if is_gang
        else None,
    )
    return Template.of(name, name, request)


def node(machine_id: str, *, cpu: str = "4", rack: str = "r", instance_type: str = "t") -> Machine:
    return Machine(
        id=MachineId(machine_id),
        state=MachineState.CONFIGURED,
        host=Host("p", machine_id),
        instance_type=instance_type,
        allocatable={"cpu": cpu},
        labels={labels.RACK: rack},
    )


class Bench:
    """A cluster and the roll-up that follows it."""

    def __init__(self) -> None:
        self.builder = RollUpBuilder(ClusterId("c"))
        self.pods = PodCluster("c", self._change)

    def _change(self, add: list[CapacityRequest], remove: list[str]) -> None:
        for request_id in remove:
            assert self.builder.remove(request_id), f"{request_id} was not asked for"
        for request in add:
            assert self.builder.put(request), f"{request.id} was asked for already"

    def where(self, name: str) -> list[str]:
        """Return the nodes of a template's pods, "" for one that waits."""
        return sorted(pod.node or "" for pod in self.pods.pods.values() if pod.template.name == name)


def test_pods_are_bound_where_they_match_and_have_room() -> None:
    bench, work = Bench(), template("work", "2")
    bench.pods.resize(work, 5)
    bench.pods.join(node("a"))
    bench.pods.join(node("b"))
    bench.pods.join(node("other", instance_type="u"))

    assert bench.where("work") == ["", "a", "a", "b", "b"]


def test_pods_spread_over_the_nodes() -> None:
    bench, work = Bench(), template("work", "1")
    bench.pods.join(node("a"))
    bench.pods.join(node("b"))
    bench.pods.resize(work, 4)

    assert bench.where("work") == ["a", "a", "b", "b"]


def test_a_lost_node_s_pods_are_made_anew_and_demand_does_not_change() -> None:
    bench, work = Bench(), template("work", "2")
    bench.pods.join(node("a"))
    bench.pods.join(node("b"))
    bench.pods.resize(work, 3)
    names, rows = set(bench.pods.pods), bench.builder.rows()
    bench.pods.leave("a")

    assert bench.where("work") == ["", "b", "b"]
    assert bench.builder.rows() == rows
    assert len(set(bench.pods.pods) - names) == 2
    assert bench.pods.evictions == 2


def test_a_drained_node_takes_no_pods_until_it_is_uncordoned() -> None:
    bench, work = Bench(), template("work", "2")
    bench.pods.join(node("a"))
    bench.pods.resize(work, 1)
    bench.pods.drain("a")
    assert bench.where("work") == [""]

    bench.pods.uncordon("a")
    assert bench.where("work") == ["a"]


def test_the_pods_of_a_gang_go_where_all_have_room_and_stay_together() -> None:
    bench, gang = Bench(), template("gang", "4", is_gang=True)
    bench.pods.join(node("a1", rack="a"))
    for machine_id in ("b1", "b2", "b3"):
        bench.pods.join(node(machine_id, rack="b"))
    bench.pods.resize(gang, 3)
    assert bench.where("gang") == ["b1", "b2", "b3"]

    bench.pods.leave("b2")
    assert bench.where("gang") == ["", "b1", "b3"]


def test_a_higher_priority_takes_the_place_of_the_fewest_lower_ones() -> None:
    bench, low, high = Bench(), template("low", "1", priority=1), template("high", "3", priority=2)
    bench.pods.join(node("a"))
    bench.pods.join(node("b"))
    bench.pods.resize(low, 7)
    bench.pods.resize(high, 1)

    assert bench.where("high") == ["b"]
    assert bench.where("low") == ["", "", "a", "a", "a", "a", "b"]
    assert bench.pods.preemptions == 2


def test_a_workload_that_shrinks_loses_what_waits_first() -> None:
    bench, work = Bench(), template("work", "2")
    bench.pods.join(node("a"))
    bench.pods.resize(work, 4)
    bench.pods.resize(work, 2)

    assert bench.where("work") == ["a", "a"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("resize"), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.sampled_from(["join", "leave", "drain", "uncordon"]), st.integers(0, 4), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_pods_are_as_many_as_wanted_and_never_more_than_a_node_holds(steps: list[tuple[str, int, int]]) -> None:
    """After any course: each workload has its pods, demand is all of them, no node is over-full, a gang is together."""
    bench = Bench()
    templates = [template("low", "1"), template("high", "3", priority=9), template("gang", "2", is_gang=True)]
    wanted = dict.fromkeys(templates, 0)
    for what, number, pods in steps:
        machine_id = f"n{number}"
        if what == "resize":
            wanted[templates[number]] = pods
            bench.pods.resize(templates[number], pods)
        elif what == "join" and machine_id not in bench.pods.nodes:
            bench.pods.join(node(machine_id, rack=f"r{number % 2}"))
        elif what == "leave":
            bench.pods.leave(machine_id)
        elif what in ("drain", "uncordon") and machine_id in bench.pods.nodes:
            getattr(bench.pods, what)(machine_id)
        check(bench, wanted)


def check(bench: Bench, wanted: dict[Template, int]) -> None:
    """Hold the cluster against what was asked of it."""
    counts: dict[Any, int] = dict.fromkeys(wanted, 0)
    total = 0
    for pod in bench.pods.pods.values():
        counts[pod.template] += 1
        total += pod.template.vector["cpu"]
    assert counts == wanted
    assert sum(need.aggregate["cpu"] for need in bench.builder.rows()) == total
    for each in bench.pods.nodes.values():
        used = sum(pod.template.vector["cpu"] for pod in each.pods.values())
        assert used + each.free["cpu"] == parse_vector(each.machine.allocatable)["cpu"]
        assert each.free["cpu"] >= 0
        assert not (each.is_cordoned and each.pods)
    gang = [p for p in bench.pods.pods.values() if p.template.topology_key and p.node is not None]
    assert len({bench.pods.nodes[p.node].machine.labels[labels.RACK] for p in gang if p.node}) <= 1
