"""Computes a digest of a decision in a canonical form that is the same for all engines (docs/adr/0134).

Actions are stored whole, as numbers: kind, row of the machine in the view, place of the row of demand. Of what rows
got, the digests show whether it is the same: members, machines in claim order, domain, victims; all other fields of a
result follow from these and the input. The columns of an answer are read as they are, without making an action or a
row, and say what the objects of the reference say. This module must not depend on how an engine numbers things inside.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import ActionKind, Decision, RowResult
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.recording.values import RecordedOutcome, rows_bytes

if TYPE_CHECKING:
    # It loads kernels, which only who has decided with them may do.
    from bigfleet.engine.columnar.answer import ColumnarAnswer

Ints = npt.NDArray[np.int64]

#: What the digests of an outcome are of, in their order.
PARTS: Final = ("actions", "rows", "claims", "domains", "victims")
_NONE: Final = np.zeros(0, np.int64)
#: Place of the row of an action that serves none.
NO_ROW: Final = -1


class _Canonical(NamedTuple):
    """Everything that two engines must agree in."""

    kinds: npt.NDArray[np.uint8]
    machines: Ints
    #: Place in the folded list of the row that an action serves, `NO_ROW` for none.
    places: Ints
    rows: int
    short: int
    #: What `recording_kernel.mix_rows` wrote.
    numbers: Ints
    #: (place, machine) of every victim, by place, in the order of picking.
    victim_places: Ints
    victims: Ints


class Digester:
    """Makes outcomes; what it keeps only saves work."""

    def __init__(self) -> None:
        #: Numbers of all values of topology keys one key after the other, and where each key's begin.
        self._values: Ints = _NONE
        self._value_start: Ints = _NONE
        #: The lists that they are of, and how many of each.
        self._known: list[tuple[Sequence[str], int]] = []

    def outcome(self, decision: Decision, view: ColumnSnapshot, demand: Sequence[Need]) -> RecordedOutcome:
        """Return a decision on a view and a demand as it is recorded.

        Cost: passes over the arrays for an answer in columns, else a pass over every action and row in Python.
        """
        answer = _answer_of(decision, view)
        form = _from_objects(decision, view, demand) if answer is None else self._from_columns(answer)
        kinds, machines, places = form.kinds.tobytes(), rows_bytes(form.machines), rows_bytes(form.places)
        rows, claims, domains = (number.to_bytes(8, "little", signed=True) for number in form.numbers.tolist())
        return RecordedOutcome(
            kinds=kinds,
            machines=machines,
            places=places,
            rows=form.rows,
            short=form.short,
            digests=(
                _digest(kinds, machines, places),
                rows,
                claims,
                domains,
                _digest(rows_bytes(form.victim_places), rows_bytes(form.victims)),
            ),
        )

    def _from_columns(self, answer: "ColumnarAnswer") -> _Canonical:
        from bigfleet.recording.kernel import mix_rows

        rows, work, folded, arranged = answer.rows_in_list, answer.work, answer.folded, answer.arranged
        place_of, numbers = np.empty(len(rows), np.int64), np.empty(3, np.int64)
        self._follow(answer.values)
        mix_rows(
            *(numbers, place_of, rows),
            *(arranged.places, arranged.start, folded.cluster, folded.local, folded.members, folded.parked),
            *(answer.newly_parked, work.satisfiable),
            *(work.domain, answer.rows.key, self._value_start, self._values),
            *(work.credited, work.credit_from, work.credit_to),
            *(work.acquired, work.acquire_from, work.acquire_to),
        )
        taken = int(work.lengths[2])
        taken_rows = work.taken_row[:taken]
        is_victim = work.taken_victim[:taken] != 0
        victim_places, victims = place_of[taken_rows[is_victim]], work.taken_machine[:taken][is_victim]
        by_place = np.argsort(victim_places, kind="stable")
        is_short = work.want != 0
        is_short[taken_rows] = True
        return _Canonical(
            *_actions(answer, place_of),
            rows=len(rows),
            short=int(is_short.sum()),
            numbers=numbers,
            victim_places=victim_places[by_place],
            victims=victims[by_place].astype(np.int64),
        )

    def _follow(self, values: Sequence[Sequence[str]]) -> None:
        """Have a number for every value; engines number values as they like, and only ever add some."""
        sizes = [len(of_key) for of_key in values]
        known = self._known
        if len(known) == len(values) and all(
            of_key is former and size == former_size
            for of_key, size, (former, former_size) in zip(values, sizes, known, strict=True)
        ):
            return
        texts = [text for of_key, size in zip(values, sizes, strict=True) for text in of_key[:size]]
        self._values = np.array([_number(text) for text in texts], np.int64)
        self._value_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])
        self._known = list(zip(values, sizes, strict=True))


def outcome_of(decision: Decision, view: ColumnSnapshot, demand: Sequence[Need]) -> RecordedOutcome:
    """Return a decision on a view and a demand as it is recorded."""
    return Digester().outcome(decision, view, demand)


def digest_text(outcome: RecordedOutcome) -> str:
    """Return 32 hexadecimal digits that stand for the whole decision."""
    return xxhash.xxh3_128_hexdigest(b"".join(outcome.digests))


def _digest(*parts: bytes) -> bytes:
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _number(text: str) -> int:
    """Return a number of 63 bits for a text."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) >> 1


