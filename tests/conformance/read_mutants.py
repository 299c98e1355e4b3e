"""Providers that are broken in what they show: records, filters, caps, cursors, and how long a large fleet takes.

Those of the kit bend its view, its cursor and its journal; the others bend what a peer is told.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from bigfleet.conformance.ports import (
    Answer,
    Create,
    Delete,
    Get,
    HostSeen,
    List,
    ListSeen,
    MachineSeen,
    Request,
)
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import Host, MachineView, Op
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage import cursor, view
from bigfleet.provider.storage.change_log import ChangeLog
from bigfleet.provider.storage.cursor import Cursor, CursorRejection
from bigfleet.provider.storage.view import CommittedView
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.conformance.bench import (
    Bent,
    Making,
    Mutant,
    StagedBackend,
    bent,
    method,
    replaced,
    replaced_in,
)
from tests.conformance.client_mutants import showing, shown
from tests.conformance.kit_mutants import completion

S = MachineState
Bend = Callable[[MachineSeen], MachineSeen]


# ---- records ---------------------------------------------------------------------------------------------------------


def one_of(wanted: MachineState | None, **changes: Any) -> Bend:
    """Return a bend of every machine of a state whose id ends in 7; None is any state."""

    def bend(machine: MachineSeen) -> MachineSeen:
        is_met = machine.id.endswith("7") and wanted in (None, machine.state)
        return dataclasses.replace(machine, **changes) if is_met else machine

    return bend


def of_state(state: MachineState, **changes: Any) -> Bend:
    """Return a bend of every machine of a state."""
    return lambda machine: dataclasses.replace(machine, **changes) if machine.state is state else machine


def of_type(capacity_type: CapacityType, **changes: Any) -> Bend:
    """Return a bend of every machine that is paid for so."""
    return lambda m: dataclasses.replace(m, **changes) if m.capacity_type is capacity_type else m


def other_provider(machine: MachineSeen) -> MachineSeen:
    if machine.host is None or machine.state is not S.CONFIGURED:
        return machine
    return dataclasses.replace(machine, host=HostSeen("joined", machine.host.ref))


def hosted(**changes: Any) -> Bend:
    return lambda machine: machine if machine.host is None else dataclasses.replace(machine, **changes)


def delete_keeps_metadata(before: Record, after: Record) -> Record:
    """A deleted machine still shows a key."""
    is_delete = before.operation is not None and before.operation.kind is Kind.DELETE
    return dataclasses.replace(after, metadata=MappingProxyType({"left": "behind"})) if is_delete else after


# ---- the kit's view --------------------------------------------------------------------------------------------------


def listed(mutant: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch of View.list; the mutant gets the sound method, the view, states, cap and cursor."""
    return lambda: method(CommittedView, "list", mutant)


