"""Reads the PodDisruptionBudgets of namespaces, and finds pods that they never let go.

The budgets of a namespace are read once for all of its pods that are due at one time.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import DisruptionBudget, PodObject
from bigfleet.operator.kubernetes.resources import DISRUPTION_BUDGETS
from bigfleet.operator.kubernetes.scheduling_rules import selects
from bigfleet.operator.nodes.pod_index import is_healthy

log = structlog.get_logger(__name__)

#: How long the budgets of a namespace are taken as they were read. Pods that a budget blocks are asked for again and
#: again: with a request for each, they would delay every other request of the process.
BUDGETS_SECONDS: Final = 2.0
#: How long `why_never` waits for the API server.
_ANSWER_SECONDS_MAX: Final = 10.0


@dataclass(slots=True)
class _Budgets:
    """The disruption budgets of one namespace, and how their last reading ended."""

    #: Held by the pod that reads them; others of its namespace wait for the answer.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    items: list[DisruptionBudget] = field(default_factory=list)
    #: None after they were read.
    error: ApiError | None = None
    read_seconds: float = -math.inf


class DisruptionBudgets:
    """The budgets of one cluster."""

    def __init__(self, *, api: KubernetesApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        #: By namespace.
        self._known: dict[str, _Budgets] = {}

    async def in_namespace(self, namespace: str) -> list[DisruptionBudget]:
        """Return the budgets of a namespace, read now or `BUDGETS_SECONDS` ago at most. Raises ApiError."""
        asked_seconds = self._clock.monotonic_seconds()
        known = self._known.get(namespace)
        if known is None:
            self._forget(asked_seconds)
            known = self._known[namespace] = _Budgets()
        async with known.turn:
            if known.error is not None and known.read_seconds >= asked_seconds:
                # What was asked while this one waited: a server that hangs is not asked for each pod in turn.
                raise known.error
            if known.error is None and self._clock.monotonic_seconds() - known.read_seconds < BUDGETS_SECONDS:
                return known.items
            # A reading that is cancelled changes nothing: what is known may be too old, or nothing at all.
            try:
                page = await self._api.list_page(DISRUPTION_BUDGETS, namespace=namespace, limit=0)
            except ApiError as error:
                known.error, known.read_seconds = error, self._clock.monotonic_seconds()
                raise
            known.items, known.error, known.read_seconds = page.items, None, self._clock.monotonic_seconds()
            return known.items

    def _forget(self, now_seconds: float) -> None:
        self._known = {
            namespace: each
            for namespace, each in self._known.items()
            if each.turn.locked() or now_seconds - each.read_seconds < BUDGETS_SECONDS
        }

    async def why_never(self, pods: Iterable[PodObject]) -> str | None:
        """Return why the first healthy pod that cannot be evicted never can; None if there is none, or it is unknown.

        A budget never lets a pod go if it wants as many healthy pods as there are to be, and the API server evicts no
        pod that several budgets select.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS_MAX):
                for pod in sorted(pods, key=lambda pod: pod.metadata.key):
                    if not is_healthy(pod):
                        continue
                    budgets = await self.in_namespace(pod.metadata.namespace)
                    selecting = [each for each in budgets if selects(each.spec.selector, pod.metadata.labels)]
                    why = _why_never(selecting)
                    if why is not None:
                        return f"pod {'/'.join(pod.metadata.key)} can never be evicted: {why}"
        except (ApiError, TimeoutError) as error:
            log.info("drain.budgets_unknown", error=str(error) or "the API server did not answer")
        return None


def _why_never(budgets: list[DisruptionBudget]) -> str | None:
    if len(budgets) > 1:
        names = ", ".join(sorted(each.metadata.name for each in budgets))
        return f"the disruption budgets {names} select it, and Kubernetes evicts no pod of several budgets"
    for budget in budgets:
        status = budget.status
        if status.disruptions_allowed <= 0 < status.expected_pods <= status.desired_healthy:
            wanted = f"{status.desired_healthy} healthy pods of {status.expected_pods}"
            return f"the disruption budget {budget.metadata.name} wants {wanted}"
    return None
