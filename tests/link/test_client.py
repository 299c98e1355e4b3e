"""Who is asked, in which order, and what happens when nobody answers (docs/spec/coordinator.md §8, point 2)."""

from collections.abc import Sequence

import pytest
import structlog

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.client import Client, NotAnswered
from bigfleet.model.ids import ShardId
from bigfleet.model.shard_report import ShardReport
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time
REPORT = ShardReport(shard_id=ShardId("shard-0"), epoch=1, cycle=1)


class Replicas:
    """Replicas by address: a leader answers with its term, a follower names somebody or nobody, others are gone."""

    def __init__(self, **leaders: str) -> None:
        #: Address → "leads", "" for a follower without a hint, else the address that it names.
        self.replicas = leaders
        self.names: dict[str, tuple[str, ...]] = {}
        self.asked: list[str] = []

    async def addresses(self, name: str) -> Sequence[str]:
        return self.names.get(name, (name,))

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        self.asked.append(address)
        stands = self.replicas.get(address)
        if stands is None:
            raise NotAnswered("UNAVAILABLE: connection refused")
        if stands != "leads":
            raise NotAnswered("FAILED_PRECONDITION: not the leader", leader=stands)
        return ReportAnswer(term=1)

    def took(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


def client(replicas: Replicas, *names: str) -> Client:
    return Client(names or ("a", "b", "c"), replicas, LoopClock())


@pytest.mark.rule("coordinator 8/2")
async def test_addresses_are_asked_in_turn_and_the_leader_first_once_it_is_known() -> None:
    replicas = Replicas(a="", c="leads")
    asking = client(replicas)

    assert await asking.send(REPORT) == ReportAnswer(term=1)
    assert replicas.took() == ["a", "b", "c"]
    await asking.send(REPORT)
    assert replicas.took() == ["c"]


@pytest.mark.rule("coordinator 8/2")
async def test_a_follower_that_names_the_leader_is_believed() -> None:
    replicas = Replicas(a="d", d="leads")

    assert await client(replicas).send(REPORT) is not None
    assert replicas.took() == ["a", "d"]


@pytest.mark.rule("coordinator 8/2")
async def test_hints_that_lead_nowhere_end_after_three_hops_and_nobody_is_asked_twice() -> None:
    replicas = Replicas(a="h1", h1="h2", h2="h3", h3="h4", h4="leads", b="a")
    assert await client(replicas, "a", "b").send(REPORT) is None
    assert replicas.took() == ["a", "h1", "h2", "h3", "b"]

    circle = Replicas(a="b", b="a")
    assert await client(circle, "a", "b").send(REPORT) is None
    assert circle.took() == ["a", "b"]


async def test_a_dead_leader_is_asked_first_once_more_and_then_the_turn_goes_on() -> None:
    replicas = Replicas(a="leads")
    asking = client(replicas)
    await asking.send(REPORT)
    replicas.replicas = {"b": "leads"}
    replicas.took()

    assert await asking.send(REPORT) is not None
    assert replicas.took() == ["a", "b"]
    await asking.send(REPORT)
    assert replicas.took() == ["b"]


@pytest.mark.rule("coordinator 8/2")
async def test_a_name_stands_for_all_its_addresses() -> None:
    replicas = Replicas(n2="leads")
    replicas.names["coordinator"] = ("n1", "n2")

    assert await client(replicas, "coordinator").send(REPORT) is not None
    assert replicas.took() == ["n1", "n2"]


async def test_the_turn_begins_with_another_address_when_nobody_answered() -> None:
    replicas = Replicas()
    asking = client(replicas)

    for first in ("a", "b", "c", "a"):
        assert await asking.send(REPORT) is None
        assert replicas.took()[0] == first


@pytest.mark.rule("coordinator 8/2")
async def test_that_nobody_answers_is_told_once_a_minute() -> None:
    asking = client(Replicas())
    told = []
    for _ in range(5):
        with structlog.testing.capture_logs() as logs:
            await asking.send(REPORT)
        told.append(len(logs))
        await LoopClock().sleep(30)

    assert told == [1, 0, 1, 0, 1]
