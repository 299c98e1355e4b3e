"""The custom resource definitions on a real API server: what it accepts, refuses, defaults, selects and prints."""

from typing import Any

import pytest

from bigfleet.operator.kubernetes.api import ApiError, Resource
from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES, CAPACITY_REQUESTS, UPCOMING_NODES
from tests.kubernetes.cluster import ClusterUnderTest
from tests.operator.crd_cases import PARAMETERS, DefinitionCase, contains
from tests.operator.crd_schema import definitions

pytestmark = pytest.mark.kubernetes

RESOURCES: dict[str, Resource[Any]] = {
    each.kind: each for each in (CAPACITY_REQUESTS, UPCOMING_NODES, AVAILABLE_CAPACITIES)
}
DEFINED: Resource[dict[str, Any]] = Resource(
    group="apiextensions.k8s.io",
    version="v1",
    plural="customresourcedefinitions",
    kind="CustomResourceDefinition",
    namespaced=False,
    type=dict,
)


def raw(kind: str) -> Resource[dict[str, Any]]:
    """Return a resource of ours whose objects are read as JSON."""
    resource = RESOURCES[kind]
    return Resource(
        group=resource.group,
        version=resource.version,
        plural=resource.plural,
        kind=resource.kind,
        namespaced=resource.namespaced,
        type=dict,
    )


class _Steps:
    """The steps of a case on a server."""

    def __init__(self, cluster: ClusterUnderTest, case: DefinitionCase, namespace: str) -> None:
        self._api = cluster.api
        self._resource = raw(case.kind)
        self._namespace = namespace if self._resource.namespaced else ""
        self.name = f"case-{namespace}"
        self._case = case
        self._stored: dict[str, Any] = {}

    async def create(self) -> dict[str, Any]:
        """Create the object with its spec."""
        resource = self._resource
        body: dict[str, Any] = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": self.name},
        }
        if self._case.spec is not None:
            body["spec"] = self._case.spec
        self._stored = await self._api.create(resource, body, namespace=self._namespace)
        return self._stored

    async def give(self, status: dict[str, Any]) -> dict[str, Any]:
        """Give the object a status."""
        body = {**self._stored, "status": status}
        self._stored = await self._api.replace(self._resource.status, self.name, body, namespace=self._namespace)
        return self._stored

    async def last(self) -> dict[str, Any]:
        """Take the last step, and return what is stored; `before_the_last` must have been taken."""
        return await (self.give(self._case.statuses[-1]) if self._case.statuses else self.create())

    async def before_the_last(self) -> None:
        """Take all steps but the last."""
        if self._case.statuses:
            await self.create()
        for status in self._case.statuses[:-1]:
            await self.give(status)


@pytest.mark.parametrize("case", PARAMETERS)
async def test_the_server_accepts_and_refuses(
    cluster: ClusterUnderTest, namespace: str, definitions: list[str], case: DefinitionCase
) -> None:
    """What the case says; a refusal is 422 and names the field."""
    steps = _Steps(cluster, case, namespace)
    resource = RESOURCES[case.kind]
    try:
        await steps.before_the_last()
        if case.refused:
            with pytest.raises(ApiError) as caught:
                await steps.last()
            assert caught.value.status == 422
            for text in case.refused:
                assert text in str(caught.value)
        else:
            assert contains(await steps.last(), case.stored)
    finally:
        if not resource.namespaced and await cluster.read(resource, steps.name) is not None:
            await cluster.api.delete(resource, steps.name)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("AvailableCapacity", {"availability": "None", "availableCount": 0, "cost": "0", "resources": {}}),
        ("UpcomingNode", {"machineID": "m", "resources": {}}),
    ],
)
async def test_server_side_apply_takes_amounts_that_are_empty(
    cluster: ClusterUnderTest, definitions: list[str], kind: str, spec: dict[str, Any]
) -> None:
    """It would turn an empty map of single fields into null, which the schema refuses."""
    resource, name = RESOURCES[kind], "empty-amounts"
    body: dict[str, Any] = {"apiVersion": resource.api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    try:
        stored = await cluster.api.apply(resource, name, body, field_manager="bigfleet-tests")
        assert stored.spec.resources == {}
    finally:
        await cluster.api.delete(resource, name)


async def test_the_server_takes_the_definitions_as_they_are_written(
    cluster: ClusterUnderTest, definitions: list[str]
) -> None:
    """It prunes no part of them; a misspelled one would be missing."""
    for definition in _written():
        stored = await cluster.api.get(DEFINED, definition["metadata"]["name"])
        assert contains(stored["spec"], {**definition["spec"], "versions": stored["spec"]["versions"]})
        (written,), (found,) = definition["spec"]["versions"], stored["spec"]["versions"]
        assert contains(found, written)
        conditions = {each["type"]: each["status"] for each in stored["status"]["conditions"]}
        assert conditions["Established"] == conditions["NamesAccepted"] == "True"
        assert "NonStructuralSchema" not in conditions


def _written() -> list[dict[str, Any]]:
    return list(definitions().values())
