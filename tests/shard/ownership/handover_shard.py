"""One shard with an ownership file and a handover, over the provider of `tests.shard.world`; its process can die."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.instructions import CrossShardDrain, Instruction, Payload, Selector, TransferOwnership
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.ownership import Base, Owned, OwnershipVersion, Reservation
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.handover import Handover
from bigfleet.shard.ownership.handover_host import ShardHandoverHost
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.shard.ownership.state_file import StateFile
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, SequentialIds, World, machine

ME, OTHER, THIRD = ShardId("shard-0"), ShardId("shard-1"), ShardId("shard-2")
REPORT_SECONDS = 30.0


def idle(*names: str, **changes: Any) -> list[Machine]:
    """Return Idle machines of these names."""
    return [machine(name, MachineState.IDLE, **changes) for name in names]


class Dies(BaseException):
    """The process ends here."""


class MortalFile:
    """An ownership file of a process that can die right before or right after a change is durable."""

    def __init__(self, file: OwnershipFile, step: Callable[[str], None]) -> None:
        self._file = file
        self._step = step

    @property
    def owned(self) -> Owned:
        return self._file.owned

    @property
    def reservations(self) -> Mapping[MachineId, Reservation]:
        return self._file.reservations

    def accept_term(self, term: int) -> None:
        self._file.accept_term(term)

    def commit(self, owned: Owned, reservations: Mapping[MachineId, Reservation] | None = None) -> None:
        self._step("before the commit")
        self._file.commit(owned, reservations)
        self._step("after the commit")


class HandoverShard:
    """A shard whose disk and provider outlive its process."""

    def __init__(
        self,
        directory: Path,
        *machines: Machine,
        settings: ShardSettings | None = None,
        name: ShardId = ME,
        provider: ScriptedProvider | None = None,
        new_file_owns: Base = Base.ALL,
    ) -> None:
        self.directory = directory
        self.new_file_owns = new_file_owns
        self.name = name
        self.provider = provider or ScriptedProvider()
        self.provider.add(*machines)
        self.settings = settings or ShardSettings()
        self.audit_log = MemoryAuditLog()
        self.claimed: set[MachineId] = set()
        self.unjoined: set[str] = set()
        self.widened = 0
        #: The step at which the process dies, and those that it went through.
        self.dies_at = -1
        self.steps: list[str] = []
        self._state_file: StateFile | None = None
        self.start()

    def start(self) -> None:
        """Begin a new process on the same disk."""
        if self._state_file is not None:
            self._state_file.close()
        self._state_file = StateFile.open(
            self.directory, shard_id=self.name, clock=LoopClock(), new_file_owns=self.new_file_owns
        )
        self.dies_at, self.steps, self.has_read = -1, [], False
        self.file = self._state_file.ownership
        self.world = World(
            self.provider,
            epoch=self._state_file.epoch,
            settings=self.settings,
            audit_log=self.audit_log,
            shard_id=self.name,
            ownership_file=self.file,
        )
        shard = self.world.shard
        self.handover_host = ShardHandoverHost(
            settings=self.settings,
            inventory=shard.inventory,
            ingest=shard.ingest,
            ledger=shard.ledger,
            actuator=shard.actuator,
            provider=self.provider,
            tokens=shard.tokens,
            audit=shard.audit,
            clock=LoopClock(),
            ids=SequentialIds(),
            is_ready=lambda: self.has_read,
            claimed=lambda: self.claimed,
            unjoined=lambda: self.unjoined,
            widened=self._widen,
        )
        mortal: Any = MortalFile(self.file, self._step)
        self.handover = Handover(
            me=self.name,
            file=mortal,
            handover_host=self.handover_host,
            clock=LoopClock(),
            report_interval_seconds=REPORT_SECONDS,
        )

    async def read(self) -> None:
        """Reconcile once, deciding nothing."""
        await self.world.shard.reconciler.run()
        self.has_read = True

    def _widen(self) -> None:
        self.widened += 1

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) - 1 == self.dies_at:
            raise Dies(name)

    def close(self) -> None:
        assert self._state_file is not None
        self._state_file.close()

    @property
    def owned(self) -> Owned:
        return self.file.owned

    def holds(self) -> list[str]:
        """Return the machines of the inventory."""
        return sorted(self.world.shard.inventory.ids)


def instruction(payload: Payload | None, sequence: int = 1, *, term: int = 1, suffix: str = "") -> Instruction:
    version = OwnershipVersion(term, sequence)
    return Instruction(instruction_id=version.instruction_id + suffix, version=version, payload=payload)


def release(*machine_ids: str, count: int = 0, to: ShardId = OTHER, **selector: Any) -> TransferOwnership:
    """Return a transfer away from here, of named machines or of as many as a selector finds."""
    wanted = Selector(count=count, **selector) if count else None
    return TransferOwnership(
        from_shard=ME, to_shard=to, machine_ids=tuple(map(MachineId, machine_ids)), selector=wanted
    )


def adopt(machines: Iterable[Machine], *, by_gift_of: ShardId = OTHER) -> TransferOwnership:
    return TransferOwnership(from_shard=by_gift_of, to_shard=ME, machines=tuple(machines))


def drain(count: int, *, priority: int = 1000, bucket: int = 13, **selector: Any) -> CrossShardDrain:
    return CrossShardDrain(
        to_shard=OTHER,
        preemptor_priority=priority,
        requester_interruption_bucket=bucket,
        selector=Selector(count=count, **selector),
    )


def serve(shard: HandoverShard, machine_id: str, *, priority: int, interruption: float = 0.0) -> None:
    """Bind a machine at the provider to a cluster, with stamps."""
    record = machine(machine_id, MachineState.CONFIGURED, cluster=ClusterId("web"))
    stamped = replace(record, assigned_priority=priority, assigned_interruption_penalty_dollars=interruption)
    shard.provider.records[machine_id] = record
    shard.provider.metadata[machine_id] = encode_metadata(stamped)
