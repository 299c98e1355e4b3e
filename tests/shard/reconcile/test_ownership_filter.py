"""What of a provider's machines is this shard's is asked before anything else (docs/spec/shard.md §5.3 point 1)."""

from dataclasses import replace
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import AssignDomain, TransferOwnership, UnassignDomain
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ListedMachine, Listing, ShardSettings
from bigfleet.shard.reconcile.ownership_filter import EVERYTHING, OwnershipFilter
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.shard.ownership.handover_shard import ME, OTHER, HandoverShard, adopt, idle, instruction, release
from tests.shard.reconcile.test_unchanged_records import CountedRecords, digest_of
from tests.shard.world import FakeOperator, RevisionedProvider, ScriptedProvider, machine, need, note_pending

pytestmark = pytest.mark.virtual_time
S = MachineState
ZONE = "topology.kubernetes.io/zone"
ZA, ZB = Domain(ZONE, "za"), Domain(ZONE, "zb")


def bind(shard: HandoverShard, name: str, *, by: str, cluster: str = "web", **changes: Any) -> None:
    """Let the provider show a machine that a shard has bound."""
    shard.provider.records[name] = machine(name, S.CONFIGURED, cluster=cluster, **changes)
    shard.provider.metadata[name] = {labels.ASSIGNED_SHARD: by}


async def told(shard: HandoverShard, payload: Any, sequence: int, suffix: str = "") -> Any:
    """Let the shard that runs carry an instruction out."""
    ownership = shard.world.shard.ownership
    assert ownership is not None
    return await ownership.handover.carry_out(instruction(payload, sequence, suffix=suffix))


# ---- one record ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.3/13", "coordinator 9.1/1")
async def test_a_machine_that_another_shard_has_bound_is_not_ours_whatever_the_file_says(make: Any) -> None:
    shard = make(*idle("free"))
    bind(shard, "mine", by=ME)
    bind(shard, "theirs", by=OTHER)
    bind(shard, "nobodys", by="")

    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            await shard.world.cycle()

    assert shard.holds() == ["free", "mine", "nobodys"]
    (warned,) = [each for each in logged if each["event"] == "ownership.foreign_machines_found"]
    assert (warned["machines"], "--inherits" in warned["advice"]) == (1, True)
    assert shard.world.metric("ownership_machines", relation="foreign") == 1


@pytest.mark.rule("shard 1/20", "coordinator 9.1/1")
async def test_the_bound_machines_of_a_shard_that_is_gone_for_good_are_its_heirs(make: Any) -> None:
    shard = make(settings=ShardSettings(inherits=frozenset({OTHER})))
    bind(shard, "theirs", by=OTHER)
    bind(shard, "strangers", by="shard-9")

    await shard.world.cycle()

    assert shard.holds() == ["theirs"]


@pytest.mark.rule("shard 5.3/13", "coordinator 9.1/2")
async def test_a_shard_without_a_file_owns_all_that_nobody_else_has_bound() -> None:
    ownership_filter = OwnershipFilter(
        me=ME, inherits=frozenset(), resources=EVERYTHING, is_known=lambda _id: False, is_busy=lambda _id: False
    )
    bound = machine("m", S.CONFIGURED, cluster="web")
    assert ownership_filter.owns(ListedMachine(machine("m", S.IDLE), {}))
    assert ownership_filter.owns(ListedMachine(bound, {labels.ASSIGNED_SHARD: ME}))
    assert not ownership_filter.owns(ListedMachine(bound, {labels.ASSIGNED_SHARD: OTHER}))
    assert not ownership_filter.reserved


@pytest.mark.rule("shard 5.3/14")
async def test_a_machine_that_is_elsewhere_leaves_the_inventory_without_being_gone(make: Any) -> None:
    """Nobody is told that it failed, and no removal is counted or braked."""
    shard = make(*idle(*(f"m{number:02}" for number in range(30))))
    await shard.world.cycle()
    operator = shard.world.connect("web")
    rows = {
        each: OwnershipRow(RowKind.DISOWNED, OwnershipVersion(1, 1), OTHER) for each in shard.world.shard.inventory.ids
    }
    shard.file.commit(replace(shard.owned, rows=rows))

    await shard.world.cycle()

    assert shard.holds() == []
    assert shard.world.metric("removals_braked") == 0
    assert not [frame for frame in operator.frames if "failed" in repr(frame).lower()]


