"""Two shards, a coordinator on SQLite and a provider as processes: capacity moves, and outages stop nothing else.

docs/spec/coordinator.md §9 and §12, docs/spec/shard.md §15.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from bigfleet.engine.columnar.engine import warm_up
from bigfleet.model import labels
from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.fake import INSTANCE_TYPE
from bigfleet.rpc.wire.gen import capacity_pb2, coordinator_pb2_grpc
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from tests.e2e.fault_world import LiveOperator, LiveProvider, LiveShard, live_shard, until
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port, serving

pytestmark = pytest.mark.slow
ZONES = {"zone-a": "east-0", "zone-b": "east-1", "zone-c": "east-1"}
PACE = "500ms"


class Watch:
    """Looks all the time at which shard has which machine."""

    def __init__(self, first: LiveShard, second: LiveShard) -> None:
        self._pair = first, second
        self._ends = threading.Event()
        #: Machines that both shards had at one moment, and how often it was looked.
        self.shared: set[str] = set()
        self.looks = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        first, second = self._pair
        while not self._ends.wait(0.02):
            try:
                before, between, after = first.machines(), second.machines(), first.machines()
            except grpc.RpcError:
                continue  # one of them is being started
            # Who had it before and after had it in between.
            self.shared |= before.keys() & between.keys() & after.keys()
            self.looks += 1

    def end(self) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_SECONDS)


@dataclass
class Fleet:
    """What runs."""

    provider: LiveProvider
    address: str
    place: Path
    shards: tuple[LiveShard, LiveShard]

    def coordinator(self) -> AbstractContextManager[Any]:
        """Run the coordinator on its store, always at one address."""
        return serving(
            self.address,
            self.place / "coordinator.log",
            *("coordinator", "--listen", self.address, "--advertise-addr", self.address, "--metrics-addr", "off"),
            *("--store", f"sqlite://{self.place}/coordinator.db", "--report-interval", PACE, "--lease-ttl", "2s"),
            *("--rebalance-interval", "1s", "--rebalance-age", "2", "--rebalance-preempt-age", "4"),
        )

    def ask(self, method: str, request: Any) -> Any:
        """Call the coordinator."""
        with grpc.insecure_channel(self.address) as channel:
            return getattr(coordinator_pb2_grpc.CoordinatorStub(channel), method)(request, timeout=PATIENCE_SECONDS)

    def hand_out_zones(self) -> None:
        """Give each shard its zones, once both have reported."""
        until(lambda: len(self.ask("ListShards", pb.ListShardsRequest()).shards), lambda n: n == 2, "registered")
        for zone, shard in ZONES.items():
            request = pb.AssignDomainRequest(topology_key=labels.ZONE, topology_value=zone, shard_id=shard)
            self.ask("AssignDomain", request)
        until(self.held, lambda held: held == (3, 6), "the domains reach the shards")

    def held(self) -> tuple[int, int]:
        """Return how many machines each shard has."""
        first, second = self.shards
        return len(first.machines()), len(second.machines())


@contextmanager
def fleet(place: Path) -> Iterator[Fleet]:
    """Run a provider of nine bare machines and two shards that own nothing yet."""
    # Each process would compile the engine's kernels for itself, for a minute.
    warm_up()
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        provider = LiveProvider(place, 9)
        provider.backend.slots = [replace(s, capacity_type=CapacityType.BARE_METAL) for s in provider.backend.slots]
        provider.backend.hosts = {slot.id: f"host-{slot.id}" for slot in provider.backend.slots}
        stack.callback(provider.stop)
        provider.start()
        flags = ("--coordinator-addr", address, "--ownership", "assigned", "--report-interval", PACE)
        shards = [
            stack.enter_context(live_shard(place / name, provider.address, "--id", name, *flags))
            for name in ("east-0", "east-1")
        ]
        yield Fleet(provider, address, place, (shards[0], shards[1]))


class PricedOperator(LiveOperator):
    """An operator whose work has a priority, and costs something to interrupt."""

    def want(self, cpu: str, *, priority: int, bucket: int) -> None:
        row = capacity_pb2.CapacityNeed(
            aggregate_resources={"cpu": cpu},
            min_unit={"cpu": "1"},
            priority=priority,
            interruption_penalty_bucket=capacity_pb2.PenaltyBucket.ValueType(bucket),
            requirements=[
                capacity_pb2.NodeSelectorRequirement(
                    key=labels.INSTANCE_TYPE,
                    operator=capacity_pb2.NodeSelectorRequirement.OPERATOR_IN,
                    values=[INSTANCE_TYPE],
                )
            ],
        )
        rollup = capacity_pb2.ClusterCapacityNeeds(
            cluster_id=self.cluster, timestamp_unix_nanos=time.time_ns(), needs=[row]
        )
        self._say(rollup=rollup)


def served(shard: LiveShard, cluster: str) -> int:
    return list(shard.bound(cluster).values()).count("MACHINE_STATE_CONFIGURED")


@pytest.mark.rule("shard 1/21", "shard 5.3/16", "shard 11.3/4", "shard 15/28", "coordinator 7.2/2", "coordinator 12/1")
def test_capacity_moves_to_who_starves_and_a_coordinator_that_is_killed_stops_nothing(tmp_path: Path) -> None:
    with fleet(tmp_path) as running, ExitStack() as stack:
        hungry, rich = running.shards
        # Without a coordinator nothing idle is anybody's.
        assert running.held() == (0, 0)
        with running.coordinator() as first_leader:
            running.hand_out_zones()
            watch = Watch(hungry, rich)
            stack.callback(watch.end)

            blue = LiveOperator(hungry.address, "blue")
            stack.callback(blue.close)
            blue.report("30")
            until(lambda: served(hungry, "blue"), lambda n: n == 4, "a machine of the other shard serves blue")
            assert running.held() == (4, 5)
            assert [each["reason"].split("-")[0] for each in rich.audited()] == ["coordinator.1"]
            first_leader.kill()
            first_leader.wait(PATIENCE_SECONDS)

        # Nobody leads: both go on deciding.
        green = LiveOperator(rich.address, "green")
        stack.callback(green.close)
        green.report("15")
        until(lambda: served(rich, "green"), lambda n: n == 2, "the donor serves its own")
        blue.report("7")
        until(lambda: served(hungry, "blue"), lambda n: n == 1, "what blue wants no more is drained")
        until(lambda: hungry.metric('reports_total{outcome="error"}'), lambda n: n > 0, "reports fail and are counted")
        assert running.held() == (4, 5)
        assert hungry.metric("cycle_failures_total") == rich.metric("cycle_failures_total") == 0

        # And a shard that dies meanwhile comes back with all that it had, the adopted machine too.
        assert hungry.process is not None
        hungry.process.kill()
        hungry.process.wait(PATIENCE_SECONDS)
        stack.enter_context(serving(hungry.address, hungry.log, *hungry.flags))
        until(lambda: len(hungry.said("shard.became_ready")), lambda n: n == 2, "it is ready again")
        until(running.held, lambda held: held == (4, 5), "it has what it had")
        blue = LiveOperator(hungry.address, "blue")
        stack.callback(blue.close)

        with running.coordinator():
            blue.report("37")
            until(lambda: served(hungry, "blue"), lambda n: n == 5, "machines move again")
            assert running.held() == (5, 4)
            until(lambda: hungry.metric('ownership_machines{relation="adopted"}'), lambda n: n == 2, "adopted")
            until(lambda: rich.metric('ownership_machines{relation="disowned"}'), lambda n: n == 2, "confirmed")

        watch.end()
        assert watch.looks > 20
        assert watch.shared == set()
        assert not hungry.metric("fenced_total")


@pytest.mark.rule("shard 9.3/13")
def test_urgent_work_gets_a_machine_that_is_drained_for_it_in_another_shard(tmp_path: Path) -> None:
    """Nothing is free anywhere: cheaper work makes room, and its machine is kept until it has moved."""
    with fleet(tmp_path) as running, ExitStack() as stack, running.coordinator():
        urgent, cheap = running.shards
        running.hand_out_zones()
        watch = Watch(urgent, cheap)
        stack.callback(watch.end)
        green, blue = PricedOperator(cheap.address, "green"), PricedOperator(urgent.address, "blue")
        for operator in (green, blue):
            stack.callback(operator.close)
        green.want("45", priority=100, bucket=2)
        until(lambda: served(cheap, "green"), lambda n: n == 6, "cheap work fills one shard")

        blue.want("30", priority=700_000, bucket=13)
        until(lambda: served(urgent, "blue"), lambda n: n == 4, "a machine is drained, given and bound")

        watch.end()
        assert watch.shared == set()
        assert running.held() == (4, 5)
        (preempted,) = [each for each in cheap.audited() if each["kind"] == "Preempt"]
        (touched,) = [each for each in cheap.audited() if each["kind"] == "FenceTouch"]
        assert preempted["reason"].startswith("coordinator.")
        assert (preempted["machine"], preempted["cluster"]) == (touched["machine"], "green")
        assert preempted["machine"] in urgent.bound("blue")
        until(lambda: cheap.metric("machines_reserved"), lambda n: n == 0, "nothing is kept any more")
