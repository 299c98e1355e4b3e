"""How demand follows CapacityRequests, and what a roll-up says."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import DemandShape, Overhead
from bigfleet.operator.demand import demand
from bigfleet.operator.demand.capacity_requests import capacity_request
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey, RequestEntry
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, OwnerReference
from bigfleet.operator.requests import UnmappableReason, UnmappableRequest
from bigfleet.operator.rollup import recount
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.demand.objects import HandClock, HandView, request

CLUSTER = ClusterId("c")


class Waiting:
    """Says whose pods wait."""

    def __init__(self) -> None:
        self.keys: set[ObjectKey] = set()

    def waiting_requests(self) -> Iterable[ObjectKey]:
        return self.keys


class Overheads:
    """Says what DaemonSets take."""

    is_synced = True

    def overheads(self) -> tuple[Overhead, ...]:
        return (Overhead((), {"cpu": 100}),)


class Heard:
    """A DemandListener that remembers."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.removed: list[str] = []
        self.reported: list[tuple[int, list[str]]] = []

    def request_changed(self, entry: RequestEntry, former: RequestEntry | None) -> None:
        self.changed.append(entry.key[1])

    def request_removed(self, entry: RequestEntry) -> None:
        self.removed.append(entry.key[1])

    def rolled_up(self, stamp_nanos: int, entries: list[RequestEntry]) -> None:
        self.reported.append((stamp_nanos, [entry.key[1] for entry in entries]))


class Cluster:
    """A demand view over requests that a test changes."""

    def __init__(self, *, clock: Clock | None = None, **given: Any) -> None:
        self.clock = HandClock()
        self.objects: HandView[CapacityRequestObject] = HandView()
        self.waiting = Waiting()
        self.heard = Heard()
        self.changes = 0
        self.view = DemandView(
            cluster=CLUSTER,
            requests=self.objects,
            clock=clock or self.clock,
            on_demand_changed=self.count_change,
            **given,
        )
        self.view.add_listener(self.heard)
        self.objects.listeners.append(self.view)

    def count_change(self) -> None:
        self.changes += 1

    def aggregates(self) -> list[dict[str, int]]:
        roll_up = self.view.roll_up(self.waiting.waiting_requests)
        assert roll_up is not None
        return [dict(need.aggregate) for need in roll_up.needs]


def test_a_roll_up_sums_the_requests_that_exist() -> None:
    cluster = Cluster(overheads=Overheads())
    cluster.objects.put(request("a", resources={"cpu": "500m"}))
    cluster.objects.put(request("b", resources={"cpu": "2"}))
    cluster.objects.remove(cluster.objects.put(request("c")))

    roll_up = cluster.view.roll_up()

    assert roll_up is not None
    assert roll_up.cluster_id == CLUSTER
    assert [need.shapes for need in roll_up.needs] == [(DemandShape({"cpu": 2000}, 1), DemandShape({"cpu": 500}, 1))]
    assert roll_up.overheads == (Overhead((), {"cpu": 100}),)


def test_an_empty_cluster_that_was_read_says_that_it_is_empty() -> None:
    roll_up = Cluster().view.roll_up()

    assert roll_up is not None
    assert roll_up.needs == ()


def test_nothing_is_said_before_the_requests_have_been_read() -> None:
    cluster = Cluster()
    cluster.objects.is_synced = False

    assert cluster.view.roll_up() is None
    assert cluster.view.skipped_unsynced_total == 1


def test_nothing_is_said_before_the_daemon_sets_have_been_read() -> None:
    class Unread(Overheads):
        is_synced = False

    assert Cluster(overheads=Unread()).view.roll_up() is None


def test_nothing_is_said_while_the_watch_has_been_failing_for_more_than_a_minute() -> None:
    cluster = Cluster()
    cluster.objects.failing = 60.0
    assert cluster.view.roll_up() is not None

    cluster.objects.failing = 60.1
    assert cluster.view.roll_up() is None

    cluster.objects.failing = 0.0
    assert cluster.view.roll_up() is not None


def test_timestamps_rise_even_when_the_clock_goes_back() -> None:
    cluster = Cluster()
    stamps = []
    for seconds in (1000.0, 1000.0, 10.0, 2000.0):
        cluster.clock.seconds = seconds
        roll_up = cluster.view.roll_up()
        assert roll_up is not None
        stamps.append(roll_up.timestamp_unix_nanos)

    assert stamps == sorted(set(stamps))


def test_a_request_that_is_being_deleted_is_not_counted() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("b", deleting=True))
    cluster.objects.put(request("a", deleting=True))

    assert cluster.aggregates() == []
    assert (len(cluster.view), cluster.heard.removed) == (0, ["a"])


