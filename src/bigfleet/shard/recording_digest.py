"""Brings a decision of either engine into one canonical form, and digests it (docs/adr/0134).

Actions are kept whole, as numbers: kind, row of the machine in the view, place of the row of demand. Of what rows got,
the digests tell whether it is the same: members, machines in claim order, domain, victims; all other fields of a result
follow from these and the input. The columns of an answer are read as they are, without making an action or a row, and
say what the objects of the reference say. Nothing here may depend on how an engine numbers things inside.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bigfleet.engine.columnar.store import ColumnSnapshot
from bigfleet.engine.decision import ActionKind, Decision, RowResult
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.shard.recording_values import Outcome, rows_bytes

if TYPE_CHECKING:
    # It loads kernels, which only who has decided with them may do.
    from bigfleet.engine.columnar.answer import Answer

Ints = npt.NDArray[np.int64]

#: What the digests of an outcome are of, in their order.
PARTS: Final = ("actions", "rows", "claims", "domains", "victims")
#: Place of the row of an action that serves none.
NO_ROW: Final = -1


class _Canonical(NamedTuple):
    """Everything that two engines must agree in."""

    kinds: npt.NDArray[np.uint8]
    machines: Ints
    #: Place in the folded list of the row that an action serves, `NO_ROW` for none.
    places: Ints
    #: By place in the folded list: place of the first member in the demand, members where folded, parked, satisfiable.
    rows: tuple[Ints, ...]
    short: int
    #: One number for the machines of every row, in claim order.
    claims: int
    #: Places of the rows that chose a domain, ascending, and a number for each one's value.
    domain_places: Ints
    domains: npt.NDArray[np.uint64]
    #: (place, machine) of every victim, by place, in the order of picking.
    victim_places: Ints
    victims: Ints


class Digester:
    """Makes outcomes; what it keeps only saves work."""

    def __init__(self) -> None:
        #: Numbers of the values of a topology key, with the list that they are of.
        self._numbers: dict[int, tuple[Sequence[str], npt.NDArray[np.uint64]]] = {}

    def outcome(self, decision: Decision, view: ColumnSnapshot, demand: Sequence[Need]) -> Outcome:
        """Return a decision on a view and a demand as it is recorded.

        Cost: passes over the arrays for an answer in columns, else a pass over every action and row in Python.
        """
        answer = _answer_of(decision, view)
        form = _from_objects(decision, view, demand) if answer is None else self._from_columns(answer)
        kinds, machines, places = form.kinds.tobytes(), rows_bytes(form.machines), rows_bytes(form.places)
        return Outcome(
            kinds=kinds,
            machines=machines,
            places=places,
            rows=len(form.rows[0]),
            short=form.short,
            digests=(
                _digest(kinds, machines, places),
                _digest(*(rows_bytes(column) for column in form.rows)),
                _digest(form.claims.to_bytes(8, "little", signed=True)),
                _digest(rows_bytes(form.domain_places), form.domains.astype("<u8").tobytes()),
                _digest(rows_bytes(form.victim_places), rows_bytes(form.victims)),
            ),
        )

    def _from_columns(self, answer: "Answer") -> _Canonical:
        from bigfleet.shard.recording_kernel import mixed

        rows, work, folded, arranged = answer.rows_in_list, answer.work, answer.folded, answer.arranged
        place_of = np.empty(len(rows), np.int64)
        place_of[rows] = np.arange(len(rows))
        taken = int(work.lengths[2])
        taken_places, taken_machines = place_of[work.taken_row[:taken]], work.taken_machine[:taken]
        is_victim = work.taken_victim[:taken] != 0
        victim_places, victims = taken_places[is_victim], taken_machines[is_victim]
        by_place = np.argsort(victim_places, kind="stable")
        is_short = work.want != 0
        is_short[work.taken_row[:taken]] = True
        chosen = np.flatnonzero(work.domain[rows] >= 0)
        spans = (work.credit_from, work.credit_to), (work.acquire_from, work.acquire_to)
        return _Canonical(
            *_actions(answer, place_of),
            rows=(
                arranged.places[arranged.start[folded.cluster] + folded.local][rows],
                folded.members[rows],
                (folded.parked | answer.newly_parked)[rows].astype(np.int64),
                work.satisfiable[rows].astype(np.int64),
            ),
            short=int(is_short.sum()),
            claims=int(mixed(work.credited, *spans[0], work.acquired, *spans[1], rows)),
            domain_places=chosen,
            domains=self._domains(answer, rows[chosen]),
            victim_places=victim_places[by_place],
            victims=victims[by_place].astype(np.int64),
        )

    def _domains(self, answer: "Answer", rows: Ints) -> npt.NDArray[np.uint64]:
        """Return a number for the value that each of some rows chose; engines number values as they like."""
        keys, domains = answer.rows.key[rows], answer.work.domain[rows]
        numbers = np.zeros(len(rows), np.uint64)
        for key in np.unique(keys).tolist():
            of_key = keys == key
            numbers[of_key] = self._numbers_of(key, answer.values[key])[domains[of_key]]
        return numbers

    def _numbers_of(self, key: int, values: Sequence[str]) -> npt.NDArray[np.uint64]:
        known = self._numbers.get(key)
        if known is None or known[0] is not values or len(known[1]) != len(values):
            # Taken once: values are appended while they are read.
            known = self._numbers[key] = (values, np.array([_number(value) for value in list(values)], np.uint64))
        return known[1]


def outcome_of(decision: Decision, view: ColumnSnapshot, demand: Sequence[Need]) -> Outcome:
    """Return a decision on a view and a demand as it is recorded."""
    return Digester().outcome(decision, view, demand)


def digest_text(outcome: Outcome) -> str:
    """Return 32 hexadecimal digits that stand for the whole decision."""
    return xxhash.xxh3_128_hexdigest(b"".join(outcome.digests))


def _digest(*parts: bytes) -> bytes:
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _number(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _answer_of(decision: Decision, view: ColumnSnapshot) -> "Answer | None":
    from bigfleet.engine.columnar.answer import ActionColumns, RowColumns

    actions, rows = decision.actions, decision.rows
    if isinstance(actions, ActionColumns) and isinstance(rows, RowColumns) and actions.answer is rows.answer:
        return rows.answer if rows.answer.view is view else None
    return None


def _actions(answer: "Answer", place_of: Ints) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
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
    place_of_need = {id(need): place for place, need in enumerate(demand)}
    row_of, results = view.rows, list(decision.rows)
    served = {
        machine_id: place
        for place, result in enumerate(results)
        for machine_id in (*result.bootstraps, *result.provisions, *result.victims)
    }
    actions = list(decision.actions)
    chosen = [(place, _number(result.domain)) for place, result in enumerate(results) if result.has_domain]
    victims = [(place, row_of[one]) for place, result in enumerate(results) for one in result.victims]
    return _Canonical(
        kinds=np.array([int(action.kind) for action in actions], np.uint8),
        machines=_ints(row_of[action.machine_id] for action in actions),
        places=_ints(served.get(action.machine_id, NO_ROW) for action in actions),
        rows=(
            _ints(_first_place(result, place_of_need, demand) for result in results),
            _ints(len(result.members) if result.folded else 0 for result in results),
            _ints(int(result.need.parked) for result in results),
            _ints(int(result.satisfiable) for result in results),
        ),
        short=sum(not result.satisfied for result in results),
        claims=_claims(results, row_of),
        domain_places=_ints(place for place, _value in chosen),
        domains=np.array([value for _place, value in chosen], np.uint64),
        victim_places=_ints(place for place, _row in victims),
        victims=_ints(row for _place, row in victims),
    )


def _claims(results: Sequence[RowResult], row_of: Mapping[MachineId, int]) -> int:
    from bigfleet.shard.recording_kernel import mixed

    held = np.array([row_of[machine_id] for result in results for machine_id in result.claimed], np.int32)
    ends = np.cumsum(_ints(len(result.claimed) for result in results))
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    none = np.zeros(len(results), np.int64)
    return int(mixed(held, starts, ends, np.zeros(0, np.int32), none, none, np.arange(len(results))))


def _first_place(result: RowResult, place_of_need: dict[int, int], demand: Sequence[Need]) -> int:
    """Return the place of a row's first member; a row that is parked by its age alone may be another object."""
    first = result.members[0]
    known = place_of_need.get(id(first))
    return demand.index(first) if known is None else known


def _ints(values: object) -> Ints:
    return np.array(list(values), np.int64)  # type: ignore[call-overload]
