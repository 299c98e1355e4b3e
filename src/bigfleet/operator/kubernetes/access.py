"""Checks which rights a process lacks, by SelfSubjectAccessReviews: at start, and when a request was forbidden.

All missing rights are reported together, so that they can be granted at once.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, Json, KubernetesApi, Resource
from bigfleet.operator.kubernetes.resources import ACCESS_REVIEWS

log = structlog.get_logger(__name__)

#: What a person is to do about missing rights.
ADVICE: Final = "grant the account of this process the rights of deploy/kubernetes"
#: Reviews under way at a time.
_AT_ONCE_MAX = 8
#: While rights are missing they are reviewed so often, and after each forbidden request at most so often.
REVIEW_SECONDS: Final = 10.0
#: Rights that stay missing are logged so often.
_REPEAT_SECONDS: Final = 300.0


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


class RightsMonitor:
    """Reports the rights that a running process has lost, and when they are granted again.

    What the process does with the rights that it has goes on; each part retries what was forbidden.
    """

    def __init__(
        self,
        api: KubernetesApi,
        rights: Iterable[Right],
        *,
        forbidden: asyncio.Event,
        clock: Clock,
        on_review: Callable[[int], None] = lambda missing: None,
    ) -> None:
        """Take the rights, what is set when a request was forbidden, and what hears how many rights are missing."""
        self._api = api
        self._rights = tuple(rights)
        self._forbidden = forbidden
        self._clock = clock
        self._on_review = on_review
        self.missing: tuple[str, ...] = ()
        self._logged_seconds = 0.0

    async def run(self) -> None:
        """Review the rights after each forbidden request, and until all are there again; until cancelled."""
        while True:
            if not self.missing:
                await self._forbidden.wait()
            # An API server that was restarted forbids everything until it has read its roles.
            await self._clock.sleep(REVIEW_SECONDS)
            self._forbidden.clear()
            with contextlib.suppress(ApiError):
                self._note(tuple(await missing_rights(self._api, self._rights)))

    def _note(self, missing: tuple[str, ...]) -> None:
        former, self.missing = self.missing, missing
        self._on_review(len(missing))
        now_seconds = self._clock.monotonic_seconds()
        if missing and (missing != former or now_seconds - self._logged_seconds >= _REPEAT_SECONDS):
            self._logged_seconds = now_seconds
            log.error("operator.rights_missing", missing="; ".join(missing), advice=ADVICE)
        elif former and not missing:
            log.info("operator.rights_restored", restored="; ".join(former))
