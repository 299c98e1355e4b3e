"""A full answer whose records carry digests comes to the same as one without, and most of it is never read."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.columns import store as store_module
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine, invariant_fault
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.states import MachineState, is_legal_transition
from bigfleet.shard.ports import ListedMachine, Listing, ProviderRefusal, RefusalKind, ShardSettings
from bigfleet.shard.reconcile import unchanged_records
from bigfleet.shard.reconcile.unchanged_records import ROUNDS_MAX, _Index
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.shard.world import World, machine
from tests.strategies import machines

S = MachineState


def digest_of(record: ListedMachine) -> bytes:
    """Return a digest that equal records share."""
    return xxhash.xxh3_128_digest(repr((record.machine, sorted(record.metadata.items()))).encode())


class CountedRecords(Sequence[ListedMachine]):
    """Records that count how often one is read; some cannot be."""

    def __init__(self, records: Sequence[ListedMachine], broken: int | None = None) -> None:
        self._records = records
        self._broken = broken
        self.reads = 0

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, place: int) -> ListedMachine: ...
    @overload
    def __getitem__(self, place: slice) -> list[ListedMachine]: ...
    def __getitem__(self, place: int | slice) -> ListedMachine | list[ListedMachine]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if place == self._broken:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "the answer is no MachineList")
        self.reads += 1
        return self._records[place]


def listing_of(shown: Sequence[Machine], *, broken: int | None = None) -> tuple[Listing, CountedRecords]:
    """Return an answer with digests, and the count of its reads."""
    records = [ListedMachine(each, encode_metadata(each) if each.cluster else {}) for each in shown]
    counted = CountedRecords(records, broken)
    return Listing(records=counted, digests=b"".join(map(digest_of, records))), counted


async def reconcile(world: World, listing: Listing) -> None:
    """Let the shard read one answer."""
    world.provider.listings.append(listing)
    await world.shard.reconciler.run()


def account(world: World) -> object:
    """Return all that a List may change."""
    inventory, ingest = world.shard.inventory, world.shard.ingest
    return (
        {each.id: each for each in inventory},
        dict(ingest._applied),
        {each.id: inventory.idle_since_seconds(each.id) for each in inventory},
        {name: inventory.bound_to(name) for name in inventory.clusters},
        [(kind, world.metric(kind)) for kind in ("removals_braked", "binding_conflicts_total", "machines_held")],
        {states: world.metric("machines_rejected_total", reason=states) for states in ("structural", "price")},
    )


names = st.sampled_from(["a", "b", "c", "d"])
told = st.builds(lambda name, drawn: replace(drawn, id=MachineId(name)), names, machines())
#: What a provider shows from then on, or the shard does, between two Lists.
steps = st.one_of(
    st.tuples(st.just("show"), told),
    st.tuples(st.just("show twice"), told),
    st.tuples(st.just("refuse"), told),
    st.tuples(st.just("gone"), names),
    st.tuples(st.just("drive"), st.tuples(names, st.sampled_from(MachineState))),
    st.tuples(st.just("fail"), names),
    st.tuples(st.just("list"), st.booleans()),
    st.tuples(st.just("list"), st.booleans()),
    st.tuples(st.just("view"), st.none()),
)


def act(world: World, kind: str, subject: Any) -> None:
    """Do what a shard does beside its Lists."""
    inventory, ingest = world.shard.inventory, world.shard.ingest
    if kind == "view":
        inventory.snapshot()
    elif kind == "drive":
        name, state = subject
        known = inventory.get(name)
        if known is None:
            return
        moved = replace(known, state=state, cluster=ClusterId(known.cluster or "c1"))
        if is_legal_transition(known.state, state) and invariant_fault(moved) is None:
            ingest.drive(moved)
    elif kind == "fail":
        known = inventory.get(subject)
        if known is not None:
            ingest.fail(known, "broken here")


@pytest.mark.rule("shard 5.1/4")
@pytest.mark.slow
@given(st.lists(steps, max_size=25), st.sampled_from([1, 2, 8192]))
@settings(max_examples=in_proportion(100), deadline=None)
def test_a_list_with_digests_comes_to_what_one_without_does(story: list[tuple[str, Any]], waiting_max: int) -> None:
    """Whatever was shown, refused, driven and lost before, in any order of records, however rows are numbered."""

    async def tell() -> None:
        worlds = [World(settings=ShardSettings(removal_brake=False)) for _ in range(2)]
        shown: list[Machine] = []
        for kind, subject in [*story, ("list", False), ("list", False)]:
            if kind in ("show", "refuse"):
                shown = [each for each in shown if each.id != subject.id]
            if kind == "gone":
                shown = [each for each in shown if each.id != subject]
            elif kind in ("show", "show twice"):
                shown.append(subject)
            elif kind == "refuse":
                shown.append(replace(subject, price_usd_per_hour=-1.0))
            elif kind == "list":
                listing, _counted = listing_of(shown[::-1] if subject else shown)
                await reconcile(worlds[0], listing)
                await reconcile(worlds[1], Listing(records=list(listing.records)))
            for world in worlds:
                act(world, kind, subject)
            assert account(worlds[0]) == account(worlds[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "WAITING_MAX", waiting_max)
        patch.setattr(unchanged_records, "LOOKED_UP_PER_TURN_MAX", 2)
        run_virtual(tell)


def fleet(count: int) -> list[Machine]:
    """Return as many idle machines."""
    return [machine(f"m{number:03}", S.IDLE) for number in range(count)]


@pytest.mark.rule("shard 5.1/4")
async def test_what_is_known_is_not_read_again() -> None:
    """Of a fleet only what changed is; a provider that lists it in another order is understood as well."""
    world, shown = World(), fleet(50)
    for expected in (50, 0):
        listing, counted = listing_of(shown)
        await reconcile(world, listing)
        assert counted.reads == expected
    shown[7] = replace(shown[7], price_usd_per_hour=9.0)

    listing, counted = listing_of(shown[::-1])
    await reconcile(world, listing)

    assert counted.reads == 1
    assert world.machine("m007").price_usd_per_hour == 9.0


@pytest.mark.parametrize("waiting_max", [0, 2, 8192])
async def test_new_machines_make_no_known_one_be_read(waiting_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not rows are numbered again for them while the answer is applied."""
    monkeypatch.setattr(store_module, "WAITING_MAX", waiting_max)
    world, shown = World(), fleet(50)
    await reconcile(world, listing_of(shown)[0])
    for new in range(1, 4):
        fresh = [machine(f"a{new}-{number}", S.IDLE) for number in range(4)]
        shown = [*fresh, *shown]
        listing, counted = listing_of(shown)
        await reconcile(world, listing)

        assert counted.reads == 4
    assert len(world.shard.inventory) == 62


