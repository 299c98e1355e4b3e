"""States how API servers behave, as facts that the simulated one and a real one are both tested against.

A fact is a coroutine of a `FactWorld`; `FACTS` lists them. What a real server needs some time for, a fact awaits with
`eventually`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, EventType, Json, KubernetesApi, PatchKind, Resource, WatchEvent
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
from bigfleet.operator.kubernetes.resources import (
    ACCESS_REVIEWS,
    CAPACITY_REQUESTS,
    EVICTIONS,
    GROUP,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    TOKEN_REQUESTS,
    UPCOMING_NODES,
)
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS, SERVICE_ACCOUNTS

T = TypeVar("T")

#: A rule of an RBAC role.
RoleRule = Mapping[str, Sequence[str]]
_ATTEMPTS = 120


@dataclass(frozen=True, slots=True)
class FactWorld:
    """An API server and a place in it that nothing else uses."""

    #: May do everything.
    api: KubernetesApi
    #: Exists, and is empty.
    namespace: str
    #: Makes names of objects of the cluster unique.
    suffix: str
    clock: Clock
    #: Returns a client that may do in the namespace what the rules of a Role allow, and nothing else.
    restricted: Callable[[Sequence[RoleRule]], Awaitable[KubernetesApi]]
    #: Lets the server forget the history of changes, where that can be asked for.
    forget_history: Callable[[], Awaitable[None]]

    async def eventually(self, check: Callable[[], Awaitable[T | None]]) -> T:
        """Return the first result of `check` that is not None."""
        for _ in range(_ATTEMPTS):
            found = await check()
            if found is not None:
                return found
            await self.clock.sleep(0.5)
        raise AssertionError(f"{check.__qualname__} never held")

    async def create_request(self, name: str, **metadata: Json) -> CapacityRequestObject:
        """Create a CapacityRequest."""
        body = request(name, **metadata)
        return await self.api.create(CAPACITY_REQUESTS, body, namespace=self.namespace)

    async def create_pod(self, name: str, *, node: str = "", labels: Mapping[str, str] | None = None) -> PodObject:
        """Create a pod; one on a node is made Running and Ready."""
        body = pod(name, node=node, labels=labels or {})
        created = await self.api.create(PODS, body, namespace=self.namespace)
        if not node:
            return created
        status: Json = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
        return await self.api.patch(PODS.status, name, status, namespace=self.namespace)


Fact = Callable[[FactWorld], Awaitable[None]]
FACTS: list[Fact] = []


def fact(function: Fact) -> Fact:
    """Add a fact to the list."""
    FACTS.append(function)
    return function


def request(name: str, *, cpu: str = "1", priority: int = 0, **metadata: Json) -> dict[str, Any]:
    """Return a CapacityRequest as it is written."""
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "CapacityRequest",
        "metadata": {"name": name, **metadata},
        "spec": {"priority": priority, "resources": {"cpu": cpu}},
    }


def pod(name: str, *, node: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a pod as it is written."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "main", "image": "none"}], **({"nodeName": node} if node else {})},
    }


async def refused(call: Awaitable[object]) -> ApiError:
    """Return the error with which a call is refused."""
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value


async def events_until(
    world: FactWorld, resource: Resource[T], version: str, count: int, **selectors: str
) -> list[WatchEvent[T]]:
    """Return the first `count` events of a watch, bookmarks apart."""
    events: list[WatchEvent[T]] = []
    async with world.api.watch(resource, resource_version=version, namespace=world.namespace, **selectors) as stream:
        async for event in stream:
            if event.type is not EventType.BOOKMARK:
                events.append(event)
            if len(events) == count:
                return events
    raise AssertionError(f"the watch ended after {events}")


# ---- create, read, replace ---------------------------------------------------------------------------------------


@fact
async def a_creation_is_stamped_by_the_server(world: FactWorld) -> None:
    """uid, resource version, creation time and generation are the server's; a status is ignored."""
    body = request("a", uid="mine", generation=7) | {"status": {"phase": "Acknowledged"}}
    created = await world.api.create(CAPACITY_REQUESTS, body, namespace=world.namespace)
    read = await world.api.get(CAPACITY_REQUESTS, "a", namespace=world.namespace)

    assert created == read
    assert created.metadata.uid not in ("", "mine")
    assert created.metadata.resource_version
    assert created.metadata.creation_timestamp.endswith("Z")
    assert (created.metadata.generation, created.status.phase) == (1, "")
    assert created.metadata.key == (world.namespace, "a")