def test_a_request_that_cannot_be_mapped_is_left_out_and_the_others_are_counted() -> None:
    cluster = Cluster()
    cluster.objects.put(request("good"))
    cluster.objects.put(request("bad", resources={"cpu": "much"}))

    assert cluster.aggregates() == [{"cpu": 1000}]
    entry = cluster.view.get(("ns", "bad"))
    assert entry is not None
    assert entry.fault is not None
    assert (entry.fault.reason, cluster.view.invalid_count) == (UnmappableReason.INVALID_QUANTITY, 1)
    assert "much" in entry.fault.message


def test_a_request_that_becomes_wrong_is_counted_no_longer_until_it_is_right_again() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("a", generation=2, resources={"cpu": "-1"}))
    assert cluster.aggregates() == []
    assert cluster.heard.reported[-1][1] == []

    cluster.objects.put(request("a", generation=3, resources={"cpu": "3"}))
    assert cluster.aggregates() == [{"cpu": 3000}]
    assert cluster.view.invalid_count == 0


def test_a_request_belongs_to_the_row_of_its_present_generation() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    first = cluster.view.get(("ns", "a"))
    assert first is not None
    assert first.row is not None
    row_id = first.row.id
    cluster.objects.put(request("a", generation=2, priority=9))
    second = cluster.view.get(("ns", "a"))

    assert second is not None
    assert second.row is not None
    assert (cluster.view.row(row_id), list(second.row.members)) == (None, [("ns", "a")])
    row_id = second.row.id
    cluster.objects.remove(request("a"))
    assert cluster.view.row(row_id) is None


def test_demand_has_changed_only_when_a_row_has() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("a", status={"phase": "Acknowledged"}))
    cluster.objects.put(request("a", generation=2, resources={"cpu": "1000m"}))
    cluster.objects.put(request("bad", resources={"cpu": "x"}))

    assert cluster.changes == 1


def test_a_generation_is_first_reported_by_the_roll_up_that_follows_it() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("bad", resources={"cpu": "x"}))
    cluster.view.roll_up()
    cluster.objects.put(request("b"))
    cluster.view.roll_up()
    cluster.view.roll_up()
    cluster.objects.put(request("a", generation=2))
    cluster.view.roll_up()

    assert [names for _stamp, names in cluster.heard.reported] == [["a"], ["b"], [], ["a"]]
    entry = cluster.view.get(("ns", "a"))
    assert entry is not None
    assert entry.first_stamp_nanos == cluster.heard.reported[3][0]


def test_a_request_that_is_made_again_under_its_name_is_another_one() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", uid="one"))
    cluster.view.roll_up()
    first = cluster.view.get(("ns", "a"))
    cluster.view.put(request("a", uid="two"), None)
    cluster.objects.objects["ns", "a"] = request("a", uid="two")
    second = cluster.view.get(("ns", "a"))

    assert first is not None
    assert second is not None
    assert (first.first_stamp_nanos > 0, second.first_stamp_nanos, second.uid) == (True, 0, "two")
    assert cluster.aggregates() == [{"cpu": 1000}]


def test_waiting_pods_are_shapes_of_their_own_and_no_part_of_the_demand() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("b"))
    cluster.objects.put(request("c", exclusion={"group": "g"}))
    cluster.waiting.keys = {("ns", "a"), ("ns", "c")}

    roll_up = cluster.view.roll_up(cluster.waiting.waiting_requests)

    assert roll_up is not None
    (need,) = roll_up.needs
    assert need.waiting == (DemandShape({"cpu": 1000}, 1), DemandShape({"cpu": 1000}, 1, 1))
    assert (need.aggregate, sum(shape.count for shape in need.shapes)) == ({"cpu": 3000}, 3)


def test_a_waiting_request_that_changes_waits_with_its_new_shape() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.waiting.keys = {("ns", "a")}
    cluster.view.roll_up(cluster.waiting.waiting_requests)
    cluster.objects.put(request("a", generation=2, resources={"cpu": "2"}))

    roll_up = cluster.view.roll_up(cluster.waiting.waiting_requests)

    assert roll_up is not None
    assert roll_up.needs[0].waiting == (DemandShape({"cpu": 2000}, 1),)