@pytest.mark.rule("shard 5.3/14")
async def test_the_former_cluster_hears_of_a_machine_that_another_shard_has_bound_to_another_one(make: Any) -> None:
    shard = make()
    bind(shard, "m", by=ME, cluster="web")
    await shard.world.cycle()
    operator: FakeOperator = shard.world.connect("web")
    bind(shard, "m", by=OTHER, cluster="db")

    await shard.world.cycle()

    assert shard.holds() == []
    assert operator.states("m")[-1] is S.FAILED


@pytest.mark.rule("shard 5.3/14")
async def test_a_drained_machine_that_is_not_ours_any_more_leaves_with_its_last_word_to_its_cluster(make: Any) -> None:
    """A domain that is gone already: what the last binding held goes as soon as the drain is acked."""
    for is_synchronous in (False, True):
        provider = ScriptedProvider(synchronous=is_synchronous)
        shard = make(provider=provider, name=f"shard-{is_synchronous:d}", new_file_owns=Base.DOMAINS)
        shard.file.commit(replace(shard.owned, base=Base.DOMAINS))
        bind(shard, "m", by=shard.name)
        await shard.world.cycle()
        operator = shard.world.connect("web")
        operator.report()

        await shard.world.cycle()
        if not is_synchronous:
            shard.provider.settle()
            await shard.world.cycle()

        assert shard.holds() == []
        assert operator.states("m")[-2:] == [S.DRAINING, S.IDLE]
        shard.close()
        for path in shard.directory.glob("shard.db*"):
            path.unlink()


# ---- a lost state file -----------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 1/19", "shard 15/2", "coordinator 9.1/2")
async def test_a_shard_that_lost_its_file_knows_its_own_and_touches_nothing_idle_until_it_is_told(make: Any) -> None:
    shard = make(*idle("a", "b"), new_file_owns=Base.DOMAINS)
    bind(shard, "mine", by=ME)
    operator = shard.world.connect("web")
    operator.report(need("web", "12"))

    for _ in range(3):
        await shard.world.cycle()
    assert shard.holds() == ["mine"]
    assert not shard.provider.calls

    await told(shard, AssignDomain(ZA), 1)
    await shard.world.settle()
    assert shard.holds() == ["a", "b", "mine"]
    assert {shard.world.state(name) for name in ("a", "b")} == {S.CONFIGURED}


# ---- domains ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.3/15", "coordinator 9.2/1")
async def test_of_a_domain_that_is_left_the_free_machines_go_at_once_and_the_bound_ones_with_their_demand(
    make: Any,
) -> None:
    shard = make(*idle("free"), *idle("far", zone="zb"))
    bind(shard, "bound", by=ME)
    await shard.world.cycle()
    operator = shard.world.connect("web")
    operator.report(need("web", "4"))
    for number, payload in enumerate((AssignDomain(ZA), AssignDomain(ZB), UnassignDomain(ZA)), start=1):
        await told(shard, payload, number)

    await shard.world.cycle()
    assert shard.holds() == ["bound", "far"]
    assert shard.owned.leaving == {ZA}

    operator.report()
    await shard.world.settle()
    assert shard.holds() == ["far"]
    assert not shard.owned.leaving
    assert [call[:2] for call in shard.provider.calls] == [("drain", "bound")]


@pytest.mark.rule("shard 5.3/15")
async def test_what_lies_in_a_held_domain_too_keeps_no_leaving_one_open(make: Any) -> None:
    rack = Domain("rack", "r1")
    shard = make(*idle("m", labels={"rack": "r1"}))
    await shard.world.cycle()
    for number, payload in enumerate((AssignDomain(ZA), AssignDomain(rack), UnassignDomain(ZA)), start=1):
        await told(shard, payload, number)

    await shard.world.cycle()

    assert shard.holds() == ["m"]
    assert (shard.owned.domains, shard.owned.leaving) == ({rack}, frozenset())


