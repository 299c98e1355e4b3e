"""What a process says of a cluster that lacks something, and of credentials that cannot be read."""

import asyncio
from pathlib import Path

import pytest

from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.kubernetes import ClusterConnection, connect_cluster, find_endpoint
from bigfleet.operator.kubernetes.access import Right
from bigfleet.operator.kubernetes.api import INVALID_RESPONSE, ApiError
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.resources import LEASES, PODS, UPCOMING_NODES
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.faults import fail_times
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer

pytestmark = pytest.mark.virtual_time

ENDPOINT = ApiEndpoint(server="http://api", source="the simulation")
RIGHTS = (Right(resource=PODS, verbs=("list", "watch")),)


def connection(api: InMemoryApi) -> ClusterConnection:
    return ClusterConnection(endpoint=ENDPOINT, api=api, election_api=api, token_api=api, clock=LoopClock())


async def test_a_cluster_that_lacks_nothing_passes() -> None:
    await connection(InMemoryApi(InMemoryApiServer(LoopClock()))).check(RIGHTS, (UPCOMING_NODES,))


async def test_all_missing_rights_are_named() -> None:
    reviews = {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews"], "verbs": ["create"]}
    api = InMemoryApi(InMemoryApiServer(LoopClock()), rights=AccessRights(rules_of_role({"rules": [reviews]}, "")))

    with pytest.raises(RunFault, match="missing rights: list pods; watch pods; grant"):
        await connection(api).check(RIGHTS, ())


async def test_definitions_that_are_not_installed_are_named_with_their_folder() -> None:
    server = InMemoryApiServer(LoopClock())
    server.unserved.add((UPCOMING_NODES.group, UPCOMING_NODES.plural))

    with pytest.raises(RunFault, match=r"upcomingnodes.*; install the custom resources of BigFleet \(deploy/crds\)"):
        await connection(InMemoryApi(server)).check(RIGHTS, (UPCOMING_NODES,))


async def test_a_server_that_is_away_is_named_by_where_it_was_found() -> None:
    server = InMemoryApiServer(LoopClock())
    server.go_down()

    with pytest.raises(RunFault, match=r"API server of the simulation: .*connection refused"):
        await connection(InMemoryApi(server)).check(RIGHTS, (UPCOMING_NODES,))


async def test_an_address_at_which_no_api_server_answers_is_named() -> None:
    api = InMemoryApi(InMemoryApiServer(LoopClock()))
    api.faults.refuse = fail_times(1000, ApiError(0, INVALID_RESPONSE, "the answer cannot be read"))

    with pytest.raises(RunFault, match=r"cannot be read; check that an API server answers at http://api$"):
        await connection(api).check(RIGHTS, (UPCOMING_NODES,))


async def test_a_server_that_is_away_for_a_while_is_waited_for() -> None:
    """A process that ended would be started again with growing pauses."""
    server = InMemoryApiServer(LoopClock())
    server.go_down()
    checking = asyncio.create_task(connection(InMemoryApi(server)).check(RIGHTS, (UPCOMING_NODES,)))
    await asyncio.sleep(90)
    assert not checking.done()
    server.come_up()

    await checking


async def test_a_server_that_has_not_read_its_roles_is_asked_again() -> None:
    api = InMemoryApi(InMemoryApiServer(LoopClock()))
    api.faults.refuse = fail_times(5, ApiError(403, "Forbidden", "RBAC: no roles"))

    await connection(api).check(RIGHTS, (UPCOMING_NODES,))

    api.faults.refuse = fail_times(1000, ApiError(403, "Forbidden", "RBAC: no roles"))
    with pytest.raises(RunFault, match="RBAC: no roles"):
        await connection(api).check(RIGHTS, (UPCOMING_NODES,))


def test_credentials_that_cannot_be_read_are_a_wrong_call() -> None:
    with pytest.raises(UsageFault, match="absent"):
        find_endpoint(Path("absent"), LoopClock(), {})


async def test_leases_and_tokens_are_asked_for_beside_a_backlog_of_other_requests() -> None:
    """The limit of the process's requests is neither one of its election nor one of the tokens of its machines."""
    clock = LoopClock()
    away = ApiEndpoint(server="http://127.0.0.1:1", source="the simulation")
    async with connect_cluster(away, clock=clock, user_agent="x", qps=0.001, burst=1) as made:
        for api in (made.election_api, made.token_api):
            for _ in range(3):
                with pytest.raises(ApiError):
                    await api.get(LEASES, "x", namespace="y")
        assert clock.monotonic_seconds() < 10
        for _ in range(2):
            with pytest.raises(ApiError):
                await made.api.get(LEASES, "x", namespace="y")
        assert clock.monotonic_seconds() > 900
