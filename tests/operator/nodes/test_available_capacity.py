"""AvailableCapacities: what a hint shows, and when it goes (docs/spec/operator.md §9)."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.frames import AvailableCapacity, Confidence
from bigfleet.model.profile import Operator as RequirementOperator
from bigfleet.model.profile import Requirement
from bigfleet.model.quantity import parse_quantity
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES
from bigfleet.operator.nodes.available_capacity import price_quantity
from bigfleet.operator.nodes.names import available_capacity_name
from bigfleet.sim.kubernetes.faults import fail_times
from tests.operator.nodes.node_world import NodeWorld

pytestmark = pytest.mark.virtual_time


def hint(fingerprint: str = "f", count: int = 3, **fields: Any) -> AvailableCapacity:
    given = {
        "requirements": (),
        "resources": {"cpu": "8"},
        "confidence": Confidence.HIGH,
        "price_usd_per_hour": 0.5,
        **fields,
    }
    return AvailableCapacity(fingerprint=fingerprint, available_count=count, **given)


def counts(world: NodeWorld) -> dict[str, int]:
    return {found.metadata.name: found.spec.available_count for found in world.server.read_all(AVAILABLE_CAPACITIES)}


NAME = available_capacity_name("available:f")


async def test_a_hint_is_shown_with_its_price_and_the_moment_it_expires(world: NodeWorld) -> None:
    operator = world.operator()
    operator.hints.available(
        hint(
            requirements=(
                Requirement("rack", RequirementOperator.SAME),
                Requirement("zone", RequirementOperator.IN, ("a", "b")),
            ),
            resources={"cpu": "8", "odd": "x"},
            price_usd_per_hour=1.23456,
        )
    )
    await asyncio.sleep(1)

    raw = world.server.raw(AVAILABLE_CAPACITIES, NAME)
    assert raw["spec"] == {
        "availability": "High",
        "availableCount": 3,
        "cost": "1.2346",
        "resources": {"cpu": "8"},
        "requirements": [
            {"key": "rack", "operator": "Same", "values": []},
            {"key": "zone", "operator": "In", "values": ["a", "b"]},
        ],
    }
    assert raw["status"] == {"lastUpdated": "2026-01-01T00:00:00Z", "expiresAt": "2026-01-01T00:15:00Z"}
    assert raw["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "bigfleet-operator"}


@pytest.mark.parametrize(
    ("confidence", "availability"),
    [
        (Confidence.UNSPECIFIED, "None"),
        (Confidence.NONE, "None"),
        (Confidence.LOW, "Low"),
        (Confidence.MEDIUM, "Medium"),
        (Confidence.HIGH, "High"),
    ],
)
async def test_confidence_is_availability(world: NodeWorld, confidence: Confidence, availability: str) -> None:
    operator = world.operator()
    operator.hints.available(hint(confidence=confidence))
    await asyncio.sleep(1)

    assert world.server.raw(AVAILABLE_CAPACITIES, NAME)["spec"]["availability"] == availability


async def test_a_newer_hint_of_a_key_replaces_the_older(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.latency_seconds = 1.0
    for count in (1, 2, 3):
        operator.hints.available(hint(count=count))
        operator.hints.available(hint("g", count=count * 10))
    await asyncio.sleep(20)

    assert counts(world) == {NAME: 3, available_capacity_name("available:g"): 30}


async def test_hints_expire_after_fifteen_minutes_while_a_session_stands(world: NodeWorld) -> None:
    operator = world.operator()
    operator.hints.session_opened()
    operator.hints.available(hint())
    operator.hints.available(hint("g"))
    for _ in range(3):
        await asyncio.sleep(300)
        operator.hints.available(hint())
    await asyncio.sleep(120)

    assert list(counts(world)) == [NAME]


async def test_a_lost_shard_does_not_erase_hints_at_once(world: NodeWorld) -> None:
    operator = world.operator()
    operator.hints.session_opened()
    operator.hints.available(hint())
    await asyncio.sleep(800)
    operator.hints.session_closed()
    await asyncio.sleep(800)
    operator.hints.session_closed()
    assert list(counts(world)) == [NAME]
    await asyncio.sleep(200)

    assert counts(world) == {}


async def test_a_new_process_gives_hints_the_same_time(world: NodeWorld) -> None:
    first = world.operator()
    first.hints.available(hint())
    await asyncio.sleep(1)
    await first.stop()
    await asyncio.sleep(2000)
    world.operator()
    await asyncio.sleep(800)
    assert list(counts(world)) == [NAME]
    await asyncio.sleep(200)

    assert counts(world) == {}


async def test_a_hint_that_comes_as_the_old_one_expires_is_shown(world: NodeWorld) -> None:
    operator = world.operator()
    operator.hints.session_opened()
    operator.hints_view.is_paused = False
    operator.hints.available(hint(count=1))
    await asyncio.sleep(899)
    operator.hints_view.is_paused = True
    operator.hints.available(hint(count=2))
    await asyncio.sleep(300)

    assert counts(world) == {NAME: 2}


async def test_objects_of_others_and_without_a_moment_are_judged_by_label_and_age(world: NodeWorld) -> None:
    spec = {"availability": "Low", "availableCount": 1, "cost": "1", "resources": {}}
    ours = {"app.kubernetes.io/managed-by": "bigfleet-operator"}
    world.server.put(AVAILABLE_CAPACITIES, {"metadata": {"name": "foreign"}, "spec": spec})
    world.server.put(AVAILABLE_CAPACITIES, {"metadata": {"name": "half", "labels": ours}, "spec": spec})
    operator = world.operator()
    operator.hints.session_opened()
    await asyncio.sleep(800)
    assert list(counts(world)) == ["foreign", "half"]
    await asyncio.sleep(200)

    assert list(counts(world)) == ["foreign"]


async def test_a_hint_is_written_once_the_api_server_is_back(world: NodeWorld) -> None:
    operator = world.operator()
    operator.api.faults.refuse = fail_times(3, ApiError(429, "TooManyRequests", "slow down"))
    operator.hints.available(hint())
    await asyncio.sleep(60)

    assert list(counts(world)) == [NAME]


async def test_an_object_expires_although_a_later_hint_of_it_was_refused(world: NodeWorld) -> None:
    operator = world.operator()
    operator.hints.session_opened()
    operator.hints.available(hint())
    await asyncio.sleep(300)
    operator.api.faults.refuse = fail_times(1, ApiError(422, "Invalid", "spec.cost: not a quantity"), verb="patch")
    operator.hints.available(hint(count=4))
    await asyncio.sleep(500)
    assert counts(world) == {NAME: 3}
    await asyncio.sleep(200)

    assert counts(world) == {}


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0, 1e300])
async def test_a_price_that_is_none_is_not_shown(world: NodeWorld, price: float) -> None:
    operator = world.operator()
    operator.hints.available(hint(price_usd_per_hour=price))
    await asyncio.sleep(1)

    assert counts(world) == {}


@pytest.mark.parametrize(
    ("price", "text"),
    [(0.0, "0"), (10.0, "10"), (0.1, "0.1"), (0.00004, "0"), (1e-7, "0"), (2.5, "2.5"), (1e9, "1000000000")],
)
def test_prices_are_decimal_numbers_with_at_most_four_places(price: float, text: str) -> None:
    assert price_quantity(price) == text


@given(st.floats(min_value=0.0, max_value=1e9))
def test_a_price_is_a_quantity_within_half_a_step(price: float) -> None:
    text = price_quantity(price)

    parse_quantity(text)
    assert abs(float(text) - price) <= 0.00005 + 1e-6
