"""Provides a behaviour with machines, calls with fresh tokens, and waits until a machine settles.

One lab per behaviour and run. Its shard ids are new, so that a provider can be tested twice. Expectations are in the
behaviours, never here.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bigfleet.conformance.calls import CallLog, machine_text
from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.expecting import broken, expect, expect_ok
from bigfleet.conformance.ports import (
    Answer,
    CallToken,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    List,
    ListSeen,
    MachineSeen,
    Mutation,
    ProviderUnderTest,
    Request,
    Status,
)
from bigfleet.conformance.slots import NO_RESET, RESET_LABEL, Slots
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState

_POLL_SECONDS_MIN = 0.001
_POLL_SECONDS_MAX = 0.1
_POLL_GROWTH = 1.5
#: Slots that are tried before one is found that no other run has taken.
_TAKES_MAX = 16
#: How long a machine that should stay as it is gets watched.
QUIET_SECONDS = 0.25
_QUIET_READS = 5
_HAND_BACK_SECONDS_MIN = 30.0
#: Machines that are handed back at the same time.
_HANDED_BACK_AT_ONCE_MAX = 16
#: The T of a provider that serves the fault selectors, and how long after it a machine may take to settle.
FAULT_TIMEOUT_SECONDS = 2.0
_FAULT_SLACK_SECONDS = 5.0

_S = MachineState
T = TypeVar("T")


async def side_by_side(flows: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run flows at the same time and return their results in order; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(flow) for flow in flows]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the suite waits for a machine to settle."""

    step_seconds: float = 15.0

    @property
    def bulk_seconds(self) -> float:
        """For many machines at once."""
        return 2 * self.step_seconds

    @property
    def fault_seconds(self) -> float:
        """For an operation that fails when its timeout is over."""
        return FAULT_TIMEOUT_SECONDS + _FAULT_SLACK_SECONDS

    @property
    def hand_back_seconds(self) -> float:
        """For a machine on its way back to where it was found."""
        return max(self.bulk_seconds, _HAND_BACK_SECONDS_MIN)


@dataclass(frozen=True, slots=True)
class Way:
    """What was read of a machine until it rested."""

    #: Every reading, the ack's first when it was handed in.
    readings: tuple[MachineSeen, ...]

    @property
    def end(self) -> MachineSeen:
        """The last reading."""
        return self.readings[-1]

    @property
    def states(self) -> tuple[MachineState, ...]:
        """The states in order, each run of equal ones once."""
        states = [reading.state for reading in self.readings]
        return tuple(state for place, state in enumerate(states) if place == 0 or state is not states[place - 1])

    def expect_only(self, passing: MachineState, expectation: str) -> None:
        """Raise Broken when another state than `passing` was read before the end."""
        for reading in self.readings[:-1]:
            if reading.state is not self.end.state:
                expect(reading.state is passing, expectation, machine_text(reading))