def _answer_of(decision: Decision, view: ColumnSnapshot) -> "ColumnarAnswer | None":
    from bigfleet.engine.columnar.answer import ActionColumns, RowColumns

    actions, rows = decision.actions, decision.rows
    if isinstance(actions, ActionColumns) and isinstance(rows, RowColumns) and actions.answer is rows.answer:
        return rows.answer if rows.answer.view is view else None
    return None


def _actions(answer: "ColumnarAnswer", place_of: Ints) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
    is_idle = answer.view.columns.state[answer.acquired_machine] == MachineState.IDLE
    parts: tuple[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], Ints], ...] = (
        (
            np.where(is_idle, np.uint8(ActionKind.BOOTSTRAP), np.uint8(ActionKind.PROVISION)),
            answer.acquired_machine,
            place_of[answer.acquired_row],
        ),
        (_all(ActionKind.PREEMPT, answer.victim_machine), answer.victim_machine, place_of[answer.victim_row]),
        (_all(ActionKind.RECLAIM, answer.reclaimed), answer.reclaimed, np.full(len(answer.reclaimed), NO_ROW)),
        (_all(ActionKind.DELETE, answer.released), answer.released, np.full(len(answer.released), NO_ROW)),
    )
    kinds, machines, places = zip(*parts, strict=True)
    return (np.concatenate(kinds), np.concatenate(machines).astype(np.int64), np.concatenate(places))


def _all(kind: ActionKind, machines: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    return np.full(len(machines), int(kind), np.uint8)


# ---- from objects ------------------------------------------------------------------------------------------------


def _from_objects(decision: Decision, view: ColumnSnapshot, demand: Sequence[Need]) -> _Canonical:
    row_of, results = view.rows, list(decision.rows)
    served = {
        machine_id: place
        for place, result in enumerate(results)
        for machine_id in (*result.bootstraps, *result.provisions, *result.victims)
    }
    actions = list(decision.actions)
    victims = [(place, row_of[one]) for place, result in enumerate(results) for one in result.victims]
    return _Canonical(
        kinds=np.array([int(action.kind) for action in actions], np.uint8),
        machines=_ints(row_of[action.machine_id] for action in actions),
        places=_ints(served.get(action.machine_id, NO_ROW) for action in actions),
        rows=len(results),
        short=sum(not result.satisfied for result in results),
        numbers=_numbers(results, view, demand),
        victim_places=_ints(place for place, _row in victims),
        victims=_ints(row for _place, row in victims),
    )


def _numbers(results: Sequence[RowResult], view: ColumnSnapshot, demand: Sequence[Need]) -> Ints:
    """Have the kernel go through objects: every row is a cluster of its own, every domain a value of its own."""
    from bigfleet.recording.kernel import mix_rows

    place_of_need = {id(need): place for place, need in enumerate(demand)}
    size = len(results)
    numbers, none, each = np.empty(3, np.int64), np.zeros(size, np.int64), np.arange(size)
    held = [view.rows[machine_id] for result in results for machine_id in result.claimed]
    ends = np.cumsum(_ints(len(result.claimed) for result in results))
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    mix_rows(
        *(numbers, np.empty(size, np.int64), each),
        *(_ints(place_of_need[id(result.members[0])] for result in results), each, each.astype(np.int32), none),
        _ints(len(result.members) if result.folded else 0 for result in results),
        np.array([result.need.parked for result in results], np.uint8),
        np.zeros(size, np.uint8),
        np.array([result.satisfiable for result in results], np.uint8),
        np.array([place if result.has_domain else -1 for place, result in enumerate(results)], np.int32),
        *(np.zeros(size, np.int32), np.zeros(1, np.int64), _ints(_number(result.domain) for result in results)),
        *(np.array(held, np.int32), starts, ends, np.zeros(0, np.int32), none, none),
    )
    return numbers


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)
