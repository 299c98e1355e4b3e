"""Makes the real shard for a simulated process: its calls cross the simulated network, and its work runs inline.

Both simulators make their shards with it. It must not watch or change what a shard decides.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from bigfleet.model.clock import Clock
from bigfleet.model.compute import compute_inline
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ports import FenceToken
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.sites.remote_provider import ProviderHost, RemoteProvider

S = TypeVar("S", bound=Shard)


def make_simulated_shard(
    make: Callable[..., S],
    *,
    site: ProviderHost,
    network: Network,
    caller: str,
    clock: Clock,
    on_call: Callable[[str, str, FenceToken, str], None],
    synchronous_create: bool = False,
    **parts: Any,
) -> S:
    """Return the shard of one process; `parts` are those of any shard, the others are `RemoteProvider`'s."""
    provider = RemoteProvider(
        site=site,
        network=network,
        clock=clock,
        caller=caller,
        on_call=on_call,
        synchronous_create=synchronous_create,
    )
    return make(provider=provider, clock=clock, compute=compute_inline, registry=CollectorRegistry(), **parts)
