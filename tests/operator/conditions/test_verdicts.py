"""What the status of a request should say, from acks, verdicts, the session and waiting pods."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import frames
from bigfleet.model.frames import Acknowledgement, NeedStatus, NeedStatusUpdate, RollUp, UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.operator.conditions.verdicts import DesiredStatus, RequestVerdicts, Urgency
from bigfleet.operator.conditions.wording import ConditionValue
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey, PodKey
from bigfleet.operator.demand.waiting import PodWait, WaitingPod
from bigfleet.operator.kubernetes.objects import CapacityRequestObject
from tests.operator.demand.objects import HandClock, HandView, need_status, request

VERDICTS = frozenset({frames.CAPABILITY_NEED_STATUS})


class Pods:
    def __init__(self) -> None:
        self.waits: dict[str, WaitingPod] = {}

    def get(self, pod: PodKey) -> WaitingPod | None:
        return self.waits.get(pod[1])


class Cluster:
    """Requests with their verdicts; remembers which requests were to be looked at."""

    def __init__(self, *, session: bool = True, capabilities: frozenset[str] = VERDICTS) -> None:
        self.clock = HandClock()
        self.objects: HandView[CapacityRequestObject] = HandView()
        self.pods = Pods()
        self.demand = DemandView(cluster=ClusterId("c"), requests=self.objects, clock=self.clock)
        self.looked_at: list[tuple[str, Urgency]] = []
        self.verdicts = RequestVerdicts(demand=self.demand, clock=self.clock, pods=self.pods, changed=self.look_at)
        self.demand.add_listener(self.verdicts)
        self.objects.listeners.append(self.demand)
        if session:
            self.verdicts.session_opened(capabilities)

    def look_at(self, key: ObjectKey, urgency: Urgency) -> None:
        self.looked_at.append((key[1], urgency))

    def taken(self) -> dict[str, Urgency]:
        """Return what was to be looked at since the last call, each with its greatest urgency."""
        found: dict[str, Urgency] = {}
        for name, urgency in self.looked_at:
            found[name] = min(urgency, found.get(name, urgency))
        self.looked_at.clear()
        return found

    def roll_up(self) -> RollUp:
        roll_up = self.demand.roll_up()
        assert roll_up is not None
        return roll_up

    def ack(self, stamp: int, **fields: Any) -> None:
        given: dict[str, Any] = {"echo": frames.ECHO_ROLLUP, "rollup_timestamp_unix_nanos": stamp, **fields}
        self.verdicts.acknowledged(Acknowledgement(**given))

    def report(self, *unmet: str, **fields: Any) -> RollUp:
        """Report and judge: the rows of these requests are unmet."""
        roll_up = self.roll_up()
        self.ack(roll_up.timestamp_unix_nanos)
        self.judge(*unmet, stamp=roll_up.timestamp_unix_nanos, **fields)
        return roll_up

    def judge(self, *unmet: str, **fields: Any) -> None:
        self.verdicts.need_status(need_status(*self.rows(unmet), **fields))

    def rows(self, names: Iterable[str]) -> list[tuple[str, str]]:
        found = []
        for name in names:
            entry = self.demand.get(("ns", name))
            assert entry is not None
            assert entry.row is not None
            found.append(entry.row.id)
        return found

    def desired(self, name: str) -> DesiredStatus:
        entry = self.demand.get(("ns", name))
        assert entry is not None
        return self.verdicts.desired(entry)

    def says(self, name: str) -> tuple[str, str, str]:
        """Return the reasons of Accepted, Satisfied and Shortfall; "" where the condition is left as it is."""
        desired = self.desired(name)
        values = (desired.accepted, desired.satisfied, desired.shortfall)
        return tuple(value.reason if value is not None else "" for value in values)  # type: ignore[return-value]


# ---- acknowledgement ------------------------------------------------------------------------------------------------


def test_a_request_is_acknowledged_when_a_roll_up_with_it_is_in_force() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    stamp = cluster.roll_up().timestamp_unix_nanos
    assert not cluster.desired("a").is_acknowledged
    cluster.taken()

    cluster.ack(stamp)

    assert cluster.desired("a").is_acknowledged
    assert cluster.says("a")[0] == "InRollup"
    assert cluster.taken() == {"a": Urgency.PHASE}
    assert cluster.verdicts.acknowledged_count == 1


def test_an_ack_does_not_count_for_requests_that_came_after_its_roll_up() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    first = cluster.roll_up().timestamp_unix_nanos
    cluster.objects.put(request("b"))
    cluster.roll_up()

    cluster.ack(first)

    assert [cluster.desired(name).is_acknowledged for name in "ab"] == [True, False]


def test_an_ack_counts_for_all_earlier_roll_ups() -> None:
    """A newer roll-up takes the place of one that was never sent."""
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.roll_up()
    cluster.objects.put(request("b"))

    cluster.ack(cluster.roll_up().timestamp_unix_nanos)

    assert [cluster.desired(name).is_acknowledged for name in "ab"] == [True, True]


def test_an_ack_without_a_timestamp_counts_for_the_oldest_roll_up() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.roll_up()
    cluster.objects.put(request("b"))
    cluster.roll_up()

    cluster.ack(0)
    assert [cluster.desired(name).is_acknowledged for name in "ab"] == [True, False]
    cluster.ack(0)
    assert [cluster.desired(name).is_acknowledged for name in "ab"] == [True, True]


def test_roll_ups_of_former_sessions_are_not_awaited() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.roll_up()
    cluster.verdicts.session_closed()
    cluster.objects.put(request("b"))
    cluster.verdicts.session_opened(VERDICTS)
    cluster.roll_up()

    cluster.ack(0)

    assert [cluster.desired(name).is_acknowledged for name in "ab"] == [True, True]


def test_a_new_generation_waits_for_its_own_ack() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    first = cluster.roll_up().timestamp_unix_nanos
    cluster.objects.put(request("a", generation=2))
    cluster.ack(first)
    assert not cluster.desired("a").is_acknowledged
    assert cluster.verdicts.acknowledged_count == 0

    cluster.ack(cluster.roll_up().timestamp_unix_nanos)
    assert cluster.desired("a")[:2] == (2, True)


def test_a_held_roll_up_acknowledges_nothing() -> None:
    cluster = Cluster()
    cluster.objects.put(request("old"))
    cluster.ack(cluster.roll_up().timestamp_unix_nanos)
    cluster.objects.put(request("new"))
    cluster.taken()

    cluster.ack(cluster.roll_up().timestamp_unix_nanos, held=True)

    assert [cluster.says(name)[0] for name in ("old", "new")] == ["InRollup", "Held"]
    assert cluster.taken() == {"new": Urgency.CONDITION}

    cluster.ack(cluster.roll_up().timestamp_unix_nanos)
    assert cluster.says("new")[0] == "InRollup"


def test_a_refused_roll_up_says_why_on_the_requests_that_are_not_in_force() -> None:
    cluster = Cluster()
    cluster.objects.put(request("old"))
    cluster.ack(cluster.roll_up().timestamp_unix_nanos)
    cluster.objects.put(request("new"))
    cluster.roll_up()

    cluster.verdicts.acknowledged(Acknowledgement(echo=frames.ECHO_ROLLUP_REJECTED, error="needs[3].priority: is odd"))

    assert cluster.says("old")[0] == "InRollup"
    accepted = cluster.desired("new").accepted
    assert accepted == ConditionValue(
        "False", "RollupRejected", "the shard refused the cluster's roll-up: needs[3].priority: is odd"
    )


def test_another_error_of_a_refusal_is_shown_after_a_minute() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.roll_up()
    texts = []
    for seconds, error in ((0, "first"), (30, "second"), (60, "third")):
        cluster.clock.seconds = 1000.0 + seconds
        cluster.verdicts.acknowledged(Acknowledgement(echo=frames.ECHO_ROLLUP_REJECTED, error=error))
        accepted = cluster.desired("a").accepted
        assert accepted is not None
        texts.append(accepted.message.rpartition(": ")[2])

    assert texts == ["first", "first", "third"]


def test_a_request_that_cannot_be_mapped_is_refused_with_its_field() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", requirements=[{"key": "k", "operator": "Gt", "values": ["1"]}]))
    cluster.report()

    desired = cluster.desired("a")
    assert cluster.says("a") == ("InvalidRequirement", "NotEvaluated", "NotEvaluated")
    assert desired.accepted is not None
    assert "spec.requirements[0].operator: 'Gt'" in desired.accepted.message
    assert not desired.is_acknowledged


def test_requests_that_are_gone_are_forgotten_while_the_shard_holds_the_roll_up() -> None:
    """However long that takes, and however many come and go."""
    cluster = Cluster()
    cluster.objects.put(request("stays"))
    for number in range(3000):
        stored = cluster.objects.put(request(f"a{number}"))
        cluster.roll_up()
        cluster.objects.remove(stored)
    assert cluster.verdicts.unacknowledged_count < 1100

    cluster.ack(cluster.roll_up().timestamp_unix_nanos)

    assert cluster.desired("stays").is_acknowledged
    assert cluster.verdicts.unacknowledged_count == 0


# ---- the session ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("had_session", [True, False])
def test_after_a_minute_without_a_session_requests_say_that_they_are_not_reported(had_session: bool) -> None:
    cluster = Cluster(session=had_session)
    cluster.objects.put(request("a"))
    if had_session:
        cluster.report()
        cluster.verdicts.session_closed()
    before = cluster.says("a")
    cluster.clock.seconds += 60
    cluster.verdicts.tick()
    assert cluster.says("a") == before
    cluster.taken()

    cluster.clock.seconds += 1
    cluster.verdicts.session_closed()
    cluster.verdicts.tick()

    assert cluster.says("a") == ("NotReported", *before[1:])
    assert cluster.taken() == {"a": Urgency.CONDITION}


def test_the_minute_begins_when_the_process_begins_to_lead() -> None:
    cluster = Cluster(session=False)
    cluster.objects.put(request("a"))
    cluster.clock.seconds += 3600
    cluster.verdicts.started()
    cluster.clock.seconds += 59
    cluster.verdicts.tick()
    assert cluster.says("a")[0] == ""

    cluster.clock.seconds += 2
    cluster.verdicts.tick()
    assert cluster.says("a")[0] == "NotReported"


def test_what_is_in_force_is_shown_again_with_the_next_session() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.report()
    cluster.verdicts.session_closed()
    cluster.clock.seconds += 100
    cluster.verdicts.tick()

    cluster.verdicts.session_opened(VERDICTS)

    assert cluster.says("a")[0] == "InRollup"


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_a_need_that_is_not_listed_is_met() -> None:
    cluster = Cluster()
    cluster.objects.put(request("met"))
    cluster.objects.put(request("unmet", priority=5))
    cluster.report("unmet")

    assert cluster.says("met") == ("InRollup", "Covered", "None")
    assert cluster.says("unmet") == ("InRollup", "Unmet", "PriorityStarved")


def test_a_need_whose_machines_do_not_serve_yet_is_met_and_says_so() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.report(coming=tuple(cluster.rows(["a"])))

    assert cluster.says("a") == ("InRollup", "Coming", "None")


def test_only_the_pod_that_waits_is_shown_as_coming() -> None:
    cluster = Cluster()
    cluster.objects.put(request("runs", pod_uid="u1"))
    cluster.objects.put(request("waits", pod_uid="u2"))
    cluster.objects.put(request("without-a-pod"))
    cluster.pods.waits["u2"] = WaitingPod("ns", "waits", "u2", PodWait.REQUESTED, "0/1 nodes: Insufficient cpu")
    cluster.report(coming=tuple(cluster.rows(["runs"])))

    assert {name: cluster.says(name)[1] for name in ("runs", "waits", "without-a-pod")} == {
        "runs": "Covered",
        "waits": "Coming",
        "without-a-pod": "Coming",
    }


def test_a_request_is_judged_by_verdicts_on_roll_ups_that_contain_it() -> None:
    cluster = Cluster()
    cluster.objects.put(request("old"))
    first = cluster.roll_up().timestamp_unix_nanos
    cluster.objects.put(request("new"))
    cluster.roll_up()
    cluster.judge(stamp=first)

    assert [cluster.says(name)[1] for name in ("old", "new")] == ["Covered", "NotEvaluated"]
    assert [cluster.desired(name).is_passing for name in ("old", "new")] == [False, True]


def test_nothing_is_judged_by_a_shard_that_reports_no_verdicts() -> None:
    cluster = Cluster(capabilities=frozenset())
    cluster.objects.put(request("a"))
    cluster.ack(cluster.roll_up().timestamp_unix_nanos)

    assert cluster.says("a") == ("InRollup", "NotEvaluated", "NotEvaluated")
    assert not cluster.desired("a").is_passing


def test_a_truncated_verdict_judges_only_what_it_lists() -> None:
    cluster = Cluster()
    cluster.objects.put(request("listed"))
    cluster.objects.put(request("other", priority=5))
    cluster.report("listed", truncated=True)

    assert [cluster.says(name)[1] for name in ("listed", "other")] == ["Unmet", "NotEvaluated"]


@pytest.mark.parametrize("reason", list(UnmetReason))
def test_every_reason_of_a_shard_has_a_word(reason: UnmetReason) -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.report("a", reason=reason)

    shortfall = cluster.desired("a").shortfall
    assert shortfall is not None
    assert shortfall.status == "True"
    words = "".join(part.capitalize() for part in reason.name.split("_"))
    assert shortfall.reason == ("Unmet" if reason is UnmetReason.UNSPECIFIED else words)


def test_a_parked_gang_says_so() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    roll_up = cluster.roll_up()
    ((fingerprint, group),) = cluster.rows("a")
    row = NeedStatus(
        fingerprint=fingerprint,
        group=group,
        residual={"cpu": "1"},
        reason=UnmetReason.TOPOLOGY_UNSATISFIABLE,
        parked=True,
    )
    cluster.verdicts.need_status(
        NeedStatusUpdate(
            cycle=1,
            computed_at_unix_nanos=1,
            rows=(row,),
            rollup_timestamp_unix_nanos=roll_up.timestamp_unix_nanos,
        )
    )

    assert cluster.says("a")[2] == "Parked"


def test_the_message_says_that_the_verdict_is_the_needs() -> None:
    cluster = Cluster()
    for number in range(40):
        cluster.objects.put(request(f"a{number}"))
    unmet: dict[str, Any] = {
        "residual": {"memory": "480Gi", "cpu": "120"},
        "message": "matching machines are held by higher priority",
    }
    cluster.report("a0", **unmet)
    cluster.clock.seconds += 200
    cluster.report("a0", **unmet)

    shortfall = cluster.desired("a7").shortfall
    assert shortfall is not None
    assert shortfall.message == (
        "40 requests share this need; short of cpu 120, memory 480Gi for 2 min:"
        " matching machines are held by higher priority"
    )


def test_a_verdict_touches_only_the_requests_of_rows_whose_verdict_changed() -> None:
    cluster = Cluster()
    for priority in range(5):
        cluster.objects.put(request(f"a{priority}", priority=priority))
    cluster.report("a1", "a2")
    cluster.taken()

    cluster.judge("a2", "a3")
    assert cluster.taken() == {"a1": Urgency.CONDITION, "a3": Urgency.CONDITION}
    cluster.judge("a2", "a3")
    assert cluster.taken() == {}


def test_figures_change_at_most_once_a_minute() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.report("a", residual={"cpu": "9"})
    cluster.taken()
    seen: list[dict[str, Urgency]] = []
    for _ in range(13):
        cluster.clock.seconds += 10
        cluster.judge("a", residual={"cpu": str(len(seen))})
        seen.append(cluster.taken())

    assert [place for place, looked_at in enumerate(seen) if looked_at] == [5, 11]
    assert seen[5] == {"a": Urgency.MESSAGE}


def test_a_new_reason_is_shown_at_once() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.report("a")
    cluster.taken()

    cluster.judge("a", reason=UnmetReason.STOCKOUT)

    assert cluster.says("a")[2] == "Stockout"
    assert cluster.taken() == {"a": Urgency.CONDITION}


# ---- one pod that is too large, and pods that wait -------------------------------------------------------------------


def test_a_request_that_is_too_large_affects_itself_alone() -> None:
    cluster = Cluster()
    cluster.objects.put(request("typo", resources={"cpu": "1000"}))
    cluster.objects.put(request("good"))
    cluster.report(
        "typo",
        reason=UnmetReason.REQUEST_TOO_LARGE,
        message="1 pod wants cpu 1k, the largest machine for it has 96",
        residual={"cpu": "1k"},
    )

    assert cluster.says("typo")[1:] == ("Unmet", "RequestTooLarge")
    assert cluster.says("good")[1:] == ("Covered", "None")
    shortfall = cluster.desired("typo").shortfall
    assert shortfall is not None
    assert "the largest machine for it has 96" in shortfall.message


@pytest.mark.parametrize(
    "message",
    [
        "no machine of the fleet is large enough for one of its pods",
        "1 pod wants cpu 9, the largest machine for it has 8; 1 pod wants cpu 8, the largest machine for it has 7;"
        " 1 pod wants gpu 9, the largest machine for it has none",
    ],
)
def test_a_sentence_that_does_not_name_them_all_concerns_the_whole_need(message: str) -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", resources={"cpu": "500m"}))
    cluster.report("a", reason=UnmetReason.REQUEST_TOO_LARGE, message=message)

    assert cluster.says("a")[2] == "RequestTooLarge"


def _waiting(wait: PodWait) -> WaitingPod:
    return WaitingPod("ns", "pod", "p", wait, "0/3 nodes are available: 3 Insufficient cpu. preemption: none.")


@pytest.mark.parametrize(
    ("wait", "reason"),
    [
        (PodWait.REQUESTED, "Covered"),
        (PodWait.ASKED_FOR, "Waiting"),
        (PodWait.NOT_FOR_WANT_OF_CAPACITY, "NotForWantOfCapacity"),
    ],
)
def test_a_pod_that_waits_although_its_need_is_met_says_so(wait: PodWait, reason: str) -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", pod_uid="p"))
    cluster.objects.put(request("b"))
    cluster.report()
    cluster.pods.waits["p"] = _waiting(wait)

    assert cluster.says("a")[1:] == (reason, "None")
    assert cluster.says("b")[1:] == ("Covered", "None")
    satisfied = cluster.desired("a").satisfied
    assert satisfied is not None
    assert ("Insufficient cpu" in satisfied.message) == (wait is not PodWait.REQUESTED)


def test_an_unmet_need_is_what_its_waiting_pods_say_unless_they_are_given_up() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", pod_uid="p"))
    cluster.report("a")
    for wait, says in ((PodWait.ASKED_FOR, "Unmet"), (PodWait.NOT_FOR_WANT_OF_CAPACITY, "NotForWantOfCapacity")):
        cluster.pods.waits["p"] = _waiting(wait)
        assert cluster.says("a")[1] == says


# ---- properties -----------------------------------------------------------------------------------------------------

_NAMES = st.sampled_from("abc")
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "again", "delete", "bad"]), _NAMES),
        st.tuples(
            st.sampled_from(["report", "held", "rejected", "ack", "ack old", "ack plain", "lost", "open"]), st.just("")
        ),
    ),
    max_size=50,
)


@given(_EVENTS)
def test_no_generation_is_acknowledged_that_no_acknowledged_roll_up_contained(events: list[tuple[str, str]]) -> None:
    cluster = Cluster()
    #: What each roll-up contained: (uid, generation) by timestamp, in the order in which they were sent.
    contained: dict[int, set[tuple[str, int]]] = {}
    unacked: list[int] = []
    in_force: set[tuple[str, int]] = set()
    for number, (kind, name) in enumerate(events, 2):
        known = cluster.objects.get(name, "ns")
        if kind == "put":
            uid = known.metadata.uid if known is not None else ""
            cluster.objects.put(request(name, uid=uid, generation=number, priority=number % 2))
        elif kind == "again":
            cluster.objects.put(request(name, uid=f"uid-{number}", generation=1))
        elif kind == "bad":
            cluster.objects.put(request(name, uid=f"uid-{number}", generation=1, resources={"cpu": "x"}))
        elif kind == "delete" and known is not None:
            cluster.objects.remove(known)
        elif kind == "report":
            stamp = cluster.roll_up().timestamp_unix_nanos
            contained[stamp] = {(e.uid, e.generation) for e in cluster.demand if e.fault is None}
            unacked.append(stamp)
        elif kind == "held":
            cluster.ack(max(contained, default=1), held=True)
        elif kind == "rejected":
            cluster.ack(0, echo=frames.ECHO_ROLLUP_REJECTED, error="no")
        elif kind in ("ack", "ack old", "ack plain") and unacked:
            stamp = unacked[-1] if kind == "ack" else unacked[0]
            cluster.ack(0 if kind == "ack plain" else stamp)
            for each in [each for each in unacked if each <= stamp]:
                in_force |= contained[each]
                unacked.remove(each)
        elif kind == "lost":
            cluster.verdicts.session_closed()
        elif kind == "open":
            cluster.verdicts.session_opened(VERDICTS)
            unacked.clear()

        for entry in cluster.demand:
            desired = cluster.verdicts.desired(entry)
            if desired.is_acknowledged:
                assert (entry.uid, desired.generation) in in_force
                assert entry.fault is None
        counts = Counter(entry.is_acknowledged for entry in cluster.demand)
        assert cluster.verdicts.acknowledged_count == counts[True]
