"""Providers that are broken in one point as a peer sees it: a sound core behind a client that bends what is said."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from bigfleet.conformance.in_process import CoreClient
from bigfleet.conformance.ports import (
    Answer,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    ListSeen,
    MachineSeen,
    ProviderClient,
    Request,
    Status,
)
from bigfleet.model.states import MachineState
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.conformance.bench import Bent, Clients, Mutant, bent

S = MachineState


def ok(machine: MachineSeen | None, operation_id: str = "op-broken") -> Answer:
    return Answer(status=Status.OK, operation_id=operation_id, machine=machine)


def no(status: Status) -> Answer:
    return Answer(status=status, details="broken on purpose")


def showing(answer: Answer, bend: Callable[[MachineSeen], MachineSeen]) -> Answer:
    """Return an answer whose machines are bent."""
    machine = None if answer.machine is None else bend(answer.machine)
    listing = answer.listing
    if listing is not None:
        listing = ListSeen(
            machines=tuple(bend(entry) for entry in listing.machines),
            revision=listing.revision,
            removed_ids=listing.removed_ids,
            tombstones=listing.tombstones,
        )
    return dataclasses.replace(answer, machine=machine, listing=listing)


def state_in(answer: Answer) -> MachineState:
    return answer.machine.state if answer.machine is not None else S.UNSPECIFIED


class Reader(Bent):
    """Knows the true state of a machine before a call."""

    async def seen(self, machine_id: str) -> MachineSeen | None:
        return (await self.inner.call(Get(machine_id))).machine

    async def state(self, machine_id: str) -> MachineState:
        machine = await self.seen(machine_id)
        return S.UNSPECIFIED if machine is None else machine.state


def shown(bend: Callable[[MachineSeen], MachineSeen]) -> Clients:
    """Return clients that see every machine bent."""

    class Shown(Bent):
        async def after(self, request: Request, answer: Answer) -> Answer:
            return showing(answer, bend)

    return bent(Shown)


def answered(kind: type[Request], bend: Callable[[Request, Answer], Answer]) -> Clients:
    """Return clients that see the answers of one call bent."""

    class Answered(Bent):
        async def after(self, request: Request, answer: Answer) -> Answer:
            return bend(request, answer) if isinstance(request, kind) else answer

    return bent(Answered)


def instead(kind: type[Request], state: MachineState, status: Status) -> Clients:
    """Return clients of a provider that answers a call on a machine of that state at once, and does nothing."""

    class Instead(Reader):
        async def before(self, request: Request) -> Request | Answer:
            if isinstance(request, kind) and not isinstance(request, Get):
                machine = await self.seen(getattr(request, "machine_id", ""))
                if (S.UNSPECIFIED if machine is None else machine.state) is state:
                    return ok(machine) if status is Status.OK else no(status)
            return request

    return bent(Instead)


def ack_state(kind: type[Request], state: MachineState) -> Clients:
    """Return clients whose acks of a kind show another state."""
    return answered(kind, lambda _request, answer: showing(answer, lambda m: dataclasses.replace(m, state=state)))


class GoesOnAfterCreate(Reader):
    """A Create that binds the machine at once."""

    async def after(self, request: Request, answer: Answer) -> Answer:
        is_idle = isinstance(request, Get) and state_in(answer) is S.IDLE
        return showing(answer, lambda m: dataclasses.replace(m, state=S.CONFIGURED)) if is_idle else answer


class Flickers(Bent):
    """Every third reading of an IDLE machine shows CREATING."""

    reads = 0

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Get) and state_in(answer) is S.IDLE:
            self.reads += 1
            if self.reads % 3 == 0:
                return showing(answer, lambda m: dataclasses.replace(m, state=S.CREATING))
        return answer


class Restless(Bent):
    """A machine fails a second after it was first read CONFIGURED."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.since: dict[str, float] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        now = LoopClock().monotonic_seconds()
        return showing(answer, lambda machine: self.aged(machine, now))

    def aged(self, machine: MachineSeen, now: float) -> MachineSeen:
        if machine.state is not S.CONFIGURED:
            self.since.pop(machine.id, None)
            return machine
        if now - self.since.setdefault(machine.id, now) > 1.0:
            return dataclasses.replace(machine, state=S.FAILED, last_error="BACKEND: restless")
        return machine


class DeletesBound(Reader):
    """A Delete of a bound machine drains it first."""

    async def before(self, request: Request) -> Request | Answer:
        if isinstance(request, Delete) and await self.state(request.machine_id) is S.CONFIGURED:
            return Drain(request.machine_id, 0, request.token)
        return request


