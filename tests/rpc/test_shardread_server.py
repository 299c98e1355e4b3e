"""`ShardRead` over real gRPC: the last cycle's rows, the live inventory, the newest actions (docs/spec/wire.md §9)."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.engine.decision import ActionKind
from bigfleet.model import labels, vector
from bigfleet.model.frames import CAPABILITY_NODE_STATUS, UnmetReason
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.gen import provider_pb2, shard_pb2, shardread_pb2
from bigfleet.shard.outcomes import ActionOutcome
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.shard.status.views import CycleView, NeedView
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import LiveShard, live_shard
from tests.shard.world import ScriptedProvider, World, machine, need, note_pending

S = MachineState
Code = grpc.StatusCode


@pytest.fixture
async def live() -> AsyncIterator[LiveShard]:
    """A shard whose provider has nothing yet."""
    async with live_shard(World(ScriptedProvider(synchronous=True))) as shard:
        yield shard


async def all_of(call: Any) -> list[Any]:
    """Return every message of a stream."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [message async for message in call]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status with which a stream is refused."""
    with pytest.raises(aio.AioRpcError) as error:
        await all_of(call)
    return error.value.code(), error.value.details() or ""


# ---- InspectNeeds -----------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 12/2")
async def test_before_the_first_cycle_nothing_is_computed(live: LiveShard) -> None:
    """Cycle 0 says so; it does not say that there is no demand."""
    live.world.provider.list_fails = True
    live.world.connect("c1").report(need("c1", "4"))
    await live.world.cycle()
    (header,) = await all_of(live.read.InspectNeeds(shardread_pb2.InspectNeedsRequest()))

    assert (header.header.cycle, header.header.computed_at_unix_nanos, header.header.total_needs) == (0, 0, 0)


@pytest.mark.rule("shard 12/3")
async def test_rows_are_shown_as_they_were_reported_and_decided(live: LiveShard) -> None:
    """A header first; then a met row with what it got, and an unmet one with what it lacks and why."""
    live.world.provider.add(machine("m1", S.IDLE), machine("m2", S.CONFIGURED, cluster="c1"))
    met, unmet = need("c1", "8", priority=700), replace(need("c2", "4"), profile=need("c2", "4", priority=5).profile)
    live.world.connect("c1").report(met)
    live.world.connect("c2").report(unmet)
    for _ in range(2):
        await live.world.step()
    header, one, two = await all_of(live.read.InspectNeeds(shardread_pb2.InspectNeedsRequest()))

    assert (header.header.cycle, header.header.total_needs) == (2, 2)
    assert header.header.computed_at_unix_nanos > START_UNIX_SECONDS * 10**9
    row = one.need
    assert (row.cluster_id, row.profile_fingerprint, row.need.priority) == ("c1", met.fingerprint, 700)
    assert dict(row.need.aggregate_resources) == {"cpu": "8"}
    assert (row.satisfied, row.claimed_machine_count, row.bootstrap_count, row.provision_count) == (True, 2, 1, 0)
    assert not any(row.HasField(name) for name in ("residual_deficit", "matching_supply", "preemption"))
    assert (row.unmet_reason, row.same_satisfiable) == (0, False)
    row = two.need
    assert (row.satisfied, dict(row.residual_deficit.resources)) == (False, {"cpu": "4"})
    assert (row.unmet_reason, row.age_cycles_unmet) == (UnmetReason.PRIORITY_STARVED, 2)
    supply = row.matching_supply
    assert (supply.idle, supply.configured, supply.speculative, supply.capped) == (1, 1, 0, False)
    assert row.arrival_unix_nanos > 0


