"""Connects shards and providers to a simulated network, where their clients reach the current process.

docs/spec/wire.md. The sites of the fault world and the processes of scenarios use it. This module does not start or end
a process.
"""

from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.refusal import Code, Refused
from bigfleet.shard.cycle.controller import Shard
from bigfleet.sim.kernel.network import Connection, Link, Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.sites.remote_provider import list_bytes
from bigfleet.sim.sites.session_server import serve_session

#: One way between two processes.
WIRE_SECONDS: Final = 0.002


def even_network(clock: Clock, rng: Rng) -> Network:
    """Return a network on which every message takes the same time."""
    network = Network(clock, rng)
    network.usual = Link(delay_seconds_min=WIRE_SECONDS, delay_seconds_max=WIRE_SECONDS)
    return network


class ReachableProvider:
    """Where shards reach a provider; implements `bigfleet.sim.sites.remote_provider.ProviderHost`."""

    def __init__(self, name: str, core: CapacityCore | None = None) -> None:
        """Without a core it serves nothing yet."""
        self.process = Process(name)
        self.core = core

    def serving(self) -> CapacityCore:
        """Return the core. Raises Refused while none serves."""
        if self.core is None:
            raise Refused(Code.UNAVAILABLE, "the provider is starting")
        return self.core

    async def listing(self, since: bytes) -> bytes:
        """Return the bytes of an answer to List. Raises Refused."""
        return await list_bytes(self.serving(), since)


class ReachableShard:
    """Where operators reach a shard; implements `bigfleet.sim.sites.session_dialer.SessionHost`."""

    def __init__(self, name: str) -> None:
        self.process = Process(name)
        self.process.kill()
        self.shard: Shard | None = None

    async def serve(self, connection: Connection[bytes, bytes]) -> None:
        """Serve one session's stream until either side ends it; run in the shard's process."""
        if self.shard is None:
            connection.break_off("the shard is starting")
            return
        await serve_session(self.shard, connection)
