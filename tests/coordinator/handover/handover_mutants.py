"""The rules of handover, taken out one at a time: each must let a machine have two owners, or none for ever."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from bigfleet.coordinator import ephemeral_state, ownership_reconcile
from bigfleet.coordinator.ephemeral_state import EphemeralState, ReceivedReport
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.ownership_reconcile import OwnershipView, PeerViews
from bigfleet.link import inbox
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Owned, OwnershipRow, RowKind


class Mutant(NamedTuple):
    """A rule that is taken out."""

    rule: str
    apply: Callable[[pytest.MonkeyPatch], None]
    #: Whether it shows in few seeds only.
    is_slow: bool = False


def _drop_on_an_old_view(patch: pytest.MonkeyPatch) -> None:
    def has_left(view: OwnershipView, domain: Any) -> bool:
        return domain not in view.reported.domains and domain not in view.reported.leaving

    patch.setattr(ownership_reconcile, "_has_left", has_left)
    # Giving a domain while another shard has it would be refused all the same.
    patch.setattr(ownership_reconcile, "_still_in", lambda _domain, _others: ())


def _notes_without_what_was_only_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership_reconcile, "_moved", lambda view: view.reported.rows.items())


def _forget_while_a_release_is_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    def is_nowhere(rows: Iterable[OwnershipRow]) -> bool:
        return all(row.kind is not RowKind.ADOPTED for row in rows)

    patch.setattr(ownership_reconcile, "_is_nowhere", is_nowhere)


def _forget_what_was_only_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership_reconcile, "_assumed_rows", lambda _machine_id, _around: [])


def _answer_a_new_file_without_the_check(patch: pytest.MonkeyPatch) -> None:
    async def may_instruct(_self: Leader, _report: ReceivedReport) -> bool:
        return True

    patch.setattr(Leader, "_may_instruct", may_instruct)


def _deliver_what_no_longer_follows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ephemeral_state, "still_follows", lambda _instruction, _to, _around: True)


def _any_view_is_current(patch: pytest.MonkeyPatch) -> None:
    def has_view(self: EphemeralState, shard_id: ShardId, now_seconds: float) -> bool:
        known = self.known.get(shard_id)
        return known is not None and known.reported is not None

    patch.setattr(EphemeralState, "has_current_view", has_view)


def _nobody_is_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerViews, "missing", ())


def _no_order_of_reports(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EphemeralState, "is_in_order", lambda _self, _report: True)


def _a_lower_turn_replaces_a_row(patch: pytest.MonkeyPatch) -> None:
    def with_row(self: Owned, machine_id: MachineId, row: OwnershipRow) -> Owned:
        return Owned(base=self.base, domains=self.domains, leaving=self.leaving, rows={**self.rows, machine_id: row})

    patch.setattr(Owned, "_with", with_row)
    # A repeated instruction that is carried out again mends what a lower turn has replaced.
    patch.setattr(inbox, "_follows_from_rows", lambda _instruction: False)


#: Chance finds these.
MUTANTS = (
    Mutant("notes tell of adoptions that were sent and not reported yet", _notes_without_what_was_only_sent),
    Mutant("nothing is forgotten while a release is unconfirmed", _forget_while_a_release_is_unconfirmed),
    Mutant("what no longer follows is not delivered", _deliver_what_no_longer_follows, is_slow=True),
    Mutant("what could make two owners waits for all views", _nobody_is_missing),
    Mutant("a row is replaced under a higher turn only", _a_lower_turn_replaces_a_row, is_slow=True),
)
NO_ORDER_OF_REPORTS = Mutant("reports are taken in their order", _no_order_of_reports)
FORGET_WHAT_WAS_ONLY_SENT = Mutant("nothing is forgotten that was sent to be adopted", _forget_what_was_only_sent)
DROP_ON_AN_OLD_VIEW = Mutant(
    "a domain is dropped only on a view that is newer than the last answer", _drop_on_an_old_view
)
ANSWER_A_NEW_FILE = Mutant(
    "a shard with a new file is answered after asking the store", _answer_a_new_file_without_the_check
)
ANY_VIEW_IS_CURRENT = Mutant("a view counts only when its report echoed this term", _any_view_is_current)
