"""Tying Nodes to machines: by label, else by provider id, never by a guess (docs/spec/operator.md §7.1, §10)."""

import asyncio

import msgspec
import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigfleet.model.frames import NodeStateUpdate
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.resources import MACHINE_ID, NODES
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.names import machine_label
from bigfleet.operator.work_queue import WorkQueue
from bigfleet.sim.kubernetes.faults import fail_times
from tests.engine.proof import in_proportion
from tests.operator.nodes.node_world import NodeWorld, Operator, node_body

pytestmark = pytest.mark.virtual_time

CONFIGURED = MachineState.CONFIGURED
#: No label can hold it.
ODD_ID = "aws/i-1#a"


def tied(operator: Operator, machine_id: str) -> str | None:
    node = operator.matcher.node_of(machine_id)
    return node.metadata.name if node is not None else None


def record(machine: str = "m", node: str = "", provider_id: str = "") -> DrainRecord:
    return DrainRecord(
        instruction_id="i", machine_id=machine, node=node, provider_id=provider_id, deadline_seconds=60.0,
        preemptor_priority=0, reason="reclaim",
    )  # fmt: skip


async def test_a_labelled_node_is_its_machines_without_a_word_of_the_shard(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()

    assert tied(operator, "m") == "n"
    assert operator.matcher.machine_of("n") == "m"


@pytest.mark.parametrize(
    ("of_node", "of_machine"),
    [
        ("aws:///z1/i-1", "aws:///z1/i-1"),
        ("aws:///z1/i-1", "i-1"),
        ("aws:///z1/i-1", "aws:///i-1"),
        ("hcloud://42", "42"),
        ("azure:///vmss/a/0", "azure:///vmss/a/0"),
    ],
)
async def test_a_provider_id_ties_and_the_tie_is_written(world: NodeWorld, of_node: str, of_machine: str) -> None:
    world.node("n", provider_id=of_node)
    operator = world.operator()
    operator.see(ODD_ID, CONFIGURED, provider_id=of_machine)
    await asyncio.sleep(1)

    metadata = world.read_node("n").metadata
    assert (metadata.labels or {})[MACHINE_ID] == machine_label(ODD_ID)
    assert (metadata.annotations or {})[MACHINE_ID] == ODD_ID
    assert tied(operator, ODD_ID) == "n"


@pytest.mark.parametrize(
    ("of_node", "of_machine"),
    [
        ("aws:///z1/i-11", "i-1"),
        ("i-1", "aws:///z1/i-1"),
        # Instance 0 of one scale set is not instance 0 of another.
        ("azure:///vmss/a/0", "azure:///vmss/b/0"),
        ("", ""),
        ("aws:///z1/", "aws:///z2/"),
    ],
)
async def test_provider_ids_that_only_look_alike_tie_nothing(world: NodeWorld, of_node: str, of_machine: str) -> None:
    world.node("n", provider_id=of_node)
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id=of_machine)
    await asyncio.sleep(1)

    assert tied(operator, "m") is None
    assert MACHINE_ID not in (world.read_node("n").metadata.labels or {})


async def test_a_tie_that_the_cache_does_not_show_yet_is_written_and_logged_once(world: NodeWorld) -> None:
    world.node("n", provider_id="p/m")
    operator = world.operator()
    matcher = operator.matcher
    with structlog.testing.capture_logs() as logs:
        operator.see("m", CONFIGURED, provider_id="p/m")
        # The cache hears of the write only after what happens here.
        before = world.read_node("n")
        await matcher._write_tie("m")
        version = world.read_node("n").metadata.resource_version
        matcher._nodes["n"] = before
        await matcher._write_tie("m")
        assert world.read_node("n").metadata.resource_version == version
        # A report of the kubelet that was on its way arrives first.
        changed = msgspec.structs.replace(before.metadata, resource_version="another")
        matcher.put(msgspec.structs.replace(before, metadata=changed), before)
        await asyncio.sleep(1)
    ties = [each for each in logs if each["event"] == "operator.node_tied"]

    assert [(each["machine"], each["node"]) for each in ties] == [("m", "n")]


async def test_a_tie_that_a_person_removed_is_written_again(world: NodeWorld) -> None:
    world.node("n", provider_id="p/m")
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id="p/m")
    for _ in range(2):
        await asyncio.sleep(1)
        assert (world.read_node("n").metadata.labels or {})[MACHINE_ID] == "m"
        world.node("n", provider_id="p/m")
    await asyncio.sleep(1)

    assert (world.read_node("n").metadata.labels or {})[MACHINE_ID] == "m"


async def test_a_node_that_comes_after_its_machine_is_tied_as_well(world: NodeWorld) -> None:
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id="p://x/m")
    world.node("n", provider_id="p://x/m")
    await asyncio.sleep(1)

    assert tied(operator, "m") == "n"
    assert (world.read_node("n").metadata.labels or {})[MACHINE_ID] == "m"


