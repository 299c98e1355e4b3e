"""Handles a coordinator's answer: checks its term, runs its instructions, acknowledges each.

docs/spec/coordinator.md §8, points 3 to 5 and 7. Instructions are handled in order, each to its end. This module does
not know how an instruction is carried out, or how reports are sent.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import structlog

from bigfleet.model.ids import MachineId
from bigfleet.model.instructions import Ack, Instruction, InstructionOutcome
from bigfleet.shard.ownership.handover import DoesNotApply as DoesNotApply
from bigfleet.shard.ownership.handover import HandoverDone
from bigfleet.shard.ownership.handover import MayYetSucceed as MayYetSucceed

#: Instructions whose answers are remembered, so that a redelivery is answered alike.
ANSWERED_MAX = 10_000

_log = structlog.get_logger("bigfleet.link.inbox")


class Handler(Protocol):
    """What the shard does; every method is idempotent, because a redelivery after a restart runs again."""

    async def accept_term(self, term: int) -> None:
        """Make the highest accepted term durable before anything of it is handled."""
        ...

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        """Note that released machines have arrived."""
        ...

    async def carry_out(self, instruction: Instruction) -> HandoverDone | None:
        """Carry an instruction out, to its end, and return its result. Raises DoesNotApply, MayYetSucceed."""
        ...


class Inbox:
    """What one process has answered, and the acks that no report has carried yet."""

    def __init__(
        self,
        handler: Handler,
        *,
        accepted_term: int,
        on_answer: Callable[[Instruction, Ack], None] = lambda _instruction, _ack: None,
    ) -> None:
        """`on_answer` is called for each instruction that was judged, and not for a repeated one that is remembered."""
        self._handler = handler
        self._on_answer = on_answer
        #: The highest term that was accepted; reports echo it.
        self.accepted_term = accepted_term
        self.dropped_answers = 0
        self._answered: OrderedDict[str, Ack] = OrderedDict()
        self._waiting: list[Ack] = []

    def waiting(self) -> tuple[Ack, ...]:
        """Return the acks that the next report carries, in order."""
        return tuple(self._waiting)

    def carried(self, acks: Iterable[Ack]) -> None:
        """Forget acks after a report with them was acknowledged; not before."""
        acks = tuple(acks)
        for ack in acks:
            if ack.machines and ack.instruction_id in self._answered:
                # The leader has the records now, and the view lists them; thousands of answers would hold very many.
                self._answered[ack.instruction_id] = replace(ack, machines=())
        gone = {(ack.instruction_id, ack.outcome) for ack in acks}
        self._waiting = [ack for ack in self._waiting if (ack.instruction_id, ack.outcome) not in gone]

    async def take(self, term: int, confirmed: Iterable[MachineId], instructions: Iterable[Instruction]) -> None:
        """Handle one answer; of one whose term is below the accepted one all is dropped."""
        if term < self.accepted_term:
            self.dropped_answers += 1
            _log.warning(
                "link.answer_dropped", term=term, accepted_term=self.accepted_term, reason="its leader was replaced"
            )
            return
        if term > self.accepted_term:
            await self._handler.accept_term(term)
            self.accepted_term = term
        await self._handler.confirm(confirmed)
        for instruction in sorted(instructions, key=lambda each: each.version.sequence):
            if instruction.instruction_id:
                self._waiting.append(await self._answer(instruction))

    async def _answer(self, instruction: Instruction) -> Ack:
        if _follows_from_rows(instruction):
            # One transfer has many of the same id: each for what the rows say now, and without effect where they agree.
            ack = await self._judged(instruction)
            self._on_answer(instruction, ack)
            return ack
        known = self._answered.get(instruction.instruction_id)
        if known is not None:
            return known
        ack = await self._judged(instruction)
        self._on_answer(instruction, ack)
        # A failure is not remembered, nor is a term that was too low: the redelivery runs again.
        if ack.outcome not in (InstructionOutcome.FAILED, InstructionOutcome.REJECTED_STALE):
            self._answered[instruction.instruction_id] = ack
            if len(self._answered) > ANSWERED_MAX:
                self._answered.popitem(last=False)
        return ack

    async def _judged(self, instruction: Instruction) -> Ack:
        instruction_id = instruction.instruction_id
        if instruction.version.term < self.accepted_term:
            return Ack(instruction_id, InstructionOutcome.REJECTED_STALE, f"term {self.accepted_term} was accepted")
        if instruction.payload is None:
            return Ack(instruction_id, InstructionOutcome.REJECTED_INVALID, "this version knows no such instruction")
        try:
            done = await self._handler.carry_out(instruction) or HandoverDone()
        except DoesNotApply as refusal:
            return Ack(instruction_id, InstructionOutcome.REJECTED_INVALID, str(refusal))
        except MayYetSucceed as failure:
            return Ack(instruction_id, InstructionOutcome.FAILED, str(failure))
        return Ack(instruction_id, InstructionOutcome.ACCEPTED, machine_ids=done.machine_ids, machines=done.machines)


def _follows_from_rows(instruction: Instruction) -> bool:
    """Return whether an instruction goes on with a transfer that another one began: adopt, note, forget."""
    return instruction.row_version != instruction.version
