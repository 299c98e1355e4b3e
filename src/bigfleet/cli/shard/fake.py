"""Serves fake machines within a shard's process, for development: the real provider kit over slots in memory.

docs/spec/shard.md §1. The shard calls it over gRPC on loopback like any other provider. It is imported only with
--fake-provider. It must never touch anything real, store anything on disk, or be reachable from another host.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry

from bigfleet.cli.runtime.system import SystemClock, SystemIds, system_rng
from bigfleet.provider.backend import CONFIGURE_WAITS
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.storage.store import MemoryStore
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.servers.provider import (
    RECEIVE_BYTES_MAX,
    SEND_BYTES_MAX,
    SERVICE,
    ProviderServicer,
    encode_list_entry,
)

#: The shard has closed its channel by then; this is for other callers.
_STOP_SECONDS_MAX = 1.0
_HOST = "127.0.0.1"

_log = structlog.get_logger("bigfleet.cli.shard.command")


@asynccontextmanager
async def serving_fake(slot_count: int, clock: SystemClock) -> AsyncIterator[tuple[str, int]]:
    """Serve that many slots while the context lasts; yield host and port once List answers.

    Plain text on a loopback port that the system chooses. Raises ListenFault when there is none.
    """
    core = CapacityCore(
        FakeBackend(slot_count),
        readiness=CONFIGURE_WAITS,
        store=MemoryStore(),
        clock=clock,
        ids=SystemIds(),
        rng=system_rng(),
        encode=encode_list_entry,
        # Its series are no facts about the shard, which shows its own.
        metrics=ProviderMetrics(CollectorRegistry()),
    )
    server = GrpcServer(
        services=(SERVICE,),
        register=ProviderServicer(core, clock).register,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        send_bytes_max=SEND_BYTES_MAX,
        reflect=False,
        # Every call to a provider has a deadline (docs/spec/wire.md §2).
        keep_alive=False,
    )
    try:
        await core.start()
        await core.loaded()
        port = await server.start(_HOST, 0)
        advice = "the machines are fake and are discarded when the process ends"
        _log.warning("shard.fake_provider_started", slots=slot_count, port=port, advice=advice)
        yield _HOST, port
    finally:
        await server.stop(_STOP_SECONDS_MAX)
        await core.stop()