def test_a_row_that_does_not_change_is_not_built_again() -> None:
    """So a roll-up costs the rows that changed, however many requests there are."""
    cluster = Cluster()
    for number in range(50):
        cluster.objects.put(request(f"a{number}"))
        cluster.objects.put(request(f"b{number}", priority=1))
    first = cluster.view.roll_up()
    cluster.objects.put(request("another", priority=1))
    second = cluster.view.roll_up()

    assert first is not None
    assert second is not None
    assert second.needs[1] is first.needs[1]
    assert second.needs[0] is not first.needs[0]


def test_a_pod_is_found_by_label_and_by_owner_reference() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", pod_uid="p1"))
    owned = request("b")
    owned.metadata.owner_references = [OwnerReference(api_version="v1", kind="Pod", name="pod", uid="p2")]
    cluster.objects.put(owned)

    assert [entry.key[1] for uid in ("p1", "p2") if (entry := cluster.view.entry_of_pod(("ns", uid)))] == ["a", "b"]
    cluster.objects.remove(owned)
    assert cluster.view.entry_of_pod(("ns", "p2")) is None


# ---- recounts ------------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_recount_is_made_when_a_session_opens_and_every_ten_minutes() -> None:
    clock = LoopClock()
    cluster = Cluster(clock=clock)
    cluster.objects.put(request("a"))
    recounting = asyncio.create_task(cluster.view.run())
    counts = []
    for seconds, opens in ((2, True), (10, False), (10, True), (590, False), (12, False)):
        if opens:
            cluster.view.session_opened()
        await clock.sleep(seconds)
        counts.append(cluster.view.recounts_total)
    recounting.cancel()

    assert counts == [1, 1, 2, 2, 3]
    assert cluster.view.recount_mismatches_total == 0


@pytest.mark.virtual_time
async def test_nothing_is_recounted_from_a_view_that_may_be_partial() -> None:
    clock = LoopClock()
    cluster = Cluster(clock=clock)
    cluster.objects.is_synced = False
    recounting = asyncio.create_task(cluster.view.run())

    await clock.sleep(30)
    before = cluster.view.recounts_total
    cluster.objects.is_synced = True
    await clock.sleep(2)
    recounting.cancel()

    assert (before, cluster.view.recounts_total) == (0, 1)


def test_a_recount_that_differs_wins_and_is_reported() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.view.roll_up()
    changes = cluster.changes
    # Changes that the view never heard of.
    missed, gone = request("b", resources={"cpu": "4"}), cluster.objects.get("a", "ns")
    assert gone is not None
    cluster.objects.objects = {missed.metadata.key: missed}

    assert not cluster.view.recount()

    assert cluster.changes > changes
    assert cluster.aggregates() == [{"cpu": 4000}]
    assert cluster.view.recount_mismatches_total == 1
    assert cluster.heard.removed == ["a"]