async def test_rows_can_be_asked_for_by_cluster_and_up_to_a_limit(live: LiveShard) -> None:
    """The header counts what the filter leaves, before the limit; 0 is no limit."""
    live.world.connect("c1").report(*(need("c1", "4", priority=number) for number in range(5)))
    live.world.connect("c2").report(need("c2", "4", priority=9))
    await live.world.cycle()

    async def asked(**request: Any) -> tuple[int, list[int]]:
        header, *rows = await all_of(live.read.InspectNeeds(shardread_pb2.InspectNeedsRequest(**request)))
        return header.header.total_needs, [row.need.need.priority for row in rows]

    assert await asked() == (6, [9, 4, 3, 2, 1, 0])
    assert await asked(cluster_id="c1", limit=2) == (5, [4, 3])
    assert await asked(limit=100) == (6, [9, 4, 3, 2, 1, 0])
    assert await asked(cluster_id="nobody") == (0, [])
    code, details = await refusal(live.read.InspectNeeds(shardread_pb2.InspectNeedsRequest(limit=-1)))
    assert (code, "limit -1" in details) == (Code.INVALID_ARGUMENT, True)


def need_views(count: int) -> tuple[NeedView, ...]:
    """Return that many rows, every second one met."""
    empty = vector.ZERO
    row = need("c1", "4")
    return tuple(
        NeedView(
            need=replace(row, group=f"g{number}"),
            residual=row.aggregate if number % 2 else empty,
            claimed_machines=1,
            bootstraps=0,
            provisions=0,
            domain="",
            satisfiable=True,
            parked=False,
            parked_age_cycles=0,
            unmet_age_cycles=number,
            reason=UnmetReason.NO_MATCHING_SUPPLY if number % 2 else UnmetReason.UNSPECIFIED,
            matching=None,
            victims=2 if number % 2 else 0,
            freed=row.aggregate,
        )
        for number in range(count)
    )


@pytest.mark.rule("shard 12/2")
@pytest.mark.slow
async def test_twenty_thousand_rows_are_streamed(live: LiveShard) -> None:
    """All of them, in order, as they were when the reader came: a cycle that ends meanwhile changes nothing."""
    live.shard.view = CycleView(cycle=7, computed_at_unix_nanos=1, make_needs=lambda: need_views(20_000))
    call = live.read.InspectNeeds(shardread_pb2.InspectNeedsRequest())
    answer = aiter(call)
    async with asyncio.timeout(PATIENCE_SECONDS):
        header = await anext(answer)
        live.shard.view = CycleView(cycle=8)
        rows = [message async for message in answer]

    assert (header.header.cycle, header.header.total_needs, len(rows)) == (7, 20_000, 20_000)
    assert [row.need.age_cycles_unmet for row in rows] == list(range(20_000))
    assert rows[1].need.preemption.victims_found == 2
    assert not rows[2].need.HasField("preemption")


# ---- ListMachines -----------------------------------------------------------------------------------------------


async def page(live: LiveShard, **request: Any) -> tuple[int, list[shardread_pb2.MachineView], str]:
    """Return one page: total, machines and the next token."""
    answer = await all_of(live.read.ListMachines(shardread_pb2.ListMachinesRequest(**request)))
    header, *machines, end = answer
    assert [message.WhichOneof("frame") for message in answer] == ["header", *["machine"] * len(machines), "end"]
    return header.header.total_matched, [message.machine for message in machines], end.end.next_page_token


async def ids(live: LiveShard, **request: Any) -> list[str]:
    """Return the ids of one page."""
    _total, machines, _token = await page(live, **request)
    return [view.machine.id for view in machines]


@pytest.mark.rule("shard 12/4")
async def test_the_inventory_is_paged_by_id(live: LiveShard) -> None:
    """Ids ascending, no machine twice or left out; the last page has no token."""
    live.world.provider.add(*(machine(f"m{number:02d}", S.IDLE) for number in reversed(range(25))))
    await live.world.cycle()
    seen, token, pages = [], "", []
    while True:
        total, machines, token = await page(live, page_size=10, page_token=token)
        seen += [view.machine.id for view in machines]
        pages.append((total, len(machines), token))
        if not token:
            break

    assert pages == [(25, 10, "m09"), (25, 10, "m19"), (25, 5, "")]
    assert seen == [f"m{number:02d}" for number in range(25)]
    assert len(await ids(live)) == 25
    assert (await page(live, page_size=25))[2] == ""


