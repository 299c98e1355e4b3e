"""What is read of a shard, added up, and what a restart of it does to the counts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.observer import LOST, RUNNING, ActionTally, SeenAction, ShardObserver, gpu_models
from bigfleet.model import labels
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shardread_pb2, shardread_pb2_grpc

CLUSTERS = ("cluster-0", "cluster-1")


def seen(id: str, outcome: str = RUNNING, decided: int = 1, kind: str = "Bootstrap") -> SeenAction:
    return SeenAction(
        action_id=id,
        kind=kind,
        machine_id="m",
        cluster_id="c",
        reason="phase1.idle",
        outcome=outcome,
        decided_unix_nanos=decided,
    )


def test_an_action_is_counted_once_however_often_it_is_seen() -> None:
    tally = ActionTally()
    for action in (seen("a"), seen("a"), seen("a", "success"), seen("a", "success"), seen("a")):
        tally.take(action)

    assert tally.counts() == {"Bootstrap": {"success": 1}}
    assert tally.total == 1
    assert len(tally.recent) == 1


def test_actions_are_asked_for_from_the_oldest_that_may_still_end() -> None:
    tally = ActionTally()
    tally.take(seen("slow", decided=5))
    tally.take(seen("quick", "success", decided=9))
    assert tally.since_unix_nanos == 5
    tally.take(seen("slow", "success", decided=5))

    assert tally.since_unix_nanos == 9


def test_what_ran_when_its_shard_died_is_counted_as_lost() -> None:
    tally = ActionTally()
    tally.take(seen("a", kind="Reclaim"))
    tally.take(seen("b", "success", kind="Reclaim"))
    tally.shard_restarted()

    assert tally.counts() == {"Reclaim": {LOST: 1, "success": 1}}


def requirement(operator: str, *values: str, key: str = labels.GPU_PRODUCT) -> capacity_pb2.NodeSelectorRequirement:
    number = capacity_pb2.NodeSelectorRequirement.Operator.Value(f"OPERATOR_{operator}")
    return capacity_pb2.NodeSelectorRequirement(key=key, operator=number, values=values)


@pytest.mark.parametrize(
    ("requirements", "models"),
    [
        ([], ""),
        ([requirement("EXISTS")], "any"),
        ([requirement("IN", "T4", "V100")], "T4|V100"),
        ([requirement("DOES_NOT_EXIST")], ""),
        ([requirement("IN", "z", key=labels.ZONE)], ""),
    ],
)
def test_a_row_names_the_gpu_models_that_would_do(requirements: list[Any], models: str) -> None:
    assert gpu_models(capacity_pb2.CapacityNeed(requirements=requirements)) == models


class FakeShardRead(shardread_pb2_grpc.ShardReadServicer):
    """A shard's read side with answers that a test sets."""

    def __init__(self) -> None:
        self.cycle = 0
        self.computed_at = 0
        self.needs: list[shardread_pb2.NeedView] = []
        self.machines: list[provider_pb2.Machine] = []
        self.actions: list[shardread_pb2.ActionRecord] = []

    async def InspectNeeds(self, request: Any, context: Any) -> AsyncIterator[shardread_pb2.InspectNeedsResponse]:
        header = shardread_pb2.InspectNeedsHeader(cycle=self.cycle, computed_at_unix_nanos=self.computed_at)
        yield shardread_pb2.InspectNeedsResponse(header=header)
        for need in self.needs:
            yield shardread_pb2.InspectNeedsResponse(need=need)

    async def ListMachines(self, request: Any, context: Any) -> AsyncIterator[shardread_pb2.ListMachinesResponse]:
        left = [machine for machine in self.machines if machine.id > request.page_token]
        for machine in left[:2]:
            yield shardread_pb2.ListMachinesResponse(machine=shardread_pb2.MachineView(machine=machine))
        token = left[1].id if len(left) > 2 else ""
        yield shardread_pb2.ListMachinesResponse(end=shardread_pb2.ListMachinesEnd(next_page_token=token))

    async def ListActions(self, request: Any, context: Any) -> AsyncIterator[shardread_pb2.ListActionsResponse]:
        for action in reversed(self.actions):
            yield shardread_pb2.ListActionsResponse(action=action)

    async def ListSessions(self, request: Any, context: Any) -> AsyncIterator[shardread_pb2.ListSessionsResponse]:
        yield shardread_pb2.ListSessionsResponse()

    async def ListExchanges(self, request: Any, context: Any) -> AsyncIterator[shardread_pb2.ListExchangesResponse]:
        yield shardread_pb2.ListExchangesResponse()

    async def ExplainNeed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("no view asks for it")

    async def ExplainMachine(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("no view asks for it")


class Bench:
    """A served shard and its observer."""

    def __init__(self) -> None:
        self.shard = FakeShardRead()
        self.server = aio.server()
        shardread_pb2_grpc.add_ShardReadServicer_to_server(self.shard, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.observer = ShardObserver(f"127.0.0.1:{port}", CLUSTERS, SystemClock())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.server.start()
    yield bench
    await bench.observer.close()
    await bench.server.stop(None)


def need(cluster: str, cpu: str, short: str = "", claimed: int = 0) -> shardread_pb2.NeedView:
    view = shardread_pb2.NeedView(cluster_id=cluster, claimed_machine_count=claimed)
    view.need.aggregate_resources["cpu"] = cpu
    if short:
        view.residual_deficit.resources["cpu"] = short
    return view


def machine(id: str, state: MachineState, cluster: str = "", price: float = 0.0) -> provider_pb2.Machine:
    record = provider_pb2.Machine(
        id=id,
        state=state.value,  # type: ignore[arg-type]
        cluster=cluster,
        price_per_hour=price,
        capacity_type=CapacityType.SPOT.value,  # type: ignore[arg-type]
    )
    record.resources.resources["cpu"] = "99"
    record.allocatable.resources["cpu"] = "4"
    return record


async def test_the_figures_are_the_shard_s_rows_and_machines_added_up(bench: Bench) -> None:
    bench.shard.cycle = 3
    bench.shard.needs = [need("cluster-0", "2", claimed=2), need("cluster-0", "3500m", short="500m", claimed=1)]
    bench.shard.machines = [
        machine("a", MachineState.CONFIGURED, "cluster-0", 1.5),
        machine("b", MachineState.CONFIGURING, "cluster-0", 0.5),
        machine("c", MachineState.DRAINING, "cluster-0", 0.25),
        machine("d", MachineState.IDLE, price=9.0),
        machine("e", MachineState.FAILED, "cluster-0", 7.0),
        machine("f", MachineState.CREATING),
        machine("g", MachineState.CREATING),
    ]
    bench.shard.actions = [
        shardread_pb2.ActionRecord(action_id="1", kind="Provision", machine_id="f", cluster_id="cluster-0"),
        shardread_pb2.ActionRecord(
            action_id="2", kind="Provision", machine_id="g", cluster_id="cluster-0", outcome="exhausted"
        ),
    ]

    figures = await bench.observer.look()

    one = figures.clusters["cluster-0"]
    assert (one.demand, one.shortfall, one.bound) == ({"cpu": 5500}, {"cpu": 500}, {"cpu": 4000})
    assert (one.bound_machines, one.pending_machines, one.cost_usd_per_hour) == (1, 2, 2.25)
    assert figures.clusters["cluster-1"].demand == {}
    assert sum(figures.machines.values()) == 7
    assert [one.id for one in figures.inventory] == ["a", "b", "c", "d", "e", "f", "g"]
    assert figures.provisioning == {"f": "cluster-0"}
    assert figures.shortfall_by_model == {"": {"cpu": 500}}


async def test_a_fresh_shard_that_has_not_decided_hides_nothing(bench: Bench) -> None:
    bench.shard.cycle, bench.shard.needs = 40, [need("cluster-0", "2")]
    bench.shard.actions = [shardread_pb2.ActionRecord(action_id="x", kind="Delete", decided_unix_nanos=1)]
    await bench.observer.look()
    bench.shard.cycle, bench.shard.needs, bench.shard.actions = 0, [], []
    assert (await bench.observer.look()).demand == {"cpu": 2000}
    heard = [bench.observer.answers]
    bench.shard.cycle = 2
    await bench.observer.look()
    heard.append(bench.observer.answers)

    assert heard == [False, True]
    assert bench.observer.cycles_total == 42
    assert bench.observer.actions.counts() == {"Delete": {LOST: 1}}


async def test_figures_after_a_time_are_waited_for(bench: Bench) -> None:
    bench.shard.cycle, bench.shard.computed_at = 1, 100
    waiting = asyncio.create_task(bench.observer.look_after(100))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    bench.shard.cycle, bench.shard.computed_at = 2, 101

    assert (await waiting).computed_at_unix_nanos == 101


async def test_the_last_answer_stands_while_the_shard_is_away(bench: Bench) -> None:
    bench.shard.cycle, bench.shard.needs = 1, [need("cluster-0", "2")]
    await bench.observer.look()
    await bench.server.stop(None)

    assert (await bench.observer.look()).demand == {"cpu": 2000}
    assert not bench.observer.answers