@fact
async def a_name_is_generated(world: FactWorld) -> None:
    """From `generateName`, when there is no name."""
    body: dict[str, Json] = {"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "token-"}}
    names = [(await world.api.create(SECRETS, body, namespace=world.namespace)).metadata.name for _ in range(2)]

    assert names[0] != names[1]
    assert all(name.startswith("token-") and len(name) == len("token-") + 5 for name in names)


@fact
async def a_name_is_taken_once(world: FactWorld) -> None:
    """A second creation is a conflict of its own kind."""
    await world.create_request("a")
    error = await refused(world.create_request("a"))

    assert (error.status, error.reason) == (409, "AlreadyExists")
    assert str(error).endswith('capacityrequests.bigfleet.lucy.sh "a" already exists')


@fact
async def what_is_absent_is_not_found(world: FactWorld) -> None:
    """Whatever is asked of it."""
    place = {"namespace": world.namespace}
    calls = [
        world.api.get(PODS, "a", **place),
        world.api.patch(PODS, "a", {"metadata": {"labels": {"a": "b"}}}, **place),
        world.api.patch(CAPACITY_REQUESTS.status, "a", {"status": {"phase": "Pending"}}, **place),
        world.api.delete(CAPACITY_REQUESTS, "a", **place),
        world.api.create(EVICTIONS, eviction("a", world.namespace), name="a", **place),
    ]

    for call in calls:
        error = await refused(call)
        assert (error.status, error.reason, error.is_not_found) == (404, "NotFound", True)
        assert '"a" not found' in str(error)


@fact
async def a_replacement_of_an_older_version_is_refused(world: FactWorld) -> None:
    """With the text that asks for another attempt."""
    lease: dict[str, Any] = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "a"},
        "spec": {"holderIdentity": "one"},
    }
    created = await world.api.create(LEASES, lease, namespace=world.namespace)
    lease["metadata"]["resourceVersion"] = created.metadata.resource_version
    lease["spec"] = {"holderIdentity": "two"}
    replaced = await world.api.replace(LEASES, "a", lease, namespace=world.namespace)
    error = await refused(world.api.replace(LEASES, "a", lease | {"spec": {}}, namespace=world.namespace))

    assert replaced.metadata.resource_version != created.metadata.resource_version
    assert (error.status, error.reason, error.is_conflict) == (409, "Conflict", True)
    assert "the object has been modified" in str(error)


@fact
async def a_custom_object_is_replaced_with_a_version_alone(world: FactWorld) -> None:
    """Without one the request is invalid."""
    await world.create_request("a")
    error = await refused(world.api.replace(CAPACITY_REQUESTS, "a", request("a"), namespace=world.namespace))

    assert (error.status, error.reason) == (422, "Invalid")
    assert "metadata.resourceVersion" in str(error)


@fact
async def a_write_that_changes_nothing_makes_no_version(world: FactWorld) -> None:
    """Of whatever kind the write is."""
    created = await world.create_request("a", labels={"a": "b"})
    patch: Json = {"metadata": {"labels": {"a": "b"}}}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)
    body = request("a", labels={"a": "b"}, resourceVersion=created.metadata.resource_version)
    replaced = await world.api.replace(CAPACITY_REQUESTS, "a", body, namespace=world.namespace)

    assert created == patched == replaced


# ---- status ------------------------------------------------------------------------------------------------------


@fact
async def the_main_path_ignores_status(world: FactWorld) -> None:
    """The status that is stored stays."""
    await world.create_request("a")
    pending: Json = {"status": {"phase": "Pending"}}
    await world.api.patch(CAPACITY_REQUESTS.status, "a", pending, namespace=world.namespace)
    patch: Json = {"status": {"phase": "Acknowledged"}, "spec": {"priority": 7}}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)

    assert (patched.status.phase, patched.spec.priority) == ("Pending", 7)


