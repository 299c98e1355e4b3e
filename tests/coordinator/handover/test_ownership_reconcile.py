"""What a leader does about each finding of docs/spec/coordinator.md §9.6, one by one, on chosen views."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bigfleet.coordinator.commands import DropDomain, ReleaseDomain
from bigfleet.coordinator.commands import SetDomainOwner as AssignRow
from bigfleet.coordinator.ownership_reconcile import (
    OwnershipPlan,
    OwnershipView,
    PeerViews,
    WantedInstruction,
    reconcile_ownership,
)
from bigfleet.coordinator.tables import DomainRow, DomainState
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import (
    AssignDomain,
    Instruction,
    ReassignSpeculative,
    TransferOwnership,
    UnassignDomain,
)
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipVersion
from bigfleet.model.states import MachineState

D, R, X = ShardId("d"), ShardId("r"), ShardId("x")
ZONE = Domain("zone", "a")
M = MachineId("m")
IDLE = Machine(id=M, state=MachineState.IDLE, host=HostRef("p", "m"))
SLOT = Machine(id=M, state=MachineState.SPECULATIVE)
TERM = 5
MINE, FORMER = OwnershipVersion(TERM, 3), OwnershipVersion(TERM - 1, 3)
NOTHING = Owned(base=Base.DOMAINS)


def held(*domains: Domain) -> Owned:
    return replace(NOTHING, domains=frozenset(domains))


def around(
    views: Mapping[ShardId, Owned],
    *,
    stale: frozenset[ShardId] = frozenset(),
    unseen: frozenset[ShardId] = frozenset(),
    domains: Mapping[Domain, DomainRow] | None = None,
    refused: frozenset[tuple[MachineId, OwnershipVersion]] = frozenset(),
    answered: Mapping[ShardId, tuple[Instruction, ...]] | None = None,
) -> PeerViews:
    return PeerViews(
        views={
            name: OwnershipView(
                shard_id=name, reported=told, is_current=name not in stale, answered=(answered or {}).get(name, ())
            )
            for name, told in views.items()
        },
        unseen=unseen,
        domains=domains or {},
        term=TERM,
        refused=refused,
    )


def assigned(to: ShardId) -> dict[Domain, DomainRow]:
    return {ZONE: DomainRow(to, DomainState.ASSIGNED)}


def releasing(by: ShardId) -> dict[Domain, DomainRow]:
    return {ZONE: DomainRow(by, DomainState.RELEASING)}


def is_nothing(done: OwnershipPlan) -> bool:
    return not (done.commands or done.instructions or done.taken_back or done.confirmed)


def told(done: OwnershipPlan) -> list[object]:
    return [wanted.payload for wanted in done.instructions]


# ---- domains -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 9.6/1", "coordinator 12/7")
def test_a_domain_without_a_row_is_written_for_the_shard_that_lists_it() -> None:
    assert reconcile_ownership(D, around({D: held(ZONE)})).commands == [AssignRow(ZONE, D)]
    leaving = replace(NOTHING, leaving=frozenset({ZONE}))
    assert reconcile_ownership(D, around({D: leaving})).commands == [AssignRow(ZONE, D), ReleaseDomain(ZONE)]


@pytest.mark.rule("coordinator 9.6/1", "coordinator 12/13")
@pytest.mark.parametrize("row", [assigned(R), releasing(D)], ids=["of another shard", "being released"])
def test_a_domain_that_is_listed_and_not_ones_own_is_taken(row: Mapping[Domain, DomainRow]) -> None:
    assert told(reconcile_ownership(D, around({D: held(ZONE), R: NOTHING}, domains=row))) == [UnassignDomain(ZONE)]


@pytest.mark.rule("coordinator 9.2/1")
def test_a_row_goes_once_its_shard_lists_the_domain_no_more() -> None:
    assert reconcile_ownership(D, around({D: NOTHING}, domains=releasing(D))).commands == [DropDomain(ZONE)]
    still = replace(NOTHING, leaving=frozenset({ZONE}))
    assert is_nothing(reconcile_ownership(D, around({D: still}, domains=releasing(D))))


@pytest.mark.rule("coordinator 9.6/3")
def test_a_row_stays_while_the_last_answer_may_have_given_the_domain() -> None:
    """A view is older than the answer that followed it."""
    giving = Instruction(instruction_id="5-1", version=OwnershipVersion(TERM, 1), payload=AssignDomain(ZONE))

    done = reconcile_ownership(D, around({D: NOTHING}, domains=releasing(D), answered={D: (giving,)}))

    assert done.commands == []


@pytest.mark.rule("coordinator 9.6/1")
def test_a_domain_is_given_when_all_views_are_there_and_not_before() -> None:
    rows = assigned(D)

    assert told(reconcile_ownership(D, around({D: NOTHING, R: NOTHING}, domains=rows))) == [AssignDomain(ZONE)]
    for doubt in (
        around({D: NOTHING, R: NOTHING}, stale=frozenset({R}), domains=rows),
        around({D: NOTHING}, unseen=frozenset({R}), domains=rows),
        around({D: NOTHING, R: held(ZONE)}, domains=rows),
    ):
        done = reconcile_ownership(D, doubt)
        assert (is_nothing(done), done.waits_for) == (True, (R,))


@pytest.mark.rule("coordinator 9.6/1")
def test_what_lies_elsewhere_is_noted_before_its_domain_is_given() -> None:
    adopted = NOTHING.adopted(M, FORMER, by_gift_of=X)

    first, second = told(reconcile_ownership(D, around({D: NOTHING, R: adopted}, domains=assigned(D))))

    assert first == TransferOwnership(from_shard=D, to_shard=R, machine_ids=(M,), is_note=True)
    assert second == AssignDomain(ZONE)


# ---- machines ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 9.6/2")
def test_a_machine_that_arrived_is_confirmed_to_who_released_it() -> None:
    views = {D: NOTHING.released(IDLE, MINE, to=R), R: NOTHING.adopted(M, MINE, by_gift_of=D)}

    assert reconcile_ownership(D, around(views)).confirmed == [M]


@pytest.mark.rule("coordinator 9.6/2")
def test_where_a_machine_came_from_and_is_forgotten_hears_where_it_is() -> None:
    """As after a lost disk."""
    views = {D: NOTHING, R: NOTHING.adopted(M, MINE, by_gift_of=D)}

    note = TransferOwnership(from_shard=D, to_shard=R, machine_ids=(M,), is_note=True)
    assert reconcile_ownership(R, around(views)).instructions == [WantedInstruction(D, "5-3/note/d", note)]


@pytest.mark.rule("coordinator 9.6/2")
def test_an_older_adopter_hears_that_the_machine_is_elsewhere() -> None:
    """The shard that took it back got a later version: the older adopter had been removed, and came back."""
    views = {D: NOTHING.adopted(M, MINE, by_gift_of=D), R: NOTHING.adopted(M, FORMER, by_gift_of=D)}

    note = TransferOwnership(from_shard=R, to_shard=D, machine_ids=(M,), is_note=True)
    assert reconcile_ownership(R, around(views)).instructions == [WantedInstruction(R, "5-3/note/r", note)]
    assert is_nothing(reconcile_ownership(D, around(views)))


@pytest.mark.rule("coordinator 9.6/2")
def test_an_older_release_is_history() -> None:
    views = {D: NOTHING.released(IDLE, FORMER, to=R), X: NOTHING.noted(M, MINE, at=R)}

    assert reconcile_ownership(D, around(views)).confirmed == [M]


@pytest.mark.rule("coordinator 9.3/4")
@pytest.mark.parametrize("machine", [IDLE, SLOT], ids=["a machine", "a slot"])
def test_what_was_released_is_sent_on_to_its_recipient(machine: Machine) -> None:
    views = {D: NOTHING.released(machine, MINE, to=R), R: NOTHING}

    (wanted,) = reconcile_ownership(D, around(views)).instructions

    assert (wanted.to, wanted.instruction_id) == (R, "5-3/adopt")
    if machine is IDLE:
        assert wanted.payload == TransferOwnership(from_shard=D, to_shard=R, machine_ids=(M,), machines=(IDLE,))
    else:
        assert wanted.payload == ReassignSpeculative(from_shard=D, to_shard=R, machine_ids=(M,))


@pytest.mark.rule("coordinator 9.6/2")
def test_a_release_of_this_term_needs_no_other_view_and_one_of_a_former_term_all_of_them() -> None:
    for version, is_sent in ((MINE, True), (FORMER, False)):
        views = {D: NOTHING.released(IDLE, version, to=R), R: NOTHING}
        done = reconcile_ownership(D, around(views, stale=frozenset({R})))
        assert (bool(done.instructions), done.waits_for) == (is_sent, () if is_sent else (R,))


@pytest.mark.rule("coordinator 9.6/2")
def test_what_has_no_recipient_any_more_is_taken_back_once_all_views_are_there() -> None:
    gone = {D: NOTHING.released(IDLE, MINE, to=R), X: NOTHING}
    assert reconcile_ownership(D, around(gone)).taken_back == [M]
    refusing = {D: NOTHING.released(IDLE, MINE, to=R), R: NOTHING}
    assert reconcile_ownership(D, around(refusing, refused=frozenset({(M, MINE)}))).taken_back == [M]

    done = reconcile_ownership(D, around(gone, stale=frozenset({X})))
    assert (done.taken_back, done.waits_for) == ([], (X,))


@pytest.mark.rule("coordinator 9.3/5")
def test_what_everybody_says_is_elsewhere_is_forgotten_once_all_views_are_there() -> None:
    views = {D: NOTHING.noted(M, MINE, at=R), R: NOTHING}

    forget = TransferOwnership(from_shard=D, to_shard=ShardId(""), machine_ids=(M,), is_note=True)
    assert reconcile_ownership(D, around(views)).instructions == [WantedInstruction(D, "5-3/forget/d", forget)]
    assert is_nothing(reconcile_ownership(D, around(views, stale=frozenset({R}))))


@pytest.mark.rule("coordinator 9.6/3")
def test_a_shard_whose_view_is_not_current_is_left_alone() -> None:
    views = {D: NOTHING.released(IDLE, MINE, to=R), R: NOTHING}

    assert is_nothing(reconcile_ownership(D, around(views, stale=frozenset({D}), domains=assigned(D))))
    assert is_nothing(reconcile_ownership(X, around(views)))
