"""Which missing rights are found, and how they are named."""

import asyncio

import pytest
from structlog.testing import capture_logs

from bigfleet.operator.kubernetes.access import Right, RightsMonitor, missing_rights
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, Resource
from bigfleet.operator.kubernetes.objects import AccessReview, AccessReviewStatus
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, EVICTIONS, LEASES, NODES, TOKEN_REQUESTS
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.fake_api import FakeApi, T, unreachable

pytestmark = pytest.mark.virtual_time


class Reviewer(FakeApi):
    """Allows what a test lists, and collects what it was asked."""

    def __init__(self, *allowed: str) -> None:
        super().__init__()
        self.allowed = set(allowed)
        self.asked: list[JsonObject] = []

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        await self.request("create", resource)
        spec = body["spec"]
        assert isinstance(spec, dict)
        attributes = spec["resourceAttributes"]
        assert isinstance(attributes, dict)
        self.asked.append(attributes)
        text = " ".join(str(attributes.get(field, "-")) for field in ("verb", "resource", "subresource"))
        review = AccessReview(status=AccessReviewStatus(allowed=text in self.allowed))
        assert isinstance(review, resource.type)
        return review


RIGHTS = [
    Right(resource=NODES, verbs=("get", "patch")),
    Right(resource=CAPACITY_REQUESTS.status, verbs=("patch",)),
    Right(resource=EVICTIONS, verbs=("create",), namespace="x"),
    Right(resource=LEASES, verbs=("update",), namespace="bigfleet", name="bigfleet-operator"),
    Right(resource=TOKEN_REQUESTS, verbs=("create",), namespace="kube-system", name="boot"),
]


async def test_all_missing_rights_are_named_in_order() -> None:
    api = Reviewer("get nodes -")
    assert await missing_rights(api, RIGHTS) == [
        "patch nodes",
        "patch capacityrequests.bigfleet.lucy.sh/status",
        "create pods/eviction in namespace x",
        "update leases.coordination.k8s.io 'bigfleet-operator' in namespace bigfleet",
        "create serviceaccounts/token 'boot' in namespace kube-system",
    ]


async def test_nothing_is_missing() -> None:
    api = Reviewer(
        "get nodes -",
        "patch nodes -",
        "patch capacityrequests status",
        "create pods eviction",
        "update leases -",
        "create serviceaccounts token",
    )
    assert await missing_rights(api, RIGHTS) == []
    assert await missing_rights(api, []) == []


async def test_a_review_names_group_namespace_and_object() -> None:
    api = Reviewer()
    await missing_rights(api, RIGHTS[3:4])
    assert api.asked == [
        {
            "group": "coordination.k8s.io",
            "version": "v1",
            "resource": "leases",
            "verb": "update",
            "namespace": "bigfleet",
            "name": "bigfleet-operator",
        }
    ]


async def test_an_api_server_that_is_away_is_no_missing_right() -> None:
    api = Reviewer()
    api.fault = unreachable()
    with pytest.raises(ApiError, match="connection refused"):
        await missing_rights(api, RIGHTS)


class Monitored:
    """A monitor of RIGHTS whose reviews are answered by a Reviewer that allows everything."""

    def __init__(self) -> None:
        self.api = Reviewer(*EVERYTHING)
        self.forbidden = asyncio.Event()
        self.counts: list[int] = []
        self.monitor = RightsMonitor(
            self.api, RIGHTS, forbidden=self.forbidden, clock=LoopClock(), on_review=self.counts.append
        )


EVERYTHING = (
    "get nodes -",
    "patch nodes -",
    "patch capacityrequests status",
    "create pods eviction",
    "update leases -",
    "create serviceaccounts token",
)


async def test_a_right_that_is_lost_is_named_once_and_again_when_it_is_back() -> None:
    world = Monitored()
    running = asyncio.create_task(world.monitor.run())
    with capture_logs() as logs:
        await asyncio.sleep(100)
        assert world.api.asked == []
        world.api.allowed.discard("create pods eviction")
        world.forbidden.set()
        await asyncio.sleep(100)
        assert world.monitor.missing == ("create pods/eviction in namespace x",)
        world.api.allowed.update(EVERYTHING)
        await asyncio.sleep(20)
        asked = len(world.api.asked)
        await asyncio.sleep(1000)
    running.cancel()

    assert [(line["event"], line.get("missing") or line["restored"]) for line in logs] == [
        ("operator.rights_missing", "create pods/eviction in namespace x"),
        ("operator.rights_restored", "create pods/eviction in namespace x"),
    ]
    assert "deploy/kubernetes" in logs[0]["advice"]
    assert (world.counts[0], world.counts[-1]) == (1, 0)
    assert len(world.api.asked) == asked


async def test_a_request_that_is_forbidden_for_another_reason_is_no_lost_right() -> None:
    """Such as one that a policy refuses."""
    world = Monitored()
    running = asyncio.create_task(world.monitor.run())
    world.forbidden.set()
    with capture_logs() as logs:
        await asyncio.sleep(100)
    running.cancel()

    assert (logs, world.counts) == ([], [0])


async def test_a_review_that_is_not_answered_is_repeated_after_the_next_refusal() -> None:
    world = Monitored()
    world.api.allowed.clear()
    world.api.fault = unreachable()
    running = asyncio.create_task(world.monitor.run())
    world.forbidden.set()
    await asyncio.sleep(100)
    world.api.fault = None
    world.forbidden.set()
    await asyncio.sleep(20)
    running.cancel()

    assert len(world.monitor.missing) == len(EVERYTHING)
