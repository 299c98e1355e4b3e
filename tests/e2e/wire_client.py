"""A client in its own process that knows only the generated messages: it calls, and prints JSON lines.

python tests/e2e/wire_client.py PROVIDER_ADDRESS SHARD_ADDRESS
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from bigfleet.rpc.wire.gen import (
    capacity_pb2,
    provider_pb2,
    provider_pb2_grpc,
    shard_pb2,
    shard_pb2_grpc,
    shardread_pb2,
    shardread_pb2_grpc,
)

CALL_SECONDS = 180.0


def say(step: str, **facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps({"step": step, **facts}), flush=True)


def status_of(call: Callable[[], Any]) -> str:
    """Return the status code's name of a call."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def until(get: Callable[[], provider_pb2.Machine], state: Any) -> provider_pb2.Machine:
    """Read a machine until it is in the state."""
    deadline = time.monotonic() + CALL_SECONDS
    while time.monotonic() < deadline:
        machine = get()
        if machine.state == state:
            return machine
        time.sleep(0.02)
    raise SystemExit(f"the machine did not reach {provider_pb2.MachineState.Name(state)}: {machine}")


def drive_provider(address: str) -> None:
    """Call the six RPCs once each, the fence and the repeats among them."""
    with grpc.insecure_channel(address) as channel:
        stub = provider_pb2_grpc.CapacityProviderStub(channel)
        listing = stub.List(provider_pb2.ListFilter(states=[provider_pb2.MACHINE_STATE_SPECULATIVE]))
        chosen = next(m for m in listing.machines if m.capacity_type == provider_pb2.CAPACITY_TYPE_ON_DEMAND)
        token: Any = {"shard_id": "wire-client", "shard_epoch": 7}

        def get() -> provider_pb2.Machine:
            return stub.Get(provider_pb2.MachineRef(id=chosen.id))

        def create(sequence: int) -> provider_pb2.TransitionAck:
            return stub.Create(provider_pb2.CreateRequest(machine_id=chosen.id, sequence_number=sequence, **token))

        first = create(1)
        say("create", state=provider_pb2.MachineState.Name(first.machine.state))
        say("create stale", code=status_of(lambda: create(1)))
        idle = until(get, provider_pb2.MACHINE_STATE_IDLE)
        say("create repeated", same=create(2).operation_id == first.operation_id, host=bool(idle.host.ref))
        configured = stub.Configure(
            provider_pb2.ConfigureRequest(
                machine_id=chosen.id,
                cluster_id="wire",
                bootstrap_blob=b"#cloud-config",
                sequence_number=3,
                shard_metadata={"a/b": "c"},
                **token,
            )
        )
        say("configure", state=provider_pb2.MachineState.Name(configured.machine.state))
        bound = until(get, provider_pb2.MACHINE_STATE_CONFIGURED)
        say("get", cluster=bound.cluster, metadata=dict(bound.shard_metadata))
        drain = provider_pb2.DrainRequest(machine_id=chosen.id, grace_period_seconds=1, sequence_number=4, **token)
        say("drain", state=provider_pb2.MachineState.Name(stub.Drain(drain).machine.state))
        free = until(get, provider_pb2.MACHINE_STATE_IDLE)
        say("drained", cluster=free.cluster, metadata=dict(free.shard_metadata))
        delete = provider_pb2.DeleteRequest(machine_id=chosen.id, sequence_number=5, **token)
        say("delete", state=provider_pb2.MachineState.Name(stub.Delete(delete).machine.state))
        until(get, provider_pb2.MACHINE_STATE_SPECULATIVE)
        unknown = provider_pb2.MachineRef(id="no-such-machine")
        say("get unknown", code=status_of(lambda: stub.Get(unknown)))
        say("list", machines=len(stub.List(provider_pb2.ListFilter()).machines))


def drive_session(address: str) -> None:
    """Open a session, report demand, answer bootstraps until a machine is Configured, then read the shard."""
    outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
    with grpc.insecure_channel(address) as channel:
        wrong = iter([shard_pb2.OperatorMessage(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id="wire"))])
        stub = shard_pb2_grpc.ShardStub(channel)
        say("session without hello", code=status_of(lambda: list(stub.Session(wrong))))
        outgoing.put(shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id="wire", protocol_version="v1alpha1")))
        replies: Any = stub.Session(iter(outgoing.get, None))
        echoes, states = converse(outgoing, replies)
        say("session", echoes=echoes, states=sorted(states))
        read = shardread_pb2_grpc.ShardReadStub(channel)
        frames = list(read.InspectNeeds(shardread_pb2.InspectNeedsRequest(cluster_id="wire")))
        say("inspect", first=frames[0].WhichOneof("frame"), needs=[MessageToDict(f.need.need) for f in frames[1:]])
        listed = list(read.ListMachines(shardread_pb2.ListMachinesRequest(cluster_id="wire")))
        say("machines", bound=[f.machine.machine.cluster for f in listed if f.WhichOneof("frame") == "machine"])
        explain(read, next(f.machine.machine.id for f in listed if f.WhichOneof("frame") == "machine"))


def explain(read: shardread_pb2_grpc.ShardReadStub, bound: str) -> None:
    """Ask why the bound machine is where it is until a cycle has seen it bound, then about one that is not there."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        told = read.ExplainMachine(shardread_pb2.ExplainMachineRequest(machine_id=bound))
        kinds = [event.kind for event in told.events]
        if "machine_kept" in kinds or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    about = {event.machine_id for event in told.events}
    actions = [action.kind for action in told.actions]
    say("explain", kinds=kinds, about=about == {bound}, shown=told.machine.machine.id == bound, actions=actions[-1:])
    unknown = shardread_pb2.ExplainMachineRequest(machine_id="no-such-machine")
    say("explain unknown", code=status_of(lambda: read.ExplainMachine(unknown)))


def converse(
    outgoing: "Queue[shard_pb2.OperatorMessage | None]", replies: Iterator[shard_pb2.ShardMessage]
) -> tuple[list[str], set[str]]:
    """Say what an operator says until a machine is Configured with its bootstrap data; return the acks and its states.

    The shard may have listed the provider while another machine was bound by `drive_provider`, and shows that one too.
    """
    need = capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "1"}, min_unit={"cpu": "1"}, priority=100)
    rollup = capacity_pb2.ClusterCapacityNeeds(cluster_id="wire", timestamp_unix_nanos=time.time_ns(), needs=[need])
    echoes: list[str] = []
    states: defaultdict[str, set[str]] = defaultdict(set)
    booted = ""
    for message in replies:
        kind = message.WhichOneof("payload")
        if kind == "ack":
            echoes.append(message.ack.echo)
            if message.ack.echo == "hello":
                outgoing.put(shard_pb2.OperatorMessage(rollup=rollup))
        elif kind == "bootstrap_request":
            booted = message.bootstrap_request.machine_id
            answer = shard_pb2.BootstrapBlobResponse(
                request_id=message.bootstrap_request.request_id, user_data=b"#cloud-config", ttl_seconds=600
            )
            outgoing.put(shard_pb2.OperatorMessage(bootstrap_response=answer))
        elif kind == "node_state_update":
            update = message.node_state_update
            states[update.machine_id].add(provider_pb2.MachineState.Name(update.state))
            if update.machine_id == booted and update.state == provider_pb2.MACHINE_STATE_CONFIGURED:
                outgoing.put(None)
                return echoes, states[booted]
    raise SystemExit("the shard ended the session before a machine was Configured")


if __name__ == "__main__":
    drive_provider(sys.argv[1])
    drive_session(sys.argv[2])
