"""The custom resource definitions on a real API server: what it accepts, refuses, defaults, selects and prints."""

from typing import Any

import pytest
from tests.kubernetes.cluster import ClusterUnderTest

from bigfleet.operator.kubernetes.api import ApiError, Resource
from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES, CAPACITY_REQUESTS, UPCOMING_NODES
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


async def last_step(cluster: ClusterUnderTest, case: DefinitionCase, name: str, namespace: str) -> dict[str, Any]:
    """Take the steps of a case and return what is stored; raises AssertionError if one before the last is refused."""
    resource = raw(case.kind)
    place = namespace if resource.namespaced else ""
    body: dict[str, Any] = {"apiVersion": resource.api_version, "kind": case.kind, "metadata": {"name": name}}
    if case.spec is not None:
        body["spec"] = case.spec
    try:
        stored = await cluster.api.create(resource, body, namespace=place)
        for number, status in enumerate(case.statuses, 1):
            written = {**body, "metadata": stored["metadata"], "status": status}
            try:
                stored = await cluster.api.replace(resource.status, name, written, namespace=place)
            except ApiError as error:
                assert number == len(case.statuses), error
                raise
    except ApiError as error:
        assert not case.statuses or case.spec is not None, error
        raise
    return stored


@pytest.mark.parametrize("case", PARAMETERS)
async def test_the_server_accepts_and_refuses(
    cluster: ClusterUnderTest, namespace: str, definitions: list[str], case: DefinitionCase
) -> None:
    """What the case says; a refusal is 422 and names the field."""
    name = f"case-{namespace}"
    resource = RESOURCES[case.kind]
    try:
        if case.refused:
            with pytest.raises(ApiError) as caught:
                await last_step(cluster, case, name, namespace)
            assert caught.value.status == 422
            for text in case.refused:
                assert text in str(caught.value)
        else:
            stored = await last_step(cluster, case, name, namespace)
            assert contains(stored, case.stored)
    finally:
        if not resource.namespaced and await cluster.read(resource, name) is not None:
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