def cut(mutant: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    """Return a patch of what cuts an answer; the mutant gets the sound function and its arguments."""
    sound = view._cut
    return lambda: replaced_in(view, "_cut", lambda *arguments: mutant(sound, *arguments))


def decoded(
    mutant: Callable[[Cursor | CursorRejection, bytes, bytes, int], Cursor | CursorRejection],
) -> Callable[[], Any]:
    """Return a patch of the cursor's reading; the mutant gets the sound answer, text, incarnation and head."""
    sound = cursor.decode_cursor

    def decode(text: bytes, *, incarnation: bytes, head: int, floor: int) -> Cursor | CursorRejection:
        return mutant(sound(text, incarnation=incarnation, head=head, floor=floor), text, incarnation, head)

    return lambda: replaced(sound, decode)


def idle_means_configuring_too(sound: Any, self: CommittedView, states: Any, results_max: int, since: bytes) -> Any:
    if states == frozenset({S.IDLE}):
        states = frozenset({S.IDLE, S.CONFIGURED})
    return sound(self, states, results_max, since)


def first_state_only(sound: Any, self: CommittedView, states: Any, results_max: int, since: bytes) -> Any:
    return sound(self, None if states is None else frozenset({min(states)}), results_max, since)


def unbounded(sound: Any, self: CommittedView, states: Any, results_max: int, since: bytes) -> Any:
    return sound(self, states, 0 if results_max == 3 else results_max, since)


def hundred_at_most(sound: Any, self: CommittedView, states: Any, results_max: int, since: bytes) -> Any:
    return sound(self, states, 100 if results_max <= 0 else results_max, since)


def cap_and_one(sound: Any, records: Iterable[Record], states: Any, results_max: int, head: int) -> Any:
    return sound(records, states, results_max + 1 if results_max == 2 else results_max, head)


def position_is_the_head(sound: Any, records: Iterable[Record], states: Any, results_max: int, head: int) -> Any:
    kept, _position = sound(records, states, results_max, head)
    return kept, head


def position_is_one_less(sound: Any, records: Iterable[Record], states: Any, results_max: int, head: int) -> Any:
    kept, position = sound(records, states, results_max, head)
    return kept, position - 1


def position_stays_behind(sound: Any, records: Iterable[Record], states: Any, results_max: int, head: int) -> Any:
    kept, position = sound(records, states, results_max, head)
    return kept, position - 1 if results_max <= 0 else position


def skips_every_other_page(sound: Any, records: Iterable[Record], states: Any, results_max: int, head: int) -> Any:
    kept, position = sound(records, states, results_max, head)
    return kept, position + 1 if 0 < results_max == len(kept) else position


def delta_of_one(sound: Any, self: ChangeLog, position: int) -> Any:
    return list(sound(self, position))[-1:]


def delta_without_configured(sound: Any, self: ChangeLog, position: int) -> Any:
    return (record for record in sound(self, position) if record.state is not S.CONFIGURED)


def delta_of_twelve(sound: Any, self: ChangeLog, position: int) -> Any:
    return list(sound(self, position))[:12]


def garbage_is_now(
    answer: Cursor | CursorRejection, _text: bytes, incarnation: bytes, head: int
) -> Cursor | CursorRejection:
    return Cursor(incarnation, head, head) if answer is CursorRejection.MALFORMED else answer


def checksum_unread(
    answer: Cursor | CursorRejection, text: bytes, incarnation: bytes, head: int
) -> Cursor | CursorRejection:
    if answer is not CursorRejection.MALFORMED or len(text) != cursor.CURSOR_BYTES:
        return answer
    read = Cursor(*cursor._BODY.unpack(text[: cursor._BODY.size]))
    is_possible = read.incarnation == incarnation and read.position <= head and read.removals <= head
    return read if is_possible else CursorRejection.FUTURE


def only_its_first_bytes(
    answer: Cursor | CursorRejection, text: bytes, incarnation: bytes, head: int
) -> Cursor | CursorRejection:
    if answer is not CursorRejection.MALFORMED or len(text) <= cursor.CURSOR_BYTES:
        return answer
    return cursor.decode_cursor(text[: cursor.CURSOR_BYTES], incarnation=incarnation, head=head, floor=0)


def never_taken(
    _answer: Cursor | CursorRejection, _text: bytes, _incarnation: bytes, _head: int
) -> Cursor | CursorRejection:
    return CursorRejection.EXPIRED


def never_more_than_now(
    answer: Cursor | CursorRejection, _text: bytes, incarnation: bytes, head: int
) -> Cursor | CursorRejection:
    return Cursor(incarnation, head, head) if isinstance(answer, Cursor) else answer


# ---- what a peer sees ------------------------------------------------------------------------------------------------


class FrozenRevision(Bent):
    """The revision of a full list never moves."""

    revision = b""

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(request, List) or request.since or answer.listing is None:
            return answer
        self.revision = self.revision or answer.listing.revision
        return dataclasses.replace(answer, listing=dataclasses.replace(answer.listing, revision=self.revision))


class Ticks(Bent):
    """Every second delta shows a machine, changed or not."""

    deltas = 0

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(request, List) or not request.since or answer.listing is None or answer.listing.machines:
            return answer
        self.deltas += 1
        if self.deltas % 2:
            return answer
        everything = await self.inner.call(List(results_max=1))
        assert everything.listing is not None
        machines = everything.listing.machines
        return dataclasses.replace(answer, listing=dataclasses.replace(answer.listing, machines=machines))


class QuietTicks(Bent):
    """A reading after a quiet while shows a machine that did not change."""

    asked_seconds = math.inf

    async def after(self, request: Request, answer: Answer) -> Answer:
        before_seconds, self.asked_seconds = self.asked_seconds, LoopClock().monotonic_seconds()
        listing = answer.listing
        if listing is None or not isinstance(request, List) or not request.since or listing.machines:
            return answer
        if self.asked_seconds - before_seconds < 0.7:
            return answer
        full = (await self.inner.call(List())).listing
        assert full is not None
        return dataclasses.replace(answer, listing=dataclasses.replace(listing, machines=full.machines[-1:]))


def listing_bent(bend: Callable[[List, ListSeen], ListSeen]) -> Any:
    """Return clients that see lists bent."""

    class Lists(Bent):
        async def after(self, request: Request, answer: Answer) -> Answer:
            if not isinstance(request, List) or answer.listing is None:
                return answer
            return dataclasses.replace(answer, listing=bend(request, answer.listing))

    return bent(Lists)


def calls_itself_a_delta(request: List, listing: ListSeen) -> ListSeen:
    return dataclasses.replace(listing, tombstones=bool(request.since))


def page_loses_its_last(request: List, listing: ListSeen) -> ListSeen:
    is_whole = 0 < request.results_max == len(listing.machines)
    return dataclasses.replace(listing, machines=listing.machines[:-1]) if is_whole and request.since else listing


def slow(kind: type[Request], seconds: float, every: int = 1) -> Any:
    """Return clients of a provider that takes so long for every so-many-th call of a kind."""

    class Slow(Bent):
        calls = 0

        async def before(self, request: Request) -> Request | Answer:
            if isinstance(request, kind):
                Slow.calls += 1
                if Slow.calls % every == 0:
                    await asyncio.sleep(seconds)
            return request

    return bent(Slow)


class Drifts(Bent):
    """An IDLE machine fails once it was read for a second and a half."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.since: dict[str, float] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        return showing(answer, self.aged)

    def aged(self, machine: MachineSeen) -> MachineSeen:
        now = LoopClock().monotonic_seconds()
        if machine.state is not S.IDLE:
            self.since.pop(machine.id, None)
        elif now - self.since.setdefault(machine.id, now) > 1.5:
            return dataclasses.replace(machine, state=S.FAILED, last_error="HOST_LOST: drifted")
        return machine


class OneIdOfABurst(Bent):
    """Creates within a millisecond are one operation."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.ids: dict[float, str] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(request, Create) or not answer.is_ok:
            return answer
        now = round(LoopClock().monotonic_seconds(), 3)
        return dataclasses.replace(answer, operation_id=self.ids.setdefault(now, answer.operation_id))


class NewHomes(Bent):
    """A machine that was created again is listed under a new id beside the old one."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.deleted: dict[str, MachineSeen] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Delete) and answer.is_ok and answer.machine is not None:
            gone = dataclasses.replace(answer.machine, id=f"{request.machine_id}-old", state=S.SPECULATIVE, host=None)
            self.deleted[gone.id] = gone
        if answer.listing is None or not isinstance(request, List) or request.since:
            return answer
        machines = (*answer.listing.machines, *self.deleted.values())
        return dataclasses.replace(answer, listing=dataclasses.replace(answer.listing, machines=machines))


def third_drain_keeps_metadata() -> AbstractContextManager[None]:
    """Return a patch under which every third drain of a machine leaves the metadata."""
    drains: dict[str, int] = {}

    def bend(before: Record, after: Record) -> Record:
        if before.operation is None or before.operation.kind is not Kind.DRAIN:
            return after
        drains[before.id] = drains.get(before.id, 0) + 1
        return dataclasses.replace(after, metadata=before.metadata) if drains[before.id] % 3 == 0 else after

    return completion(bend)()


class OneAtATime(StagedBackend):
    """Creates wait for each other, and the last of many for too long."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.creating = 0

    async def create(self, machine: MachineView, op: Op) -> Host:
        self.creating += 1
        try:
            await asyncio.sleep(self.creating * 4.0)
            return await super().create(machine, op)
        finally:
            self.creating -= 1


_PLAIN_SHAPE = {"cpu": "7500m", "memory": "28Gi"}
READ_KIT_MUTANTS = (
    Mutant(name="a delete keeps metadata", breaks="SHAPE-7", patch=completion(delete_keeps_metadata)),
    Mutant(name="IDLE means CONFIGURED too", breaks="LIST-1", patch=listed(idle_means_configuring_too)),
    Mutant(name="of a union the first state counts", breaks="LIST-1", patch=listed(first_state_only)),
    Mutant(name="a cap of 3 is none", breaks="LIST-2", patch=listed(unbounded)),
    Mutant(name="without a cap there are 100", breaks="LIST-2", patch=listed(hundred_at_most)),
    Mutant(name="a cap of 2 gives 3", breaks="LIST-2", patch=cut(cap_and_one)),
    Mutant(
        name="a delta leaves out what is CONFIGURED",
        breaks="LIST-3",
        patch=lambda: method(ChangeLog, "after", delta_without_configured),
    ),
    Mutant(name="a cursor stays one behind", breaks="LIST-4", patch=cut(position_stays_behind)),
    Mutant(
        name="a delta holds the last change alone",
        breaks="LIST-5",
        patch=lambda: method(ChangeLog, "after", delta_of_one),
    ),
    Mutant(name="every cursor is that of now", breaks="LIST-5", patch=decoded(never_more_than_now)),
    Mutant(name="garbage is the cursor of now", breaks="LIST-6", patch=decoded(garbage_is_now)),
    Mutant(name="a page's cursor is the head", breaks="LIST-7", patch=cut(position_is_the_head)),
    Mutant(name="a page begins with the last one's end", breaks="LIST-7", patch=cut(position_is_one_less)),
    Mutant(name="a page leaves out what follows it", breaks="LIST-7", patch=cut(skips_every_other_page)),
    Mutant(name="the checksum is not read", breaks="LIST-9", patch=decoded(checksum_unread)),
    Mutant(name="of a cursor the first bytes count", breaks="LIST-9", patch=decoded(only_its_first_bytes)),
    Mutant(name="no cursor is ever taken", breaks="LIST-9", patch=decoded(never_taken)),
    Mutant(
        name="a delta holds twelve",
        breaks="SCALE-2",
        patch=lambda: method(ChangeLog, "after", delta_of_twelve),
    ),
    Mutant(name="a large page's cursor is the head", breaks="SCALE-3", patch=cut(position_is_the_head)),
    Mutant(name="every third drain keeps the metadata", breaks="SCALE-4", patch=third_drain_keeps_metadata),
)
READ_CLIENT_MUTANTS = (
    Mutant(name="a record has no state", breaks="SHAPE-1", clients=shown(one_of(S.SPECULATIVE, state=S.UNSPECIFIED))),
    Mutant(name="a record has no instance type", breaks="SHAPE-1", clients=shown(one_of(None, instance_type=""))),
    Mutant(
        name="the zone is a label too",
        breaks="SHAPE-1",
        clients=shown(of_state(S.CONFIGURED, labels={"availability_zone": "zone-z"})),
    ),
    Mutant(name="a price is no number", breaks="SHAPE-2", clients=shown(one_of(None, price_usd_per_hour=math.nan))),
    Mutant(name="a price is below zero", breaks="SHAPE-2", clients=shown(one_of(None, price_usd_per_hour=-0.01))),
    Mutant(
        name="a probability is a percentage",
        breaks="SHAPE-2",
        clients=shown(of_type(CapacityType.SPOT, interruption_probability=5.0)),
    ),
    Mutant(
        name="spot never ends",
        breaks="SHAPE-2",
        clients=shown(of_type(CapacityType.SPOT, interruption_probability=0.0)),
    ),
    Mutant(
        name="a slot names a host",
        breaks="SHAPE-3",
        clients=shown(of_state(S.SPECULATIVE, host=HostSeen("fake", "host"))),
    ),
    Mutant(name="IDLE names half a host", breaks="SHAPE-3", clients=shown(of_state(S.IDLE, host=HostSeen("fake", "")))),
    Mutant(name="CONFIGURED names no cluster", breaks="SHAPE-3", clients=shown(of_state(S.CONFIGURED, cluster=""))),
    Mutant(
        name="a replica has no memory",
        breaks="SHAPE-4",
        clients=shown(one_of(None, resources={**_PLAIN_SHAPE, "memory": "0"})),
    ),
    Mutant(
        name="memory is told in words",
        breaks="SHAPE-4",
        clients=shown(one_of(None, allocatable={**_PLAIN_SHAPE, "memory": "28 GiB"})),
    ),
    Mutant(
        name="a cpu count is told in powers",
        breaks="SHAPE-4",
        clients=shown(of_state(S.CONFIGURED, resources={**_PLAIN_SHAPE, "cpu": "75e2"})),
    ),
    Mutant(name="a bound host has another provider", breaks="SHAPE-5", clients=shown(other_provider)),
    Mutant(name="a hosted machine has no zone", breaks="SHAPE-6", clients=shown(hosted(zone=""))),
    Mutant(
        name="a hosted machine has no capacity type",
        breaks="SHAPE-6",
        clients=shown(hosted(capacity_type=CapacityType.UNSPECIFIED)),
    ),
    Mutant(name="the revision stays", breaks="LIST-3", clients=bent(FrozenRevision)),
    Mutant(name="deltas tick", breaks="LIST-4", clients=bent(Ticks)),
    Mutant(name="quiet makes a machine change", breaks="LIST-8", clients=bent(QuietTicks)),
    Mutant(name="a full list calls itself a delta", breaks="LIST-6", clients=listing_bent(calls_itself_a_delta)),
    Mutant(name="a page loses its last machine", breaks="LIST-7", clients=listing_bent(page_loses_its_last)),
    Mutant(name="one of many records has no zone", breaks="SCALE-1", clients=shown(one_of(S.SPECULATIVE, zone=""))),
    Mutant(name="a deleted machine stays beside its slot", breaks="SCALE-5", clients=bent(NewHomes)),
    Mutant(name="every 40th Get is slow", breaks="SCALE-6", clients=slow(Get, 0.3, every=40)),
    Mutant(name="Create answers when it is done", breaks="SCALE-6", clients=slow(Create, 0.4)),
    Mutant(name="a list is slow", breaks="SCALE-6", clients=slow(List, 2.5)),
    Mutant(name="a full list takes four seconds", breaks="SCALE-7", clients=slow(List, 4.0)),
    Mutant(name="Creates of a burst are one operation", breaks="SCALE-8", clients=bent(OneIdOfABurst)),
    Mutant(name="Creates wait for each other", breaks="SCALE-8", making=Making(backend=OneAtATime)),
    Mutant(name="an idle machine drifts", breaks="SCALE-9", clients=bent(Drifts)),
)