async def test_a_machine_that_this_shard_moved_is_read_again() -> None:
    """Its record is the same as ever, and our view is not."""
    world, shown = World(), fleet(3)
    await reconcile(world, listing_of(shown)[0])
    world.shard.ingest.drive(replace(shown[1], state=S.CONFIGURING, cluster=ClusterId("c1")))

    listing, counted = listing_of(shown)
    await reconcile(world, listing)

    assert (counted.reads, world.state("m001")) == (1, S.IDLE)


async def test_a_machine_that_moves_while_its_list_is_read_is_judged_by_its_record() -> None:
    """As if nothing were recognised: the call was pending after the List was sent, and the record is skipped."""
    world, shown = World(), fleet(3)
    await reconcile(world, listing_of(shown)[0])
    listing, counted = listing_of(shown)
    ledger = world.shard.ledger

    async def drive() -> None:
        ledger._touched.add(MachineId("m001"))
        world.shard.ingest.drive(replace(shown[1], state=S.CONFIGURING, cluster=ClusterId("c1")))

    world.provider.during_list = drive
    await reconcile(world, listing)

    assert (counted.reads, world.state("m001")) == (1, S.CONFIGURING)


async def test_a_machine_told_twice_and_once_as_it_is_known_is_what_was_told_last() -> None:
    world, shown = World(), fleet(3)
    await reconcile(world, listing_of(shown)[0])
    dearer = replace(shown[1], price_usd_per_hour=9.0)
    for twice, price in (([dearer, *shown], 1.0), ([*shown, dearer], 9.0)):
        await reconcile(world, listing_of(twice)[0])
        assert world.machine("m001").price_usd_per_hour == price


