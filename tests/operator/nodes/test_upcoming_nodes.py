"""UpcomingNodes: phases, conditions, deletions, and what any order of frames leaves (docs/spec/operator.md §8)."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigfleet.model.frames import DrainOutcome, NodeStateUpdate, Taint
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.objects import Condition, UpcomingNode
from bigfleet.operator.kubernetes.resources import FIELD_MANAGER, MACHINE_ID, NODES, PODS, UPCOMING_NODES
from bigfleet.operator.nodes.names import machine_label, upcoming_node_name
from bigfleet.operator.nodes.upcoming_node_body import spec_body
from bigfleet.sim.kubernetes.faults import ApiCall, fail_times
from tests.operator.nodes.node_world import NodeWorld, Operator

pytestmark = pytest.mark.virtual_time

S = MachineState


def shown(world: NodeWorld) -> dict[str, str]:
    """Return the phases by machine."""
    return {found.spec.machine_id: found.status.phase for found in world.server.read_all(UPCOMING_NODES)}


def read(world: NodeWorld, machine_id: str = "m") -> UpcomingNode:
    found = world.server.read(UPCOMING_NODES, upcoming_node_name(machine_id))
    assert found is not None
    return found


def condition(world: NodeWorld, type_: str) -> Condition | None:
    return next((c for c in read(world).status.conditions or () if c.type == type_), None)


def writes(operator: Operator) -> list[str]:
    return [f"{c.verb} {c.resource}" for c in operator.api.calls if c.resource.startswith("upcomingnodes")]


async def see(operator: Operator, state: MachineState, machine_id: str = "m", **fields: Any) -> None:
    operator.see(machine_id, state, **fields)
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (S.SPECULATIVE, None),
        (S.CREATING, "Provisioning"),
        (S.CONFIGURING, "Registered"),
        (S.CONFIGURED, "Ready"),
        (S.DRAINING, "Draining"),
        (S.FAILED, "Failed"),
        (S.IDLE, None),
        (S.DELETING, None),
        (S.UNSPECIFIED, None),
    ],
)
async def test_the_phase_of_a_new_object_follows_the_machine(
    world: NodeWorld, state: MachineState, phase: str | None
) -> None:
    await see(world.operator(), state)

    assert shown(world) == ({"m": phase} if phase else {})


async def test_the_object_says_what_the_frame_says(world: NodeWorld) -> None:
    operator = world.operator()
    await see(
        operator, S.CONFIGURING, "a/b", provider_id="p://1", labels={"zone": "z"},
        resources={"cpu": "8", "memory": "32Gi", "odd": "1Q", "negative": "-1"},
        taints=(Taint("t", "v", "NoSchedule"), Taint("u", "", "NoExecute")),
    )  # fmt: skip

    raw = world.server.raw(UPCOMING_NODES, upcoming_node_name("a/b"))
    label = machine_label("a/b")
    assert raw["spec"] == {
        "machineID": "a/b",
        "resources": {"cpu": "8", "memory": "32Gi"},
        "labels": {"zone": "z", MACHINE_ID: label},
        "taints": [{"key": "t", "value": "v", "effect": "NoSchedule"}, {"key": "u", "effect": "NoExecute"}],
    }
    assert raw["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "bigfleet-operator", MACHINE_ID: label}
    assert raw["metadata"]["annotations"] == {MACHINE_ID: "a/b"}
    assert raw["status"]["providerID"] == "p://1"
    assert raw["status"]["provisioningStartTime"] == "2026-01-01T00:00:00Z"


async def test_frames_that_say_the_same_write_nothing(world: NodeWorld) -> None:
    operator = world.operator()
    for _ in range(3):
        await see(operator, S.CONFIGURED, resources={"cpu": "8"})
        await asyncio.sleep(10)

    assert writes(operator) == [
        "patch upcomingnodes.bigfleet.lucy.sh",
        "patch upcomingnodes.bigfleet.lucy.sh/status",
    ]


async def test_only_what_differs_is_written(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURING, resources={"cpu": "8"})
    operator.api.calls.clear()
    await see(operator, S.CONFIGURED, resources={"cpu": "8"})
    assert writes(operator) == ["patch upcomingnodes.bigfleet.lucy.sh/status"]
    operator.api.calls.clear()
    await see(operator, S.CONFIGURED, resources={"cpu": "16"})

    assert writes(operator) == ["patch upcomingnodes.bigfleet.lucy.sh"]


async def test_frames_of_a_machine_are_coalesced_to_the_newest(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.latency_seconds = 1.0
    for state in (S.CREATING, S.CONFIGURING, S.CONFIGURED, S.DRAINING, S.CONFIGURED):
        operator.see("m", state)
    await asyncio.sleep(20)

    assert shown(world) == {"m": "Ready"}
    assert len(writes(operator)) == 2


async def test_a_state_that_goes_back_while_it_is_written_ends_in_the_last(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    operator.api.faults.latency_seconds = 1.0
    operator.see("m", S.DRAINING)
    await asyncio.sleep(0.5)
    operator.see("m", S.CONFIGURED)
    await asyncio.sleep(20)

    assert shown(world) == {"m": "Ready"}


async def test_the_error_of_a_failed_machine_is_cleared_when_it_leaves_that_state(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.FAILED, last_error="no power")
    assert read(world).status.last_error == "no power"
    await see(operator, S.CONFIGURING)

    assert read(world).status.last_error is None
    assert shown(world) == {"m": "Registered"}


async def test_the_node_is_referred_to_and_joined_once_it_is_ready(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURING)
    joined = condition(world, "NodeJoined")
    assert joined is not None
    assert (joined.status, joined.reason) == ("False", "NoNode")
    node = world.node("n", "m", ready=False)
    await asyncio.sleep(1)
    joined = condition(world, "NodeJoined")
    assert joined is not None
    assert (joined.status, joined.reason, joined.last_transition_time) == (
        "False", "NodeNotReady", "2026-01-01T00:00:00Z",
    )  # fmt: skip
    reference = read(world).status.node_ref
    assert reference is not None
    assert (reference.kind, reference.name, reference.uid) == ("Node", "n", node.metadata.uid)
    world.node("n", "m")
    await asyncio.sleep(1)
    joined = condition(world, "NodeJoined")
    assert joined is not None
    assert (joined.status, joined.last_transition_time) == ("True", "2026-01-01T00:00:02Z")
    world.server.remove(NODES, "n")
    await asyncio.sleep(1)

    assert read(world).status.node_ref is None
    assert shown(world) == {"m": "Registered"}


async def test_nodes_that_all_fit_are_named(world: NodeWorld) -> None:
    operator = world.operator()
    world.node("a", "m")
    world.node("b", "m")
    await see(operator, S.CONFIGURED)

    joined = condition(world, "NodeJoined")
    assert joined is not None
    assert (joined.status, joined.reason) == ("False", "Ambiguous")
    assert "a, b" in joined.message


async def test_a_drain_is_shown_until_its_machine_serves_again(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    assert condition(world, "Drained") is None
    operator.instruct("m", grace_seconds=30)
    await see(operator, S.DRAINING)
    drained = condition(world, "Drained")
    assert drained is not None
    assert (drained.status, drained.reason) == ("False", "Draining")
    await operator.result()
    await asyncio.sleep(1)
    drained = condition(world, "Drained")
    assert drained is not None
    assert (drained.status, drained.reason) == ("False", "GraceExpired")
    assert read(world).status.last_error == "drain: 1 pod was left: d/p"
    assert shown(world) == {"m": "Draining"}
    await see(operator, S.CONFIGURED)

    assert condition(world, "Drained") is None
    assert read(world).status.last_error is None


async def test_a_refused_reclaim_stays_readable_until_the_next_drain(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    operator.instruct("m", preemptor_priority=0, reason="reclaim")
    await see(operator, S.DRAINING)
    assert (await operator.result()).outcome is DrainOutcome.WOULD_NOT_FIT
    await see(operator, S.CONFIGURED)
    drained = condition(world, "Drained")
    assert drained is not None
    assert (drained.status, drained.reason) == ("False", "WouldNotFit")
    assert "d/p" in drained.message
    assert read(world).status.last_error is None
    operator.instruct("m", id="next")
    await see(operator, S.DRAINING)

    drained = condition(world, "Drained")
    assert drained is not None
    assert drained.reason != "WouldNotFit"


# ---- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [S.DRAINING, S.FAILED])
async def test_a_drained_or_failed_machine_that_is_idle_is_deleted(world: NodeWorld, before: MachineState) -> None:
    operator = world.operator()
    await see(operator, before)
    phases: list[str] = []
    operator.upcoming_view.add(_PhaseRecorder(phases))
    await see(operator, S.IDLE)

    assert shown(world) == {}
    assert phases[-1] == "Drained"


class _PhaseRecorder:
    def __init__(self, phases: list[str]) -> None:
        self._phases = phases

    def put(self, stored: UpcomingNode, former: UpcomingNode | None) -> None:
        self._phases.append(stored.status.phase)

    def remove(self, former: UpcomingNode) -> None:
        pass


async def test_a_machine_that_was_rolled_back_is_deleted_ten_minutes_after_its_last_frame(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURING)
    await see(operator, S.IDLE)
    assert shown(world) == {"m": "Launched"}
    await asyncio.sleep(500)
    await see(operator, S.IDLE)
    await asyncio.sleep(590)
    assert shown(world) == {"m": "Launched"}
    await asyncio.sleep(20)

    assert shown(world) == {}


async def test_a_machine_that_is_bound_again_is_not_deleted_by_the_old_time(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURING)
    await see(operator, S.IDLE)
    await asyncio.sleep(300)
    await see(operator, S.CONFIGURING)
    await asyncio.sleep(1000)

    assert shown(world) == {"m": "Registered"}


async def test_a_machine_that_is_lost_to_the_cluster_is_shown_as_failed_for_ten_minutes(world: NodeWorld) -> None:
    """Nothing about it follows: without this its object would stay until the next session."""
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    await see(operator, S.FAILED, cluster_id="", last_error="no longer reported by the provider")
    await asyncio.sleep(590)
    assert shown(world) == {"m": "Failed"}
    await asyncio.sleep(20)

    assert shown(world) == {}


async def test_a_failed_machine_of_the_cluster_stays(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    await see(operator, S.FAILED)
    await asyncio.sleep(10_000)

    assert shown(world) == {"m": "Failed"}


@pytest.mark.parametrize("end", [S.SPECULATIVE, S.DELETING, S.UNSPECIFIED])
async def test_a_machine_that_goes_takes_its_object_along(world: NodeWorld, end: MachineState) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    await see(operator, end)

    assert shown(world) == {}


async def test_an_object_that_a_person_deleted_comes_back(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    world.server.remove(UPCOMING_NODES, upcoming_node_name("m"))
    await asyncio.sleep(1)
    await see(operator, S.CONFIGURED)

    assert shown(world) == {"m": "Ready"}


async def test_what_a_person_changed_is_put_right(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED, resources={"cpu": "8"})
    await operator.api.patch(UPCOMING_NODES.status, upcoming_node_name("m"), {"status": {"phase": "Failed"}})
    await operator.api.patch(UPCOMING_NODES, upcoming_node_name("m"), {"spec": {"resources": {"cpu": "1"}}})
    await asyncio.sleep(1)

    assert shown(world) == {"m": "Ready"}
    assert read(world).spec.resources == {"cpu": "8"}


# ---- resync ------------------------------------------------------------------------------------------------------


async def test_what_a_former_leader_writes_once_more_after_the_resync_is_deleted(world: NodeWorld) -> None:
    """It was paused, and writes what it knew before it notices that it does not lead any more."""
    former = world.operator()
    await see(former, S.DRAINING, "a")
    await former.stop()
    leader = world.operator()
    await see(leader, S.CONFIGURED, "b")
    leader.resync("b")
    await asyncio.sleep(1)
    assert shown(world) == {"b": "Ready"}

    name = upcoming_node_name("a")
    late = NodeStateUpdate(machine_id="a", cluster_id="c", state=S.DRAINING)
    await former.api.apply(UPCOMING_NODES, name, spec_body(name, late), field_manager=FIELD_MANAGER)
    await asyncio.sleep(1)
    assert shown(world) == {"b": "Ready"}


async def test_a_resync_deletes_the_objects_of_machines_that_it_does_not_name(world: NodeWorld) -> None:
    first = world.operator()
    for machine in ("a", "b", "odd/id"):
        await see(first, S.CONFIGURED, machine)
    await first.stop()
    world.server.put(UPCOMING_NODES, {"metadata": {"name": "un-foreign"}, "spec": {"resources": {}}})
    second = world.operator()
    await see(second, S.CONFIGURED, "a")
    second.resync("a")
    await asyncio.sleep(1)

    assert sorted(found.metadata.name for found in world.server.read_all(UPCOMING_NODES)) == ["un-a", "un-foreign"]


async def test_a_frame_after_the_resync_saves_an_object(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED)
    operator.resync()
    operator.see("m", S.DRAINING)
    await asyncio.sleep(1)

    assert shown(world) == {"m": "Draining"}


async def test_an_object_that_is_being_created_during_the_resync_does_not_leak(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.latency_seconds = 1.0
    operator.see("m", S.CONFIGURED)
    await asyncio.sleep(0.5)
    operator.resync()
    await asyncio.sleep(20)

    assert shown(world) == {}


async def test_writes_are_retried_once_the_api_server_is_back(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.is_down = True
    operator.see("m", S.CONFIGURED)
    await asyncio.sleep(300)
    operator.api.faults.is_down = False
    await asyncio.sleep(61)

    assert shown(world) == {"m": "Ready"}


async def test_an_object_that_is_refused_harms_no_other(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.refuse = lambda call: (
        ApiError(422, "Invalid", "spec is wrong") if call.name == "un-bad" else None
    )
    await see(operator, S.CONFIGURED, "bad")
    await see(operator, S.CONFIGURED, "good")

    assert shown(world) == {"good": "Ready"}


async def test_phases_are_counted(world: NodeWorld) -> None:
    operator = world.operator()
    await see(operator, S.CONFIGURED, "a")
    await see(operator, S.CONFIGURED, "b")
    await see(operator, S.CREATING, "c")

    assert operator.upcoming.count_phases() == {"Ready": 2, "Provisioning": 1}


@pytest.mark.parametrize("state", [S.CREATING, S.CONFIGURED])
@pytest.mark.parametrize("deletion", [0.05, 0.15, 0.25, 0.35, 0.45])
async def test_an_object_that_is_deleted_while_it_is_written_is_made_again(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch, deletion: float, state: MachineState
) -> None:
    """Also when the watch shows the deletion before the answer to the write arrives: they use two connections."""
    operator = world.operator()
    answer = operator.api.apply

    async def answer_later(*args: Any, **named: Any) -> UpcomingNode:
        stored: UpcomingNode = await answer(*args, **named)
        await asyncio.sleep(0.2)
        return stored

    monkeypatch.setattr(operator.api, "apply", answer_later)
    operator.see("m", state)
    await asyncio.sleep(deletion)
    if world.server.read(UPCOMING_NODES, upcoming_node_name("m")) is not None:
        world.server.remove(UPCOMING_NODES, upcoming_node_name("m"))
    await asyncio.sleep(60)

    assert shown(world) == {"m": {S.CREATING: "Provisioning", S.CONFIGURED: "Ready"}[state]}


async def test_an_object_that_came_and_went_while_the_watch_was_away_is_made_again(world: NodeWorld) -> None:
    """The list after a lost connection does not show that it was deleted, only the refused status does."""
    world.server.faults.latency_seconds = 0.2
    operator = world.operator()
    operator.upcoming_view.is_paused = True
    operator.see("m", S.CREATING)
    await asyncio.sleep(0.3)
    world.server.remove(UPCOMING_NODES, upcoming_node_name("m"))
    await asyncio.sleep(0.06)
    operator.upcoming_view.relist()
    await asyncio.sleep(60)

    assert shown(world) == {"m": "Provisioning"}


def _loses(refuse: Callable[[ApiCall], ApiError | None]) -> Callable[[ApiCall], bool]:
    return lambda call: refuse(call) is not None


BOUND = (S.CONFIGURING, S.CONFIGURED, S.DRAINING)
MACHINES = ("a", "b", "odd/id")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), st.sampled_from(MACHINES), st.sampled_from(list(S))),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.2, 3.0, 700.0])),
        st.tuples(st.just("restart")),
        st.tuples(st.just("delete"), st.sampled_from(MACHINES)),
        st.tuples(st.just("refuse"), st.integers(1, 5)),
        st.tuples(st.just("lose"), st.integers(1, 3)),
        st.tuples(st.just("resync"), st.sets(st.sampled_from(MACHINES))),
    ),
    max_size=12,
)


@example(steps=[("lose", 1), ("frame", "a", S.SPECULATIVE), ("wait", 0.01)], bound={})
@given(steps=steps, bound=st.dictionaries(st.sampled_from(MACHINES), st.sampled_from(BOUND)))
async def test_after_a_resync_there_are_exactly_the_objects_of_the_bound_machines(
    steps: list[tuple[Any, ...]], bound: dict[str, MachineState]
) -> None:
    """Frames in any order, lost and repeated; errors, lost answers, restarts and people in between."""
    world = NodeWorld()
    world.server.faults.latency_seconds = 0.1
    operator = world.operator()
    for step in steps:
        match step:
            case ("frame", machine, state):
                operator.see(machine, state)
            case ("wait", seconds):
                await asyncio.sleep(seconds)
            case ("restart",):
                await operator.stop()
                operator = world.operator()
            case ("delete", machine):
                if world.server.read(UPCOMING_NODES, upcoming_node_name(machine)) is not None:
                    world.server.remove(UPCOMING_NODES, upcoming_node_name(machine))
            case ("refuse", count):
                operator.api.faults.refuse = fail_times(count, ApiError(503, "ServiceUnavailable", "away"))
            case ("lose", count):
                refuse = fail_times(count, ApiError(0, "Unreachable", "lost"), verb="patch")
                operator.api.faults.lose_answer = _loses(refuse)
            case ("resync", named):
                operator.resync(*named)
    for machine, state in bound.items():
        operator.see(machine, state)
    operator.resync(*bound)
    await asyncio.sleep(300)
    phases = {S.CONFIGURING: "Registered", S.CONFIGURED: "Ready", S.DRAINING: "Draining"}
    await world.stop()

    assert shown(world) == {machine: phases[state] for machine, state in bound.items()}
    assert world.server.read_all(PODS) == []
