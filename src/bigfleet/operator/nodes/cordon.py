"""Cordons a Node for a drain and uncordons it if the drain is withdrawn, each in one patch.

docs/spec/operator.md §7.2, §7.4. Each patch is based on the Node as the API server has it now, and is rejected if the
Node has changed since. A withdrawal uncordons a Node only if no person had cordoned it. A Node that was created again
under the same name is never touched.
"""

from dataclasses import replace
from typing import Any, Final

import structlog

from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.kubernetes.resources import NODES, RECLAIM_ANNOTATION
from bigfleet.operator.nodes.drain_annotation import DrainAnnotation, UnreadableAnnotation, read_annotation

log = structlog.get_logger(__name__)

#: Patches in a row that find a changed Node, before the caller's back-off takes over.
_CONFLICTS_MAX: Final = 5
_DEADLINE_STEP_SECONDS: Final = 1.0


class NodeGone(Exception):
    """The Node does not exist any more, or another one has its name (`is_replaced`)."""

    def __init__(self, message: str, *, is_replaced: bool = False) -> None:
        super().__init__(message)
        self.is_replaced = is_replaced


class NodeCordon:
    """Begins and withdraws drains on the Nodes of one cluster."""

    def __init__(self, *, api: KubernetesApi) -> None:
        self._api = api

    async def begin(self, name: str, uid: str, wanted: DrainAnnotation) -> DrainAnnotation:
        """Cordon the Node and write the annotation; return what it says now.

        A drain of the same instruction keeps its deadline if that is earlier. Raises NodeGone and ApiError.
        """
        for attempt in range(1, _CONFLICTS_MAX + 1):
            node = await self._get(name, uid)
            known = _known(node)
            annotation = _merged(wanted, known, is_unschedulable=node.spec.unschedulable)
            if annotation == known and node.spec.unschedulable:
                return annotation
            try:
                await self._patch(node, {"unschedulable": True}, annotation.text())
            except ApiError as error:
                if not error.is_conflict or attempt == _CONFLICTS_MAX:
                    raise
            else:
                return annotation
        raise AssertionError("the last attempt returns or raises")

    async def withdraw(self, name: str, uid: str, machine_id: str) -> NodeObject | None:
        """Remove the machine's annotation, and uncordon the Node if that says that the operator cordoned it.

        Returns the Node as it was, None if it carried no annotation of the machine. Raises NodeGone and ApiError.
        """
        for attempt in range(1, _CONFLICTS_MAX + 1):
            node = await self._get(name, uid)
            known = _known(node)
            if known is None or known.machine != machine_id:
                return None
            try:
                await self._patch(node, {"unschedulable": None} if known.cordoned else {}, None)
            except ApiError as error:
                if not error.is_conflict or attempt == _CONFLICTS_MAX:
                    raise
            else:
                return node
        raise AssertionError("the last attempt returns or raises")

    async def _get(self, name: str, uid: str) -> NodeObject:
        try:
            node = await self._api.get(NODES, name)
        except ApiError as error:
            if error.is_not_found:
                raise NodeGone(f"Node {name} is gone") from error
            raise
        if node.metadata.uid != uid:
            raise NodeGone(f"Node {name} was deleted and made again", is_replaced=True)
        return node

    async def _patch(self, node: NodeObject, spec: dict[str, Any], annotation: str | None) -> None:
        body: dict[str, Any] = {
            "metadata": {
                "uid": node.metadata.uid,
                "resourceVersion": node.metadata.resource_version,
                "annotations": {RECLAIM_ANNOTATION: annotation},
            }
        }
        if spec:
            body["spec"] = spec
        try:
            await self._api.patch(NODES, node.metadata.name, body)
        except ApiError as error:
            if error.is_not_found:
                raise NodeGone(f"Node {node.metadata.name} is gone") from error
            raise


def _known(node: NodeObject) -> DrainAnnotation | None:
    try:
        return read_annotation(node)
    except UnreadableAnnotation as error:
        log.warning("drain.annotation_unreadable", node=node.metadata.name, error=str(error))
        return None


def _merged(wanted: DrainAnnotation, known: DrainAnnotation | None, *, is_unschedulable: bool) -> DrainAnnotation:
    """Return what the Node is to say: who cordoned it is not forgotten, and no deadline moves later."""
    cordoned = not is_unschedulable or (known is not None and known.cordoned)
    deadline_seconds = wanted.deadline_seconds
    if known is not None and (known.instruction, known.machine) == (wanted.instruction, wanted.machine):
        # Seconds are lost and won on the way from a moment to what is left until it: only an earlier one is news.
        is_earlier = deadline_seconds <= known.deadline_seconds - _DEADLINE_STEP_SECONDS
        deadline_seconds = deadline_seconds if is_earlier else known.deadline_seconds
    return replace(wanted, cordoned=cordoned, deadline_seconds=deadline_seconds)