async def test_an_equal_provider_id_goes_before_one_that_ends_alike(world: NodeWorld) -> None:
    world.node("a", provider_id="p://x/1a")
    world.node("b", provider_id="p://y/1a")
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id="p://y/1a")
    await asyncio.sleep(1)

    assert tied(operator, "m") == "b"


async def test_several_nodes_with_one_provider_id_are_named_and_not_written(world: NodeWorld) -> None:
    world.node("a", provider_id="p://x/1a")
    world.node("b", provider_id="p://y/1a")
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id="1a")
    await asyncio.sleep(1)

    assert tied(operator, "m") is None
    assert operator.matcher.ambiguous("m") == ("a", "b")
    assert all(MACHINE_ID not in (world.read_node(name).metadata.labels or {}) for name in "ab")

    world.server.remove(NODES, "a")
    await asyncio.sleep(1)
    assert tied(operator, "m") == "b"
    assert operator.matcher.ambiguous("m") == ()


async def test_two_machines_with_one_provider_id_tie_nothing(world: NodeWorld) -> None:
    operator = world.operator()
    for machine in ("m", "o"):
        operator.see(machine, CONFIGURED, provider_id="p://x/1a")
    world.node("n", provider_id="p://x/1a")
    await asyncio.sleep(1)
    assert (tied(operator, "m"), tied(operator, "o")) == (None, None)

    operator.see("o", MachineState.IDLE)
    await asyncio.sleep(1)
    assert tied(operator, "m") == "n"


async def test_a_machine_that_comes_later_makes_an_unwritten_tie_ambiguous(world: NodeWorld) -> None:
    world.node("n", provider_id="p://x/1a")
    matcher = _matcher(world)
    matcher.put(world.read_node("n"), None)
    matcher.node_state(_frame("m", CONFIGURED, "1a"))
    assert matcher.machine_of("n") == "m"
    matcher.node_state(_frame("o", CONFIGURED, "p://y/1a"))
    assert matcher.machine_of("n") is None
    matcher.node_state(_frame("equal", CONFIGURED, "p://x/1a"))

    assert matcher.machine_of("n") == "equal"


async def test_a_label_goes_before_a_provider_id(world: NodeWorld) -> None:
    world.node("labelled", "m")
    world.node("alike", provider_id="p://x/m")
    operator = world.operator()
    operator.see("m", CONFIGURED, provider_id="p://x/m")
    await asyncio.sleep(1)

    assert tied(operator, "m") == "labelled"


async def test_a_hashed_label_needs_its_annotation_or_the_shard(world: NodeWorld) -> None:
    world.server.put(
        NODES, {**node_body("n"), "metadata": {"name": "n", "labels": {MACHINE_ID: machine_label(ODD_ID)}}}
    )
    operator = world.operator()
    assert operator.matcher.machine_of("n") is None
    operator.see(ODD_ID, CONFIGURED)
    await asyncio.sleep(1)

    assert operator.matcher.machine_of("n") == ODD_ID
    assert (world.read_node("n").metadata.annotations or {})[MACHINE_ID] == ODD_ID
    second = world.operator()
    assert second.matcher.machine_of("n") == ODD_ID


async def test_a_tie_is_written_once_the_api_server_is_back(world: NodeWorld) -> None:
    world.node("n", provider_id="p://x/m")
    operator = world.operator()
    operator.api.faults.refuse = fail_times(4, ApiError(503, "ServiceUnavailable", "away"), verb="patch")
    operator.see("m", CONFIGURED, provider_id="p://x/m")
    await asyncio.sleep(60)

    assert (world.read_node("n").metadata.labels or {})[MACHINE_ID] == "m"


async def test_a_node_under_an_old_name_is_not_labelled(world: NodeWorld) -> None:
    world.node("n", provider_id="p://x/m")
    operator = world.operator()
    operator.nodes_view.is_paused = True
    world.server.remove(NODES, "n")
    world.node("n", provider_id="p://x/other")
    operator.see("m", CONFIGURED, provider_id="p://x/m")
    await asyncio.sleep(5)

    assert MACHINE_ID not in (world.read_node("n").metadata.labels or {})