@pytest.mark.rule("shard 12/4")
async def test_a_machine_that_comes_or_goes_between_pages_is_in_or_out(live: LiveShard) -> None:
    """Never twice, and the rest stays in order."""
    live.world.provider.add(*(machine(f"m{number}", S.IDLE) for number in range(6)))
    await live.world.cycle()
    first = await ids(live, page_size=3)
    del live.world.provider.records["m2"], live.world.provider.records["m4"]
    live.world.provider.add(machine("a", S.IDLE), machine("m9", S.IDLE))
    await live.world.cycle()

    assert (first, await ids(live, page_size=3, page_token="m2")) == (["m0", "m1", "m2"], ["m3", "m5", "m9"])


@pytest.mark.rule("shard 12/4")
async def test_what_changed_since_the_last_cycle_is_shown_as_it_is(live: LiveShard) -> None:
    """The inventory is live: what came, went or moved is in its place, in or out, on whatever page."""
    live.world.provider.add(*(machine(f"m{number}", S.IDLE) for number in range(8)))
    await live.world.cycle()
    inventory = live.shard.inventory
    inventory.remove("m2")
    inventory.insert(machine("a", S.CONFIGURED, cluster="c1"), now_seconds=0.0)
    inventory.insert(machine("m45", S.IDLE), now_seconds=0.0)
    inventory.observe(machine("m6", S.CONFIGURED, cluster="c1"), now_seconds=0.0)
    inventory.insert(machine("m7z", S.IDLE), now_seconds=0.0)
    inventory.remove("m7z")

    assert await ids(live, states=[provider_pb2.MACHINE_STATE_CONFIGURED]) == ["a", "m6"]
    token = ""
    for expected, following in ((["m0", "m1", "m3"], "m3"), (["m4", "m45", "m5"], "m5"), (["m7"], "")):
        total, machines, token = await page(
            live, states=[provider_pb2.MACHINE_STATE_IDLE], page_size=3, page_token=token
        )
        assert (total, [view.machine.id for view in machines], token) == (7, expected, following)


@pytest.mark.rule("shard 12/4")
async def test_every_filter_narrows(live: LiveShard) -> None:
    """All of them must hold; the total counts what they leave."""
    live.world.provider.add(
        machine("a", S.IDLE),
        machine("b", S.CONFIGURED, cluster="c1", zone="zb"),
        machine("c", S.CONFIGURED, cluster="c2", instance_type="t8"),
        machine("d", S.SPECULATIVE, capacity_type=CapacityType.SPOT),
        machine("e", S.IDLE),
    )
    live.world.provider.refusals["configure", "a"] = [RefusalKind.NOT_SUPPORTED]
    await live.world.cycle()
    await _hold(live, "a")
    note_pending(live.shard, "e")

    assert await ids(live, cluster_id="c1") == ["b"]
    assert await ids(live, instance_type="t8") == ["c"]
    assert await ids(live, zone="zb") == ["b"]
    assert await ids(live, states=[provider_pb2.MACHINE_STATE_CONFIGURED]) == ["b", "c"]
    assert await ids(live, states=[provider_pb2.MACHINE_STATE_IDLE, provider_pb2.MACHINE_STATE_FAILED]) == ["a", "e"]
    assert await ids(live, capacity_types=[provider_pb2.CAPACITY_TYPE_SPOT]) == ["d"]
    assert await ids(live, flags=["held"]) == ["a"]
    assert await ids(live, flags=["pending"]) == ["e"]
    assert await ids(live, flags=["pending", "held"]) == []
    for flag in ("stuck", "unjoined", "reserved"):
        assert await ids(live, flags=[flag]) == []
    assert await page(live, states=[provider_pb2.MACHINE_STATE_CONFIGURED], zone="za", page_size=1) == (
        1,
        [(await page(live, instance_type="t8"))[1][0]],
        "",
    )


