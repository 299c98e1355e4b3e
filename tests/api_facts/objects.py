"""Facts about creations, replacements, status, generations and patches."""

from collections.abc import Mapping
from typing import Any

from bigfleet.operator.kubernetes.api import Json, JsonObject, PatchKind, Resource
from bigfleet.operator.kubernetes.objects import CapacityRequestObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    EVICTIONS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
)
from tests.api_facts.world import Fact, FactWorld, eviction, refused, request


async def a_creation_is_stamped_by_the_server(world: FactWorld) -> None:
    """uid, resource version, creation time and generation are the server's; a status is ignored."""
    body = request("a", uid="mine", generation=7) | {"status": {"phase": "Acknowledged"}}
    created = await world.api.create(CAPACITY_REQUESTS, body, namespace=world.namespace)
    read = await world.api.get(CAPACITY_REQUESTS, "a", namespace=world.namespace)

    assert created == read
    assert created.metadata.uid not in ("", "mine")
    assert created.metadata.resource_version
    assert (created.metadata.creation_timestamp or "").endswith("Z")
    assert (created.metadata.generation, created.status.phase) == (1, "")
    assert created.metadata.key == (world.namespace, "a")


async def a_name_is_generated(world: FactWorld) -> None:
    """From `generateName`, when there is no name."""
    body: dict[str, Json] = {"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "token-"}}
    names = [(await world.api.create(SECRETS, body, namespace=world.namespace)).metadata.name for _ in range(2)]

    assert names[0] != names[1]
    assert all(name.startswith("token-") and len(name) == len("token-") + 5 for name in names)


async def a_name_is_taken_once(world: FactWorld) -> None:
    """A second creation is a conflict of its own kind."""
    await world.create_request("a")
    error = await refused(world.create_request("a"))

    assert (error.status, error.reason) == (409, "AlreadyExists")
    assert 'capacityrequests.bigfleet.lucy.sh "a" already exists' in str(error)


async def what_is_absent_is_not_found(world: FactWorld) -> None:
    """For every request."""
    place: dict[str, Any] = {"namespace": world.namespace}
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


async def a_custom_object_is_replaced_with_a_version_alone(world: FactWorld) -> None:
    """Without one the request is invalid."""
    await world.create_request("a")
    error = await refused(world.api.replace(CAPACITY_REQUESTS, "a", request("a"), namespace=world.namespace))

    assert (error.status, error.reason) == (422, "Invalid")
    assert "metadata.resourceVersion" in str(error)


async def a_write_that_changes_nothing_makes_no_version(world: FactWorld) -> None:
    """For every kind of write."""
    created = await world.create_request("a", labels={"a": "b"})
    patch: JsonObject = {"metadata": {"labels": {"a": "b"}}}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)
    body = request("a", labels={"a": "b"}, resourceVersion=created.metadata.resource_version)
    replaced = await world.api.replace(CAPACITY_REQUESTS, "a", body, namespace=world.namespace)

    assert created == patched == replaced


async def the_main_path_ignores_status(world: FactWorld) -> None:
    """The status that is stored stays."""
    await world.create_request("a")
    pending: JsonObject = {"status": {"phase": "Pending"}}
    await world.api.patch(CAPACITY_REQUESTS.status, "a", pending, namespace=world.namespace)
    patch: JsonObject = {"status": {"phase": "Acknowledged"}, "spec": {"priority": 7}}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)

    assert (patched.status.phase, patched.spec.priority) == ("Pending", 7)


async def the_status_path_ignores_all_else(world: FactWorld) -> None:
    """Spec and labels that come along."""
    await world.create_request("a")
    patch: JsonObject = {"status": {"phase": "Pending"}, "spec": {"priority": 7}, "metadata": {"labels": {"a": "b"}}}
    patched = await world.api.patch(CAPACITY_REQUESTS.status, "a", patch, namespace=world.namespace)

    assert (patched.status.phase, patched.spec.priority, patched.metadata.labels) == ("Pending", 0, None)


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