class CreateUnbinds(Reader):
    """A Create on a bound machine is refused, and drains it all the same."""

    async def before(self, request: Request) -> Request | Answer:
        if isinstance(request, Create) and await self.state(request.machine_id) is S.CONFIGURED:
            await self.inner.call(Drain(request.machine_id, 0))
            return no(Status.ABORTED)
        return request


class MakesUnknown(Bent):
    """A call about an unknown id is NOT_FOUND, and makes the machine."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.made: set[str] = set()

    async def before(self, request: Request) -> Request | Answer:
        if isinstance(request, Get) and request.machine_id in self.made:
            return ok(MachineSeen(id=request.machine_id, state=S.SPECULATIVE), "")
        return request

    async def after(self, request: Request, answer: Answer) -> Answer:
        if answer.status is Status.NOT_FOUND and isinstance(request, Configure):
            self.made.add(request.machine_id)
        return answer


def map_bytes(metadata: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())


def large_map(bytes_min: int, bytes_max: int, bend: Callable[[Configure], Request | Answer]) -> Clients:
    """Return clients of a provider that treats maps of a size in its own way."""

    class LargeMap(Bent):
        async def before(self, request: Request) -> Request | Answer:
            if isinstance(request, Configure) and bytes_min <= map_bytes(request.metadata) < bytes_max:
                return bend(request)
            return request

    return bent(LargeMap)


def truncated(request: Configure) -> Request:
    return dataclasses.replace(request, metadata={key: value[:100] for key, value in request.metadata.items()})


class BigBlobSticks(Bent):
    """A large blob is refused with a good status, and the machine is bound."""

    async def before(self, request: Request) -> Request | Answer:
        if isinstance(request, Configure) and len(request.blob) > 1024 * 1024:
            await self.inner.call(dataclasses.replace(request, blob=b""))
            return no(Status.RESOURCE_EXHAUSTED)
        return request


class NegativeGrace(Bent):
    """A negative grace is taken, and forgotten."""

    async def before(self, request: Request) -> Request | Answer:
        if isinstance(request, Drain) and request.grace_seconds < 0:
            return ok((await self.inner.call(Get(request.machine_id))).machine)
        return request


class FencedButDone(Bent):
    """A stale Drain is fenced, and done all the same."""

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Drain) and answer.is_fenced:
            await self.inner.call(Drain(request.machine_id, 0))
        return answer


class RaceLosesBinding(Bent):
    """A Drain that meets a Configure under way wipes the binding, though it is refused."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.wiped: set[str] = set()

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Drain) and answer.status is Status.ABORTED:
            machine = (await self.inner.call(Get(request.machine_id))).machine
            if machine is not None and machine.state is S.CONFIGURING:
                self.wiped.add(machine.id)
        return showing(answer, lambda m: dataclasses.replace(m, cluster="") if m.id in self.wiped else m)


class SecondConnection(CoreClient):
    """Repeats are known per connection only."""

    async def call(self, request: Request) -> Answer:
        answer = await super().call(request)
        return dataclasses.replace(answer, operation_id=f"{answer.operation_id}-2") if answer.operation_id else answer


def per_connection(core: CapacityCore) -> Sequence[ProviderClient]:
    return CoreClient(core), SecondConnection(core)


