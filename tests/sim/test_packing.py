"""What the packer would pay for pods on the machines of a fleet, worked by hand on a tiny catalogue."""

from typing import Any

import pytest

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.penalty import bucket_for_dollars
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.operator.requests import CapacityRequest
from bigfleet.sim.packing.comparison import PackedCost, offers_of, packed_cost


def machines(
    count: int,
    cpu: int,
    usd: float,
    kind: CapacityType = CapacityType.ON_DEMAND,
    *,
    state: MachineState = MachineState.SPECULATIVE,
    probability: float = 0.0,
    gpus: int = 0,
) -> list[Machine]:
    name = f"{kind.label}-{cpu}{'-gpu' * bool(gpus)}"
    has_host = state not in (MachineState.SPECULATIVE, MachineState.CREATING)
    return [
        Machine(
            id=MachineId(f"{name}-{number}"),
            state=state,
            host=HostRef("p", f"{name}-{number}") if has_host else HostRef(),
            instance_type=name,
            zone="z",
            capacity_type=kind,
            allocatable={"cpu": str(cpu), "memory": "64Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})},
            labels={"gpu": "T4"} if gpus else {},
            price_usd_per_hour=usd,
            interruption_probability=probability,
            last_error="broken" if state is MachineState.FAILED else "",
        )
        for number in range(count)
    ]


def pods(count: int, cpu: int, name: str = "p", **more: Any) -> list[CapacityRequest]:
    resources = {"cpu": str(cpu), "memory": "1Gi"}
    return [CapacityRequest(id=f"{name}-{n}", resources=resources, **more) for n in range(count)]


def cost(usd: float, count: int, unhosted: int = 0) -> PackedCost:
    about: Any = pytest.approx(usd)
    return PackedCost(usd_per_hour=about, machines=count, unhosted=unhosted)


def test_the_cheapest_type_that_hosts_the_batch_is_taken() -> None:
    """Pods of 3, 3, 1, 1 and 1 cpu: four of them fill 8 cpu for $0.80, the last one goes to 2 cpu for $0.20."""
    fleet = machines(9, 2, 0.2) + machines(9, 8, 0.8)

    assert packed_cost({"c": pods(2, 3, "a") + pods(3, 1, "b")}, fleet) == cost(1.0, 2)


def test_free_machines_count_as_often_as_the_fleet_has_them() -> None:
    """Two of the three pods fill the two free machines; the third is bought."""
    fleet = machines(2, 8, 0.0, CapacityType.BARE_METAL, state=MachineState.IDLE) + machines(9, 8, 0.8)

    assert packed_cost({"c": pods(3, 8)}, fleet) == cost(0.8, 3)


def test_all_clusters_share_the_machines_and_the_rest_is_told() -> None:
    fleet = machines(1, 8, 0.8) + machines(5, 8, 0.1, state=MachineState.FAILED)

    assert packed_cost({"c": pods(1, 8), "d": pods(2, 8)}, fleet) == cost(0.8, 1, unhosted=2)
    assert packed_cost({"c": [], "d": []}, fleet) == cost(0.0, 0)


def test_reservations_cost_their_listed_price() -> None:
    fleet = machines(1, 8, 0.48, CapacityType.RESERVED, state=MachineState.IDLE) + machines(
        1, 8, 0.2, CapacityType.SPOT
    )

    assert packed_cost({"c": pods(2, 8)}, fleet) == cost(0.68, 2)


def test_pods_that_an_interruption_hurts_are_kept_off_spot_and_the_sum_is_of_prices_alone() -> None:
    """$1024 × 0.01 per hour is more than $0.80; $1 × 0.01 is not, and is not part of the price."""
    fleet = machines(9, 8, 0.8) + machines(9, 8, 0.2, CapacityType.SPOT, probability=0.01)

    dear = pods(1, 8, interruption_bucket=bucket_for_dollars(1024))
    assert packed_cost({"c": dear}, fleet) == cost(0.8, 1)
    assert packed_cost({"c": pods(1, 8, interruption_bucket=bucket_for_dollars(1))}, fleet) == cost(0.2, 1)


def test_requirements_hold() -> None:
    fleet = machines(1, 8, 9.0, gpus=4) + machines(1, 8, 0.8)
    wants_gpu = [
        CapacityRequest(
            id="g",
            resources={"cpu": "1", "nvidia.com/gpu": "1"},
            requirements=(Requirement("gpu", Operator.EXISTS),),
        )
    ]

    assert packed_cost({"c": wants_gpu}, fleet) == cost(9.0, 1)
    assert packed_cost({"c": pods(1, 1, requirements=(Requirement("gpu", Operator.DOES_NOT_EXIST),))}, fleet) == cost(
        0.8, 1
    )


def test_equal_machines_are_one_class_with_a_stock() -> None:
    fleet = machines(3, 8, 0.8) + machines(2, 8, 0.7, CapacityType.SPOT)

    assert [(offer.price_usd_per_hour, offer.stock) for offer in offers_of(fleet)] == [(0.7, 2), (0.8, 3)]