@fact
async def the_status_path_ignores_all_else(world: FactWorld) -> None:
    """Spec and labels that come along."""
    await world.create_request("a")
    patch: Json = {"status": {"phase": "Pending"}, "spec": {"priority": 7}, "metadata": {"labels": {"a": "b"}}}
    patched = await world.api.patch(CAPACITY_REQUESTS.status, "a", patch, namespace=world.namespace)

    assert (patched.status.phase, patched.spec.priority, patched.metadata.labels) == ("Pending", 0, None)


@fact
async def a_generation_counts_changes_of_the_spec(world: FactWorld) -> None:
    """Labels and status are none."""
    await world.create_request("a")
    patches: list[tuple[Resource[CapacityRequestObject], dict[str, Json], int]] = [
        (CAPACITY_REQUESTS, {"metadata": {"labels": {"a": "b"}}}, 1),
        (CAPACITY_REQUESTS.status, {"status": {"phase": "Pending"}}, 1),
        (CAPACITY_REQUESTS, {"spec": {"priority": 1}}, 2),
        (CAPACITY_REQUESTS, {"spec": {"priority": 1}}, 2),
        (CAPACITY_REQUESTS, {"spec": {"resources": {"cpu": "2"}}}, 3),
    ]

    for resource, patch, generation in patches:
        patched = await world.api.patch(resource, "a", patch, namespace=world.namespace)
        assert patched.metadata.generation == generation, patch


# ---- patches -----------------------------------------------------------------------------------------------------


@fact
async def a_merge_patch_removes_with_null(world: FactWorld) -> None:
    """Mappings merge; lists are replaced."""
    await world.create_request("a", labels={"a": "1", "b": "2"})
    first: Json = {"spec": {"requirements": [{"key": "one", "operator": "Exists"}]}}
    await world.api.patch(CAPACITY_REQUESTS, "a", first, namespace=world.namespace)
    second: Json = {
        "metadata": {"labels": {"a": None, "c": "3"}},
        "spec": {"requirements": [{"key": "two", "operator": "Exists"}]},
    }
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", second, namespace=world.namespace)

    assert patched.metadata.labels == {"b": "2", "c": "3"}
    assert [each.key for each in patched.spec.requirements or []] == ["two"]


@fact
async def a_patch_with_an_older_version_or_another_uid_is_refused(world: FactWorld) -> None:
    """A patch without them applies to whatever is there."""
    created = await world.create_request("a")
    await world.api.patch(CAPACITY_REQUESTS, "a", {"spec": {"priority": 1}}, namespace=world.namespace)
    stale: list[dict[str, Json]] = [
        {"metadata": {"resourceVersion": created.metadata.resource_version}, "spec": {"priority": 2}},
        {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}, "spec": {"priority": 2}},
    ]
    for patch in stale:
        error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace))
        assert error.is_conflict, patch

    read = await world.api.get(CAPACITY_REQUESTS, "a", namespace=world.namespace)
    assert read.spec.priority == 1


@fact
async def a_strategic_patch_merges_taints_by_key(world: FactWorld) -> None:
    """Custom resources do not understand one."""
    name = f"node-{world.suffix}"
    taints: Json = [{"key": "one", "value": "1", "effect": "NoSchedule"}, {"key": "two", "effect": "NoSchedule"}]
    node: dict[str, Json] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": taints}}
    await world.api.create(NODES, node)
    try:
        patch: dict[str, Json] = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "unschedulable": True,
                "taints": [{"key": "one", "value": "2", "effect": "NoSchedule"}, {"key": "two", "$patch": "delete"}],
            },
        }
        patched = await world.api.patch(NODES, name, patch, kind=PatchKind.STRATEGIC)
    finally:
        await world.api.delete(NODES, name)
    await world.create_request("a")
    strategic = PatchKind.STRATEGIC
    error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", {}, namespace=world.namespace, kind=strategic))

    assert patched.spec.unschedulable
    assert (patched.metadata.labels or {})["a"] == "b"
    assert {each.key: each.value for each in patched.spec.taints or [] if each.key in ("one", "two")} == {"one": "2"}
    assert (error.status, error.reason) == (415, "UnsupportedMediaType")


