"""Our custom resource definitions in a real API server: installed, served, and open to a first object."""

from typing import Any

import pytest

from bigfleet.operator.kubernetes.api import ApiError, JsonObject, Resource
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    UPCOMING_NODES,
)
from tests.kubernetes.cluster import ClosedLoop, ClusterUnderTest

pytestmark = pytest.mark.kubernetes

REQUEST: JsonObject = {
    "apiVersion": "bigfleet.lucy.sh/v1alpha1",
    "kind": "CapacityRequest",
    "metadata": {"name": "r"},
    "spec": {"priority": 1, "resources": {"cpu": "1"}},
}


async def test_our_kinds_are_installed_and_served(cluster: ClusterUnderTest, definitions: list[str]) -> None:
    ours: tuple[Resource[Any], ...] = (CAPACITY_REQUESTS, UPCOMING_NODES, AVAILABLE_CAPACITIES)
    for resource in ours:
        assert resource.label in definitions
        await cluster.api.list_page(resource)


async def test_a_capacity_request_is_stored_and_one_without_resources_refused(
    cluster: ClusterUnderTest, definitions: list[str], namespace: str
) -> None:
    assert definitions
    await cluster.api.create(CAPACITY_REQUESTS, REQUEST, namespace=namespace)
    stored = await cluster.api.get(CAPACITY_REQUESTS, "r", namespace=namespace)
    with pytest.raises(ApiError) as raised:
        await cluster.api.create(
            CAPACITY_REQUESTS, {**REQUEST, "metadata": {"name": "bad"}, "spec": {"priority": 1}}, namespace=namespace
        )

    assert (stored.spec.priority, stored.spec.resources) == (1, {"cpu": "1"})
    assert raised.value.status == 422


@pytest.mark.slow
async def test_clusters_of_a_closed_loop_are_separate(closed_loop: ClosedLoop) -> None:
    """What is cluster-scoped in one is absent from the other."""
    first, second = await closed_loop.add_clusters("first", "second")
    node: JsonObject = {
        "apiVersion": "bigfleet.lucy.sh/v1alpha1",
        "kind": "UpcomingNode",
        "metadata": {"name": "n"},
        "spec": {"machineID": "n", "resources": {"cpu": "1"}},
    }
    await first.api.create(UPCOMING_NODES, node)

    assert (await first.read(UPCOMING_NODES, "n")) is not None
    assert (await second.read(UPCOMING_NODES, "n")) is None