async def test_machines_without_a_node_are_counted_after_five_minutes(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    operator.see("late", CONFIGURED)
    operator.see("booting", MachineState.CONFIGURING)
    await asyncio.sleep(290)
    assert operator.matcher.count_unmatched() == 0
    operator.see("late", CONFIGURED)
    await asyncio.sleep(20)
    assert operator.matcher.count_unmatched() == 1
    world.node("l", "late")
    await asyncio.sleep(1)
    assert operator.matcher.count_unmatched() == 0


# ---- which node a drain means ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drain", "nodes"),
    [
        (record(provider_id="p://x/1a"), ("by-id",)),
        (record(provider_id="1a"), ("by-id",)),
        (record(provider_id="p://x/nobody"), ("by-label",)),
        (record(), ("by-label",)),
        (record("another", node="by-name"), ("by-name",)),
        (record("another", node="by-label"), ()),
        (record("another", node="absent"), ()),
        (record(provider_id="2b"), ("twin-1", "twin-2")),
        # Equality decides against any label; a like ending does not.
        (record("another", provider_id="p://x/m"), ("by-label",)),
        (record("another", provider_id="m"), ()),
    ],
    ids=str,
)
async def test_a_drain_means_the_first_rule_that_finds_any(
    world: NodeWorld, drain: DrainRecord, nodes: tuple[str, ...]
) -> None:
    world.node("by-id", provider_id="p://x/1a")
    world.node("by-label", "m", provider_id="p://x/m")
    world.node("by-name")
    world.node("twin-1", provider_id="p://x/2b")
    world.node("twin-2", provider_id="p://y/2b")
    operator = world.operator()

    assert tuple(node.metadata.name for node in operator.matcher.search(drain).nodes) == nodes


# ---- any order of events -----------------------------------------------------------------------------------------

MACHINES = ("m1", "m2", ODD_ID)
PROVIDER_IDS = ("", "p://x/a", "p://y/a", "a", "p://x/b")
events = st.lists(
    st.one_of(
        st.tuples(
            st.just("node"), st.sampled_from("xyz"), st.sampled_from(["", *MACHINES]), st.sampled_from(PROVIDER_IDS)
        ),
        st.tuples(st.just("gone"), st.sampled_from("xyz")),
        st.tuples(st.just("machine"), st.sampled_from(MACHINES), st.sampled_from(PROVIDER_IDS)),
        st.tuples(st.just("left"), st.sampled_from(MACHINES)),
    ),
    max_size=14,
)


@settings(max_examples=in_proportion(800))
@example(
    [("node", "x", "", "p://x/a"), ("machine", "m1", "p://x/a"), ("machine", "m2", "p://x/a"), ("machine", "m1", "")]
)
@given(events)
async def test_indexes_that_follow_events_agree_with_ones_made_from_the_end(steps: list[tuple[str, ...]]) -> None:
    """The order in which Nodes and machines came does not matter."""
    world = NodeWorld()
    follower = _matcher(world)
    nodes: dict[str, tuple[str, str]] = {}
    machines: dict[str, str] = {}
    for step in steps:
        match step:
            case ("node", name, machine, provider_id):
                nodes[name] = (machine, provider_id)
                _put(world, follower, name, machine, provider_id)
            case ("gone", name):
                if nodes.pop(name, None) is not None:
                    node = world.read_node(name)
                    world.server.remove(NODES, name)
                    follower.remove(node)
            case ("machine", machine, provider_id):
                machines[machine] = provider_id
                follower.node_state(_frame(machine, CONFIGURED, provider_id))
            case ("left", machine):
                machines.pop(machine, None)
                follower.node_state(_frame(machine, MachineState.IDLE, ""))
    fresh = _matcher(world)
    for machine, provider_id in machines.items():
        fresh.node_state(_frame(machine, CONFIGURED, provider_id))
    for name in sorted(nodes, reverse=True):
        fresh.put(world.read_node(name), None)

    def ties(matcher: NodeMatcher) -> list[object]:
        nodes = [(m, getattr(matcher.node_of(m), "metadata", None)) for m in MACHINES]
        ambiguous = [matcher.ambiguous(m) for m in MACHINES]
        return [*nodes, *ambiguous, *(matcher.machine_of(name) for name in "xyz")]

    assert ties(follower) == ties(fresh)
    for machine in MACHINES:
        tie = follower.node_of(machine)
        assert tie is None or follower.machine_of(tie.metadata.name) == machine


def _matcher(world: NodeWorld) -> NodeMatcher:
    clock = world.server.clock
    return NodeMatcher(api=None, queue=WorkQueue(clock=clock, rng=None), clock=clock)  # type: ignore[arg-type]


def _put(world: NodeWorld, matcher: NodeMatcher, name: str, machine: str, provider_id: str) -> None:
    body = node_body(name, provider_id=provider_id)
    if machine:
        body["metadata"]["labels"][MACHINE_ID] = machine_label(machine)
        body["metadata"]["annotations"][MACHINE_ID] = machine
    matcher.put(world.server.put(NODES, body), None)


def _frame(machine: str, state: MachineState, provider_id: str) -> NodeStateUpdate:
    return NodeStateUpdate(machine_id=machine, cluster_id="c", state=state, provider_id=provider_id)