@fact
async def a_json_patch_applies_as_a_whole_or_not_at_all(world: FactWorld) -> None:
    """A test that fails leaves the object as it was."""
    await world.create_request("a", labels={"x/y": "1"})
    good: list[Mapping[str, Json]] = [
        {"op": "test", "path": "/metadata/labels/x~1y", "value": "1"},
        {"op": "replace", "path": "/metadata/labels/x~1y", "value": "2"},
        {"op": "add", "path": "/spec/requirements", "value": [{"key": "one", "operator": "Exists"}]},
        {"op": "add", "path": "/spec/requirements/-", "value": {"key": "two", "operator": "Exists"}},
        {"op": "remove", "path": "/spec/requirements/0"},
    ]
    bad: list[Mapping[str, Json]] = [
        {"op": "replace", "path": "/spec/priority", "value": 7},
        {"op": "test", "path": "/metadata/labels/x~1y", "value": "1"},
    ]
    place = {"namespace": world.namespace}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", good, kind=PatchKind.JSON, **place)
    error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", bad, kind=PatchKind.JSON, **place))
    read = await world.api.get(CAPACITY_REQUESTS, "a", **place)

    assert patched.metadata.labels == {"x/y": "2"}
    assert [each.key for each in patched.spec.requirements or []] == ["two"]
    assert error.status == 422
    assert read == patched


# ---- server-side apply -------------------------------------------------------------------------------------------


def upcoming(name: str, **spec: Json) -> dict[str, Any]:
    """Return an UpcomingNode as it is applied."""
    fields = {"resources": {"cpu": "4"}, **spec}
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "UpcomingNode",
        "metadata": {"name": name},
        "spec": fields,
    }


@fact
async def applying_creates_and_then_removes_what_is_left_out(world: FactWorld) -> None:
    """A field that another manager set stays."""
    name = f"un-{world.suffix}"
    created = await world.api.apply(
        UPCOMING_NODES, name, upcoming(name, labels={"a": "1", "b": "2"}), field_manager="one"
    )
    try:
        await world.api.apply(UPCOMING_NODES, name, upcoming(name, labels={"b": "2", "c": "3"}), field_manager="two")
        applied = await world.api.apply(UPCOMING_NODES, name, upcoming(name, labels={}), field_manager="one")
        again = await world.api.apply(UPCOMING_NODES, name, upcoming(name, labels={}), field_manager="one")
    finally:
        await world.api.delete(UPCOMING_NODES, name)

    assert created.spec.labels == {"a": "1", "b": "2"}
    assert created.metadata.generation == 1
    assert applied.spec.labels == {"b": "2", "c": "3"}
    assert again == applied


@fact
async def a_field_of_another_manager_is_taken_by_force_alone(world: FactWorld) -> None:
    """The conflict names manager and field; equal values are shared without one."""
    name = f"un-{world.suffix}"
    place = (UPCOMING_NODES, name)
    await world.api.apply(*place, upcoming(name, machineID="m-1"), field_manager="one")
    try:
        shared = await world.api.apply(*place, upcoming(name, machineID="m-1"), field_manager="two", force=False)
        body = upcoming(name, machineID="m-2")
        error = await refused(world.api.apply(*place, body, field_manager="three", force=False))
        forced = await world.api.apply(*place, body, field_manager="three", force=True)
        dropped = await world.api.apply(*place, upcoming(name), field_manager="one")
    finally:
        await world.api.delete(*place)

    assert shared.spec.machine_id == "m-1"
    assert (error.status, error.reason) == (409, "Conflict")
    assert ".spec.machineID" in str(error)
    assert '"one"' in str(error)
    assert forced.spec.machine_id == dropped.spec.machine_id == "m-2"


@fact
async def a_field_that_was_patched_belongs_to_the_one_who_patched_it(world: FactWorld) -> None:
    """Applying another value is a conflict."""
    name = f"un-{world.suffix}"
    place = (UPCOMING_NODES, name)
    await world.api.apply(*place, upcoming(name), field_manager="one")
    try:
        await world.api.patch(*place, {"spec": {"resources": {"cpu": "8"}}})
        error = await refused(world.api.apply(*place, upcoming(name), field_manager="one", force=False))
        forced = await world.api.apply(*place, upcoming(name), field_manager="one", force=True)
    finally:
        await world.api.delete(*place)

    assert error.is_conflict
    assert ".spec.resources.cpu" in str(error)
    assert forced.spec.resources == {"cpu": "4"}


