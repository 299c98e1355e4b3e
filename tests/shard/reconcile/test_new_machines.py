"""Machines that are new in a List come to the same whether they are taken many at once or one by one."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import Columns, ColumnStore
from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.model.states import MachineState
from bigfleet.model.validation import InvariantBroken
from bigfleet.rpc.wire.convert_machine import machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.inventory import packed_records
from bigfleet.shard.inventory.ingest import Ingest, PlainBinding
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.ports import ListedBinding, RecordsInParts, ShardSettings, SplitRecords
from bigfleet.shard.reconcile import new_machines, reconciler
from bigfleet.shard.reconcile.ownership_filter import OwnershipFilter, OwnsAll
from bigfleet.shard.status.cycle_publisher import CyclePublisher
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.shard.world import World, machine, note_pending
from tests.strategies import CLUSTERS, RACK, machines

S = MachineState
Record = tuple[Machine, dict[str, str]]

NAMES = ["a", "b", "c", "d", "e", "f"]
#: What breaks a record, or makes more of it than an insert.
oddities: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {},
        {},
        {"price_usd_per_hour": float("nan")},
        {"price_usd_per_hour": -1.0},
        {"interruption_probability": 1.5},
        {"host": HostRef()},
        {"host": HostRef("", "r")},
        {"host": HostRef("p", "")},
        {"host": HostRef("p", "r")},
        {"cluster": ClusterId("c1")},
        {"cluster": ClusterId("")},
        {"state": S.UNSPECIFIED},
        {"state": S.FAILED, "last_error": ""},
        {"node_name": "n1"},
        {"node_name": "n" * 200},
        {"zone": "zb"},
    ]
)
more_metadata = st.dictionaries(
    st.sampled_from([labels.ASSIGNED_PRIORITY, labels.ASSIGNED_SHARD, labels.ASSIGNED_GROUP, "other"]),
    st.sampled_from(["", "7", "no number", "shard-0", "shard-1"]),
    max_size=2,
)
shown_records: st.SearchStrategy[Record] = st.builds(
    lambda name, drawn, odd, more: (
        replace(drawn, id=MachineId(name), **odd),
        (encode_metadata(drawn) if drawn.cluster else {}) | more,
    ),
    st.sampled_from(NAMES),
    machines(),
    oddities,
    more_metadata,
)
lists = st.lists(st.lists(shown_records, max_size=8), min_size=1, max_size=3)
ROW = OwnershipRow(RowKind.ADOPTED, OwnershipVersion(1, 1), ShardId("shard-1"))
everything_owned = Owned(base=Base.ALL)
ownerships = st.sampled_from(
    [
        everything_owned,
        everything_owned,
        Owned(base=Base.ALL, rows={MachineId("a"): replace(ROW, kind=RowKind.DISOWNED)}),
        Owned(base=Base.DOMAINS, domains=frozenset({Domain(labels.ZONE, "za")})),
        Owned(
            base=Base.DOMAINS,
            domains=frozenset({Domain(RACK, "r1")}),
            leaving=frozenset({Domain(labels.ZONE, "za")}),
            rows={MachineId("b"): ROW},
        ),
    ]
)


@contextmanager
def small_turns() -> Iterator[None]:
    """Let a few machines be many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciler, "NEW_MIN", 1)
        patch.setattr(reconciler, "INSERTED_PER_TURN_MAX", 3)
        patch.setattr(packed_records, "UNPACKED_MAX", 2)
        yield


def content_of(shown: Sequence[Record]) -> bytes:
    """Return an answer as a provider writes it."""
    messages = [machine_to_wire(each, metadata) for each, metadata in shown]
    return provider_pb2.MachineList(machines=messages).SerializeToString(deterministic=True)


async def reconcile(world: World, content: bytes, *, is_in_parts: bool) -> object:
    """Let the shard read one answer; return what it logs and reports."""
    listing = await read_listing(content, LoopClock())
    world.provider.listings.append(listing if is_in_parts else replace(listing, parts=None))
    with structlog.testing.capture_logs() as logged:
        result = await world.shard.reconciler.run()
    world.shard.inventory.validate()
    for _ in range(8):
        await asyncio.sleep(0)
    return result, sorted(map(repr, logged))


