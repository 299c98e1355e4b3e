"""A shard gives machines up, takes them over, drains for others and may die anywhere (docs/spec/coordinator.md §9)."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import AssignDomain, ReassignSpeculative, Selector, TransferOwnership, UnassignDomain
from bigfleet.model.ownership import ADOPTED_MAX, Base, Domain, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.handover import FENCED_AT_ONCE_MAX, DoesNotApply, HandoverDone, MayYetSucceed
from bigfleet.shard.ports import FenceToken, ProviderRefusal, RefusalKind, ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.ownership.handover_shard import (
    ME,
    OTHER,
    THIRD,
    Dies,
    HandoverShard,
    adopt,
    drain,
    idle,
    instruction,
    release,
    serve,
)
from tests.shard.world import machine

pytestmark = pytest.mark.virtual_time
S = MachineState
ZONE = "topology.kubernetes.io/zone"
DAY_SECONDS = 86_400.0


def row(shard: HandoverShard, name: str) -> OwnershipRow:
    return shard.owned.rows[MachineId(name)]


# ---- giving up ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 9.3/5")
async def test_a_donor_gives_named_machines_up_for_good(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()

    done = await shard.handover.carry_out(instruction(release("a")))

    assert done.machine_ids == ("a",)
    assert done.machines == (shard.provider.records["a"],)
    assert row(shard, "a") == OwnershipRow(
        RowKind.RELEASED, OwnershipVersion(1, 1), OTHER, LoopClock().unix_nanos(), done.machines[0]
    )
    assert shard.holds() == ["b"]


@pytest.mark.rule("shard 13/11", "coordinator 9.3/3")
async def test_the_door_is_closed_behind_each_machine_with_a_token_that_fences_older_processes(make: Any) -> None:
    shard = make(*idle("a"))
    await shard.read()

    await shard.handover.carry_out(instruction(release("a")))

    assert [call[:2] for call in shard.provider.calls] == [("drain", "a")]
    assert shard.provider.grace_seconds["a"] == 600
    older = FenceToken(ME, shard.world.shard.epoch - 1, 10**6)
    with pytest.raises(ProviderRefusal) as refusal:
        await shard.provider.configure(MachineId("a"), "web", b"", {}, older)
    assert refusal.value.kind is RefusalKind.FENCED
    (record,) = [json.loads(line) for line in shard.audit_log.lines]
    assert (record["kind"], record["machine"], record["outcome"]) == ("FenceTouch", "a", "noop")
    assert record["reason"] == "coordinator.1-1"
    assert record["token_sequence"] == shard.provider.calls[0][2]


@pytest.mark.rule("coordinator 7.1/4")
@pytest.mark.parametrize(
    ("matching", "asked", "given"), [(1, 5, 0), (2, 5, 1), (10, 99, 9), (11, 99, 9), (12, 99, 10), (12, 3, 3)]
)
async def test_a_donor_keeps_a_tenth_of_what_matches_and_at_least_one(
    make: Any, matching: int, asked: int, given: int
) -> None:
    shard = make(*idle(*(f"m{number:02}" for number in range(matching))), *idle("other", instance_type="t8"))
    await shard.read()

    told = instruction(release(count=asked, instance_type="t4"))
    if given:
        done = await shard.handover.carry_out(told)
        assert len(done.machine_ids) == given
    else:
        with pytest.raises(DoesNotApply, match="Idle machines that match: 1, and none of them can be spared"):
            await shard.handover.carry_out(told)


@pytest.mark.rule("coordinator 9.3/2")
async def test_the_longest_idle_go_first_then_by_id(make: Any) -> None:
    shard = make(*idle("c", "d", "e"))
    await shard.read()
    await LoopClock().sleep(60)
    shard.provider.add(*idle("a", "b"))
    await shard.read()

    done = await shard.handover.carry_out(instruction(release(count=4)))

    assert done.machine_ids == ("c", "d", "e", "a")


@pytest.mark.rule("coordinator 9.3/2")
async def test_a_selector_never_finds_what_is_bound_claimed_or_of_another_kind(make: Any) -> None:
    shard = make(*idle("claimed", "free1", "free2", "free3"), *idle("far", zone="zb"))
    serve(shard, "bound", priority=0)
    await shard.read()
    shard.claimed = {MachineId("claimed")}

    done = await shard.handover.carry_out(instruction(release(count=99, zone="za")))

    assert done.machine_ids == ("free1", "free2")


@pytest.mark.rule("shard 11.3/3", "coordinator 7.5/2")
async def test_what_just_came_is_given_on_only_after_eight_report_cycles(make: Any) -> None:
    shard = make()
    await shard.read()
    shard.provider.add(*idle("n1", "n2"))
    await shard.handover.carry_out(instruction(adopt(idle("n1", "n2")), 1))

    await LoopClock().sleep(8 * 30 - 1)
    with pytest.raises(DoesNotApply, match="Idle machines that match: 0"):
        await shard.handover.carry_out(instruction(release(count=9), 2))
    await LoopClock().sleep(2)
    assert (await shard.handover.carry_out(instruction(release(count=9), 3))).machine_ids == ("n1",)


class Ahead(LoopClock):
    """A wall clock that is a month ahead."""

    def unix_nanos(self) -> int:
        return super().unix_nanos() + int(30 * DAY_SECONDS * 1e9)


async def test_a_wall_clock_that_was_ahead_retains_no_adopted_machine(make: Any) -> None:
    """A month later the machine would still be one that has just come."""
    shard = make()
    await shard.read()
    shard.provider.add(*idle("n1", "n2"))
    shard.handover._clock = Ahead()
    await shard.handover.carry_out(instruction(adopt(idle("n1", "n2")), 1))

    shard.handover._clock = LoopClock()
    assert (await shard.handover.carry_out(instruction(release(count=9), 2))).machine_ids == ("n1",)


@pytest.mark.rule("coordinator 9.3/4")
async def test_slots_are_given_up_as_slots(make: Any) -> None:
    shard = make(*[machine(name, S.SPECULATIVE) for name in ("s1", "s2")], *idle("a", "b"))
    await shard.read()

    payload = ReassignSpeculative(from_shard=ME, to_shard=OTHER, selector=Selector(count=9))
    done = await shard.handover.carry_out(instruction(payload))

    assert done.machine_ids == ("s1",)
    assert row(shard, "s1").kind is RowKind.RELEASED


@pytest.mark.rule("shard 16/6")
async def test_an_instruction_that_comes_again_is_answered_alike_and_does_nothing(make: Any) -> None:
    shard = make(*idle("a", "b", "c"))
    await shard.read()
    told = instruction(release(count=1))
    first = await shard.handover.carry_out(told)
    calls, rows = list(shard.provider.calls), shard.owned

    assert await shard.handover.carry_out(told) == first
    shard.start()
    await shard.read()
    assert await shard.handover.carry_out(told) == first
    assert (shard.provider.calls, shard.owned) == (calls, rows)

    await shard.handover.confirm(first.machine_ids)
    assert (await shard.handover.carry_out(told)).machine_ids == first.machine_ids
    assert row(shard, first.machine_ids[0]).kind is RowKind.DISOWNED


async def test_a_late_instruction_changes_nothing_that_a_later_one_has_settled(make: Any) -> None:
    shard = make(*idle("a"))
    await shard.read()
    await shard.handover.carry_out(instruction(adopt(idle("a")), 5))
    owned = shard.owned

    assert await shard.handover.carry_out(instruction(release("a"), 4)) == HandoverDone()
    assert shard.owned is owned
    assert not shard.provider.calls


@pytest.mark.rule("coordinator 9.3/2")
@pytest.mark.parametrize(
    ("named", "reason"),
    [("unknown", "unknown is not ours"), ("bound", "bound is Configured"), ("slot", "slot is Speculative")],
)
async def test_a_named_machine_that_cannot_be_given_is_refused_and_named(make: Any, named: str, reason: str) -> None:
    shard = make(machine("slot", S.SPECULATIVE))
    serve(shard, "bound", priority=0)
    await shard.read()

    with pytest.raises(DoesNotApply, match=reason):
        await shard.handover.carry_out(instruction(release(named)))
    assert not shard.provider.calls


@pytest.mark.rule("coordinator 9.3/2")
async def test_named_machines_that_are_still_on_their_way_may_be_given_later(make: Any) -> None:
    shard = make(machine("m", S.DELETING))
    await shard.read()

    with pytest.raises(MayYetSucceed, match="m is Deleting"):
        await shard.handover.carry_out(instruction(release("m")))


@pytest.mark.rule("coordinator 9.3/3")
@pytest.mark.parametrize("kind", [RefusalKind.UNKNOWN_OUTCOME, RefusalKind.NOT_FOUND, RefusalKind.EXHAUSTED])
async def test_a_machine_whose_door_did_not_close_is_left_out(make: Any, kind: RefusalKind) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()
    shard.provider.refusals[("drain", "a")] = [kind]

    done = await shard.handover.carry_out(instruction(release("a", "b")))

    assert done.machine_ids == ("b",)
    assert shard.holds() == ["a"]


@pytest.mark.rule("coordinator 9.3/3")
async def test_a_machine_that_the_provider_shows_in_use_is_left_out(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()
    shard.provider.records["a"] = machine("a", S.CONFIGURED, cluster="web")

    assert (await shard.handover.carry_out(instruction(release("a", "b")))).machine_ids == ("b",)


@pytest.mark.rule("coordinator 9.3/3")
async def test_a_process_that_is_fenced_itself_gives_nothing_up(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()
    shard.provider.marks[(ME, "a")] = (2**62, 1)

    with pytest.raises(MayYetSucceed, match="another process of this shard is newer"):
        await shard.handover.carry_out(instruction(release("a", "b")))
    assert not shard.owned.rows
    assert shard.holds() == ["a", "b"]


async def test_a_machine_that_the_shard_begins_to_use_meanwhile_stays(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()
    get = shard.provider.get

    async def busy_meanwhile(machine_id: MachineId) -> Any:
        known = shard.world.machine("a")
        if known.state is S.IDLE:
            shard.world.shard.ingest.drive(replace(known, state=S.CONFIGURING, cluster="web"))
        return await get(machine_id)

    shard.provider.get = busy_meanwhile

    assert (await shard.handover.carry_out(instruction(release("a", "b")))).machine_ids == ("b",)
    assert shard.holds() == ["a"]


async def test_a_machine_that_is_used_before_its_fence_is_not_drained(make: Any) -> None:
    """Sixteen are fenced at a time; by the second batch a cycle has given the last machine to a cluster."""
    *others, last = [f"m{number:02}" for number in range(FENCED_AT_ONCE_MAX + 2)]
    shard = make(*idle(*others, last))
    await shard.read()
    drained = shard.provider.drain

    async def used_meanwhile(machine_id: MachineId, grace_seconds: int, token: FenceToken) -> Any:
        known = shard.world.machine(last)
        if known.state is S.IDLE:
            serve(shard, last, priority=0)
            shard.world.shard.ingest.drive(replace(known, state=S.CONFIGURING, cluster="web"))
        return await drained(machine_id, grace_seconds, token)

    shard.provider.drain = used_meanwhile

    assert (await shard.handover.carry_out(instruction(release(*others, last)))).machine_ids == tuple(others)
    assert ("drain", last) not in [call[:2] for call in shard.provider.calls]
    assert shard.provider.state(last) is S.CONFIGURED
    assert shard.holds() == [last]


@pytest.mark.rule("shard 6/21")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"actuation_paused": True}, "actuation is paused"), ({"dry_run": True}, "this is a dry run")],
)
async def test_a_paused_shard_gives_nothing_up_and_takes_over_all_the_same(
    make: Any, settings: dict[str, Any], reason: str
) -> None:
    shard = make(*idle("a"), settings=ShardSettings(**settings))
    await shard.read()

    with pytest.raises(MayYetSucceed, match=reason):
        await shard.handover.carry_out(instruction(release("a")))
    with pytest.raises(MayYetSucceed, match=reason):
        await shard.handover.carry_out(instruction(drain(1)))
    assert not shard.provider.calls
    assert (await shard.handover.carry_out(instruction(adopt(idle("n")), 2))).machine_ids == ("n",)


async def test_nothing_is_given_up_before_the_inventory_was_read(make: Any) -> None:
    """An unread inventory is not an empty one."""
    shard = make(*idle("a"))

    with pytest.raises(MayYetSucceed, match="the inventory was not read yet"):
        await shard.handover.carry_out(instruction(release("a")))


async def test_an_instruction_for_others_is_refused(make: Any) -> None:
    shard = make()
    payload = TransferOwnership(from_shard=OTHER, to_shard=THIRD, machine_ids=(MachineId("a"),))

    with pytest.raises(DoesNotApply, match="not here"):
        await shard.handover.carry_out(instruction(payload))


# ---- crashes -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 9.4/2")
async def test_wherever_a_donor_dies_the_instruction_runs_to_the_same_end(tmp_path: Path) -> None:
    """Before the commit the machine is the donor's, after it nobody's until it is adopted."""
    told = instruction(release("a"))
    for name in ("before the commit", "after the commit"):
        shard = HandoverShard(tmp_path / name, *idle("a", "b"))
        await shard.read()
        shard.dies_at = ("before the commit", "after the commit").index(name)
        with pytest.raises(Dies, match=name):
            await shard.handover.carry_out(told)
        shard.start()
        assert (MachineId("a") in shard.owned.rows) is (name == "after the commit")
        await shard.read()

        done = await shard.handover.carry_out(told)

        assert done.machine_ids == ("a",)
        assert done.machines[0].id == "a"
        assert row(shard, "a").kind is RowKind.RELEASED
        shard.close()


@pytest.mark.rule("coordinator 9.4/2")
@pytest.mark.parametrize("method", ["drain", "get"])
async def test_a_donor_that_dies_while_it_closes_the_door_has_only_moved_marks(make: Any, method: str) -> None:
    shard = make(*idle("a"))
    await shard.read()
    answer = getattr(shard.provider, method)

    async def dies(*given: Any) -> None:
        await (answer(*given) if method == "get" else _unless_refused(answer(*given)))
        raise Dies(method)

    setattr(shard.provider, method, dies)
    with pytest.raises(Dies):
        await shard.handover.carry_out(instruction(release("a")))
    setattr(shard.provider, method, answer)
    shard.start()
    assert not shard.owned.rows
    await shard.read()

    assert (await shard.handover.carry_out(instruction(release("a")))).machine_ids == ("a",)


async def _unless_refused(call: Any) -> None:
    with contextlib.suppress(ProviderRefusal):
        await call


@pytest.mark.rule("coordinator 9.4/2")
async def test_wherever_a_recipient_dies_it_has_the_machine_in_the_end(tmp_path: Path) -> None:
    told = instruction(adopt(idle("n")))
    for place in range(2):
        shard = HandoverShard(tmp_path / str(place))
        shard.dies_at = place
        with pytest.raises(Dies):
            await shard.handover.carry_out(told)
        shard.start()

        assert (await shard.handover.carry_out(told)).machine_ids == ("n",)
        assert row(shard, "n").kind is RowKind.ADOPTED
        shard.close()


# ---- taking over -------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 9.3/5")
async def test_a_recipient_has_what_it_adopts_at_once_and_reads_everything_again(make: Any) -> None:
    shard = make()
    await shard.read()

    done = await shard.handover.carry_out(instruction(adopt(idle("n")), suffix="/adopt"))

    assert done.machine_ids == ("n",)
    assert row(shard, "n") == OwnershipRow(RowKind.ADOPTED, OwnershipVersion(1, 1), OTHER, LoopClock().unix_nanos())
    assert shard.holds() == ["n"]
    assert shard.widened == 1


async def test_a_record_that_breaks_the_invariant_is_not_put_into_the_inventory(make: Any) -> None:
    """The row stands: the next List shows the machine as it is."""
    shard = make()

    await shard.handover.carry_out(instruction(adopt(idle("n", price_usd_per_hour=-1.0))))

    assert shard.holds() == []
    assert row(shard, "n").kind is RowKind.ADOPTED


async def test_an_adoption_that_comes_again_puts_no_old_record_back(make: Any) -> None:
    shard = make()
    told = instruction(adopt(idle("n")))
    await shard.handover.carry_out(told)
    shard.handover_host.remove([MachineId("n")])

    assert (await shard.handover.carry_out(told)).machine_ids == ("n",)
    assert shard.holds() == []


@pytest.mark.rule("coordinator 9.3/6")
async def test_a_shard_that_has_adopted_very_many_refuses_another(make: Any) -> None:
    shard = make()
    owned = shard.owned
    rows = {
        MachineId(f"m{n}"): OwnershipRow(RowKind.ADOPTED, OwnershipVersion(1, 1), OTHER) for n in range(ADOPTED_MAX)
    }
    shard.file.commit(replace(owned, rows=rows))

    with pytest.raises(DoesNotApply, match="10000 machines were adopted here already"):
        await shard.handover.carry_out(instruction(adopt(idle("n")), 2))
    again = await shard.handover.carry_out(instruction(adopt(idle("m7"))))
    assert again.machine_ids == ("m7",)


@pytest.mark.rule("coordinator 9.3/5")
async def test_a_machine_that_never_arrived_comes_back(make: Any) -> None:
    shard = make(*idle("a"))
    await shard.read()
    await shard.handover.carry_out(instruction(release("a"), 1))

    back = TransferOwnership(from_shard=ME, to_shard=ME, machine_ids=(MachineId("a"),))
    done = await shard.handover.carry_out(instruction(back, 2))

    assert done.machine_ids == ("a",)
    assert row(shard, "a").kind is RowKind.ADOPTED
    assert shard.widened == 1


@pytest.mark.rule("coordinator 9.3/5")
async def test_a_shard_that_hears_where_a_machine_is_lets_go_of_it_unless_it_is_in_use(make: Any) -> None:
    shard = make(*idle("a"))
    serve(shard, "bound", priority=0)
    await shard.read()
    note = TransferOwnership(
        from_shard=ME,
        to_shard=OTHER,
        machine_ids=(MachineId("a"), MachineId("bound"), MachineId("unknown")),
        is_note=True,
    )

    await shard.handover.carry_out(instruction(note, suffix="/note/shard-0"))
    assert {each.kind for each in shard.owned.rows.values()} == {RowKind.DISOWNED}
    assert shard.holds() == ["bound"]

    forget = replace(note, to_shard=ShardId(""))
    await shard.handover.carry_out(instruction(forget, suffix="/forget/shard-0"))
    assert not shard.owned.rows
    assert shard.widened == 1


@pytest.mark.rule("coordinator 9.1/2")
async def test_the_first_domain_ends_owning_everything(make: Any) -> None:
    shard = make()
    assert shard.owned.base is Base.ALL

    await shard.handover.carry_out(instruction(AssignDomain(Domain(ZONE, "za"))))

    assert (shard.owned.base, shard.owned.domains) == (Base.DOMAINS, {Domain(ZONE, "za")})
    assert shard.widened == 1


@pytest.mark.rule("coordinator 9.2/1")
async def test_a_shard_that_owns_everything_takes_no_first_domain_that_none_of_its_machines_has(make: Any) -> None:
    """With a misspelled domain it would own no unbound machine any more."""
    shard = make(*idle("a"))
    await shard.read()

    with pytest.raises(MayYetSucceed, match="no machine of this shard has zone=za; it would own no unbound machine"):
        await shard.handover.carry_out(instruction(AssignDomain(Domain("zone", "za")), 1))
    assert (shard.owned.base, shard.holds()) == (Base.ALL, ["a"])

    await shard.handover.carry_out(instruction(AssignDomain(Domain(ZONE, "za")), 2))
    await shard.handover.carry_out(instruction(AssignDomain(Domain(ZONE, "not-yet-built")), 3))
    assert shard.owned.domains == {Domain(ZONE, "za"), Domain(ZONE, "not-yet-built")}


@pytest.mark.rule("coordinator 9.2/1")
async def test_a_domain_is_left_when_nothing_of_ours_lies_in_it(make: Any) -> None:
    """What was adopted stays with its adopter."""
    shard = make(*idle("a"))
    serve(shard, "b", priority=0)
    await shard.read()
    await shard.handover.carry_out(instruction(AssignDomain(Domain(ZONE, "za")), 1))
    await shard.handover.carry_out(instruction(adopt(idle("n")), 2))
    await shard.handover.carry_out(instruction(UnassignDomain(Domain(ZONE, "za")), 3))

    shard.handover.tend()
    assert shard.owned.leaving == {Domain(ZONE, "za")}
    shard.handover_host.remove([MachineId("a"), MachineId("b")])
    shard.handover.tend()
    assert not shard.owned.leaving
    assert not shard.owned.domains


@pytest.mark.rule("shard 2/13")
async def test_a_change_that_cannot_be_written_fails_the_instruction_alone(make: Any) -> None:
    shard = make(*idle("a"))
    await shard.read()
    shard.file._connection.execute("PRAGMA query_only = ON")

    with pytest.raises(MayYetSucceed, match="make room, or look at the file's rights"):
        await shard.handover.carry_out(instruction(release("a")))
    with pytest.raises(MayYetSucceed):
        await shard.handover.accept_term(4)
    assert shard.holds() == ["a"]
    assert not shard.owned.rows