@pytest.mark.rule("shard 5.3/15")
async def test_a_free_machine_whose_last_action_ended_goes_though_its_record_says_nothing_new(make: Any) -> None:
    """Its record was recognised by its digest, and nobody would look at it again."""
    shard = make()
    await shown(shard, *idle("m"))
    shard.file.commit(replace(shard.owned, base=Base.DOMAINS, leaving=frozenset({ZA})))
    note_pending(shard.world.shard, "m")
    await shown(shard, *idle("m"))
    assert shard.holds() == ["m"]

    shard.world.shard.ledger._pending.clear()
    await shown(shard, *idle("m"))

    assert shard.holds() == []


# ---- reading all of it again -----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.2/9", "coordinator 9.1/3")
async def test_more_that_is_ours_makes_the_next_reconcile_a_full_one_and_wakes_the_cycle(make: Any) -> None:
    provider = RevisionedProvider()
    shard = make(provider=provider, settings=ShardSettings(incremental_reconcile=True), new_file_owns=Base.DOMAINS)
    provider.add(*idle("a"))
    for _ in range(2):
        await shard.world.cycle()
    assert provider.cursors == [b"", b"0"]
    assert shard.holds() == []
    shard.world.shard._trigger._wakeup.clear()

    await told(shard, AssignDomain(ZA), 1)
    assert shard.world.shard._trigger._wakeup.is_set()
    await shard.world.cycle()

    assert provider.cursors[2:] == [b""]
    assert shard.holds() == ["a"]


@pytest.mark.rule("shard 5.2/9")
async def test_a_list_that_was_under_way_does_not_count_as_the_full_one(make: Any) -> None:
    provider = RevisionedProvider()
    shard = make(provider=provider, settings=ShardSettings(incremental_reconcile=True), new_file_owns=Base.DOMAINS)
    provider.add(*idle("a"))

    async def assign() -> None:
        provider.during_list = None
        await told(shard, AssignDomain(ZA), 1)

    provider.during_list = assign
    for _ in range(2):
        await shard.world.cycle()
    provider.list_fails = True
    await shard.world.cycle()
    provider.list_fails = False
    await shard.world.cycle()

    assert provider.cursors == [b"", b"", b"1", b"1"]
    assert shard.holds() == ["a"]


# ---- other shards' records -------------------------------------------------------------------------------------------


async def shown(shard: HandoverShard, *machines: Machine, metadata: Any = None) -> int:
    """Let the shard read an answer with digests, in a cycle; return how many records were read."""
    shard.provider.records = {each.id: each for each in machines}
    records = [ListedMachine(each, (metadata or {}).get(each.id, {})) for each in machines]
    counted = CountedRecords(records)
    shard.provider.listings.append(Listing(records=counted, digests=b"".join(map(digest_of, records))))
    await shard.world.cycle()
    return counted.reads


@pytest.mark.rule("shard 5.3/17")
async def test_the_records_of_other_shards_are_read_once(make: Any) -> None:
    mine, theirs = idle("a", "b"), idle(*(f"t{number}" for number in range(8)), zone="zb")
    shard = make(new_file_owns=Base.DOMAINS)
    await told(shard, AssignDomain(ZA), 1)

    assert await shown(shard, *mine, *theirs) == 10
    assert await shown(shard, *mine, *theirs) == 0
    assert shard.world.metric("ownership_machines", relation="foreign") == 8
    assert await shown(shard, *mine, replace(theirs[0], price_usd_per_hour=2.0), *theirs[1:]) == 1

    # What moved is read, once more than it would have to be, and nothing else; what was given up is not read for ever.
    await told(shard, TransferOwnership(from_shard=OTHER, to_shard=ME, machine_ids=(theirs[1].id,)), 2)
    assert await shown(shard, *mine, *theirs) == 2
    assert shard.holds() == ["a", "b", "t1"]
    await told(shard, release("a"), 3)
    assert await shown(shard, *mine, *theirs) == 2
    assert await shown(shard, *mine, *theirs) == 0

    # Another domain concerns everything.
    await told(shard, AssignDomain(ZB), 4)
    assert await shown(shard, *mine, *theirs) == 10
    assert shard.world.metric("ownership_machines", relation="foreign") == 1