async def _hold(live: LiveShard, machine_id: str) -> None:
    """Let the provider refuse for good to configure a machine."""
    live.world.connect("c9").report(replace(need("c9", "4", priority=1)))
    await live.world.cycle()
    assert live.world.state(machine_id) is S.FAILED


BAD_PAGES: dict[str, tuple[dict[str, Any], str]] = {
    "negative size": ({"page_size": -1}, "page_size -1"),
    "too many": ({"page_size": 100_001}, "page_size 100001"),
    "unknown flag": ({"flags": ["held", "shiny"]}, "'shiny'"),
    "unknown state": ({"states": [99]}, "states: 99"),
    "unknown capacity type": ({"capacity_types": [99]}, "capacity_types: 99"),
    "blank token": ({"page_token": "two words"}, "page_token"),
    "long token": ({"page_token": "m" * 254}, "page_token"),
    "unprintable token": ({"page_token": "m\x001"}, "page_token"),
}


@pytest.mark.parametrize(("request_fields", "named"), BAD_PAGES.values(), ids=BAD_PAGES)
async def test_a_wrong_page_request_is_named(live: LiveShard, request_fields: dict[str, Any], named: str) -> None:
    """What is wrong, and where."""
    call = live.read.ListMachines(shardread_pb2.ListMachinesRequest(**request_fields))
    code, details = await refusal(call)

    assert (code, named in details) == (Code.INVALID_ARGUMENT, True)


async def test_a_machine_is_shown_with_what_the_shard_knows_of_it(live: LiveShard) -> None:
    """Provider facts, stamps, since when it is in its state, and what is under way."""
    live.world.provider.add(machine("m1", S.CONFIGURED, cluster="c1", node_name="n1", interruption_probability=0.5))
    live.world.provider.metadata["m1"] = {
        labels.ASSIGNED_PRIORITY: "700",
        labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: "+Inf",
        labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS: "0.5",
        labels.ASSIGNED_NEED_FINGERPRINT: "p=700",
        labels.ASSIGNED_GROUP: "gang",
    }
    live.world.connect("c1").report()
    await live.world.step()
    _total, (view,), _token = await page(live)

    assert (view.machine.id, view.machine.cluster, view.machine.node_name) == ("m1", "c1", "n1")
    assert (MachineState(view.machine.state), view.machine.interruption_probability) == (S.CONFIGURED, 0.5)
    assert (view.assigned_priority, view.assigned_interruption_penalty_dollars) == (700, math.inf)
    assert (view.assigned_reclamation_penalty_dollars, view.assigned_need_fingerprint) == (0.5, "p=700")
    assert (view.assigned_group, view.pending_action) == ("gang", "Reclaim")
    assert view.state_since_unix_nanos > START_UNIX_SECONDS * 10**9
    assert [view.joined, view.unjoined, view.stuck, view.held] == [False] * 4


@pytest.mark.rule("shard 10.6/3")
async def test_a_machine_that_joined_and_one_that_did_not_are_told_apart() -> None:
    """By their flags, which narrow a list as well."""
    # Real time passes here, so the deadline has passed before anything begins.
    world = World(settings=ShardSettings(join_deadline_seconds=-2.0))
    async with live_shard(world) as live:
        world.provider.add(*(machine(f"m{i}", S.CONFIGURED, cluster="c1") for i in range(2)))
        operator = world.connect("c1", CAPABILITY_NODE_STATUS)
        await world.step()
        operator.saw("m0")
        # The minute that a session gets has passed.
        operator.session.opened_seconds -= 3600
        await world.step()
        _total, views, _token = await page(live)

        assert [(view.joined, view.unjoined) for view in views] == [(True, False), (False, True)]
        assert await ids(live, flags=["unjoined"]) == ["m1"]


# ---- ListActions ------------------------------------------------------------------------------------------------