class ActingClock(HandClock):
    """Lets something happen between two slices of work, and cancels at the second pause."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        super().__init__()
        self.acts = list(acts)
        self.pauses = 0

    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.pauses += 1
            if self.pauses > 1:
                raise asyncio.CancelledError
        elif self.acts:
            self.acts.pop(0)()


def recount_while(cluster: Cluster, clock: ActingClock, *acts: Callable[[], object]) -> None:
    """Recount, with something that happens after each slice."""
    clock.acts = list(acts)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cluster.view.run())
    assert not clock.acts


def test_what_changes_during_a_recount_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "_RECOUNT_SLICE", 1)
    clock = ActingClock()
    cluster = Cluster(clock=clock)
    *_others, c = (cluster.objects.put(request(name)) for name in "abc")

    recount_while(
        cluster,
        clock,
        # Counted already, not counted yet, new, new and gone, and one that takes another's name.
        lambda: cluster.objects.put(request("a", generation=2, resources={"cpu": "2"})),
        lambda: cluster.objects.remove(c),
        lambda: cluster.objects.put(request("d", resources={"cpu": "8"})),
        lambda: cluster.objects.remove(cluster.objects.put(request("e"))),
        lambda: cluster.objects.put(request("b", uid="another", resources={"cpu": "16"})),
    )

    assert cluster.view.recount_mismatches_total == 0
    assert cluster.aggregates() == [{"cpu": 2000 + 8000 + 16000}]
    assert cluster.view.recount()


def test_a_difference_is_found_although_others_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "_RECOUNT_SLICE", 1)
    clock = ActingClock()
    cluster = Cluster(clock=clock)
    for name in "abc":
        cluster.objects.put(request(name))
    unheard = request("a", generation=2, resources={"cpu": "32"})
    cluster.objects.objects[unheard.metadata.key] = unheard

    recount_while(cluster, clock, lambda: cluster.objects.put(request("b", generation=2, resources={"cpu": "4"})))

    assert cluster.view.recount_mismatches_total == 1
    assert cluster.aggregates() == [{"cpu": 32000 + 4000 + 1000}]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([None, "1", "2", "4"])), max_size=12))
def test_any_changes_during_a_recount_are_no_difference(changes: list[tuple[str, str | None]]) -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.objects.put(request(name))
    steps = cluster.view._recount_in_slices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand, "_RECOUNT_SLICE", 1)
        for generation, (name, cpu) in enumerate(changes, 2):
            next(steps, None)
            known = cluster.objects.get(name, "ns")
            if cpu is not None:
                cluster.objects.put(request(name, generation=generation, resources={"cpu": cpu}))
            elif known is not None:
                cluster.objects.remove(known)
        for _ in steps:
            pass

    assert cluster.view.recounts_total == 1
    assert cluster.view.recount_mismatches_total == 0


_SPECS = st.fixed_dictionaries(
    {
        "resources": st.dictionaries(
            st.sampled_from(["cpu", "memory"]), st.sampled_from(["1", "500m", "2", "x"]), min_size=1
        ),
        "priority": st.integers(0, 1),
    },
    optional={"coLocation": st.just({"topologyKey": "rack"}), "exclusion": st.just({"group": "g"})},
)
_NAMES = st.sampled_from("abcde")
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _NAMES, _SPECS),
        st.tuples(st.just("delete"), _NAMES, st.none()),
        st.tuples(st.just("deleting"), _NAMES, st.none()),
        st.tuples(st.just("again"), _NAMES, _SPECS),
        st.tuples(st.just("waits"), _NAMES, st.booleans()),
        st.tuples(st.just("report"), st.just(""), st.none()),
    ),
    max_size=40,
)


@given(_EVENTS)
def test_running_sums_equal_a_recount_after_any_events(events: list[tuple[str, str, Any]]) -> None:
    """And waiting pods are never more than the pods of their row."""
    cluster = Cluster()
    for generation, (kind, name, given_) in enumerate(events, 1):
        known = cluster.objects.get(name, "ns")
        if kind == "put":
            cluster.objects.put(request(name, generation=generation, **given_))
        elif kind == "again":
            cluster.objects.put(request(name, uid=f"uid-{generation}", generation=1, **given_))
        elif kind == "delete" and known is not None:
            cluster.objects.remove(known)
        elif kind == "deleting" and known is not None:
            cluster.objects.put(request(name, uid=known.metadata.uid, generation=generation, deleting=True))
        elif kind == "waits":
            cluster.waiting.keys ^= {("ns", name)}

        roll_up = cluster.view.roll_up()
        assert roll_up is not None
        assert [replace(need, waiting=()) for need in roll_up.needs] == list(recount(CLUSTER, counted(cluster)))
        assert cluster.view.recount()
        for need in roll_up.needs:
            assert sum(shape.count for shape in need.waiting) <= sum(shape.count for shape in need.shapes)


def counted(cluster: Cluster) -> Iterable[Any]:
    for stored in cluster.objects:
        if stored.metadata.deletion_timestamp is None:
            try:
                mapped = capacity_request(stored)
                recount(CLUSTER, [mapped])
            except UnmappableRequest:
                continue
            yield mapped


def test_equal_specs_in_two_namespaces_are_not_mixed_up() -> None:
    cluster = Cluster()
    cluster.objects.put(request("a", namespace="one", coLocation={"topologyKey": "rack"}))
    cluster.objects.put(request("a", namespace="two", coLocation={"topologyKey": "rack"}))

    roll_up = cluster.view.roll_up()

    assert roll_up is not None
    assert [need.group for need in roll_up.needs] == ["rack\0one\0", "rack\0two\0"]
    assert roll_up.needs[0].profile.requirements == (Requirement("rack", Operator.SAME),)


def test_a_generation_that_is_left_out_is_not_reported_before_it_counts() -> None:
    """Or it would be called acknowledged, though no roll-up contained it."""
    cluster = Cluster()
    cluster.objects.put(request("a"))
    cluster.objects.put(request("b"))
    left_out = [("ns", "a")]
    found = cluster.view.roll_up(given_up=lambda: left_out)
    assert found is not None
    assert [shape.count for need in found.needs for shape in need.shapes] == [1]
    assert cluster.heard.reported[-1][1] == ["b"]

    left_out.clear()
    found = cluster.view.roll_up(given_up=lambda: left_out)
    assert found is not None
    assert [shape.count for need in found.needs for shape in need.shapes] == [2]
    assert cluster.heard.reported[-1][1] == ["a"]
