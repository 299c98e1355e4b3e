"""The simulated API server behaves as the facts say that real ones do (tests/api_facts)."""

import asyncio
from collections.abc import Sequence

import pytest

from bigfleet.operator.kubernetes.api import KubernetesApi
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.api_facts.catalogue import FACTS
from tests.api_facts.world import Fact, FactWorld, RoleRule

NAMESPACE = "facts"


def world_of(server: InMemoryApiServer) -> FactWorld:
    """Return a world in a server of its own."""
    server.unserved.add(("bigfleet.lucy.sh", "absentrequests"))

    async def restricted(rules: Sequence[RoleRule]) -> KubernetesApi:
        return InMemoryApi(server, user="limited", rights=AccessRights(rules_of_role({"rules": rules}, NAMESPACE)))

    async def forget_history() -> None:
        server.store.compact()

    return FactWorld(InMemoryApi(server), NAMESPACE, "facts", server.clock, restricted, forget_history)


@pytest.mark.virtual_time
@pytest.mark.parametrize("fact", [pytest.param(each, id=each.__name__) for each in FACTS])
async def test_the_simulated_server_behaves_as_real_ones(fact: Fact) -> None:
    """Each fact in a server of its own."""
    server = InMemoryApiServer(LoopClock())
    garbage = asyncio.get_running_loop().create_task(server.run_garbage_collection())
    try:
        await fact(world_of(server))
    finally:
        garbage.cancel()