def account(world: World) -> object:
    """Return all that a List may change."""
    inventory, joins = world.shard.inventory, world.shard.publisher.joins
    view, changed = inventory.snapshot(), sorted(inventory.changed_since_snapshot)
    noted, rows = inventory.noted(), {each: inventory.row(each) for each in inventory.ids}
    return (
        {each.id: repr(each) for each in inventory},
        len(inventory),
        repr(sorted(snapshot_of(view).machines.items())),
        {each: (inventory.idle_since_seconds(each), inventory.state_since_unix_nanos(each)) for each in inventory.ids},
        {name: (inventory.bound_to(name), inventory.count_bound_to(name)) for name in inventory.clusters},
        {each: noted[row].tolist() if len(noted) and row is not None else [0, 0] for each, row in rows.items()},
        changed,
        dict(world.shard.ingest._applied),
        {each: joins._missing.since_seconds(each) for each in inventory.ids},
        sorted((since, machine_id) for since, due in joins._due for machine_id in due),
        sorted(world.shard._revisits),
        world.shard.reconciler._has_refused,
        world.shard.reconciler._foreign.count,
        {reason: world.metric("machines_rejected_total", reason=reason) for reason in ("structural", "price")},
        [world.metric(name) for name in ("metadata_decode_errors_total", "binding_conflicts_total")],
    )


async def both(
    stories: Sequence[Sequence[Record]],
    prepare: Callable[[World], Any],
    *,
    is_after_first_list: bool = True,
) -> None:
    """Show the Lists to two shards, one of which takes what is new many at once."""
    worlds = [World(settings=ShardSettings(removal_brake=False)) for _ in range(2)]
    for world in worlds:
        world.shard.sessions.are_shown_machines = is_after_first_list
    operators = [prepare(world) for world in worlds]
    for story in stories:
        said = [
            await reconcile(world, content_of(story), is_in_parts=is_in_parts)
            for world, is_in_parts in zip(worlds, (True, False), strict=True)
        ]
        assert said[0] == said[1]
        assert account(worlds[0]) == account(worlds[1])
        frames = [sorted(map(repr, operator.frames)) if operator is not None else [] for operator in operators]
        assert frames[0] == frames[1]


