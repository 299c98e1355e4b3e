"""Facts about server-side apply."""

from typing import Any

from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.resources import (
    GROUP,
    UPCOMING_NODES,
)
from tests.api_facts.world import Fact, FactWorld, refused


def upcoming(name: str, **spec: Json) -> dict[str, Any]:
    """Return an UpcomingNode as it is applied."""
    fields = {"resources": {"cpu": "4"}, **spec}
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "UpcomingNode",
        "metadata": {"name": name},
        "spec": fields,
    }


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
    assert ".spec.resources" in str(error)
    assert forced.spec.resources == {"cpu": "4"}


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


FACTS: list[Fact] = [
    applying_creates_and_then_removes_what_is_left_out,
    a_field_of_another_manager_is_taken_by_force_alone,
    a_field_that_was_patched_belongs_to_the_one_who_patched_it,
    conditions_are_owned_one_by_one,
]
