"""A real API server behaves as the facts say that the simulated one is held to (tests/api_facts)."""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.operator.kubernetes.api import Json, KubernetesApi
from bigfleet.operator.kubernetes.resources import ACCESS_REVIEWS
from tests.api_facts.catalogue import FACTS
from tests.api_facts.world import Fact, FactWorld, RoleRule
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.kinds import ROLE_BINDINGS, ROLES, SERVICE_ACCOUNTS, role, role_binding

pytestmark = pytest.mark.kubernetes


async def may(api: KubernetesApi, namespace: str, rule: RoleRule) -> bool:
    """Return whether a client may already do the first thing that a rule allows."""
    resource, _, subresource = rule["resources"][0].partition("/")
    attributes: dict[str, Json] = {
        "namespace": namespace,
        "verb": rule["verbs"][0],
        "group": rule["apiGroups"][0],
        "resource": resource,
        "subresource": subresource,
    }
    body: dict[str, Json] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return (await api.create(ACCESS_REVIEWS, body)).status.allowed


@pytest.fixture
async def world(cluster: ClusterUnderTest, namespace: str, definitions: list[str]) -> AsyncIterator[FactWorld]:
    """A namespace of a real API server."""
    async with AsyncExitStack() as clients:

        async def restricted(rules: Sequence[RoleRule]) -> KubernetesApi:
            name = f"limited-{uuid.uuid4().hex[:8]}"
            account: dict[str, Json] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
            await cluster.api.create(SERVICE_ACCOUNTS, account, namespace=namespace)
            written: list[dict[str, Json]] = [{key: list(values) for key, values in rule.items()} for rule in rules]
            await cluster.api.create(ROLES, role(name, written), namespace=namespace)
            binding = role_binding(name, role_name=name, account=name, namespace=namespace)
            await cluster.api.create(ROLE_BINDINGS, binding, namespace=namespace)
            api = await clients.enter_async_context(cluster.as_service_account(namespace, name))
            await eventually(lambda: may(api, namespace, rules[0]), f"{name} has not got its rights")
            return api

        async def forget_history() -> None:
            """The first versions are not in the cache of a server that has started after them."""

        suffix = uuid.uuid4().hex[:8]
        yield FactWorld(cluster.api, namespace, suffix, SystemClock(), restricted, forget_history)


@pytest.mark.parametrize("fact", [pytest.param(each, id=each.__name__) for each in FACTS])
async def test_a_real_server_behaves_as_the_simulated_one(world: FactWorld, fact: Fact) -> None:
    """Each fact in a namespace of its own."""
    await fact(world)
