"""Makes provider cores on virtual time, with seeded ids, for tests of backends."""

import itertools
import random  # noqa: TID251 - every generator made here is seeded by the caller
from typing import Final

from prometheus_client import CollectorRegistry

from bigfleet.provider.backend import CONFIGURE_WAITS, Backend, ConfigureWaits, Ready
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.kinds import KIND_IN_FLIGHT
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.store import MemoryStore, Store
from bigfleet.rpc.servers.provider import encode_list_entry
from bigfleet.sim.kernel.virtual_time import LoopClock

SEEDS_END: Final = 1_000_000
_LOOK_SECONDS: Final = 0.1


class SeededIds:
    """An `IdSource` that counts up: one seed gives the same ids in each run, two seeds never give the same id.

    A core that is started again over the same store goes on with the same source, or with one of another seed.
    """

    def __init__(self, seed: int = 1) -> None:
        """Raises ValueError for a seed below 0 or from 1,000,000 on."""
        if not 0 <= seed < SEEDS_END:
            raise ValueError(f"seed {seed}: it must be at least 0 and below {SEEDS_END:,}")
        self._seed = seed
        self._numbers = itertools.count(1)

    def new_id(self) -> str:
        """Return 26 digits: six of the seed, twenty of the count."""
        return f"{self._seed:06d}{next(self._numbers):020d}"


def make_core(
    backend: Backend,
    *,
    readiness: Ready | ConfigureWaits = CONFIGURE_WAITS,
    store: Store | None = None,
    ids: SeededIds | None = None,
    seed: int = 1,
    options: CoreOptions | None = None,
) -> CapacityCore:
    """Return a core over a backend, for virtual time: everything runs on the loop's thread, in memory by default.

    Raises TypeError for a backend that cannot be called.
    """
    return CapacityCore(
        backend,
        readiness=readiness,
        store=MemoryStore() if store is None else store,
        clock=LoopClock(),
        ids=SeededIds(seed) if ids is None else ids,
        rng=random.Random(seed),  # noqa: S311 - tests
        encode=encode_list_entry,
        metrics=ProviderMetrics(CollectorRegistry()),
        options=options or CoreOptions(is_inline=True),
    )


async def started_core(
    backend: Backend,
    *,
    readiness: Ready | ConfigureWaits = CONFIGURE_WAITS,
    store: Store | None = None,
    ids: SeededIds | None = None,
    seed: int = 1,
    options: CoreOptions | None = None,
) -> CapacityCore:
    """Return a core as `make_core` does, ready to be called. Raises StartRefused for an unusable inventory."""
    core = make_core(backend, readiness=readiness, store=store, ids=ids, seed=seed, options=options)
    await core.start()
    await core.loaded()
    return core


async def settled(core: CapacityCore, machine_id: str) -> Record:
    """Return a machine's record once it is in no transitional state. Raises Refused for one that is not there."""
    clock = LoopClock()
    while True:
        # First, so that what was just accepted gets to begin.
        await clock.sleep(_LOOK_SECONDS)
        record = await core.get(machine_id)
        if record.state not in KIND_IN_FLIGHT:
            return record