async def test_machines_that_a_recognised_answer_leaves_out_are_removed() -> None:
    world, shown = World(), fleet(12)
    await reconcile(world, listing_of(shown)[0])
    await reconcile(world, listing_of([*shown[:4], *shown[5:], machine("new", S.IDLE)])[0])

    assert set(world.shard.inventory.ids) == {each.id for each in shown if each.id != "m004"} | {"new"}


@pytest.mark.rule("shard 5.1/4")
async def test_an_answer_with_a_record_that_cannot_be_read_changes_nothing() -> None:
    """Not even what stands before it, and the next one is taken."""
    world, shown = World(), fleet(3)
    await reconcile(world, listing_of(shown)[0])
    dearer = [replace(each, price_usd_per_hour=9.0) for each in shown]

    with pytest.raises(ProviderRefusal):
        await reconcile(world, listing_of([*dearer[:2], machine("new", S.IDLE)], broken=2)[0])
    assert {each.price_usd_per_hour for each in world.shard.inventory} == {1.0}
    assert len(world.shard.inventory) == 3

    await reconcile(world, listing_of(dearer)[0])
    assert {each.price_usd_per_hour for each in world.shard.inventory} == {9.0}


async def test_a_refused_record_is_refused_again() -> None:
    """It is never taken for known, so that its count rises as long as it is shown."""
    world = World()
    await reconcile(world, listing_of(fleet(2))[0])
    free = replace(fleet(1)[0], price_usd_per_hour=-1.0)
    for count in (1, 2):
        await reconcile(world, listing_of([free, fleet(2)[1]])[0])
        assert world.metric("machines_rejected_total", reason="price") == count


async def test_rows_that_are_numbered_anew_under_the_look_up_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's snapshot may come in between; when rows do not hold still at all, everything is read."""
    monkeypatch.setattr(unchanged_records, "LOOKED_UP_PER_TURN_MAX", 2)
    world, shown = World(), fleet(10)
    await reconcile(world, listing_of(shown)[0])
    inventory, number = world.shard.inventory, [0]

    async def stir() -> None:
        while number[0] < 40:
            number[0] += 1
            inventory.insert(replace(machine(f"a{number[0]:02}", S.IDLE), host=HostRef("p", "x")), now_seconds=0.0)
            inventory.snapshot()
            await asyncio.sleep(0)

    stirring = asyncio.create_task(stir())
    listing, counted = listing_of([*shown[:3], replace(shown[3], price_usd_per_hour=9.0), *shown[4:]])
    await reconcile(world, listing)
    await stirring

    assert counted.reads == 10
    assert world.machine("m003").price_usd_per_hour == 9.0
    assert {each.id for each in shown} <= set(inventory.ids)


pairs = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(st.sets(pairs, max_size=ROUNDS_MAX - 2), st.lists(pairs, max_size=20))
@settings(max_examples=in_proportion(200), deadline=None)
def test_rows_are_found_by_their_digest(noted: set[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    """However many want the same place; rows without a note are not found, and nothing else is taken for one."""
    rows = [(0, 0), *sorted(pair for pair in noted if pair[0])]
    notes = np.array(rows, np.uint64).reshape(-1, 2)
    wanted = [pair for pair in asked if pair != (0, 0)]

    async def find() -> list[int]:
        index = await _Index.of(notes, LoopClock())
        return index.rows(np.array(wanted, np.uint64).reshape(-1, 2)).tolist()  # type: ignore[no-any-return]

    found = run_virtual(find)

    for pair, row in zip(wanted, found, strict=True):
        # One that finds no place of its own is not recognised, which costs a reading.
        assert row == -1 or rows[row] == pair
        assert pair in rows or row == -1


async def test_a_record_that_equals_the_last_good_one_ends_a_refusal() -> None:
    """Its digest is known from before, and it is read all the same."""
    world = World()
    good = fleet(2)
    broken = [replace(good[0], price_usd_per_hour=-1.0), good[1]]
    for shown, rejected in ((good, set()), (broken, {good[0].id}), (good, set())):
        await reconcile(world, listing_of(shown)[0])
        assert world.shard.ingest.rejected == rejected
    listing, counted = listing_of(good)
    await reconcile(world, listing)
    assert counted.reads == 0
