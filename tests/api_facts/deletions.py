"""Facts about deletions and evictions."""

from typing import Any

from bigfleet.operator.kubernetes.api import ApiError, Json, JsonObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    EVICTIONS,
    PODS,
)
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS
from tests.api_facts.world import Fact, FactWorld, eviction, refused


async def a_deletion_may_name_the_uid(world: FactWorld) -> None:
    """Another object of the same name is left alone."""
    created = await world.create_request("a")
    place: dict[str, Any] = {"namespace": world.namespace}
    error = await refused(world.api.delete(CAPACITY_REQUESTS, "a", uid="00000000-0000-0000-0000-000000000000", **place))
    await world.api.delete(CAPACITY_REQUESTS, "a", uid=created.metadata.uid, **place)

    assert error.is_conflict
    assert (await refused(world.api.get(CAPACITY_REQUESTS, "a", **place))).is_not_found


async def a_pod_on_a_node_terminates_until_it_is_deleted_with_grace_0(world: FactWorld) -> None:
    """A pod without a node is gone at once."""
    place: dict[str, Any] = {"namespace": world.namespace}
    await world.create_pod("placed", node=f"node-{world.suffix}")
    await world.create_pod("waiting")
    for name in ("placed", "waiting"):
        await world.api.delete(PODS, name, **place)
    terminating = await world.api.get(PODS, "placed", **place)
    await world.api.delete(PODS, "placed", grace_seconds=0, **place)

    assert terminating.metadata.deletion_timestamp is not None
    for name in ("placed", "waiting"):
        assert (await refused(world.api.get(PODS, name, **place))).is_not_found


async def what_is_owned_by_a_deleted_object_is_deleted(world: FactWorld) -> None:
    """After a while, by the garbage collector."""
    owner = await world.create_pod("owner")
    reference: Json = {"apiVersion": "v1", "kind": "Pod", "name": "owner", "uid": owner.metadata.uid}
    await world.create_request("owned", ownerReferences=[reference])
    await world.create_request("free")
    await world.api.delete(PODS, "owner", namespace=world.namespace, grace_seconds=0)

    async def is_gone() -> bool | None:
        page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
        return True if [each.metadata.name for each in page.items] == ["free"] else None

    assert await world.eventually(is_gone)


async def an_eviction_without_a_budget_deletes(world: FactWorld) -> None:
    """Gracefully, with a condition that says why; an eviction for another uid is refused."""
    place: dict[str, Any] = {"namespace": world.namespace, "name": "a"}
    await world.create_pod("a", node=f"node-{world.suffix}")
    other = eviction("a", world.namespace, preconditions={"uid": "00000000-0000-0000-0000-000000000000"})
    error = await refused(world.api.create(EVICTIONS, other, **place))
    answer = await world.api.create(EVICTIONS, eviction("a", world.namespace), **place)
    evicted = await world.api.get(PODS, "a", namespace=world.namespace)
    await world.api.delete(PODS, "a", namespace=world.namespace, grace_seconds=0)

    assert error.is_conflict
    assert answer.status == "Success"
    assert evicted.metadata.deletion_timestamp is not None
    assert evicted.is_displaced


async def a_budget_refuses_evictions(world: FactWorld) -> None:
    """With 429, the cause DisruptionBudget and no Retry-After, until the budget allows one."""
    labels = {"app": "web"}
    for name in ("a", "b"):
        await world.create_pod(name, node=f"node-{world.suffix}", labels=labels)
    budget: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": labels}},
    }
    await world.api.create(POD_DISRUPTION_BUDGETS, budget, namespace=world.namespace)
    # Until a budget has been computed for the first time, refusals come with a Retry-After: try without an effect.
    dry = eviction("a", world.namespace, dryRun=["All"])

    async def refusal() -> ApiError | None:
        error = await refused(world.api.create(EVICTIONS, dry, namespace=world.namespace, name="a"))
        return error if error.retry_after_seconds is None else None

    error = await world.eventually(refusal)
    patch: JsonObject = {"spec": {"minAvailable": 1}}
    await world.api.patch(POD_DISRUPTION_BUDGETS, "web", patch, namespace=world.namespace)

    async def accepted() -> bool | None:
        try:
            await world.api.create(EVICTIONS, eviction("a", world.namespace), namespace=world.namespace, name="a")
        except ApiError:
            return None
        return True

    assert (error.status, error.reason, error.causes) == (429, "TooManyRequests", ("DisruptionBudget",))
    assert error.is_transient
    assert await world.eventually(accepted)
    for name in ("a", "b"):
        await world.api.delete(PODS, name, namespace=world.namespace, grace_seconds=0)


FACTS: list[Fact] = [
    a_deletion_may_name_the_uid,
    a_pod_on_a_node_terminates_until_it_is_deleted_with_grace_0,
    what_is_owned_by_a_deleted_object_is_deleted,
    an_eviction_without_a_budget_deletes,
    a_budget_refuses_evictions,
]
