"""Calls providers as a shard does, for faults that need no shard."""

import time
from typing import Any

import grpc

from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc


def create_all(address: str) -> None:
    """Create every slot of a provider."""
    with grpc.insecure_channel(address) as channel:
        stub = provider_pb2_grpc.CapacityProviderStub(channel)
        for machine in _in_state(stub, provider_pb2.MACHINE_STATE_SPECULATIVE):
            stub.Create(provider_pb2.CreateRequest(machine_id=machine, **_token()))


def bind_one(address: str, cluster: str) -> None:
    """Bind an IDLE machine of a provider to a cluster, if there is one."""
    with grpc.insecure_channel(address) as channel:
        stub = provider_pb2_grpc.CapacityProviderStub(channel)
        for machine in _in_state(stub, provider_pb2.MACHINE_STATE_IDLE)[:1]:
            blob = b"#cloud-config"
            stub.Configure(
                provider_pb2.ConfigureRequest(machine_id=machine, cluster_id=cluster, bootstrap_blob=blob, **_token())
            )


def _token() -> dict[str, Any]:
    """Return a fence token that is newer than all before."""
    return {"shard_id": "test", "shard_epoch": 1, "sequence_number": time.time_ns()}


def _in_state(stub: Any, state: Any) -> list[str]:
    return [machine.id for machine in stub.List(provider_pb2.ListFilter(states=[state])).machines]
