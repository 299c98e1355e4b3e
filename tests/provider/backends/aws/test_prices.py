"""What an instance costs and how probably it is reclaimed: which numbers are accepted, and which are served."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.aws.api import Ec2Instance, SpotPrice
from bigfleet.provider.backends.aws.interruptions import (
    UNKNOWN_PROBABILITY,
    AdvisorFault,
    Interruptions,
    hourly,
    read_advisor,
)
from bigfleet.provider.backends.aws.prices import AwsPrices
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import TYPE, ZONE, MemoryEc2, dropped, refused

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock(), prices={TYPE: 0.1})


def prices(ec2: MemoryEc2, path: Path | None = None, region: str = "us-east-1") -> AwsPrices:
    return AwsPrices(ec2, ec2, ec2.clock, region=region, path=path)


def spot(usd: float, at: float = 1.0) -> SpotPrice:
    return SpotPrice(instance_type=TYPE, zone=ZONE, usd_per_hour=usd, at_unix_seconds=at)


@pytest.mark.parametrize(
    ("usd", "served"), [(0.0009, None), (0.001, 0.001), (0.04, 0.04), (0.12, 0.12), (0.1201, None), (0.00001, None)]
)
async def test_a_spot_price_far_from_the_on_demand_price_is_rejected(
    usd: float, served: float | None, ec2: MemoryEc2
) -> None:
    ec2.spot = [spot(usd)]
    found = prices(ec2)
    await found.refresh([], [TYPE])
    assert found.price(TYPE, ZONE, CapacityType.SPOT) == served
    assert found.refused == (served is None)


async def test_the_newest_spot_price_counts_and_a_strange_one_leaves_the_former(ec2: MemoryEc2) -> None:
    ec2.spot = [spot(0.05, at=3.0), spot(0.02, at=1.0), spot(9.0, at=4.0)]
    found = prices(ec2)
    await found.refresh([], [TYPE])
    assert found.price(TYPE, ZONE, CapacityType.SPOT) == 0.05


async def test_prices_are_asked_for_when_they_are_due(ec2: MemoryEc2) -> None:
    ec2.spot = [spot(0.05)]
    found = prices(ec2)
    for _ in range(61):
        await found.refresh([TYPE], [TYPE])
        await ec2.clock.sleep(60)
    assert len(ec2.calls["GetProducts"]) == 2
    assert len(ec2.calls["DescribeSpotPriceHistory"]) == 13


async def test_a_price_list_out_of_reach_is_asked_once_a_pass(ec2: MemoryEc2) -> None:
    ec2.faults["GetProducts"] = [dropped("GetProducts", is_after=False)]
    found = prices(ec2)
    await found.refresh(["a", "b", TYPE], [])
    assert len(ec2.calls["GetProducts"]) == 1


async def test_reserved_capacity_costs_a_share_of_on_demand(ec2: MemoryEc2) -> None:
    found = prices(ec2)
    await found.refresh([TYPE], [])
    assert found.price(TYPE, ZONE, CapacityType.RESERVED) == pytest.approx(0.06)


async def test_the_file_serves_a_start_without_a_price_list(tmp_path: Path, ec2: MemoryEc2) -> None:
    path = tmp_path / "s.db.prices"
    await prices(ec2, path).refresh([TYPE], [])
    ec2.faults["GetProducts"] = [refused("GetProducts", "InternalError", status=500)]
    again = prices(ec2, path)
    await again.refresh([TYPE], [])
    assert again.price(TYPE, ZONE, CapacityType.ON_DEMAND) == 0.1
    assert prices(ec2, path, region="eu-central-1").price(TYPE, ZONE, CapacityType.ON_DEMAND) is None
    path.write_text("not JSON")
    assert prices(ec2, path).price(TYPE, ZONE, CapacityType.ON_DEMAND) is None


# ---- interruption ----------------------------------------------------------------------------------------------


def test_a_monthly_share_becomes_a_probability_within_an_hour() -> None:
    assert hourly(0.05) == pytest.approx(1 - 0.95 ** (1 / 730))
    # Over a month it is the share again.
    assert 1 - math.pow(1 - hourly(0.2), 730) == pytest.approx(0.2)


ADVISOR = {
    "ranges": [{"index": 1, "max": 11, "label": "5-10%"}, {"index": 0, "max": 5}, {"index": 4, "max": 100}],
    "spot_advisor": {"us-east-1": {"Linux": {TYPE: {"s": 60, "r": 1}, "a": {"r": 0}, "b": {"r": 4}}}},
}


def test_the_advisor_gives_the_middle_of_each_range(tmp_path: Path) -> None:
    (tmp_path / "advisor").write_text(json.dumps(ADVISOR))
    read = read_advisor(tmp_path / "advisor", "us-east-1")
    assert read == {TYPE: hourly(0.08), "a": hourly(0.025), "b": hourly(0.30)}


@pytest.mark.parametrize(
    ("content", "region", "text"),
    [
        ("[]", "us-east-1", "not the Spot Instance Advisor's data"),
        (json.dumps(ADVISOR), "eu-central-1", "has no data of region eu-central-1"),
        (json.dumps({**ADVISOR, "ranges": []}), "us-east-1", "range 0 is used and not declared"),
    ],
)
def test_another_file_is_refused(content: str, region: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "advisor").write_text(content)
    with pytest.raises(AdvisorFault, match=text):
        read_advisor(tmp_path / "advisor", region)


def running(number: int) -> Ec2Instance:
    return Ec2Instance(id=f"i-{number}", state="running", instance_type=TYPE, zone=ZONE, is_spot=True)


async def test_reclaims_raise_the_probability_and_calm_never_lowers_it(ec2: MemoryEc2) -> None:
    learned = Interruptions(ec2.clock, {TYPE: 0.002})
    instances = [running(number) for number in range(100)]
    for _ in range(61):
        learned.look(instances)
        await ec2.clock.sleep(60)
    assert learned.probability(TYPE, ZONE) == 0.002
    for number in range(20):
        learned.note_reclaim(running(number))
        # The same warning again.
        learned.note_reclaim(running(number))
    # 100 spot-hours, and 720 of the declared 0.002.
    assert learned.probability(TYPE, ZONE) == pytest.approx((0.002 * 720 + 20) / 820, rel=0.02)
    assert learned.probability(TYPE, "us-east-1b") == 0.002
    assert learned.probability("other", ZONE) == UNKNOWN_PROBABILITY
    assert learned.probability(TYPE, ZONE) == float(f"{learned.probability(TYPE, ZONE):.2g}")


async def test_time_without_looks_and_other_instances_are_not_counted(ec2: MemoryEc2) -> None:
    learned = Interruptions(ec2.clock, None)
    others = [replace(running(1), is_spot=False), replace(running(2), state="pending")]
    learned.look([running(0)])
    await ec2.clock.sleep(10_000)
    learned.look([running(0)])
    await ec2.clock.sleep(600)
    learned.look(others)
    learned.note_reclaim(running(0))
    learned.note_reclaim(others[0])
    assert learned.probability(TYPE, ZONE) == pytest.approx((0.001 * 720 + 1) / 720, rel=0.05)
