"""Evicts and deletes single pods, and classifies the API server's answers (docs/spec/operator.md §7.3).

Evictions use policy/v1, so disruption budgets are honoured. The pod's UID is a precondition, so a new pod of the same
name is never evicted. The API server decides by the status of a budget, which may lag behind the pods, so the pods are
counted here as well. Only `delete` bypasses budgets, and it is used only with --drain-force.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import DisruptionBudget, PodObject
from bigfleet.operator.kubernetes.resources import EVICTIONS, PODS
from bigfleet.operator.kubernetes.scheduling_rules import selects
from bigfleet.operator.nodes.budgets import DisruptionBudgets
from bigfleet.operator.nodes.pod_index import PodsByNode, is_healthy

#: What Kubernetes gives a pod that says nothing.
POD_GRACE_SECONDS: Final = 30
RETRY_SECONDS: Final = 5.0
#: A server that asks for a longer pause is asked all the same: a drain has a deadline.
RETRY_SECONDS_MAX: Final = 60.0
#: How long a pod counts as leaving whose eviction was asked for by a drain that ended before the answer. The API server
#: may still carry the request out; then the pod is seen to be deleted within this time.
UNANSWERED_SECONDS: Final = 10.0
_BUDGET_CAUSE: Final = "DisruptionBudget"
#: A namespace that is being deleted refuses evictions with 403; its pods go by themselves.
_ENDING_NAMESPACE_CAUSE: Final = "NamespaceTerminating"


class EvictionAnswer(Enum):
    """How the API server answered; the values are those of the metric `evictions_total`."""

    ACCEPTED = "accepted"
    BUDGET = "budget"
    GONE = "gone"
    FORBIDDEN = "forbidden"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EvictionOutcome:
    """One answer, when to ask again if the pod is still there, and the server's text."""

    answer: EvictionAnswer
    retry_in_seconds: float = RETRY_SECONDS
    text: str = ""


@dataclass(slots=True)
class _Leaving:
    """A healthy pod whose eviction was asked for."""

    pod: PodObject
    #: When it counts as healthy again although nothing was seen of its eviction.
    until_seconds: float = math.inf


class PodEvictor:
    """Evicts and deletes pods of one cluster."""

    def __init__(self, *, api: KubernetesApi, budgets: DisruptionBudgets, pods: PodsByNode, clock: Clock) -> None:
        self._api = api
        self._budgets = budgets
        self._pods = pods
        self._clock = clock
        #: By UID, until they are seen to be healthy no longer.
        self._leaving: dict[str, _Leaving] = {}

    async def evict(self, pod: PodObject, left_seconds: float) -> EvictionOutcome:
        """Ask for an eviction within the pod's own grace, cut to the whole seconds that are left, at least 1."""
        metadata = pod.metadata
        try:
            budgets = await self._budgets.in_namespace(metadata.namespace)
            # From here to the request nothing else runs: what another drain evicts is counted.
            problem = self._problem(pod, budgets)
            if problem:
                return EvictionOutcome(EvictionAnswer.BUDGET, text=problem)
            await self._ask(pod, left_seconds)
        except ApiError as error:
            self._leaving.pop(metadata.uid, None)
            return _refused(error)
        return EvictionOutcome(EvictionAnswer.ACCEPTED)

    async def _ask(self, pod: PodObject, left_seconds: float) -> None:
        metadata = pod.metadata
        leaving = self._leaving[metadata.uid] = _Leaving(pod)
        is_accepted = False
        try:
            body = _eviction(pod, left_seconds)
            await self._api.create(EVICTIONS, body, namespace=metadata.namespace, name=metadata.name)
            is_accepted = True
        finally:
            if not is_accepted:
                # Also when the drain was ended in the meantime: the pod may stay healthy for weeks.
                leaving.until_seconds = self._clock.monotonic_seconds() + UNANSWERED_SECONDS

    def _problem(self, pod: PodObject, budgets: Iterable[DisruptionBudget]) -> str:
        """Return why a budget forbids the eviction, by the cached pods; "" if none does."""
        if not is_healthy(pod):
            # The API server knows what the budget says of such pods.
            return ""
        now_seconds = self._clock.monotonic_seconds()
        self._leaving = {
            uid: each
            for uid, each in self._leaving.items()
            if now_seconds < each.until_seconds and self._pods.is_healthy(each.pod)
        }
        gone = self._leaving.keys() | {pod.metadata.uid}
        for budget in budgets:
            selector, wanted = budget.spec.selector, budget.status.desired_healthy
            if not selects(selector, pod.metadata.labels):
                continue
            others = [each for each in self._pods.healthy_in(pod.metadata.namespace) if each.metadata.uid not in gone]
            left = sum(selects(selector, each.metadata.labels) for each in others)
            if left < wanted:
                return f"the disruption budget {budget.metadata.name} wants {wanted} healthy pods, {left} would be left"
        return ""

    async def delete(self, pod: PodObject) -> EvictionOutcome:
        """Delete a pod with grace 0, against its budget as well."""
        metadata = pod.metadata
        try:
            await self._api.delete(PODS, metadata.name, namespace=metadata.namespace, uid=metadata.uid, grace_seconds=0)
        except ApiError as error:
            return _refused(error)
        return EvictionOutcome(EvictionAnswer.ACCEPTED)


def _eviction(pod: PodObject, left_seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {"preconditions": {"uid": pod.metadata.uid}}
    own_seconds = pod.spec.termination_grace_period_seconds
    own_seconds = POD_GRACE_SECONDS if own_seconds is None else own_seconds
    # Zero would remove the pod from the API server while its containers run on.
    cut_seconds = max(1, math.floor(left_seconds))
    if own_seconds > cut_seconds:
        options["gracePeriodSeconds"] = cut_seconds
    return {
        "apiVersion": "policy/v1",
        "kind": EVICTIONS.kind,
        "metadata": {"name": pod.metadata.name, "namespace": pod.metadata.namespace},
        "deleteOptions": options,
    }


def _refused(error: ApiError) -> EvictionOutcome:
    asked_seconds = error.retry_after_seconds
    retry_seconds = RETRY_SECONDS if asked_seconds is None else min(asked_seconds, RETRY_SECONDS_MAX)
    text = str(error)
    if error.is_not_found or error.is_conflict:
        # Gone, or another pod under this name. The caches will say so.
        return EvictionOutcome(EvictionAnswer.GONE, retry_seconds, text)
    if error.is_forbidden and _ENDING_NAMESPACE_CAUSE not in error.causes:
        return EvictionOutcome(EvictionAnswer.FORBIDDEN, retry_seconds, text)
    if error.status == 429 and _BUDGET_CAUSE in error.causes:
        return EvictionOutcome(EvictionAnswer.BUDGET, retry_seconds, text)
    return EvictionOutcome(EvictionAnswer.ERROR, retry_seconds, text)
