"""Checks at start which rights a process lacks, by SelfSubjectAccessReviews.

All rights are asked for, so that a person repairs them at once and not one by one.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bigfleet.operator.kubernetes.api import Json, KubernetesApi, Resource
from bigfleet.operator.kubernetes.resources import ACCESS_REVIEWS

#: Reviews under way at a time.
_AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs on one resource, as an RBAC rule grants them."""

    #: With its subresource, if that is meant.
    resource: Resource[Any]
    verbs: tuple[str, ...]
    #: "" is every namespace, or none for a resource that has none.
    namespace: str = ""
    #: "" is every object.
    name: str = ""

    def text(self, verb: str) -> str:
        """Return the right as a person reads it, such as `create pods/eviction in namespace x`."""
        plural, group, subresource = self.resource.plural, self.resource.group, self.resource.subresource
        named = (f"{plural}.{group}" if group else plural) + (f"/{subresource}" if subresource else "")
        one = f" {self.name!r}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{verb} {named}{one}{where}"


async def missing_rights(api: KubernetesApi, rights: Iterable[Right]) -> list[str]:
    """Return the text of each right that this process lacks, in the order given. Raises ApiError."""
    wanted = [(right, verb) for right in rights for verb in right.verbs]
    slots = asyncio.Semaphore(_AT_ONCE_MAX)

    async def is_allowed(right: Right, verb: str) -> bool:
        async with slots:
            return await _review(api, right, verb)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(is_allowed(right, verb)) for right, verb in wanted]
    except ExceptionGroup as failed:
        # All of them failed for the same reason, or the first one says enough.
        raise failed.exceptions[0] from None
    return [right.text(verb) for (right, verb), task in zip(wanted, tasks, strict=True) if not task.result()]


async def _review(api: KubernetesApi, right: Right, verb: str) -> bool:
    attributes: dict[str, Json] = {
        "group": right.resource.group,
        "version": right.resource.version,
        "resource": right.resource.plural,
        "verb": verb,
    }
    optional = {"subresource": right.resource.subresource, "namespace": right.namespace, "name": right.name}
    attributes |= {field: value for field, value in optional.items() if value}
    review = await api.create(
        ACCESS_REVIEWS,
        {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": ACCESS_REVIEWS.kind,
            "spec": {"resourceAttributes": attributes},
        },
    )
    return review.status.allowed
