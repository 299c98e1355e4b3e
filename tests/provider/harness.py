"""Builds cores for tests: seeded ids, seeded randomness, virtual time, everything on one thread."""

import asyncio
import itertools
import random

from prometheus_client import CollectorRegistry

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import CONFIGURE_WAITS, Backend, ConfigureWaits, Ready
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.refusal import Code, Refused
from bigfleet.provider.storage.store import MemoryStore, Store
from bigfleet.rpc.servers.provider import encode_list_entry
from bigfleet.sim.kernel.virtual_time import LoopClock

SLOT = "fake-0"


class SeededIds:
    """Ids that count up, over every core of a test run."""

    _numbers = itertools.count(1)

    def new_id(self) -> str:
        return f"{next(self._numbers):026d}"


def make_core(
    backend: Backend,
    *,
    store: Store | None = None,
    readiness: Ready | ConfigureWaits = CONFIGURE_WAITS,
    options: CoreOptions | None = None,
    seed: int = 1,
) -> CapacityCore:
    return CapacityCore(
        backend,
        readiness=readiness,
        store=store or MemoryStore(),
        clock=LoopClock(),
        ids=SeededIds(),
        rng=random.Random(seed),
        encode=encode_list_entry,
        metrics=ProviderMetrics(CollectorRegistry()),
        options=options or CoreOptions(is_inline=True),
    )


async def started(core: CapacityCore) -> CapacityCore:
    await core.start()
    await core.loaded()
    return core


async def fake_core(count: int = 6, **arguments: object) -> tuple[CapacityCore, FakeBackend]:
    backend = FakeBackend(count)
    return await started(make_core(backend, **arguments)), backend  # type: ignore[arg-type]


async def settle() -> None:
    """Let everything that needs no time happen, also on a machine that stood still for this millisecond."""
    await asyncio.sleep(0.001)
    for _ in range(100):
        await asyncio.sleep(0)


async def state_of(core: CapacityCore, machine_id: str = SLOT) -> MachineState:
    return (await core.get(machine_id)).state


async def bring_to(core: CapacityCore, state: MachineState, machine_id: str = SLOT, cluster: str = "c-1") -> None:
    """Drive a slot of a fake backend that holds nothing to a resting state."""
    steps = [MachineState.SPECULATIVE, MachineState.IDLE, MachineState.CONFIGURED]
    if steps.index(state) >= 1:
        await core.create(machine_id)
        await settle()
    if steps.index(state) >= 2:
        await core.configure(machine_id, cluster, b"blob", {"k": "v"})
        await settle()
    assert await state_of(core, machine_id) is state


async def refusal_of(call: object) -> tuple[Code, str]:
    """Return how a call is refused; fail when it is not."""
    try:
        await call  # type: ignore[misc]
    except Refused as refused:
        return refused.code, refused.message
    raise AssertionError("the call was accepted")


def token(sequence: int, *, epoch: int = 1, shard: str = "s-1") -> Token:
    return Token(shard, epoch, sequence)


def metric(core: CapacityCore, name: str, **labels: str) -> float:
    return core.metrics.registry.get_sample_value(f"bigfleet_provider_{name}", labels) or 0.0


def is_ready(core: CapacityCore) -> bool:
    """Ask again each time, where a type checker would believe the last answer."""
    return core.is_ready
