"""Places the processes of a closed world on its network: where its provider serves, and where its shards do.

docs/spec/wire.md. Each message takes its time, and nothing is lost but with a process.
"""

from collections.abc import Callable
from typing import Final

from bigfleet.provider.kit.core import CapacityCore
from bigfleet.shard.cycle.controller import Shard
from bigfleet.sim.kernel.network import Connection, Link, Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.sites.remote_provider import list_bytes
from bigfleet.sim.sites.session_server import serve_session

#: One way between two processes.
WIRE_SECONDS: Final = 0.002


def even_network(clock: LoopClock, rng: Random) -> Network:
    """Return a network on which every message takes the same time."""
    network = Network(clock, rng)
    network.usual = Link(delay_seconds_min=WIRE_SECONDS, delay_seconds_max=WIRE_SECONDS)
    return network


class ScenarioProvider:
    """The provider, which never dies; implements `bigfleet.sim.sites.remote_provider.ProviderHost`."""

    def __init__(self, core: CapacityCore) -> None:
        self.process = Process("provider")
        self._core = core

    def serving(self) -> CapacityCore:
        """Return the core."""
        return self._core

    async def listing(self, since: bytes) -> bytes:
        """Return the bytes of an answer to List. Raises Refused."""
        return await list_bytes(self._core, since)


class ScenarioShard:
    """The process of a shard that serves sessions now; implements `bigfleet.sim.sites.session_dialer.SessionHost`."""

    def __init__(self, name: str, newest: Callable[[], tuple[Process, Shard] | None]) -> None:
        """`newest` returns the newest process of the shard, None while there is none."""
        self._newest = newest
        self._nothing = Process(name)
        self._nothing.kill()

    @property
    def process(self) -> Process:
        """The newest process, a dead one while there is none."""
        newest = self._newest()
        return self._nothing if newest is None else newest[0]

    async def serve(self, connection: Connection[bytes, bytes]) -> None:
        """Serve one session's stream until either side ends it; run in the shard's process."""
        newest = self._newest()
        if newest is None or newest[0] is not connection.server:
            connection.break_off("another process of the shard serves sessions now")
            return
        await serve_session(newest[1], connection)
