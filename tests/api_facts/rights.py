"""Facts about rights, tokens and kinds."""

from dataclasses import replace
from typing import Any

from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.resources import (
    ACCESS_REVIEWS,
    CAPACITY_REQUESTS,
    EVICTIONS,
    GROUP,
    TOKEN_REQUESTS,
)
from bigfleet.sim.kubernetes.kinds import SERVICE_ACCOUNTS
from tests.api_facts.world import Fact, FactWorld, eviction, refused, request


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


async def applying_to_what_is_absent_takes_the_right_to_create(world: FactWorld) -> None:
    """Beside the right to patch."""
    rule = {"apiGroups": [GROUP], "resources": ["capacityrequests"], "verbs": ["patch"]}
    api = await world.restricted([rule])
    place: dict[str, Any] = {"namespace": world.namespace, "field_manager": "one"}
    error = await refused(api.apply(CAPACITY_REQUESTS, "a", request("a"), **place))
    await world.create_request("a")
    await api.apply(CAPACITY_REQUESTS, "a", request("a"), **place)

    assert error.is_forbidden
    assert "cannot create resource" in str(error)


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


async def a_token_of_a_service_account_can_be_requested(world: FactWorld) -> None:
    """For at least 10 minutes, and for an account that exists."""
    account: dict[str, Json] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "joiner"}}
    await world.api.create(SERVICE_ACCOUNTS, account, namespace=world.namespace)

    def body(seconds: int) -> dict[str, Json]:
        spec: Json = {"expirationSeconds": seconds}
        return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}

    place: dict[str, Any] = {"namespace": world.namespace}
    issued = await world.api.create(TOKEN_REQUESTS, body(600), name="joiner", **place)
    short = await refused(world.api.create(TOKEN_REQUESTS, body(599), name="joiner", **place))
    absent = await refused(world.api.create(TOKEN_REQUESTS, body(600), name="nobody", **place))

    assert issued.status.token
    assert issued.status.expiration_timestamp.endswith("Z")
    assert (short.status, "spec.expirationSeconds" in str(short)) == (422, True)
    assert absent.is_not_found


async def a_kind_that_is_not_defined_is_not_served(world: FactWorld) -> None:
    """As a definition that has not been installed."""
    absent = replace(CAPACITY_REQUESTS, plural="absentrequests", kind="AbsentRequest")
    error = await refused(world.api.list_page(absent, namespace=world.namespace))

    assert error.is_kind_unserved


FACTS: list[Fact] = [
    a_missing_right_is_named,
    applying_to_what_is_absent_takes_the_right_to_create,
    a_client_may_ask_for_its_rights,
    a_token_of_a_service_account_can_be_requested,
    a_kind_that_is_not_defined_is_not_served,
]
