"""Serves `ShardAdmin`: the changes that an administrator makes to one shard.

docs/spec/wire.md §12. Order of checks: identity, arguments, readiness, then the change. This module does not decide
what happens to a machine.
"""

from typing import Any

import grpc
from grpc import aio

from bigfleet.model.ids import control_character_in, identifier_fault, text_bytes
from bigfleet.rpc.security.identity import peer_identity
from bigfleet.rpc.wire.convert_machine import state_to_wire
from bigfleet.rpc.wire.gen import shardadmin_pb2, shardadmin_pb2_grpc
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ownership.retired_clusters import REASON_BYTES_MAX, RetiredCluster
from bigfleet.shard.sessions.cluster_retirement import (
    HOLD_SECONDS_DEFAULT,
    HOLD_SECONDS_MAX,
    RefusalReason,
    RetirementRefused,
)

SERVICE_NAME = shardadmin_pb2.DESCRIPTOR.services_by_name["ShardAdmin"].full_name

_CODES = {
    RefusalReason.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    RefusalReason.CONNECTED: grpc.StatusCode.ABORTED,
    RefusalReason.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.NOT_WRITTEN: grpc.StatusCode.UNAVAILABLE,
}

_Context = aio.ServicerContext[Any, Any]


class ShardAdminServicer(shardadmin_pb2_grpc.ShardAdminServicer):
    """Changes one shard. Who may call it is checked before the request is parsed."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def RetireCluster(
        self, request: shardadmin_pb2.RetireClusterRequest, context: _Context
    ) -> shardadmin_pb2.RetireClusterResponse:
        """Empty the demand of a cluster, unless it is a dry run, and return what is left of the cluster."""
        await self._check(context, _retire_fault(request))
        retirement, cluster = self._shard.retirement, request.cluster_id
        try:
            remains = retirement.remains_of(cluster)
            if request.dry_run:
                retirement.check(cluster, force=request.force)
            else:
                retirement.retire(
                    cluster,
                    owner=_caller(context),
                    reason=request.reason,
                    force=request.force,
                    hold_seconds=request.hold_seconds or HOLD_SECONDS_DEFAULT,
                )
                self._shard.wake()
        except RetirementRefused as refused:
            return await context.abort(_CODES[refused.reason], str(refused))
        record = retirement.record_of(cluster)
        return shardadmin_pb2.RetireClusterResponse(
            machines=[
                shardadmin_pb2.ClusterMachines(
                    state=state_to_wire(each.state),
                    instance_type=each.instance_type,
                    machines=each.machines,
                    price_per_hour=each.price_usd_per_hour,
                )
                for each in remains.machines
            ],
            rows=remains.rows,
            connected=remains.is_connected,
            actions=remains.actions,
            retired=None if record is None else _record_to_wire(record),
        )

    async def ReadmitCluster(
        self, request: shardadmin_pb2.ReadmitClusterRequest, context: _Context
    ) -> shardadmin_pb2.ReadmitClusterResponse:
        """Take the roll-ups of a retired cluster again, and return the record that was deleted."""
        await self._check(context, _identifier_fault(request.cluster_id))
        try:
            record = self._shard.retirement.readmit(request.cluster_id, owner=_caller(context))
        except RetirementRefused as refused:
            return await context.abort(_CODES[refused.reason], str(refused))
        return shardadmin_pb2.ReadmitClusterResponse(retired=_record_to_wire(record))

    async def _check(self, context: _Context, fault: str) -> None:
        """Return when there is no fault and the shard has read its inventory; else end the call."""
        if fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        if not self._shard.is_ready:
            text = "the shard has not read its inventory yet, so it does not know its clusters; nothing was changed"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)


def _caller(context: _Context) -> str:
    identity = peer_identity(context)
    return "" if identity is None else identity.uri


def _identifier_fault(cluster: str) -> str:
    fault = identifier_fault(cluster)
    return "" if fault is None else f"cluster_id {fault}"


def _retire_fault(request: shardadmin_pb2.RetireClusterRequest) -> str:
    fault = _identifier_fault(request.cluster_id)
    if fault:
        return fault
    if not 0 <= request.hold_seconds <= HOLD_SECONDS_MAX:
        return f"hold_seconds {request.hold_seconds} must be from 0 to {HOLD_SECONDS_MAX}"
    size_bytes = text_bytes(request.reason)
    if size_bytes > REASON_BYTES_MAX:
        return f"reason has {size_bytes} bytes, at most {REASON_BYTES_MAX} are allowed"
    if control_character_in(request.reason):
        return "reason has a control character"
    return ""


def _record_to_wire(record: RetiredCluster) -> shardadmin_pb2.RetiredCluster:
    return shardadmin_pb2.RetiredCluster(
        cluster_id=record.cluster,
        since_unix_nanos=record.since_unix_nanos,
        until_unix_nanos=record.until_unix_nanos,
        owner=record.owner,
        reason=record.reason,
    )


def add_to_server(servicer: ShardAdminServicer, server: aio.Server) -> None:
    """Register the service on a server."""
    shardadmin_pb2_grpc.add_ShardAdminServicer_to_server(servicer, server)