class IdsByTime(Bent):
    """Operation ids are made of the kind and the time."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.ids: dict[str, str] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not answer.operation_id:
            return answer
        now = f"op-{type(request).__name__}-{LoopClock().monotonic_seconds()}"
        return dataclasses.replace(answer, operation_id=self.ids.setdefault(answer.operation_id, now))


class CrossTalk(Bent):
    """All machines that are CONFIGURED together show the binding of the latest."""

    cluster = ""

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Configure) and answer.is_ok:
            self.cluster = request.cluster
        return showing(answer, lambda m: dataclasses.replace(m, cluster=self.cluster) if m.state is S.CONFIGURED else m)


class StaleAcks(Bent):
    """A repeat's ack shows the machine as it was before the first call."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.met: set[str] = set()

    async def after(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(request, Configure) or not answer.is_ok:
            return answer
        if answer.operation_id in self.met:
            return showing(answer, lambda m: dataclasses.replace(m, state=S.IDLE, cluster="", metadata={}))
        self.met.add(answer.operation_id)
        return answer


class Aliases(Bent):
    """The sender's map is kept as it is, and read when somebody asks."""

    def __init__(self, core: CapacityCore) -> None:
        super().__init__(core)
        self.maps: dict[str, Mapping[str, str]] = {}

    async def after(self, request: Request, answer: Answer) -> Answer:
        if isinstance(request, Configure) and answer.is_ok:
            self.maps[request.machine_id] = request.metadata
        return showing(answer, self.aliased)

    def aliased(self, machine: MachineSeen) -> MachineSeen:
        if not machine.metadata or machine.id not in self.maps:
            return machine
        return dataclasses.replace(machine, metadata=dict(self.maps[machine.id]))


def without_host(state: MachineState) -> Clients:
    return shown(lambda m: dataclasses.replace(m, host=None) if m.state is state else m)


def empty_id(request: Request, answer: Answer) -> Answer:
    return no(Status.NOT_FOUND) if getattr(request, "machine_id", "x") == "" else answer


_KIB = 1024
CLIENT_MUTANTS = (
    Mutant(name="the ack of Configure shows IDLE", breaks="LIFE-2", clients=ack_state(Configure, S.IDLE)),
    Mutant(name="the ack of Drain shows CONFIGURED", breaks="LIFE-3", clients=ack_state(Drain, S.CONFIGURED)),
    Mutant(name="the ack of Delete shows IDLE", breaks="LIFE-8", clients=ack_state(Delete, S.IDLE)),
    Mutant(name="an idle machine reads as CONFIGURED", breaks="LIFE-4", clients=bent(GoesOnAfterCreate)),
    Mutant(name="resting machines flicker", breaks="LIFE-6", clients=bent(Flickers)),
    Mutant(name="CONFIGURED names no host", breaks="LIFE-6", clients=without_host(S.CONFIGURED)),
    Mutant(name="a settled machine fails by itself", breaks="LIFE-7", clients=bent(Restless)),
    Mutant(name="Create on CONFIGURED is a no-op", breaks="EDGE-1", clients=instead(Create, S.CONFIGURED, Status.OK)),
    Mutant(name="Create on CONFIGURED unbinds", breaks="EDGE-1", clients=bent(CreateUnbinds)),
    Mutant(
        name="Configure on SPECULATIVE is taken",
        breaks="EDGE-2",
        clients=instead(Configure, S.SPECULATIVE, Status.OK),
    ),
    Mutant(name="Delete on CONFIGURED drains", breaks="EDGE-4", clients=bent(DeletesBound)),
    Mutant(
        name="Delete on SPECULATIVE is fenced",
        breaks="EDGE-4",
        clients=instead(Delete, S.SPECULATIVE, Status.FAILED_PRECONDITION),
    ),
    Mutant(name="a Configure makes an unknown machine", breaks="EDGE-7", clients=bent(MakesUnknown)),
    Mutant(name="an empty id is NOT_FOUND on Get", breaks="EDGE-8", clients=answered(Get, empty_id)),
    Mutant(name="an empty id is NOT_FOUND on Drain", breaks="EDGE-8", clients=answered(Drain, empty_id)),
    Mutant(name="512 KiB of metadata are cut", breaks="EDGE-9", clients=large_map(256 * _KIB, 1024 * _KIB, truncated)),
    Mutant(name="2 MiB of metadata are cut", breaks="META-3", clients=large_map(1024 * _KIB, 4096 * _KIB, truncated)),
    Mutant(
        name="2 MiB of metadata are INTERNAL",
        breaks="META-3",
        clients=large_map(1024 * _KIB, 4096 * _KIB, lambda _request: no(Status.INTERNAL)),
    ),
    Mutant(name="a negative grace is forgotten", breaks="EDGE-10", clients=bent(NegativeGrace)),
    Mutant(name="a refused blob binds", breaks="EDGE-13", clients=bent(BigBlobSticks)),
    Mutant(
        name="Delete of an unknown id is taken",
        breaks="EDGE-15",
        clients=instead(Delete, S.UNSPECIFIED, Status.OK),
    ),
    Mutant(name="a fenced Drain drains", breaks="FENCE-4", clients=bent(FencedButDone)),
    Mutant(name="a refused Drain wipes the binding", breaks="RACE-4", clients=bent(RaceLosesBinding)),
    Mutant(name="repeats are known per connection", breaks="RACE-6", clients=per_connection),
    Mutant(name="operation ids are made of the time", breaks="RACE-7", clients=bent(IdsByTime)),
    Mutant(name="bindings of a burst get mixed", breaks="RACE-7", clients=bent(CrossTalk)),
    Mutant(name="a repeat's ack is stale", breaks="RACE-8", clients=bent(StaleAcks)),
    Mutant(name="the sender's map is kept by reference", breaks="META-5", clients=bent(Aliases)),
    Mutant(name="Drain on SPECULATIVE is a no-op", breaks="FUZZ-3", clients=instead(Drain, S.SPECULATIVE, Status.OK)),
)
