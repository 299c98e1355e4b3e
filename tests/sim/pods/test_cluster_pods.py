"""The pods of a simulated cluster: bound where there is room, made again where they are lost, never more or fewer."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.frames import NeedStatus, NeedStatusUpdate, UnmetReason
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.operator.requests import CapacityRequest, CoLocation, Exclusion, LabelSelector
from bigfleet.operator.rollup import RollUpBuilder
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.pods.cluster_pods import PodCluster
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.pods.waiting import WaitingPods, with_waiting


def template(
    name: str,
    cpu: str,
    *,
    priority: int = 0,
    instance_type: str = "t",
    is_gang: bool = False,
    is_unschedulable: bool = False,
    **more: Any,
) -> Template:
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
        **more,
    )
    return Template.of(name, name, request, is_unschedulable=is_unschedulable)


def node(machine_id: str, *, cpu: str = "4", rack: str = "r", instance_type: str = "t", **more: str) -> Machine:
    return Machine(
        id=MachineId(machine_id),
        state=MachineState.CONFIGURED,
        host=HostRef("p", machine_id),
        instance_type=instance_type,
        allocatable={"cpu": cpu} | more,
        labels={labels.RACK: rack},
    )


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def monotonic_seconds(self) -> float:
        """Return the hand's time."""
        return self.now_seconds

    def unix_nanos(self) -> int:
        """Return nothing of interest."""
        return 0

    async def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now_seconds += seconds


class Bench:
    """A cluster and the roll-up that follows it."""

    def __init__(self, order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED) -> None:
        self.clock = HandClock()
        self.builder = RollUpBuilder(ClusterId("c"))
        self.pods = PodCluster("c", self._change, clock=self.clock, order=order)
        self.waiting = WaitingPods(self.pods, self.clock)

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


def test_a_gang_that_is_stuck_starts_anew_where_all_of_it_fits() -> None:
    bench, gang = Bench(), template("gang", "4", is_gang=True)
    bench.pods.join(node("a1", rack="a"))
    bench.pods.resize(gang, 2)
    bench.pods.join(node("b1", rack="b"))
    bench.clock.now_seconds = 200.0
    bench.pods.restart_gangs()
    assert bench.where("gang") == ["", "a1"]

    bench.pods.join(node("b2", rack="b"))
    bench.pods.restart_gangs()
    assert bench.where("gang") == ["b1", "b2"]


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


def test_the_emptier_node_is_preferred_or_the_fuller_one() -> None:
    for order, expected in (
        (SchedulerOrder.LEAST_ALLOCATED, ["big", "big"]),
        (SchedulerOrder.MOST_ALLOCATED, ["small", "small"]),
    ):
        bench, work = Bench(order), template("work", "1")
        bench.pods.join(node("big", cpu="16"))
        bench.pods.join(node("small", cpu="4"))
        bench.pods.resize(work, 2)
        assert bench.where("work") == expected


def test_a_node_takes_no_more_pods_than_its_limits_say() -> None:
    bench, few = Bench(), template("few", "1")
    alone = template("alone", "1", exclusion=Exclusion(group="alone", max_per_machine=1))
    bench.pods.join(node("a", pods="3"))
    bench.pods.resize(alone, 2)
    bench.pods.resize(few, 3)

    assert bench.where("alone") == ["", "a"]
    assert bench.where("few") == ["", "a", "a"]


def test_a_strict_spread_holds_pods_back() -> None:
    spread = TopologySpread(labels.RACK, 1, SpreadMode.DO_NOT_SCHEDULE)
    bench, work = Bench(), template("work", "1", spreads=(spread,))
    bench.pods.join(node("a", rack="a"))
    bench.pods.join(node("b", cpu="1", rack="b"))
    bench.pods.resize(work, 5)

    assert bench.where("work") == ["", "", "a", "a", "b"]


# ---- preflight ---------------------------------------------------------------------------------------------------


def test_pods_that_fit_elsewhere_may_be_moved() -> None:
    bench, large, small = Bench(), template("large", "3"), template("small", "1")
    for machine_id in ("a", "b", "c"):
        bench.pods.join(node(machine_id))
    bench.pods.resize(large, 2)
    bench.pods.resize(small, 3)
    assert bench.where("small") == ["c", "c", "c"]

    assert [pod.template for pod in bench.pods.do_not_fit("a")] == [large]
    assert [pod.template for pod in bench.pods.do_not_fit("c")] == [small]
    assert bench.where("large") == ["a", "b"]


def test_cordoned_nodes_and_limits_count_in_the_preflight() -> None:
    bench = Bench()
    alone = template("alone", "1", exclusion=Exclusion(group="alone", max_per_machine=1))
    for machine_id in ("a", "b", "c"):
        bench.pods.join(node(machine_id))
    bench.pods.resize(alone, 2)
    assert bench.pods.do_not_fit("a") == []

    bench.pods.drain("c")
    assert len(bench.pods.do_not_fit("a")) == 1


