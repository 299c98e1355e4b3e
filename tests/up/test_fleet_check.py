"""A run's fleet is checked against its pods: by the machines that shards list, not by what they claim."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.cli.up.check_text import check_document, check_line
from bigfleet.cli.up.fleet_check import FleetCheck, FleetChecker, check_fleet
from bigfleet.cli.up.observer import FleetFigures
from bigfleet.operator.requests import CapacityRequest
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.sim.packing.comparison import PackedCost
from bigfleet.sim.pods.placement import PodCounts


def listed(id: str, state: str, cluster: str = "", usd: float = 1.0, cpu: int = 4) -> provider_pb2.Machine:
    return provider_pb2.Machine(
        id=id,
        state=provider_pb2.MachineState.Value(f"MACHINE_STATE_{state}"),
        host=None if state in ("SPECULATIVE", "CREATING") else provider_pb2.HostRef(provider="p", ref=id),
        instance_type="t",
        zone="z",
        capacity_type=provider_pb2.CapacityType.Value("CAPACITY_TYPE_ON_DEMAND"),
        price_per_hour=usd,
        allocatable=provider_pb2.Resources(resources={"cpu": str(cpu), "memory": "64Gi"}),
        cluster=cluster,
    )


def pods(count: int, cpu: int = 4) -> list[CapacityRequest]:
    return [CapacityRequest(id=str(number), resources={"cpu": str(cpu)}) for number in range(count)]


def figures(machines: Sequence[provider_pb2.Machine], **more: Any) -> FleetFigures:
    return FleetFigures(cycle=1, inventory=machines, **more)


def test_a_planted_fleet_that_is_too_small_is_told_with_its_number() -> None:
    """Two clusters, one machine each: the first lacks two machines, and nothing is left that a packer could take."""
    fleet = figures([listed("a", "CONFIGURED", "c"), listed("b", "CONFIGURED", "d")])
    check = check_fleet({"c": pods(3), "d": pods(1)}, fleet)

    assert check.by_cluster["c"] == PodCounts(pods=3, unplaced=2, booting=0)
    assert check.by_cluster["d"] == PodCounts(pods=1, unplaced=0, booting=0)
    assert (check.pods, check.unplaced, check.machines, check.usd_per_hour) == (4, 2, 2, 2.0)
    assert check.packed == PackedCost(usd_per_hour=2.0, machines=2, unhosted=2)
    assert check.ratio is None
    assert check_line(check) == "pods: 4, without a place: 2; $2.00/h; a packer leaves 2 out"


def test_only_configured_machines_whose_node_joined_host_pods() -> None:
    machines = [
        listed("joined", "CONFIGURED", "c"),
        listed("never-joined", "CONFIGURED", "c"),
        listed("leaving", "DRAINING", "c"),
        listed("binding", "CONFIGURING", "c"),
        listed("made", "CREATING"),
        listed("made-for-another", "CREATING"),
        listed("free", "IDLE"),
    ]
    provisioning = {"made": "c", "made-for-another": "d", "free": "c"}
    fleet = figures(machines, unjoined_ids=frozenset({"never-joined"}), provisioning=provisioning)
    check = check_fleet({"c": pods(6)}, fleet)

    assert check.by_cluster == {"c": PodCounts(pods=6, unplaced=5, booting=2)}
    assert (check.machines, check.usd_per_hour) == (4, 7.0)
    assert check_line(check) == "pods: 6, without a place: 5 (2 booting); $7.00/h, packer $6.00/h"


def test_the_ratio_is_that_of_two_fleets_that_host_the_same_pods() -> None:
    """Two machines serve two pods that one machine of twice the size hosts for less."""
    machines = [listed("a", "CONFIGURED", "c"), listed("b", "CONFIGURED", "c"), listed("m", "SPECULATIVE", "", 1.6, 8)]
    check = check_fleet({"c": pods(2)}, figures(machines))

    assert check.ratio == pytest.approx(1.25)
    assert check_line(check) == "pods: 2, without a place: 0; $2.00/h, packer $1.60/h, ratio 1.25"
    assert check_document(check) == {
        "pods": 2,
        "without_place": 0,
        "booting": 0,
        "machines": 2,
        "usd_per_hour": 2.0,
        "packer": {"machines": 1, "usd_per_hour": 1.6, "unhosted": 0},
        "ratio": 1.25,
        "clusters": {"c": {"pods": 2, "without_place": 0, "booting": 0}},
    }


def test_a_fleet_without_prices_has_nothing_to_compare() -> None:
    check = check_fleet({"c": pods(1)}, figures([listed("a", "CONFIGURED", "c", 0.0)]))

    assert (check.packed, check.ratio) == (None, None)
    assert check_line(check) == "pods: 1, without a place: 0; all machines are free"
    assert check_document(check)["packer"] is None
    assert check_line(None) == "pods not checked yet"
    assert check_line(check, 4.9) == check_line(check)
    assert check_line(check, 12.3) == "12s ago, pods: 1, without a place: 0; all machines are free"


def test_a_packer_that_pays_nothing_is_no_divisor() -> None:
    machines = [listed("a", "CONFIGURED", "c", 1.0), listed("b", "IDLE", "", 0.0)]
    check = check_fleet({"c": pods(1)}, figures(machines))

    assert check.packed == PackedCost(usd_per_hour=0.0, machines=1, unhosted=0)
    assert check.ratio is None


def test_what_is_paid_anyway_counts_on_both_sides() -> None:
    """A reserved machine idles beside a spot machine that serves: the packer takes it and rents nothing."""
    machines = [listed("a", "CONFIGURED", "c", 0.5), listed("b", "IDLE", "", 2.0)]
    machines[1].capacity_type = provider_pb2.CapacityType.Value("CAPACITY_TYPE_RESERVED")
    check = check_fleet({"c": pods(1)}, figures(machines))

    assert check.usd_per_hour == 2.5
    assert check.packed == PackedCost(usd_per_hour=2.0, machines=1, unhosted=0)
    assert check.ratio == pytest.approx(1.25)


class SteppedClock:
    """A clock that stands still but for its sleeps; it ends the run after a few."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic_seconds(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 3:
            raise asyncio.CancelledError


async def test_a_fleet_is_checked_at_a_low_rate_and_once_its_shards_answer() -> None:
    class Shards:
        figures = figures([listed("a", "CONFIGURED", "c")])
        asked = 0

        @property
        def answers(self) -> bool:
            self.asked += 1
            return self.asked > 1

    class OneCluster:
        def requests(self) -> list[CapacityRequest]:
            return pods(1)

    clock: Any = SteppedClock()
    shards: Any = Shards()
    clusters: Any = {"c": OneCluster()}
    checker = FleetChecker(clusters, shards, clock)
    with pytest.raises(asyncio.CancelledError):
        await checker.run()

    assert clock.slept == [0.5, 2.0, 2.0]
    assert isinstance(checker.last, FleetCheck)
    assert replace(checker.last, packed=None).pods == 1
