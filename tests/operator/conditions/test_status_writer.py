"""How statuses reach the API server: on a simulated server, with the reflector that the operator uses."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.model import frames
from bigfleet.model.frames import Acknowledgement, UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.operator.conditions.verdicts import RequestVerdicts
from bigfleet.operator.conditions.writer import StatusWriter
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey, PodKey
from bigfleet.operator.demand.waiting import PodWait, WaitingPod
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.events import EventSeverity
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, Condition, ObjectReference
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, OWNED_BY_POD
from bigfleet.operator.work_queue import KeyQueue
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.faults import ApiCall, fail_times
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.demand.objects import HandView, need_status

pytestmark = pytest.mark.virtual_time

STATUS = "capacityrequests.bigfleet.lucy.sh/status"


class Events:
    """An EventSink that remembers."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, str, str]] = []

    def record(self, about: ObjectReference, severity: EventSeverity, reason: str, message: str) -> bool:
        assert severity is EventSeverity.WARNING
        assert message
        self.recorded.append((about.kind, about.name, reason))
        return True


class Written:
    """A StatusWriteListener that counts."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.phases: list[str] = []

    def phase_written(self, phase: str, seconds: float) -> None:
        assert seconds >= 0
        self.phases.append(phase)

    def write_ended(self, written: str, outcome: str) -> None:
        self.outcomes[written, outcome] += 1


class Pods:
    def __init__(self) -> None:
        #: By uid; the pods of these tests have one namespace.
        self.waits: dict[str, WaitingPod] = {}

    def get(self, pod: PodKey) -> WaitingPod | None:
        return self.waits.get(pod[1])


class Cluster:
    """A cluster whose requests are followed and whose statuses are written."""

    def __init__(self, workers: int = 4, server: InMemoryApiServer | None = None) -> None:
        self.clock = LoopClock()
        self.server = server or InMemoryApiServer(self.clock)
        #: Our client; a person has another one.
        self.api = InMemoryApi(self.server)
        rng = random.Random(1)
        self.requests = Reflector(InMemoryApi(self.server), CAPACITY_REQUESTS, clock=self.clock, rng=rng)
        self.demand = DemandView(cluster=ClusterId("c"), requests=self.requests, clock=self.clock)
        self.pods = Pods()
        self.events = Events()
        self.written = Written()
        queue: KeyQueue[ObjectKey] = KeyQueue(self.clock)
        self.verdicts = RequestVerdicts(demand=self.demand, clock=self.clock, changed=queue.put, pods=self.pods)
        self.demand.add_listener(self.verdicts)
        self.writer = StatusWriter(
            api=self.api,
            requests=self.requests,
            demand=self.demand,
            verdicts=self.verdicts,
            queue=queue,
            events=self.events,
            clock=self.clock,
            rng=rng,
            pods=self.pods,
            workers=workers,
            listener=self.written,
        )
        self.verdicts.session_opened(frozenset({frames.CAPABILITY_NEED_STATUS}))

    def create(self, name: str, *, pod_uid: str = "", **spec: Any) -> None:
        metadata: dict[str, Any] = {"name": name, "namespace": "ns"}
        if pod_uid:
            metadata["labels"] = {OWNED_BY_POD: pod_uid}
        fields: dict[str, Any] = {"priority": 0, "resources": {"cpu": "1"}, **spec}
        self.server.put(
            CAPACITY_REQUESTS,
            {
                "apiVersion": CAPACITY_REQUESTS.api_version,
                "kind": "CapacityRequest",
                "metadata": metadata,
                "spec": fields,
            },
        )

    def stored(self, name: str) -> CapacityRequestObject:
        found = self.server.read(CAPACITY_REQUESTS, name, "ns")
        assert found is not None
        return found

    def condition(self, name: str, type_: str) -> Condition:
        return next(each for each in self.stored(name).status.conditions or () if each.type == type_)

    def patches(self) -> list[str]:
        return [call.name for call in self.api.calls if call.verb == "patch"]

    async def settle(self, seconds: float = 5.0) -> None:
        """Let what is under way come to its end."""
        await self.clock.sleep(seconds)
        while not self.writer.is_idle:
            await self.clock.sleep(1.0)

    async def report(self, *unmet: str, judges: bool = True, waits: bool = True, **fields: Any) -> None:
        """Report, and have the shard put it into force and judge it; then wait until that is written."""
        await self.clock.sleep(1.0)
        roll_up = self.demand.roll_up()
        assert roll_up is not None
        stamp = roll_up.timestamp_unix_nanos
        self.verdicts.acknowledged(Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=stamp))
        if judges:
            rows = [entry.row.id for entry in self.demand if entry.row is not None and entry.key[1] in unmet]
            self.verdicts.need_status(need_status(*rows, stamp=stamp, **fields))
        if waits:
            await self.settle()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Cluster"]:
        async with asyncio.TaskGroup() as tasks:
            self.requests.add_listener(self.demand)
            running = [tasks.create_task(self.requests.run()), tasks.create_task(self.writer.run())]
            await self.requests.wait_synced()
            yield self
            for task in running:
                task.cancel()


async def test_a_request_is_acknowledged_in_one_write_and_judged_in_another() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        await cluster.report(judges=False)
        status = cluster.stored("a").status
        assert (status.phase, status.observed_generation) == ("Acknowledged", 1)
        assert [(c.type, c.status) for c in status.conditions or ()] == [
            ("Accepted", "True"),
            ("Satisfied", "Unknown"),
            ("Shortfall", "Unknown"),
        ]

        await cluster.report()
        assert cluster.condition("a", "Satisfied").status == "True"
        await cluster.report()

        assert cluster.patches() == ["a", "a"]
        assert cluster.written.phases == ["Acknowledged"]
        assert cluster.written.outcomes == {
            ("Phase", "success"): 1,
            ("Accepted", "success"): 1,
            ("Satisfied", "success"): 2,
            ("Shortfall", "success"): 2,
        }


async def test_only_what_changed_is_written() -> None:
    async with Cluster().running() as cluster:
        for number in range(5):
            cluster.create(f"a{number}", priority=number)
        await cluster.report()
        before = len(cluster.patches())

        await cluster.report("a2")

        assert cluster.patches()[before:] == ["a2"]
        assert cluster.condition("a2", "Shortfall").reason == "PriorityStarved"


async def test_phases_are_written_before_conditions() -> None:
    cluster = Cluster(workers=1)
    async with cluster.running():
        for number in range(5):
            cluster.create(f"old{number}")
        await cluster.report()
        cluster.create("new", priority=1)
        await cluster.clock.sleep(1.0)
        roll_up = cluster.demand.roll_up()
        assert roll_up is not None
        before = len(cluster.patches())

        # A verdict on the old ones first, then the ack of the new one.
        rows = [entry.row.id for entry in cluster.demand if entry.row is not None and entry.key[1] == "old1"]
        cluster.verdicts.need_status(need_status(*rows, stamp=1))
        cluster.verdicts.acknowledged(
            Acknowledgement(echo="rollup", rollup_timestamp_unix_nanos=roll_up.timestamp_unix_nanos)
        )
        await cluster.settle()

        assert cluster.patches()[before:] == ["new", *(f"old{number}" for number in range(5))]


async def test_a_changed_request_is_pending_until_its_generation_is_in_force() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        await cluster.report()
        person = InMemoryApi(cluster.server)
        await person.patch(CAPACITY_REQUESTS, "a", {"spec": {"priority": 3}}, namespace="ns")
        await cluster.settle()
        status = cluster.stored("a").status
        assert (status.phase, status.observed_generation, status.acknowledged_at) == ("Pending", 2, None)

        await cluster.report()
        status = cluster.stored("a").status
        assert (status.phase, status.observed_generation) == ("Acknowledged", 2)


async def test_a_write_in_vain_is_not_repeated_on_a_request_that_is_gone() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        cluster.api.faults.latency_seconds = 3.0
        roll = asyncio.create_task(cluster.report())
        await cluster.clock.sleep(2.0)
        cluster.server.remove(CAPACITY_REQUESTS, "a", "ns")
        await roll

        assert cluster.patches() == ["a"]
        assert cluster.written.outcomes["Phase", "error"] == 1
        assert cluster.writer.failures_total == 0


async def test_a_status_never_reaches_another_request_of_the_same_name() -> None:
    """It is made again between the ack and the write, and no roll-up has contained it."""
    async with Cluster().running() as cluster:
        cluster.create("a")
        cluster.api.faults.latency_seconds = 3.0
        roll = asyncio.create_task(cluster.report())
        await cluster.clock.sleep(2.0)
        cluster.server.remove(CAPACITY_REQUESTS, "a", "ns")
        cluster.create("a")
        await roll

        assert cluster.stored("a").status.phase == ""
        assert cluster.written.outcomes["Phase", "conflict"] == 1

        await cluster.report()
        assert cluster.stored("a").status.phase == "Acknowledged"


async def test_what_another_writer_changes_meanwhile_is_kept_and_the_write_repeated() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        cluster.api.faults.latency_seconds = 3.0
        roll = asyncio.create_task(cluster.report())
        await cluster.clock.sleep(2.0)
        person = InMemoryApi(cluster.server)
        await person.patch(
            CAPACITY_REQUESTS.status,
            "a",
            {"status": {"conditions": [{"type": "Audited", "status": "True"}]}},
            namespace="ns",
        )
        await roll

        status = cluster.stored("a").status
        assert status.phase == "Acknowledged"
        assert [each.type for each in status.conditions or ()] == ["Audited", "Accepted", "Satisfied", "Shortfall"]


async def test_a_status_that_somebody_changes_is_put_right() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        await cluster.report()
        person = InMemoryApi(cluster.server)
        await person.patch(CAPACITY_REQUESTS.status, "a", {"status": {"conditions": []}}, namespace="ns")
        await cluster.settle()

        assert [each.type for each in cluster.stored("a").status.conditions or ()] == [
            "Accepted",
            "Satisfied",
            "Shortfall",
        ]


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_writes_are_retried_until_the_server_takes_them(status: int) -> None:
    async with Cluster().running() as cluster:
        error = ApiError(status, "Busy", "too busy", retry_after_seconds=7.0)
        cluster.api.faults.refuse = fail_times(9, error, verb="patch", resource=STATUS)
        cluster.create("a")
        cluster.create("b")
        await cluster.report()
        await cluster.settle(300.0)

        assert [cluster.stored(name).status.phase for name in "ab"] == ["Acknowledged"] * 2
        assert cluster.writer.failures_total == 9


async def test_the_server_is_not_hammered_while_it_is_away() -> None:
    async with Cluster().running() as cluster:
        for number in range(200):
            cluster.create(f"a{number}")
        await cluster.clock.sleep(1.0)
        cluster.api.faults.refuse = fail_times(10**9, ApiError(503, "Away", "away"), verb="patch")
        roll_up = cluster.demand.roll_up()
        assert roll_up is not None
        cluster.verdicts.acknowledged(
            Acknowledgement(echo="rollup", rollup_timestamp_unix_nanos=roll_up.timestamp_unix_nanos)
        )
        with capture_logs() as logs:
            await cluster.clock.sleep(300.0)

        # Four workers, each with a back-off that doubles to 30 s.
        assert len(cluster.patches()) <= 4 * 24
        assert len([entry for entry in logs if entry["event"] == "operator.status_not_written"]) <= 6
        cluster.api.faults.refuse = lambda call: None
        await cluster.settle(60.0)
        assert {cluster.stored(f"a{number}").status.phase for number in range(200)} == {"Acknowledged"}


async def test_a_refused_write_harms_no_other_and_is_tried_again_with_the_sweep() -> None:
    async with Cluster().running() as cluster:
        refused = ApiError(422, "Invalid", "status.phase: no")

        def refuse(call: ApiCall) -> ApiError | None:
            return refused if call.name == "bad" else None

        cluster.api.faults.refuse = refuse
        cluster.create("bad")
        cluster.create("good")
        await cluster.report()
        assert cluster.stored("good").status.phase == "Acknowledged"
        assert cluster.patches().count("bad") <= 2

        cluster.api.faults.refuse = lambda call: None
        await cluster.settle(700.0)
        assert cluster.stored("bad").status.phase == "Acknowledged"


async def test_what_is_forbidden_holds_up_nothing_and_is_tried_again_soon() -> None:
    async with Cluster().running() as cluster:
        forbidden = ApiError(403, "Forbidden", "may not")
        cluster.api.faults.refuse = lambda call: forbidden if call.name.startswith("bad") else None
        for number in range(40):
            cluster.create(f"bad-{number}")
        cluster.create("good")
        await cluster.report()
        assert cluster.stored("good").status.phase == "Acknowledged"

        cluster.api.faults.refuse = lambda call: None
        await cluster.settle(60.0)
        assert {cluster.stored(f"bad-{number}").status.phase for number in range(40)} == {"Acknowledged"}


async def test_what_was_written_counts_before_the_view_shows_it() -> None:
    """A view that is behind causes no conflict, and no second transition of a condition that did not change."""
    clock = LoopClock()
    server = InMemoryApiServer(clock)
    view: HandView[CapacityRequestObject] = HandView()
    demand = DemandView(cluster=ClusterId("c"), requests=view, clock=clock)
    queue: KeyQueue[ObjectKey] = KeyQueue(clock)
    verdicts = RequestVerdicts(demand=demand, clock=clock, changed=queue.put)
    demand.add_listener(verdicts)
    written, api = Written(), InMemoryApi(server)
    writer = StatusWriter(
        api=api,
        requests=view,
        demand=demand,
        verdicts=verdicts,
        queue=queue,
        events=Events(),
        clock=clock,
        rng=random.Random(1),
        listener=written,
    )
    view.listeners.append(demand)
    verdicts.session_opened(frozenset({frames.CAPABILITY_NEED_STATUS}))
    body: dict[str, Any] = {
        "metadata": {"name": "a", "namespace": "ns"},
        "spec": {"priority": 0, "resources": {"cpu": "1"}},
    }
    view.put(
        server.put(CAPACITY_REQUESTS, {"apiVersion": CAPACITY_REQUESTS.api_version, "kind": "CapacityRequest", **body})
    )
    running = asyncio.create_task(writer.run())
    roll_up = demand.roll_up()
    assert roll_up is not None
    stamp = roll_up.timestamp_unix_nanos
    verdicts.acknowledged(Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=stamp))
    await clock.sleep(5.0)
    verdicts.need_status(need_status(stamp=stamp))
    await clock.sleep(5.0)
    running.cancel()

    assert [call.verb for call in api.calls] == ["patch", "patch"]
    assert {outcome for _written, outcome in written.outcomes} == {"success"}
    stored = server.read(CAPACITY_REQUESTS, "a", "ns")
    assert stored is not None
    times = {each.type: each.last_transition_time for each in stored.status.conditions or ()}
    assert times["Accepted"] is not None
    assert times["Satisfied"] is not None
    assert times["Accepted"] < times["Satisfied"]


async def test_a_lost_answer_costs_at_most_another_write() -> None:
    async with Cluster().running() as cluster:
        lost = iter([True])
        cluster.api.faults.lose_answer = lambda call: call.verb == "patch" and next(lost, False)
        cluster.create("a")
        await cluster.report()
        await cluster.settle(60.0)

        assert cluster.stored("a").status.phase == "Acknowledged"
        assert cluster.condition("a", "Satisfied").status == "True"


async def test_a_backlog_is_coalesced_into_the_last_state() -> None:
    async with Cluster(workers=1).running() as cluster:
        cluster.create("a")
        await cluster.report()
        before = len(cluster.patches())
        cluster.api.faults.latency_seconds = 100.0
        for round_ in range(8):
            await cluster.report("a" if round_ % 2 else "", waits=False)
        await cluster.settle(1000.0)

        assert len(cluster.patches()) - before <= 3
        assert cluster.condition("a", "Satisfied").reason == "Unmet"


async def test_a_restarted_operator_writes_nothing_anew() -> None:
    first = Cluster()
    async with first.running():
        for name in "ab":
            first.create(name)
        await first.report("a")
    second = Cluster(server=first.server)
    async with second.running():
        await second.report("a")
        await second.settle()

        assert second.patches() == []
        assert second.events.recorded == []


# ---- Events ---------------------------------------------------------------------------------------------------------


async def test_an_event_says_what_turned_bad_once_in_ten_minutes() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        await cluster.report()
        for _ in range(4):
            await cluster.report("a")
            await cluster.report()
        assert cluster.events.recorded == [("CapacityRequest", "a", "PriorityStarved")]

        await cluster.settle(600.0)
        await cluster.report("a")
        assert len(cluster.events.recorded) == 2


async def test_a_request_that_cannot_be_mapped_gets_an_event() -> None:
    async with Cluster().running() as cluster:
        cluster.create("bad", resources={"cpu": "much"})
        await cluster.settle()

        assert cluster.condition("bad", "Accepted").reason == "InvalidQuantity"
        assert cluster.events.recorded == [("CapacityRequest", "bad", "InvalidQuantity")]


def waiting_pod(wait: PodWait) -> WaitingPod:
    return WaitingPod("ns", "web-0", "p", wait, "0/3 nodes are available: 3 Insufficient cpu.")


async def test_a_pod_that_is_too_large_gets_the_event_as_well() -> None:
    """With what is the largest available; pods of the same need that run hear nothing."""
    async with Cluster().running() as cluster:
        cluster.create("large", pod_uid="p", resources={"cpu": "1000"})
        cluster.create("small", pod_uid="q")
        cluster.pods.waits["p"] = waiting_pod(PodWait.REQUESTED)
        message = "1 pod wants cpu 1k, the largest machine for it has 96"
        await cluster.report("large", reason=UnmetReason.REQUEST_TOO_LARGE, message=message)

        assert cluster.events.recorded == [
            ("CapacityRequest", "large", "RequestTooLarge"),
            ("Pod", "web-0", "RequestTooLarge"),
        ]
        assert message in cluster.condition("large", "Shortfall").message
        assert cluster.condition("small", "Shortfall").status == "False"


async def test_a_pod_that_is_seen_after_its_verdict_gets_the_event_then() -> None:
    """A shard may judge a request before the scheduler has looked at its pod."""
    async with Cluster().running() as cluster:
        cluster.create("large", pod_uid="p", resources={"cpu": "1000"})
        await cluster.report("large", reason=UnmetReason.REQUEST_TOO_LARGE, message="too large")
        assert cluster.events.recorded == [("CapacityRequest", "large", "RequestTooLarge")]

        cluster.pods.waits["p"] = waiting_pod(PodWait.REQUESTED)
        for _ in range(2):
            cluster.verdicts.waiting_changed(("ns", "large"))
            await cluster.settle()

        assert cluster.events.recorded[1:] == [("Pod", "web-0", "RequestTooLarge")]


async def test_a_pod_whose_verdict_is_over_when_it_is_seen_gets_no_event() -> None:
    async with Cluster().running() as cluster:
        cluster.create("large", pod_uid="p", resources={"cpu": "1000"})
        await cluster.report("large", reason=UnmetReason.REQUEST_TOO_LARGE, message="too large")
        await cluster.report()
        cluster.pods.waits["p"] = waiting_pod(PodWait.REQUESTED)
        cluster.verdicts.waiting_changed(("ns", "large"))
        await cluster.settle()

        assert cluster.events.recorded == [("CapacityRequest", "large", "RequestTooLarge")]


async def test_a_request_that_was_short_already_gets_an_event_when_it_is_too_large() -> None:
    """Its row may lack other things first; that a pod can never run must not be hidden by that."""
    async with Cluster().running() as cluster:
        cluster.create("large", pod_uid="p", resources={"cpu": "1000"})
        cluster.pods.waits["p"] = waiting_pod(PodWait.REQUESTED)
        await cluster.report("large")
        for _ in range(2):
            await cluster.report("large", reason=UnmetReason.REQUEST_TOO_LARGE, message="too large")
            await cluster.report("large")

        assert cluster.events.recorded == [
            ("CapacityRequest", "large", "PriorityStarved"),
            ("CapacityRequest", "large", "RequestTooLarge"),
            ("Pod", "web-0", "RequestTooLarge"),
        ]


async def test_a_pod_that_is_no_longer_asked_for_hears_why() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a", pod_uid="p")
        await cluster.report()
        cluster.pods.waits["p"] = waiting_pod(PodWait.NOT_FOR_WANT_OF_CAPACITY)
        cluster.verdicts.waiting_changed(("ns", "a"))
        await cluster.settle()

        assert cluster.condition("a", "Satisfied").reason == "NotForWantOfCapacity"
        assert "Insufficient cpu" in cluster.condition("a", "Satisfied").message
        assert [each[0] for each in cluster.events.recorded] == ["CapacityRequest", "Pod"]


async def test_a_new_leader_gives_its_first_session_a_minute() -> None:
    cluster = Cluster()
    cluster.verdicts.session_closed()
    await cluster.clock.sleep(3600.0)
    async with cluster.running():
        cluster.create("a")
        await cluster.settle(50.0)
        assert cluster.patches() == []

        await cluster.settle(20.0)
        assert cluster.condition("a", "Accepted").reason == "NotReported"


async def test_a_lost_session_is_shown_after_a_minute() -> None:
    async with Cluster().running() as cluster:
        cluster.create("a")
        await cluster.report()
        cluster.verdicts.session_closed()
        await cluster.settle(55.0)
        assert cluster.condition("a", "Accepted").status == "True"

        await cluster.settle(10.0)
        accepted = cluster.condition("a", "Accepted")
        assert (accepted.status, accepted.reason) == ("Unknown", "NotReported")
        assert cluster.events.recorded == []