async def actions(live: LiveShard, **request: Any) -> list[shardread_pb2.ActionRecord]:
    """Return the actions of one answer."""
    call = live.read.ListActions(shardread_pb2.ListActionsRequest(**request))
    return [message.action for message in await all_of(call)]


@pytest.mark.rule("shard 12/11")
async def test_actions_are_listed_newest_first(live: LiveShard) -> None:
    """Finished ones with outcome and text, running ones without."""
    live.world.provider.add(machine("m1", S.IDLE), machine("m2", S.CONFIGURED, cluster="c2"))
    live.world.provider.refusals["configure", "m1"] = [RefusalKind.EXHAUSTED]
    live.world.connect("c1").report(need("c1", "4"))
    await live.world.cycle()
    live.world.connect("c2").report()
    await live.world.step()
    running, newer, older = await actions(live)

    assert (older.kind, older.machine_id, older.cluster_id) == ("Bootstrap", "m1", "c1")
    assert (older.outcome, older.message) == ("exhausted", "configure: as scripted")
    assert (older.reason, older.decided_cycle, older.executed_cycle) == ("phase1.idle", 1, 1)
    assert START_UNIX_SECONDS * 10**9 < older.decided_unix_nanos <= older.finished_unix_nanos
    assert (newer.kind, newer.outcome) == ("Bootstrap", "")
    assert (running.kind, running.reason, running.grace_seconds) == ("Reclaim", "phase3.excess", 600)
    assert (running.outcome, running.finished_unix_nanos, running.executed_cycle) == ("", 0, 0)
    assert len({running.action_id, newer.action_id, older.action_id}) == 3


async def test_actions_can_be_narrowed(live: LiveShard) -> None:
    """By cluster, machine, kind, outcome, time and number; all must hold."""
    live.world.provider.add(*(machine(f"m{number}", S.IDLE) for number in range(4)))
    live.world.provider.refusals["configure", "m0"] = [RefusalKind.EXHAUSTED]
    live.world.connect("c1").report(need("c1", "8"))
    live.world.connect("c2").report(need("c2", "8", priority=5))
    await live.world.cycle()
    everything = await actions(live)

    async def machines(**request: Any) -> list[str]:
        return [record.machine_id for record in await actions(live, **request)]

    assert [record.machine_id for record in everything] == ["m3", "m2", "m1", "m0"]
    assert await machines(limit=2) == ["m3", "m2"]
    assert await machines(cluster_id="c1") == ["m1", "m0"]
    assert await machines(machine_id="m2") == ["m2"]
    assert await machines(outcomes=[ActionOutcome.EXHAUSTED.value]) == ["m0"]
    assert await machines(kinds=[ActionKind.RECLAIM.label]) == []
    assert await machines(kinds=["Bootstrap"], outcomes=["success"], cluster_id="c2") == ["m3", "m2"]
    assert await machines(since_unix_nanos=everything[1].decided_unix_nanos + 10**9) == []
    for limit in (-1, 10_001):
        code, details = await refusal(live.read.ListActions(shardread_pb2.ListActionsRequest(limit=limit)))
        assert (code, "limit" in details) == (Code.INVALID_ARGUMENT, True)


async def test_an_answer_without_a_limit_has_at_most_a_thousand_actions() -> None:
    """The newest; a limit may ask for more."""
    world = World(ScriptedProvider(), settings=ShardSettings(dry_run=True))
    world.provider.add(*(machine(f"m{number:04d}", S.IDLE) for number in range(600)))
    async with live_shard(world) as live:
        world.connect("c1").report(need("c1", "2400"))
        for _ in range(2):
            await world.cycle()

        newest = await actions(live)
        assert (len(newest), len(await actions(live, limit=10_000))) == (1000, 1200)
        assert (newest[0].outcome, newest[0].decided_cycle, newest[-1].decided_cycle) == ("dryrun", 2, 1)


# ---- ListSessions -----------------------------------------------------------------------------------------------