@dataclass(slots=True, kw_only=True)
class Lab:
    """The bench of one behaviour."""

    site: ProviderUnderTest
    calls: CallLog
    clock: Clock
    draws: BehaviourDraws
    ids: IdSource
    slots: Slots
    patience: Patience
    #: How many machines the fleet of the scale lane was asked to have.
    scale_count: int
    #: How long the scale lane churns.
    soak_seconds: float
    #: Bootstrap data of each Configure that has some.
    blob: bytes
    shard: str = ""
    _sequence: int = 0
    _taken: list[str] = field(default_factory=list)
    #: Of machines that their drain does not reset, as far as this behaviour bound them.
    _former_clusters: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shard = self.new_shard()

    # ---- names ---------------------------------------------------------------------------------------------------

    def new_shard(self) -> str:
        """Return a shard id that no provider has seen."""
        return f"conformance-{self.ids.new_id()}"

    def new_cluster(self) -> str:
        """Return a cluster id that no provider has seen."""
        return f"cluster-{self.ids.new_id()}"

    def next_cluster(self, machine_id: str) -> str:
        """Return a cluster for the next binding: a new one, or the former one of a machine that no drain resets."""
        return self._former_clusters.get(machine_id) or self.new_cluster()

    def new_machine_id(self) -> str:
        """Return an id that no provider offers."""
        return f"conformance-unknown-{self.ids.new_id()}"

    def token(self) -> CallToken:
        """Return the next token of the behaviour's own shard."""
        self._sequence += 1
        return CallToken(self.shard, 1, self._sequence)

    def shards(self, count: int) -> list[CallToken]:
        """Return first tokens of so many new shards, so that calls in parallel do not fence each other."""
        return [CallToken(self.new_shard(), 1, 1) for _ in range(count)]

    # ---- calls ---------------------------------------------------------------------------------------------------

    async def call(self, request: Request, via: int = 0) -> Answer:
        """Carry a request and return how it ended."""
        return await self.calls.call(request, via)

    async def get(self, machine_id: str) -> MachineSeen:
        """Return a machine as read. Raises Broken."""
        answer = expect_ok(await self.call(Get(machine_id)), "Get of a machine that is listed")
        return _machine_of(answer, machine_id)

    async def list_machines(self, request: List | None = None) -> ListSeen:
        """Return an answer of List, the full list by default. Raises Broken."""
        answer = expect_ok(await self.call(request or List()), "List")
        if answer.listing is None:
            broken("List answers with a list", answer.status.value)
        return answer.listing

    async def listed(self, machine_id: str) -> MachineSeen:
        """Return the one entry of a machine in the full list. Raises Broken."""
        entries = [machine for machine in (await self.list_machines()).machines if machine.id == machine_id]
        expect(len(entries) == 1, f"{machine_id} is in List exactly once", f"{len(entries)} times")
        return entries[0]

    async def done(self, request: Mutation, *, via: int = 0) -> Answer:
        """Carry a call that must be taken; an absent token becomes a fresh one. Raises Broken.

        The ack names an operation and shows the machine.
        """
        answer = await self.call(self.stamped(request), via)
        expect_ok(answer, type(request).__name__)
        expect(answer.operation_id != "", f"the ack of {type(request).__name__} names an operation")
        _machine_of(answer, request.machine_id)
        return answer

    def stamped(self, request: Mutation) -> Mutation:
        """Return the request with a fresh token unless it has one."""
        return request if request.token != CallToken() else replace(request, token=self.token())

    # ---- waiting -------------------------------------------------------------------------------------------------

    async def way_of(self, machine_id: str, ack: Answer | None = None, *, seconds_max: float | None = None) -> Way:
        """Read a machine until it is in no transitional state. Raises Broken when patience ends."""
        seconds_max = self.patience.step_seconds if seconds_max is None else seconds_max
        until_seconds = self.clock.monotonic_seconds() + seconds_max
        readings = [ack.machine] if ack is not None and ack.machine is not None else []
        wait_seconds = _POLL_SECONDS_MIN
        while True:
            reading = await self.get(machine_id)
            readings.append(reading)
            if reading.state not in TRANSITIONAL_STATES:
                if reading.cluster and reading.labels.get(RESET_LABEL) == NO_RESET:
                    self._former_clusters[machine_id] = reading.cluster
                return Way(tuple(readings))
            if self.clock.monotonic_seconds() >= until_seconds:
                broken(f"{machine_id} settles within {seconds_max:g} s", machine_text(reading))
            await self.clock.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * _POLL_GROWTH, _POLL_SECONDS_MAX)

    async def way(self, request: Mutation, target: MachineState, *, seconds_max: float | None = None) -> Way:
        """Carry a call that must be taken and read its machine until it rests in `target`. Raises Broken."""
        ack = await self.done(request)
        way = await self.way_of(request.machine_id, ack, seconds_max=seconds_max)
        expectation = f"{type(request).__name__} ends in {target.name}"
        expect(way.end.state is target, expectation, machine_text(way.end))
        return way

    async def stays(self, machine_id: str, state: MachineState, expectation: str) -> MachineSeen:
        """Read a machine over a while and return the last reading. Raises Broken when it is not in `state`."""
        for _ in range(_QUIET_READS):
            reading = await self.get(machine_id)
            expect(reading.state is state, expectation, machine_text(reading))
            await self.clock.sleep(QUIET_SECONDS / _QUIET_READS)
        return reading

    # ---- machines ------------------------------------------------------------------------------------------------

    async def slot(self) -> str:
        """Return a SPECULATIVE machine, lent until the behaviour ends. Raises NoSlots or Broken."""
        seen = ""
        #: Slots that share room with machines in use: they are offered again when that is free.
        without_room: list[str] = []
        try:
            for _ in range(_TAKES_MAX):
                machine_id = self.slots.take_free(self.draws)
                answer = await self.call(Get(machine_id))
                if answer.status is Status.NOT_FOUND:
                    without_room.append(machine_id)
                    seen = f"{machine_id}: {answer.status.value}"
                    continue
                machine = _machine_of(expect_ok(answer, "Get of a machine that is listed"), machine_id)
                if machine.state is _S.SPECULATIVE:
                    self._taken.append(machine_id)
                    return machine_id
                seen = machine_text(machine)
            broken("slots stay SPECULATIVE between calls", seen)
        finally:
            self.slots.free.extend(without_room)

    async def idle(self) -> str:
        """Return an IDLE machine, lent until the behaviour ends. Raises NoSlots or Broken."""
        machine_id = self.slots.take_idle(self.draws)
        if machine_id is not None:
            self._taken.append(machine_id)
            return machine_id
        machine_id = await self.slot()
        await self.create(machine_id)
        return machine_id

    async def many_idle(self, count: int) -> list[str]:
        """Return so many IDLE machines, made side by side, lent until the behaviour ends. Raises NoSlots or Broken."""
        machine_ids = []
        slots = []
        for _ in range(count):
            machine_id = self.slots.take_idle(self.draws)
            if machine_id is None:
                machine_id = await self.slot()
                slots.append(machine_id)
            else:
                self._taken.append(machine_id)
            machine_ids.append(machine_id)
        seconds_max = self.patience.bulk_seconds
        await side_by_side(self.way(Create(machine_id), _S.IDLE, seconds_max=seconds_max) for machine_id in slots)
        return machine_ids

    async def faulty_slot(self, selector: str) -> str:
        """Return a slot that carries a selector of the fault area, such as `create=error`. Raises NoSlots.

        Used once: what became of it cannot be undone by a call.
        """
        return self.slots.take_faulty(selector, self.draws)

    async def configured(self, cluster: str = "", metadata: Mapping[str, str] | None = None) -> MachineSeen:
        """Return a CONFIGURED machine as read, lent until the behaviour ends. Raises NoSlots or Broken."""
        machine_id = await self.idle()
        return await self.configure(machine_id, cluster, metadata)

    async def create(self, machine_id: str) -> MachineSeen:
        """Bring a slot to IDLE and return it as read. Raises Broken."""
        return (await self.way(Create(machine_id), _S.IDLE)).end

    async def configure(
        self, machine_id: str, cluster: str = "", metadata: Mapping[str, str] | None = None
    ) -> MachineSeen:
        """Bind an IDLE machine, by default to its next cluster, and return it as read. Raises Broken."""
        cluster = cluster or self.next_cluster(machine_id)
        request = Configure(machine_id, cluster, metadata or {"conformance": "x"}, self.blob)
        return (await self.way(request, _S.CONFIGURED)).end

    async def drain(self, machine_id: str) -> MachineSeen:
        """Bring a CONFIGURED machine to IDLE and return it as read. Raises Broken."""
        return (await self.way(Drain(machine_id), _S.IDLE)).end

    async def delete(self, machine_id: str) -> MachineSeen:
        """Bring an IDLE machine to SPECULATIVE and return it as read. Raises Broken."""
        return (await self.way(Delete(machine_id), _S.SPECULATIVE)).end

    @property
    def taken(self) -> Sequence[str]:
        """The machines that are lent to this behaviour."""
        return tuple(self._taken)

    async def hand_back(self) -> list[str]:
        """Bring every lent machine back to where it was found; return what went wrong, one line each.

        One that is FAILED stays so, and is not lent again.
        """
        # A shard of its own: whatever the behaviour did with tokens must not fence the way back.
        self.shard, self._sequence = self.new_shard(), 0
        faults = []
        while self._taken:
            machine_ids = self._taken[-_HANDED_BACK_AT_ONCE_MAX:]
            del self._taken[-_HANDED_BACK_AT_ONCE_MAX:]
            ends = await asyncio.gather(*map(self._hand_back, machine_ids), return_exceptions=True)
            # In the order in which they were lent, so that the next behaviour draws the same in any order of return.
            for machine_id, end in zip(machine_ids, ends, strict=True):
                if isinstance(end, BaseException):
                    faults.append(f"{machine_id} was not handed back: {end}")
                elif end is _S.SPECULATIVE:
                    self.slots.free.append(machine_id)
                elif end is _S.IDLE:
                    self.slots.idle.append(machine_id)
        return faults

    async def _hand_back(self, machine_id: str) -> MachineState:
        end = await self._rested(machine_id)
        if end.state is _S.CONFIGURED:
            await self.done(Drain(machine_id))
            end = await self._rested(machine_id)
        if end.state is _S.IDLE and self.slots.can_delete:
            answer = await self.call(Delete(machine_id, self.token()))
            if answer.status is Status.UNIMPLEMENTED:
                self.slots.can_delete = False
            else:
                expect_ok(answer, "Delete")
                end = await self._rested(machine_id)
        return end.state

    async def _rested(self, machine_id: str) -> MachineSeen:
        # More patient than the behaviours: one that failed for lack of patience must not leave its machines behind.
        return (await self.way_of(machine_id, seconds_max=self.patience.hand_back_seconds)).end


def _machine_of(answer: Answer, machine_id: str) -> MachineSeen:
    if answer.machine is None:
        broken(f"an answer about {machine_id} shows the machine", "no machine")
    expect(answer.machine.id == machine_id, f"an answer about {machine_id} shows it", answer.machine.id)
    return answer.machine
