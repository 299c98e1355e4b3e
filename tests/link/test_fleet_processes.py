"""Two shards, a coordinator on SQLite and a provider as processes: capacity moves, and outages stop nothing else.

docs/spec/coordinator.md §9 and §12, docs/spec/shard.md §15.
"""

import threading
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
from bigfleet.rpc.gen import coordinator_pb2 as pb
from bigfleet.rpc.gen import coordinator_pb2_grpc
from tests.e2e.fault_world import LiveOperator, LiveProvider, LiveShard, live_shard, until
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
        self._thread.join(30)


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
            *("--rebalance-interval", "1s", "--rebalance-age", "2"),
        )

    def ask(self, method: str, request: Any) -> Any:
        """Call the coordinator."""
        with grpc.insecure_channel(self.address) as channel:
            return getattr(coordinator_pb2_grpc.CoordinatorStub(channel), method)(request, timeout=10)

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


def served(shard: LiveShard, cluster: str) -> int:
    return list(shard.bound(cluster).values()).count("MACHINE_STATE_CONFIGURED")


def test_capacity_moves_to_who_starves_and_a_coordinator_that_is_killed_stops_nothing(tmp_path: Path) -> None:
    with fleet(tmp_path) as running, ExitStack() as stack:
        hungry, rich = running.shards
        # Without a coordinator nothing idle is anybody's.
        assert running.held() == (0, 0)
        with running.coordinator() as first_leader:
            until(lambda: len(running.ask("ListShards", pb.ListShardsRequest()).shards), lambda n: n == 2, "registered")
            for zone, shard in ZONES.items():
                request = pb.AssignDomainRequest(topology_key=labels.ZONE, topology_value=zone, shard_id=shard)
                running.ask("AssignDomain", request)
            until(running.held, lambda held: held == (3, 6), "the domains reach the shards")
            watch = Watch(hungry, rich)
            stack.callback(watch.end)

            blue = LiveOperator(hungry.address, "blue")
            stack.callback(blue.close)
            blue.report("30")
            until(lambda: served(hungry, "blue"), lambda n: n == 4, "a machine of the other shard serves blue")
            assert running.held() == (4, 5)
            assert [each["reason"].split("-")[0] for each in rich.audited()] == ["coordinator.1"]
            first_leader.kill()
            first_leader.wait(10)

        # Nobody leads: both go on deciding, and a shard that dies comes back with what it adopted.
        green = LiveOperator(rich.address, "green")
        stack.callback(green.close)
        green.report("15")
        until(lambda: served(rich, "green"), lambda n: n == 2, "the donor serves its own")
        blue.report("7")
        until(lambda: served(hungry, "blue"), lambda n: n == 1, "what blue wants no more is drained")
        until(lambda: hungry.metric('reports_total{outcome="error"}'), lambda n: n > 0, "reports fail and are counted")
        assert running.held() == (4, 5)
        assert hungry.metric("cycle_failures_total") == rich.metric("cycle_failures_total") == 0

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