async def sessions(live: LiveShard, **asked: Any) -> dict[str, shardread_pb2.SessionView]:
    """Return the sessions that are listed, by cluster, in their order."""
    answers = await all_of(live.read.ListSessions(shardread_pb2.ListSessionsRequest(**asked)))
    return {answer.session.cluster_id: answer.session for answer in answers}


@pytest.mark.rule("shard 12/12")
async def test_sessions_are_listed_with_what_the_shard_knows_of_each(live: LiveShard) -> None:
    """Who is connected since when, when it last reported, its rows, and what waits for it."""
    before = await sessions(live)
    session = await live.connect("c2", CAPABILITY_NODE_STATUS)
    live.world.connect("c1").report(need("c1", "4"), need("c1", "8"))
    listed = await sessions(live)

    assert before == {}
    assert list(listed) == ["c1", "c2"]
    one, two = listed.values()
    assert (one.state, one.rows, two.rows, list(two.capabilities)) == ("connected", 2, 0, [CAPABILITY_NODE_STATUS])
    assert one.last_rollup_unix_nanos >= one.since_unix_nanos > START_UNIX_SECONDS * 10**9
    assert (two.last_rollup_unix_nanos, two.outbox_frames, two.outbox_dropped, two.rollup_held) == (0, 0, 0, False)
    assert list(await sessions(live, cluster_id="c2")) == ["c2"]
    assert await sessions(live) == listed
    session.vanish()


@pytest.mark.rule("shard 12/12")
async def test_a_cluster_that_is_missed_is_listed_without_a_session(live: LiveShard) -> None:
    """Away since its session ended, with the demand that stands; a cluster that nobody knows is not listed."""
    operator = live.world.connect("c1")
    operator.report(need("c1", "4"))
    await live.world.cycle()
    live.shard.sessions.close(operator.session, CloseReason.GONE)
    live.world.connect("c9")
    await live.world.cycle()
    (away, connected) = (await sessions(live)).values()

    assert (away.cluster_id, away.state, away.rows, connected.cluster_id) == ("c1", "away", 1, "c9")
    assert away.since_unix_nanos >= away.last_rollup_unix_nanos > 0
    assert await sessions(live, cluster_id="c7") == {}


@pytest.mark.rule("shard 12/12")
async def test_a_held_roll_up_is_shown_where_its_operator_is(live: LiveShard) -> None:
    operator = live.world.connect("c1")
    operator.report(*(need("c1", "1", priority=priority) for priority in range(12)))
    operator.report()
    view = (await sessions(live))["c1"]

    assert (view.rollup_held, view.rows) == (True, 12)


async def test_a_malformed_cluster_id_of_sessions_is_named(live: LiveShard) -> None:
    code, details = await refusal(live.read.ListSessions(shardread_pb2.ListSessionsRequest(cluster_id="a b")))

    assert (code, details.startswith("cluster_id ")) == (Code.INVALID_ARGUMENT, True)


# ---- everything else --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["InspectNeeds", "ListMachines", "ListActions", "ListSessions", "ExplainNeed", "ExplainMachine"]
)
async def test_random_bytes_end_in_a_status(live: LiveShard, method: str) -> None:
    """And cost nobody else anything."""
    session = await live.connect("c1")
    raw: Any = live.channel.unary_stream(
        f"/bigfleet.v1alpha1.ShardRead/{method}", request_serializer=bytes, response_deserializer=bytes
    )
    for content in (b"\xff\xff\xff", b"\x0a\xff", bytes(range(256))):
        code, _details = await refusal(raw(content))
        assert code is Code.INVALID_ARGUMENT
    await session.say(hello=shard_pb2.Hello(cluster_id="c1"))
    await session.hear_ack("hello")


async def test_each_service_is_healthy(live: LiveShard) -> None:
    """The process and both services."""
    stub: Any = health_pb2_grpc.HealthStub(live.channel)
    for service in ("", "bigfleet.v1alpha1.Shard", "bigfleet.v1alpha1.ShardRead"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
