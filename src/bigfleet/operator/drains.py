"""Tracks the drains that a cluster was asked for, and their outcomes (docs/spec/operator.md §7).

Keyed by machine: a new instruction for a machine replaces the previous one; a repeated instruction can only move its
deadline to an earlier time. A result is stored until the machine's state ends the drain, so that a new session can
report it again. Node states must be observed in the order in which they arrived, in one sequence with the instructions:
a Configured state after an instruction means that the drain was withdrawn. This table never drains anything itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigfleet.model.frames import DrainOutcome, DrainResult, ReclaimInstruction
from bigfleet.model.states import MachineState

#: A shard that asks for no grace, or less, still gives a node this long (docs/spec/operator.md §7.2).
GRACE_DEFAULT_SECONDS = 30

_ENDING_STATES = frozenset(
    {MachineState.IDLE, MachineState.SPECULATIVE, MachineState.CREATING, MachineState.DELETING, MachineState.FAILED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """One machine to be drained for one instruction."""

    instruction_id: str
    machine_id: str
    #: Node name where the shard knew it, else the machine id.
    node: str
    provider_id: str
    #: On the clock of `DrainTable.begin`'s caller.
    deadline_seconds: float
    preemptor_priority: int
    reason: str
    #: How it ended; None while it runs.
    result: DrainResult | None = None


class DrainTable:
    """The drains that are not over; at most one per machine that the shard has named."""

    def __init__(self) -> None:
        self._by_machine: dict[str, DrainRecord] = {}

    def __len__(self) -> int:
        return len(self._by_machine)

    def get(self, machine_id: str) -> DrainRecord | None:
        """Return the machine's drain, or None."""
        return self._by_machine.get(machine_id)

    def begin(self, instruction: ReclaimInstruction, *, now_seconds: float) -> list[DrainRecord]:
        """Note an instruction; return the drains to start or to hasten, in its order.

        One that has its result already is left alone, as is one whose deadline would move later.
        """
        grace_seconds = instruction.grace_seconds if instruction.grace_seconds > 0 else GRACE_DEFAULT_SECONDS
        deadline_seconds = now_seconds + grace_seconds
        changed = []
        # A shard without our additions names nodes only, and falls back to machine ids there.
        for position, machine_id in enumerate(instruction.machine_ids or instruction.nodes):
            known = self._by_machine.get(machine_id)
            if known is not None and known.instruction_id == instruction.instruction_id:
                if known.result is not None or known.deadline_seconds <= deadline_seconds:
                    continue
                drain = replace(known, deadline_seconds=deadline_seconds)
            else:
                drain = DrainRecord(
                    instruction_id=instruction.instruction_id,
                    machine_id=machine_id,
                    node=_at(instruction.nodes, position) or machine_id,
                    provider_id=_at(instruction.provider_ids, position),
                    deadline_seconds=deadline_seconds,
                    preemptor_priority=instruction.preemptor_priority,
                    reason=instruction.reason,
                )
            self._by_machine[machine_id] = drain
            changed.append(drain)
        return changed

    def resume(self, drain: DrainRecord) -> bool:
        """Note a drain that an earlier process began; False when the machine has one already, which stays."""
        return self._by_machine.setdefault(drain.machine_id, drain) is drain

    def finish(self, result: DrainResult) -> bool:
        """Note how a drain ended; False when that drain is no longer the machine's, or has its result."""
        drain = self._by_machine.get(result.machine_id)
        if drain is None or drain.instruction_id != result.instruction_id or drain.result is not None:
            return False
        self._by_machine[result.machine_id] = replace(drain, result=result)
        return True

    def count_begun(self, instruction_id: str) -> int:
        """Return how many machines of an instruction are here and were not reported as not found."""
        return sum(
            drain.instruction_id == instruction_id
            and (drain.result is None or drain.result.outcome is not DrainOutcome.NODE_NOT_FOUND)
            for drain in self._by_machine.values()
        )

    def observe(self, machine_id: str, state: MachineState) -> DrainRecord | None:
        """Note a machine's state; return the drain that it ends, or None.

        Configured ends it as withdrawn, any state in which the machine is not the cluster's ends it as done.
        """
        if state is MachineState.CONFIGURED or state in _ENDING_STATES:
            return self._by_machine.pop(machine_id, None)
        return None

    def forget_all_but(self, machine_ids: Iterable[str]) -> list[DrainRecord]:
        """End the drains of machines that a resync did not name; return them in machine order."""
        retained = frozenset(machine_ids)
        return [self._by_machine.pop(machine_id) for machine_id in sorted(self._by_machine.keys() - retained)]

    def results(self) -> list[DrainResult]:
        """Return the results of the drains that are not over yet, in machine order."""
        return [drain.result for _id, drain in sorted(self._by_machine.items()) if drain.result is not None]


def _at(values: tuple[str, ...], position: int) -> str:
    # An older shard leaves the parallel lists out.
    return values[position] if position < len(values) else ""