async def a_merge_patch_removes_with_null(world: FactWorld) -> None:
    """Mappings merge; lists are replaced."""
    await world.create_request("a", labels={"a": "1", "b": "2"})
    first: JsonObject = {"spec": {"requirements": [{"key": "one", "operator": "Exists"}]}}
    await world.api.patch(CAPACITY_REQUESTS, "a", first, namespace=world.namespace)
    second: JsonObject = {
        "metadata": {"labels": {"a": None, "c": "3"}},
        "spec": {"requirements": [{"key": "two", "operator": "Exists"}]},
    }
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", second, namespace=world.namespace)

    assert patched.metadata.labels == {"b": "2", "c": "3"}
    assert [each.key for each in patched.spec.requirements or []] == ["two"]


async def a_patch_with_an_older_version_or_another_uid_is_refused(world: FactWorld) -> None:
    """The version is a precondition, the uid is not: a patch cannot change it. Without them it always applies."""
    created = await world.create_request("a")
    await world.api.patch(CAPACITY_REQUESTS, "a", {"spec": {"priority": 1}}, namespace=world.namespace)
    refusals: list[tuple[dict[str, Json], int]] = [
        ({"resourceVersion": created.metadata.resource_version}, 409),
        ({"uid": "00000000-0000-0000-0000-000000000000"}, 422),
    ]
    for metadata, status in refusals:
        patch: JsonObject = {"metadata": metadata, "spec": {"priority": 2}}
        error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace))
        assert error.status == status, metadata

    read = await world.api.get(CAPACITY_REQUESTS, "a", namespace=world.namespace)
    assert read.spec.priority == 1


async def a_strategic_patch_merges_conditions_by_type(world: FactWorld) -> None:
    """Taints are replaced; custom resources do not understand such a patch."""
    name = f"node-{world.suffix}"
    conditions: Json = [{"type": "One", "status": "True"}, {"type": "Two", "status": "True"}]
    node: dict[str, Json] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"taints": [{"key": "one", "effect": "NoSchedule"}]},
        "status": {"conditions": conditions},
    }
    await world.api.create(NODES, node)
    try:
        patch: JsonObject = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"unschedulable": True, "taints": [{"key": "two", "value": "2", "effect": "NoSchedule"}]},
        }
        patched = await world.api.patch(NODES, name, patch, kind=PatchKind.STRATEGIC)
        changes: Json = [{"type": "One", "status": "False"}, {"type": "Two", "$patch": "delete"}]
        status: JsonObject = {"status": {"conditions": changes}}
        changed = await world.api.patch(NODES.status, name, status, kind=PatchKind.STRATEGIC)
    finally:
        await world.api.delete(NODES, name)
    await world.create_request("a")
    strategic = PatchKind.STRATEGIC
    error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", {}, namespace=world.namespace, kind=strategic))

    assert patched.spec.unschedulable
    assert (patched.metadata.labels or {})["a"] == "b"
    # The controller manager adds taints of its own.
    assert {each.key for each in patched.spec.taints or []} & {"one", "two"} == {"two"}
    found = {each.type: each.status for each in changed.status.conditions or []}
    assert {kind: found.get(kind) for kind in ("One", "Two")} == {"One": "False", "Two": None}
    assert (error.status, error.reason) == (415, "UnsupportedMediaType")


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
    place: dict[str, Any] = {"namespace": world.namespace}
    patched = await world.api.patch(CAPACITY_REQUESTS, "a", good, kind=PatchKind.JSON, **place)
    error = await refused(world.api.patch(CAPACITY_REQUESTS, "a", bad, kind=PatchKind.JSON, **place))
    read = await world.api.get(CAPACITY_REQUESTS, "a", **place)

    assert patched.metadata.labels == {"x/y": "2"}
    assert [each.key for each in patched.spec.requirements or []] == ["two"]
    assert error.status == 422
    assert read == patched


FACTS: list[Fact] = [
    a_creation_is_stamped_by_the_server,
    a_name_is_generated,
    a_name_is_taken_once,
    what_is_absent_is_not_found,
    a_replacement_of_an_older_version_is_refused,
    a_custom_object_is_replaced_with_a_version_alone,
    a_write_that_changes_nothing_makes_no_version,
    the_main_path_ignores_status,
    the_status_path_ignores_all_else,
    a_generation_counts_changes_of_the_spec,
    a_merge_patch_removes_with_null,
    a_patch_with_an_older_version_or_another_uid_is_refused,
    a_strategic_patch_merges_conditions_by_type,
    a_json_patch_applies_as_a_whole_or_not_at_all,
]
