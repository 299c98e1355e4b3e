"""A process that becomes a provider again and again: it imports everything once, then forks a provider for each life.

`python -m tests.e2e.killed_provider STATE SOCKET`: each line on standard input is one more life; its process id is
printed, and how it ended once it did. A life is the kit over a SQLite file, served by gRPC on a Unix socket.
"""

import asyncio
import os
import sys
from pathlib import Path

from grpc import aio
from prometheus_client import CollectorRegistry

from bigfleet.cli.runtime.system import SystemClock, SystemIds, configure_logging, system_rng
from bigfleet.provider.backend import CONFIGURE_WAITS
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.rpc.servers.provider import ProviderServicer, encode_list_entry

MACHINES = 24


async def live(state: Path, address: str) -> None:
    """Serve until killed."""
    clock = SystemClock()
    core = CapacityCore(
        # Every kind may be taken up again, so that a kill is never an operation's fault.
        FakeBackend(MACHINES, resumable=frozenset(Kind)),
        readiness=CONFIGURE_WAITS,
        store=SqliteProviderStore(state),
        clock=clock,
        ids=SystemIds(),
        rng=system_rng(),
        encode=encode_list_entry,
        metrics=ProviderMetrics(CollectorRegistry()),
        options=CoreOptions(intent_key=bytes(32), failed_hold_seconds=0),
    )
    server = aio.server()
    ProviderServicer(core, clock).register(server)
    await core.start()
    await core.loaded()
    server.add_insecure_port(f"unix:{address}")
    await server.start()
    await asyncio.Event().wait()


def main() -> None:
    """Fork a life for each line, and tell how it went."""
    state, address = Path(sys.argv[1]), sys.argv[2]
    configure_logging("provider", "error")
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            asyncio.run(live(state, address))
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(
            os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}", flush=True
        )


if __name__ == "__main__":
    main()
