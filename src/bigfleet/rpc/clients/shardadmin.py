"""Calls `ShardAdmin` of a shard over gRPC (docs/spec/wire.md §12).

The client does not retry: a call whose answer was lost may have been applied, and each may be made again.
"""

from typing import Final

import grpc

from bigfleet.rpc.clients.shardread import ShardReader
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.wire.gen import shardadmin_pb2, shardadmin_pb2_grpc

#: How long a change may take: a write to the state file, behind others.
CHANGE_SECONDS_MAX: Final = 60.0


class ShardAdministrator(ShardReader):
    """One shard, to be changed. Each method raises UnreachableShard or ReadRefused."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None) -> None:
        """Dial lazily, in plain text without `tls`; `address` is HOST:PORT."""
        super().__init__(address, tls=tls)
        self._admin = shardadmin_pb2_grpc.ShardAdminStub(self._channel)

    def retire_cluster(self, request: shardadmin_pb2.RetireClusterRequest) -> shardadmin_pb2.RetireClusterResponse:
        """Retire a cluster, or say what would become of it; return what is left of it."""
        try:
            return self._admin.RetireCluster(request, timeout=CHANGE_SECONDS_MAX)
        except grpc.RpcError as error:
            raise self._fault(error) from error

    def readmit_cluster(self, request: shardadmin_pb2.ReadmitClusterRequest) -> shardadmin_pb2.RetiredCluster:
        """Admit a retired cluster again; return the record that was deleted."""
        try:
            return self._admin.ReadmitCluster(request, timeout=CHANGE_SECONDS_MAX).retired
        except grpc.RpcError as error:
            raise self._fault(error) from error