@fact
async def conditions_are_owned_one_by_one(world: FactWorld) -> None:
    """Two managers of two conditions do not disturb each other; a status is not applied to what is absent."""
    name = f"un-{world.suffix}"
    status = UPCOMING_NODES.status

    def body(kind: str, value: str) -> dict[str, Any]:
        condition = {
            "type": kind,
            "status": value,
            "reason": "Because",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        return {**upcoming(name), "spec": {}, "status": {"phase": "Ready", "conditions": [condition]}}

    absent = await refused(world.api.apply(status, name, body("Drained", "True"), field_manager="one"))
    await world.api.apply(UPCOMING_NODES, name, upcoming(name), field_manager="one")
    try:
        await world.api.apply(status, name, body("Drained", "True"), field_manager="one")
        await world.api.apply(status, name, body("NodeJoined", "True"), field_manager="two")
        applied = await world.api.apply(status, name, body("Drained", "False"), field_manager="one")
    finally:
        await world.api.delete(UPCOMING_NODES, name)

    assert absent.is_not_found
    assert {each.type: each.status for each in applied.status.conditions or []} == {
        "Drained": "False",
        "NodeJoined": "True",
    }
    assert applied.spec.resources == {"cpu": "4"}


# ---- deletion and eviction ---------------------------------------------------------------------------------------


def eviction(name: str, namespace: str, **options: Json) -> dict[str, Any]:
    """Return an Eviction as it is written."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": options,
    }


@fact
async def a_deletion_may_name_the_uid(world: FactWorld) -> None:
    """Another object of the same name is left alone."""
    created = await world.create_request("a")
    place = {"namespace": world.namespace}
    error = await refused(world.api.delete(CAPACITY_REQUESTS, "a", uid="00000000-0000-0000-0000-000000000000", **place))
    await world.api.delete(CAPACITY_REQUESTS, "a", uid=created.metadata.uid, **place)

    assert error.is_conflict
    assert (await refused(world.api.get(CAPACITY_REQUESTS, "a", **place))).is_not_found


@fact
async def a_pod_on_a_node_terminates_until_it_is_deleted_with_grace_0(world: FactWorld) -> None:
    """A pod without a node is gone at once."""
    place = {"namespace": world.namespace}
    await world.create_pod("placed", node=f"node-{world.suffix}")
    await world.create_pod("waiting")
    for name in ("placed", "waiting"):
        await world.api.delete(PODS, name, **place)
    terminating = await world.api.get(PODS, "placed", **place)
    await world.api.delete(PODS, "placed", grace_seconds=0, **place)

    assert terminating.metadata.deletion_timestamp is not None
    for name in ("placed", "waiting"):
        assert (await refused(world.api.get(PODS, name, **place))).is_not_found


@fact
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


@fact
async def an_eviction_without_a_budget_deletes(world: FactWorld) -> None:
    """Gracefully; an eviction for another uid is refused."""
    place = {"namespace": world.namespace, "name": "a"}
    await world.create_pod("a", node=f"node-{world.suffix}")
    other = eviction("a", world.namespace, preconditions={"uid": "00000000-0000-0000-0000-000000000000"})
    error = await refused(world.api.create(EVICTIONS, other, **place))
    answer = await world.api.create(EVICTIONS, eviction("a", world.namespace), **place)
    evicted = await world.api.get(PODS, "a", namespace=world.namespace)
    await world.api.delete(PODS, "a", namespace=world.namespace, grace_seconds=0)

    assert error.is_conflict
    assert answer.status == "Success"
    assert evicted.metadata.deletion_timestamp is not None


@fact
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
    patch: Json = {"spec": {"minAvailable": 1}}
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


# ---- lists -------------------------------------------------------------------------------------------------------


@fact
async def a_list_comes_in_pages_of_one_version(world: FactWorld) -> None:
    """By name; what changes between two pages is not seen."""
    for name in ("c", "a", "b"):
        await world.create_request(name)
    first = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, limit=2)
    await world.api.delete(CAPACITY_REQUESTS, "c", namespace=world.namespace)
    await world.create_request("d")
    token = first.continue_token
    last = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, limit=2, continue_token=token)

    assert [each.metadata.name for each in first.items + last.items] == ["a", "b", "c"]
    assert first.resource_version == last.resource_version
    assert last.continue_token == ""


@fact
async def labels_select(world: FactWorld) -> None:
    """By equality, by sets and by presence, all terms together."""
    labels: dict[str, Json] = {
        "a": {"tier": "web", "zone": "1"},
        "b": {"tier": "web", "zone": "2"},
        "c": {"tier": "db"},
    }
    for name, given in labels.items():
        await world.create_request(name, labels=given)
    expected = {
        "tier=web": "ab",
        "tier==db": "c",
        "tier!=web": "c",
        "zone": "ab",
        "!zone": "c",
        "zone in (2, 3)": "b",
        "zone notin (2, 3)": "ac",
        "tier=web,zone notin (2)": "a",
        "zone!=1": "bc",
    }

    for selector, names in expected.items():
        page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, label_selector=selector)
        assert "".join(each.metadata.name for each in page.items) == names, selector


@fact
async def fields_select(world: FactWorld) -> None:
    """Those that the kind declares; any other is refused."""
    for name in ("a", "b"):
        await world.create_request(name)
    acknowledged: Json = {"status": {"phase": "Acknowledged"}}
    await world.api.patch(CAPACITY_REQUESTS.status, "b", acknowledged, namespace=world.namespace)
    expected = {
        "metadata.name=a": "a",
        "metadata.name!=a": "b",
        "status.phase=Acknowledged": "b",
        "status.phase!=Acknowledged": "a",
    }

    for selector, names in expected.items():
        page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, field_selector=selector)
        assert "".join(each.metadata.name for each in page.items) == names, selector
    call = world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, field_selector="spec.priority=0")
    error = await refused(call)
    assert error.status == 400
    assert "field label not supported: spec.priority" in str(error)


# ---- watches -----------------------------------------------------------------------------------------------------


@fact
async def a_watch_continues_where_a_list_ended(world: FactWorld) -> None:
    """Every change after it, in order, each with its version."""
    await world.create_request("before")
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    await world.create_request("a")
    await world.api.patch(CAPACITY_REQUESTS, "a", {"spec": {"priority": 1}}, namespace=world.namespace)
    await world.api.delete(CAPACITY_REQUESTS, "a", namespace=world.namespace)
    events = await events_until(world, CAPACITY_REQUESTS, page.resource_version, 3)

    assert [each.type for each in events] == [EventType.ADDED, EventType.MODIFIED, EventType.DELETED]
    assert [each.object.metadata.name for each in events if each.object] == ["a", "a", "a"]
    assert [each.object.spec.priority for each in events if each.object] == [0, 1, 1]
    assert all(each.object and each.object.metadata.resource_version == each.resource_version for each in events)
    assert [int(each.resource_version) for each in events] == sorted({int(each.resource_version) for each in events})


@fact
async def a_watch_without_a_version_begins_with_what_exists(world: FactWorld) -> None:
    """Each object as ADDED."""
    for name in ("a", "b"):
        await world.create_request(name)
    events = await events_until(world, CAPACITY_REQUESTS, "0", 2)

    assert {(each.type, each.object.metadata.name if each.object else "") for each in events} == {
        (EventType.ADDED, "a"),
        (EventType.ADDED, "b"),
    }


@fact
async def a_watch_with_a_selector_sees_objects_come_and_go(world: FactWorld) -> None:
    """An object that comes to match is ADDED; one that ceases to is DELETED."""
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    await world.create_request("a")
    for value in ("yes", "no"):
        patch: Json = {"metadata": {"labels": {"seen": value}}}
        await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)
    selector = "seen=yes"
    events = await events_until(world, CAPACITY_REQUESTS, page.resource_version, 2, label_selector=selector)

    assert [each.type for each in events] == [EventType.ADDED, EventType.DELETED]


@fact
async def a_watch_ends_at_its_timeout(world: FactWorld) -> None:
    """Without an error."""
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    version = page.resource_version
    types = set()
    async with world.api.watch(
        CAPACITY_REQUESTS, resource_version=version, namespace=world.namespace, timeout_seconds=1
    ) as stream:
        async for event in stream:
            types.add(event.type)

    assert types <= {EventType.BOOKMARK}


@fact
async def a_watch_from_a_forgotten_version_has_expired(world: FactWorld) -> None:
    """Which is said in the stream."""
    await world.create_request("a")
    await world.forget_history()
    with pytest.raises(ApiError) as caught:
        await events_until(world, CAPACITY_REQUESTS, "1", 1)

    assert (caught.value.status, caught.value.is_expired) == (410, True)


# ---- rights and tokens -------------------------------------------------------------------------------------------


@fact
async def a_missing_right_is_named(world: FactWorld) -> None:
    """With user, verb, resource and place; what the rules allow is allowed."""
    await world.create_request("a")
    rule = {"apiGroups": [GROUP], "resources": ["capacityrequests"], "verbs": ["get"]}
    api = await world.restricted([rule])

    await api.get(CAPACITY_REQUESTS, "a", namespace=world.namespace)
    calls = {
        'cannot list resource "capacityrequests"': api.list_page(CAPACITY_REQUESTS, namespace=world.namespace),
        "at the cluster scope": api.list_page(CAPACITY_REQUESTS),
        'cannot patch resource "capacityrequests/status" in API group "bigfleet.lucy.sh"': api.patch(
            CAPACITY_REQUESTS.status, "a", {"status": {"phase": "Pending"}}, namespace=world.namespace
        ),
        'cannot create resource "pods/eviction" in API group "" in the namespace': api.create(
            EVICTIONS, eviction("a", world.namespace), namespace=world.namespace, name="a"
        ),
    }
    for text, call in calls.items():
        error = await refused(call)
        assert (error.status, error.reason, error.is_forbidden) == (403, "Forbidden", True)
        assert text in str(error)


@fact
async def applying_to_what_is_absent_takes_the_right_to_create(world: FactWorld) -> None:
    """Beside the right to patch."""
    rule = {"apiGroups": [GROUP], "resources": ["capacityrequests"], "verbs": ["patch"]}
    api = await world.restricted([rule])
    place = {"namespace": world.namespace, "field_manager": "one"}
    error = await refused(api.apply(CAPACITY_REQUESTS, "a", request("a"), **place))
    await world.create_request("a")
    await api.apply(CAPACITY_REQUESTS, "a", request("a"), **place)

    assert error.is_forbidden
    assert "cannot create resource" in str(error)


@fact
async def a_client_may_ask_for_its_rights(world: FactWorld) -> None:
    """By a SelfSubjectAccessReview, which takes no right."""
    api = await world.restricted([{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}])

    async def allowed(verb: str, resource: str, subresource: str = "") -> bool:
        attributes: Json = {
            "namespace": world.namespace,
            "verb": verb,
            "group": "",
            "resource": resource,
            "subresource": subresource,
        }
        body: dict[str, Json] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        return (await api.create(ACCESS_REVIEWS, body)).status.allowed

    assert await allowed("create", "pods", "eviction")
    assert not await allowed("create", "pods")
    assert not await allowed("get", "secrets")


@fact
async def a_token_of_a_service_account_can_be_requested(world: FactWorld) -> None:
    """For at least 10 minutes, and for an account that exists."""
    account: dict[str, Json] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "joiner"}}
    await world.api.create(SERVICE_ACCOUNTS, account, namespace=world.namespace)

    def body(seconds: int) -> dict[str, Json]:
        spec: Json = {"expirationSeconds": seconds}
        return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}

    place = {"namespace": world.namespace}
    issued = await world.api.create(TOKEN_REQUESTS, body(600), name="joiner", **place)
    short = await refused(world.api.create(TOKEN_REQUESTS, body(599), name="joiner", **place))
    absent = await refused(world.api.create(TOKEN_REQUESTS, body(600), name="nobody", **place))

    assert issued.status.token
    assert issued.status.expiration_timestamp.endswith("Z")
    assert (short.status, "spec.expirationSeconds" in str(short)) == (422, True)
    assert absent.is_not_found


@fact
async def a_kind_that_is_not_defined_is_not_found(world: FactWorld) -> None:
    """As a definition that has not been installed."""
    absent = replace(CAPACITY_REQUESTS, plural="absentrequests", kind="AbsentRequest")
    error = await refused(world.api.list_page(absent, namespace=world.namespace))

    assert error.is_not_found
