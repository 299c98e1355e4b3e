"""What holds in every simulated world, whatever is called and whatever breaks (docs/spec/provider.md §21)."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.simulated.backend import SimulatedBackend
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.provider.backends.simulated_world import BUSY, AuditedBook, make_cloud, make_simulated, world_of
from tests.provider.harness import started

S = MachineState
IDS = [
    "sim/on-demand/std.8x32/b/000",
    "sim/on-demand/std.8x32/b/001",
    "sim/reserved/std.2x8/b/000",
    "sim/spot/std.8x32/a/000",
    "sim/spot/std.8x32/a/001",
]
RESTART = 4
#: Longer than every hold, time-out and late effect of the worlds here, and ending at no moment that they plan.
QUIET_SECONDS = 4001

Steps = list[tuple[int, str, int]]
STEPS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 3, RESTART]), st.sampled_from(IDS), st.integers(0, 400)),
    min_size=5,
    max_size=25,
)


class Run:
    """A provider over one cloud, which may be restarted."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.book = AuditedBook()
        self._seed = seed
        self._path = folder / "s.db"
        self.cloud: SimulatedCloud
        self.core: CapacityCore

    async def begin(self) -> None:
        self.cloud = make_cloud(world_of(BUSY), seed=self._seed, book=self.book)
        store = SqliteProviderStore(self._path, is_power_safe=False)
        self.core = await started(make_simulated(self.cloud, store, failed_hold_seconds=30))

    async def end(self) -> None:
        """End the process: nothing of it goes on."""
        await self.core.stop()
        self.cloud.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def step(self, call: int, machine_id: str) -> None:
        if call == RESTART:
            await self.end()
            await self.begin()
            return
        core = self.core
        calls = (
            lambda: core.create(machine_id),
            lambda: core.configure(machine_id, "c", b"", {}),
            lambda: core.drain(machine_id, 0),
            lambda: core.delete(machine_id),
        )
        try:
            await calls[call]()
        except Refused:
            return

    async def check_deletes(self) -> None:
        """No host survives a successful Delete."""
        for record in (await self.core.list((S.SPECULATIVE,))).records:
            if record.operation is not None and record.operation.kind is Kind.DELETE:
                assert self.cloud.host(record.id) is None

    async def check_hosts(self) -> None:
        """Each host is found by the inventory, and in quiet times it belongs to its machine."""
        hosts = {machine_id: host.ref for machine_id, host in self.cloud.hosts()}
        backend = SimulatedBackend(self.cloud, provider="sim", clock=LoopClock())
        found = {fact.id: fact.host_ref for fact in await backend.inventory() if hasattr(fact, "host_ref")}
        assert found == hosts
        for record in (await self.core.list()).records:
            if record.state in (S.IDLE, S.CONFIGURED):
                assert hosts[record.id] == record.machine.host.ref
            elif record.state is S.SPECULATIVE:
                assert record.id not in hosts
            else:
                # A node that the cloud cannot prove to be out of its cluster: a person decides.
                assert record.state is S.FAILED, f"{record.id} is {record.state.name} in quiet times"

    def check_bill(self) -> None:
        """The bill is exact to the second, pool by pool."""
        billed = {pool.name: pool.billed_seconds for pool in self.cloud.pools() if pool.billed_seconds}
        assert billed == {pool: seconds for pool, seconds in self.book.billed_seconds().items() if seconds}


@settings(max_examples=in_proportion(20, least=8), deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_hosts_are_single_owned_billed_and_gone_after_a_delete(steps: Steps, seed: int) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(seed, Path(folder))
            await run.begin()
            for call, machine_id, pause_seconds in steps:
                await run.step(call, machine_id)
                await asyncio.sleep(pause_seconds)
                await run.check_deletes()
                run.check_bill()
            await asyncio.sleep(QUIET_SECONDS)
            await run.check_hosts()
            run.check_bill()
            await run.end()

    run_virtual(main)