@st.composite
def _courses(draw: st.DrawFn) -> list[tuple[list[Machine], dict[str, dict[str, str]], Owned]]:
    names = [f"m{number}" for number in range(6)]
    course = []
    for _ in range(draw(st.integers(2, 5))):
        shown_now, metadata = [], {}
        for name in draw(st.lists(st.sampled_from(names), unique=True, min_size=3)):
            zone, is_bound = draw(st.sampled_from(["za", "zb"])), draw(st.booleans())
            shown_now.append(machine(name, S.CONFIGURED if is_bound else S.IDLE, zone=zone, cluster="web" * is_bound))
            metadata[name] = {labels.ASSIGNED_SHARD: draw(st.sampled_from([ME, OTHER, ""]))} if is_bound else {}
        kinds = st.sampled_from([RowKind.ADOPTED, RowKind.DISOWNED])
        rows = {
            MachineId(name): OwnershipRow(kind, OwnershipVersion(1, draw(st.integers(1, 2))), OTHER)
            for name, kind in draw(st.dictionaries(st.sampled_from(names), kinds, max_size=3)).items()
        }
        owned = Owned(
            base=draw(st.sampled_from(Base)),
            domains=frozenset(draw(st.sets(st.sampled_from([ZA, ZB])))),
            rows=rows,
        )
        course.append((shown_now, metadata, owned))
    return course


@pytest.mark.rule("shard 5.3/13")
@settings(max_examples=10, deadline=None)
@given(course=_courses())
def test_a_shard_that_reads_digests_has_what_one_that_reads_records_has(course: Any, tmp_path_factory: Any) -> None:
    """And both have all and only what is theirs, whatever changes of what is shown and owned."""

    async def run() -> None:
        base = tmp_path_factory.mktemp("pair")
        quiet = ShardSettings(removal_brake=False, actuation_paused=True)
        pair = [HandoverShard(base / name, settings=quiet) for name in ("digests", "records")]
        for machines, metadata, owned in course:
            for shard in pair:
                shard.file.commit(owned)
            await shown(pair[0], *machines, metadata=metadata)
            pair[1].provider.records = {each.id: each for each in machines}
            pair[1].provider.metadata = metadata
            await pair[1].world.cycle()
            mine = sorted(
                each.id
                for each in machines
                if owned.owns(
                    each,
                    metadata[each.id].get(labels.ASSIGNED_SHARD, ""),
                    me=ME,
                    inherits=frozenset(),
                    stays=False,
                )
            )
            assert [shard.holds() for shard in pair] == [mine, mine]
        for shard in pair:
            shard.close()

    run_virtual(run)


# ---- adopted rows ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.3/18", "coordinator 9.3/6")
async def test_an_adopted_row_goes_when_three_full_lists_in_a_row_do_not_name_its_machine(make: Any) -> None:
    shard = make(*idle("a"))
    await shard.world.cycle()
    gone = idle("n")
    await told(shard, adopt(gone), 1)

    for _ in range(2):
        await shard.world.cycle()
    assert MachineId("n") in shard.owned.rows
    shard.provider.add(*gone)
    await shard.world.cycle()
    del shard.provider.records["n"]
    for _ in range(3):
        assert MachineId("n") in shard.owned.rows
        await shard.world.cycle()

    assert not shard.owned.rows


@pytest.mark.rule("shard 5.3/18")
async def test_a_machine_that_is_named_and_cannot_be_read_keeps_its_row(make: Any) -> None:
    shard = make(machine("n", S.IDLE, price_usd_per_hour=-1.0))
    await told(shard, adopt(idle("n")), 1)

    for _ in range(5):
        await shard.world.cycle()

    assert shard.owned.rows[MachineId("n")].kind is RowKind.ADOPTED


@pytest.mark.rule("shard 5.3/18")
async def test_deltas_say_nothing_of_what_they_do_not_name(make: Any) -> None:
    provider = RevisionedProvider()
    provider.add(*idle("a", "n"))
    shard = make(provider=provider, settings=ShardSettings(incremental_reconcile=True))
    await told(shard, adopt(idle("n"), by_gift_of=ShardId("shard-2")), 1)

    for _ in range(6):
        await shard.world.cycle()

    assert provider.cursors[-1]
    assert MachineId("n") in shard.owned.rows
