"""The processes that `bench.workloads.provider` measures (docs/spec/provider.md §24).

`serve STATE PORT full|normal` is the provider of the command, over a state file that is there already and a backend
whose every call succeeds at once. `list PORT` reads full Lists one after the other, so that what it takes to receive
them holds nobody else up. Words come in, JSON objects go out. Nothing here may skip a step of a real provider.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from grpc import aio

from bench.harness import resident_mib
from bench.provider_fleet import PROVIDER
from bigfleet.cli.provider.process import serve_substrate
from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.cli.provider.substrate import Substrate
from bigfleet.cli.runtime.system import configure_logging, run_loop
from bigfleet.provider.backend import CONFIGURE_WAITS, Feed
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.rpc.servers.provider import SERVICE
from bigfleet.rpc.wire.gen import provider_pb2

#: Long enough for no inventory pass to fall into a measurement.
_NO_PASS_SECONDS = 1e6


class PushingBackend(FakeBackend):
    """A fake that pushes a price on command, and says how long the push took."""

    def __init__(self) -> None:
        super().__init__(0)
        self.provider = PROVIDER
        self.words: asyncio.Queue[str] = asyncio.Queue()

    async def feed(self, feed: Feed) -> None:
        """Answer each word: `figures`, or `push ID PRICE`."""
        while True:
            word, *arguments = (await self.words.get()).split()
            if word == "push":
                started = time.perf_counter()
                await feed.report_price([arguments[0]], float(arguments[1]))
                say(push_ms=(time.perf_counter() - started) * 1000)
            else:
                say(rss_mib=resident_mib(), peak_mib=resident_mib("VmHWM"), cpu_seconds=time.process_time())


def say(**what: object) -> None:
    """Print an object as one line."""
    print(json.dumps(what), flush=True)


async def serve(state: Path, port: int, *, is_power_safe: bool) -> int:
    """Serve until standard input ends."""
    process = ProviderProcessSettings(
        address=("127.0.0.1", port),
        metrics_address=None,
        state_path=state,
        is_power_safe=is_power_safe,
        provider=PROVIDER,
        reflect=False,
    )
    backend = PushingBackend()
    options = CoreOptions(reconcile_interval_seconds=_NO_PASS_SECONDS, failed_hold_seconds=0)
    store = SqliteProviderStore(state, is_power_safe=is_power_safe)
    serving = asyncio.create_task(
        serve_substrate(process, options, Substrate(backend=backend, readiness=CONFIGURE_WAITS), store)
    )
    while line := await asyncio.to_thread(sys.stdin.readline):
        await backend.words.put(line)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    return 0


async def read_lists(port: int) -> int:
    """Read full Lists until a line comes in, and say how many."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    lists = 0
    options = [("grpc.max_receive_message_length", -1)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(f"/{SERVICE}/List", provider_pb2.ListFilter.SerializeToString, None)
        while not ended.done():
            await call(provider_pb2.ListFilter())
            lists += 1
    say(lists=lists)
    return 0


def main() -> int:
    """Run what the command line names."""
    configure_logging("bench", "error")
    if sys.argv[1] == "list":
        return run_loop(lambda: read_lists(int(sys.argv[2])))
    state, port, sync = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    return run_loop(lambda: serve(state, port, is_power_safe=sync == "full"))


if __name__ == "__main__":
    os._exit(main())