def test_a_strict_spread_counts_in_the_preflight() -> None:
    """Room in the wrong rack is none; the rack of the node that leaves no longer counts if it has no other."""
    spread = TopologySpread(labels.RACK, 1, SpreadMode.DO_NOT_SCHEDULE)
    bench, work = Bench(), template("work", "1", spreads=(spread,))
    bench.pods.join(node("a", cpu="1", rack="x"))
    bench.pods.join(node("b", cpu="8", rack="y"))
    bench.pods.join(node("c", cpu="1", rack="x"))
    bench.pods.resize(work, 3)
    assert bench.where("work") == ["a", "b", "b"]

    assert bench.pods.do_not_fit("a") == []
    bench.pods.drain("c")
    assert bench.pods.do_not_fit("a") == []
    bench.pods.uncordon("c")
    bench.pods.resize(work, 4)
    assert bench.where("work") == ["a", "b", "b", "c"]
    assert [pod.template for pod in bench.pods.do_not_fit("a")] == [work]


def test_a_machine_that_could_come_is_looked_at_as_the_scheduler_would() -> None:
    """Its room, its requirements and the rack that a spread lacks."""
    spread = TopologySpread(labels.RACK, 1, SpreadMode.DO_NOT_SCHEDULE)
    bench, work = Bench(), template("work", "2", spreads=(spread,))
    bench.pods.join(node("a", cpu="2", rack="x"))
    bench.pods.join(node("b", cpu="1", rack="y"))
    bench.pods.resize(work, 2)
    assert bench.where("work") == ["", "a"]

    assert bench.pods.would_run_on(work, node("new", rack="y"))
    assert not bench.pods.would_run_on(work, node("new", rack="x"))
    assert not bench.pods.would_run_on(work, node("new", cpu="1", rack="y"))
    assert not bench.pods.would_run_on(work, node("new", rack="y", instance_type="u"))
    assert bench.where("work") == ["", "a"]


def test_nodes_that_leave_one_after_the_other_are_forecast_together() -> None:
    """What the scheduler moves to a node takes room from the next; nothing is changed."""
    bench, large, small = Bench(), template("large", "3"), template("small", "1")
    for machine_id in ("a", "b", "c"):
        bench.pods.join(node(machine_id))
    bench.pods.resize(large, 1)
    bench.pods.resize(small, 2)
    before = (bench.where("large"), bench.where("small"))
    assert before == (["a"], ["b", "c"])

    assert bench.pods.forecast(("b",), ()) is None
    assert bench.pods.forecast(("b", "a"), ()) == ("a", 1)
    assert bench.pods.forecast(("b", "a"), [node("d")]) is None
    assert bench.pods.forecast(("x",), ()) is None
    assert (bench.where("large"), bench.where("small")) == before


# ---- pods that wait ----------------------------------------------------------------------------------------------


def verdict(*unmet: Template) -> NeedStatusUpdate:
    rows = tuple(
        NeedStatus(
            fingerprint=each.profile.fingerprint,
            group=each.group,
            residual={"cpu": "1"},
            reason=UnmetReason.NO_MATCHING_SUPPLY,
        )
        for each in unmet
    )
    return NeedStatusUpdate(cycle=1, computed_at_unix_nanos=1, rows=rows, rollup_timestamp_unix_nanos=1)


def test_a_pod_is_reported_after_a_minute_in_a_row_that_is_met_until_it_runs() -> None:
    bench, work = Bench(), template("work", "2")
    bench.pods.resize(work, 2)
    bench.waiting.heard(verdict(work))
    bench.clock.now_seconds = 100.0
    assert bench.waiting.reported() == {}

    bench.waiting.heard(verdict())
    bench.clock.now_seconds = 159.0
    assert bench.waiting.reported() == {}
    bench.clock.now_seconds = 160.0
    rows = with_waiting(bench.builder.rows(), bench.waiting.reported().values())
    assert [(shape.resources, shape.count) for shape in rows[0].waiting] == [({"cpu": 2000}, 2)]
    assert rows[0].aggregate == {"cpu": 4000}

    # While it is bought for, the row is called short.
    bench.waiting.heard(verdict(work))
    assert len(bench.waiting.reported()) == 2
    bench.pods.join(node("a"))
    assert bench.waiting.reported() == {}


def test_a_pod_that_waits_for_five_minutes_after_a_node_joined_for_it_is_given_up() -> None:
    bench, work = Bench(), template("work", "2", is_unschedulable=True)
    bench.pods.join(node("before"))
    bench.pods.resize(work, 1)
    bench.waiting.heard(verdict())
    bench.clock.now_seconds = 1000.0
    assert len(bench.waiting.reported()) == 1

    bench.pods.join(node("small", cpu="1"))
    assert len(bench.waiting.reported()) == 1
    bench.clock.now_seconds = 1050.0
    bench.pods.join(node("a"))
    bench.clock.now_seconds = 1100.0
    assert len(bench.waiting.reported()) == 1
    bench.clock.now_seconds = 1400.0
    assert bench.waiting.reported() == {}
    assert bench.where("work") == [""]


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