@pytest.mark.slow
@given(lists, ownerships, st.sampled_from(["", *CLUSTERS]), st.sampled_from(["", *NAMES]), st.booleans())
@settings(max_examples=in_proportion(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_at_once_come_to_what_one_by_one_does(
    stories: list[list[Record]], owned: Owned, connected: str, pending: str, is_after_first_list: bool
) -> None:
    """Sound and unsound records, listed twice, of others, of connected clusters, with actions under way."""

    def prepare(world: World) -> Any:
        world.shard.ownership_filter._resources = OwnsAll(owned=owned)
        if pending:
            note_pending(world.shard, pending)
        return world.connect(connected) if connected else None

    with small_turns():
        run_virtual(lambda: both(stories, prepare, is_after_first_list=is_after_first_list))


def odd_fleet() -> list[Record]:
    """Return new machines of which more is to be said than that they are there."""
    bound = machine("a", S.CONFIGURED, cluster=ClusterId("c1"))
    idle = machine("b", S.IDLE)
    return [
        (bound, {labels.ASSIGNED_PRIORITY: "no number"}),
        (replace(bound, id=MachineId("c")), {labels.ASSIGNED_SHARD: "shard-1"}),
        (replace(bound, id=MachineId("d"), host=HostRef()), {}),
        (replace(idle, price_usd_per_hour=-1.0, id=MachineId("e")), {}),
        (replace(idle, cluster=ClusterId("c1"), id=MachineId("f")), {}),
        (replace(bound, id=MachineId("g"), cluster=ClusterId("c2")), {}),
        (replace(idle, id=MachineId("h")), {}),
        (replace(idle, id=MachineId("h"), node_name="n"), {}),
        (idle, {}),
    ]


def plainly(self: Ingest, listed: ListedBinding) -> PlainBinding:
    """Take every binding for plain."""
    return plain_binding(self, listed)._replace(is_plain_with_host=True)


async def not_once(parts: RecordsInParts, places: Sequence[int], *_others: object) -> SplitRecords:
    """Take machines that are listed twice for new ones."""
    return await parts.read(places)


def add_with_other_notes(self: ColumnStore, ids: Sequence[MachineId], columns: Columns, notes: Any) -> None:
    """Note another digest of each record."""
    add(self, ids, columns, notes + np.uint64(1))


plain_binding, add = Ingest.plain_binding, ColumnStore.add
DEFECTS: list[tuple[Any, str, Any]] = [
    (Ingest, "is_connected", lambda _self, _cluster: False),
    (Ingest, "is_sound", lambda _self, _facts: True),
    (Ingest, "plain_binding", plainly),
    (OwnershipFilter, "owns_by_binding", lambda _self, _listed: True),
    (CyclePublisher, "machines_inserted", lambda _self, _ids, _bindings: None),
    (ColumnStore, "add", add_with_other_notes),
    (reconciler, "split_new", not_once),
]


@pytest.mark.parametrize(("place", "name", "defect"), DEFECTS, ids=[name for _place, name, _defect in DEFECTS])
def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, defect: Any) -> None:
    """What the comparison compares is enough to find it; without a defect there is nothing to find."""

    def prepare(world: World) -> Any:
        return world.connect("c2")

    with small_turns():
        run_virtual(lambda: both([odd_fleet()], prepare))
        monkeypatch.setattr(place, name, defect)
        with pytest.raises((AssertionError, InvariantBroken)):
            run_virtual(lambda: both([odd_fleet()], prepare))


def fleet(machines: int) -> list[Record]:
    """Return machines of which nothing is to be said but that they are there."""
    shown = []
    for number in range(machines):
        state = (S.CONFIGURED, S.IDLE, S.SPECULATIVE)[number % 3]
        each = machine(f"m-{number:04}", state, cluster=ClusterId("c1" if state is S.CONFIGURED else ""))
        shown.append((each, encode_metadata(each) if each.cluster else {}))
    return shown


def inserted_many(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of machines of each insert of many."""
    sizes: list[int] = []
    insert_many = Inventory.insert_many

    def counted(self: Inventory, ids: Sequence[MachineId], *rest: Any, **named: Any) -> None:
        sizes.append(len(ids))
        insert_many(self, ids, *rest, **named)

    monkeypatch.setattr(Inventory, "insert_many", counted)
    return sizes


async def test_a_first_list_is_inserted_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns; the next List recognises all of it, and inserts only what is new."""
    monkeypatch.setattr(reconciler, "INSERTED_PER_TURN_MAX", 1_000)
    sizes, world = inserted_many(monkeypatch), World()
    await reconcile(world, content_of(fleet(2_500)), is_in_parts=True)
    assert (sizes, len(world.shard.inventory)) == ([1_000, 1_000, 500], 2_500)

    await reconcile(world, content_of(fleet(3_700)), is_in_parts=True)
    assert (sizes[3:], len(world.shard.inventory)) == ([1_000, 200], 3_700)


async def test_few_new_machines_are_inserted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge of all rows is for many."""
    sizes, world = inserted_many(monkeypatch), World()
    await reconcile(world, content_of(fleet(new_machines.NEW_MIN - 1)), is_in_parts=True)

    assert (sizes, len(world.shard.inventory)) == ([], new_machines.NEW_MIN - 1)


async def test_machines_of_a_connected_cluster_are_shown_to_it() -> None:
    """A session that stands before a List is sent each of its machines, once the first one has been applied."""
    world = World()
    world.shard.sessions.are_shown_machines = True
    operator = world.connect("c1")
    with small_turns():
        await reconcile(world, content_of(fleet(30)), is_in_parts=True)

    assert [operator.states(f"m-{number:04}") for number in range(30)] == [[S.CONFIGURED], [], []] * 10


async def test_a_machine_that_comes_meanwhile_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading and inserting others have their turn, and may insert a machine of the answer."""
    monkeypatch.setattr(reconciler, "INSERTED_PER_TURN_MAX", 10)
    monkeypatch.setattr(reconciler, "NEW_MIN", 1)
    world, insert_many = World(), Inventory.insert_many

    def insert_one_more(self: Inventory, *rest: Any, **named: Any) -> None:
        insert_many(self, *rest, **named)
        if "m-0019" not in self:
            self.insert(machine("m-0019", S.IDLE), now_seconds=0.0)

    monkeypatch.setattr(Inventory, "insert_many", insert_one_more)
    await reconcile(world, content_of(fleet(20)), is_in_parts=True)

    assert len(world.shard.inventory) == 20
    assert world.shard.inventory.known(MachineId("m-0019")) == fleet(20)[19][0]
