"""Runs a shard's real link in the world, observed, inside the shard's process or outside of it.

docs/spec/coordinator.md §8. Outside, it draws from streams of its own and runs after everything else of the same
moment, so that a run with an unanswered link can be compared with a run without a link. The observer records calls and
their results, and must never change either.
"""

from collections.abc import Callable, Iterable, Sequence, Set

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.client import Client
from bigfleet.link.inbox import Handler, Inbox
from bigfleet.link.report_conversion import pools_of
from bigfleet.link.report_source import LinkCounts, ShardReportSource
from bigfleet.link.reporter import CoordinatorLink, ReportOutcome
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import Ack, Instruction
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ownership.handover import Handover, HandoverDone
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.observations import Observations
from bigfleet.sim.sites.coordinator import CoordinatorSite, RemoteCoordinators

#: The same for every shard of a world: machines may go from each to each.
PROVIDER_ADDRESS = "provider:9100"


class WatchedHandover:
    """A shard's side of instructions, watched; implements `bigfleet.link.inbox.Handler`."""

    def __init__(
        self,
        handover: Handover,
        shard_id: ShardId,
        observations: Observations,
        on_instruction: list[Callable[[], None]],
    ) -> None:
        self._handover = handover
        self._shard_id = shard_id
        self._observations = observations
        self._on_instruction = on_instruction

    async def accept_term(self, term: int) -> None:
        """Make a term durable."""
        await self._handover.accept_term(term)

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        """Note that released machines have arrived."""
        await self._handover.confirm(machine_ids)

    async def carry_out(self, instruction: Instruction) -> HandoverDone:
        """Carry an instruction out."""
        busy = self._observations.moves.busy
        busy.add(self._shard_id)
        self._observations.note(
            "instruct", self._shard_id, f"{instruction.instruction_id} {_instruction_text(instruction)}"
        )
        for listener in self._on_instruction:
            listener()
        try:
            return await self._handover.carry_out(instruction)
        finally:
            busy.discard(self._shard_id)


class ShardLink:
    """How one shard's processes are linked."""

    def __init__(
        self,
        *,
        shard_id: ShardId,
        sites: Sequence[CoordinatorSite],
        clock: Clock,
        rng: Random,
        faults: set[str],
        interval_seconds: float,
        observations: Observations,
        is_aside: bool,
    ) -> None:
        """`sites` may all be empty places: then no call is ever answered."""
        #: Called when an instruction is about to be carried out.
        self.on_instruction: list[Callable[[], None]] = []
        self._shard_id = shard_id
        self._sites = sites
        self._clock = clock
        self._rng = rng
        self._faults = faults
        self._interval_seconds = interval_seconds
        self._observations = observations
        self._is_aside = is_aside

    def spawn(self, shard: Shard, file: OwnershipFile, process: Process) -> None:
        """Run the link of a shard process as long as that lives."""
        reporter = self._reporter(shard, file)
        if not self._is_aside:
            process.spawn(reporter.run(), name="link")
            return
        beside = Process(f"{process.name}-link", is_aside=True)
        process.add_death_callback(beside.kill)
        beside.spawn(reporter.run(), name="link")

    def _reporter(self, shard: Shard, file: OwnershipFile) -> CoordinatorLink:
        ownership = shard.ownership
        assert ownership is not None, "a shard with a disk owns what it says"
        observations, shard_id = self._observations, self._shard_id
        handler = WatchedHandover(ownership.handover, shard_id, observations, self.on_instruction)
        counts = LinkCounts(shard.metrics, self._clock)

        def answered(instruction: Instruction, ack: Ack) -> None:
            counts.answered(instruction, ack)
            observations.note("ack", shard_id, f"{ack.instruction_id} {ack.outcome.value} {ack.reason[:60]}".rstrip())
            observations.mark(f"an instruction {ack.outcome.value}")

        return coordinator_link(
            shard,
            file,
            sites=self._sites,
            interval_seconds=self._interval_seconds,
            handler=handler,
            clock=self._clock,
            rng=self._rng,
            faults=self._faults,
            on_ack=answered,
            on_answer=lambda answer, is_old: observations.answered(shard_id, answer, is_old=is_old),
            on_report=counts.reported,
        )


def coordinator_link(
    shard: Shard,
    file: OwnershipFile,
    *,
    sites: Sequence[CoordinatorSite],
    interval_seconds: float,
    handler: Handler,
    clock: Clock,
    rng: Random,
    on_report: Callable[[ReportOutcome], None],
    on_ack: Callable[[Instruction, Ack], None] = lambda _instruction, _ack: None,
    on_answer: Callable[[ReportAnswer, bool], None] = lambda _answer, _is_old: None,
    faults: Set[str] = frozenset(),
) -> CoordinatorLink:
    """Return the link of one process of a shard, as `bigfleet shard` makes it.

    `on_ack` takes each instruction with its end, `on_answer` and `faults` are `RemoteCoordinators`'.
    """
    coordinators = RemoteCoordinators(
        shard_id=shard.shard_id, sites=sites, clock=clock, rng=rng, faults=faults, on_answer=on_answer
    )
    return CoordinatorLink(
        shard_id=shard.shard_id,
        epoch=shard.epoch,
        advertised_address=f"{shard.shard_id}:7780",
        interval_seconds=interval_seconds,
        source=ShardReportSource(shard, file, provider_address=PROVIDER_ADDRESS),
        inbox=Inbox(handler, accepted_term=file.accepted_term, on_answer=on_ack),
        client=Client([site.name for site in sites], coordinators, clock),
        clock=clock,
        on_report=on_report,
        on_sold_out=lambda pools: shard.stockouts.others_report(pools_of(pools)),
    )


def _instruction_text(instruction: Instruction) -> str:
    payload = instruction.payload
    if payload is None:
        return "unknown"
    places = [getattr(payload, name, "") for name in ("from_shard", "to_shard")]
    domain = getattr(payload, "domain", None)
    machines = ",".join(getattr(payload, "machine_ids", ()))
    what = "" if domain is None else domain.topology_value
    return " ".join(filter(None, (type(payload).__name__, *places, what, machines)))
