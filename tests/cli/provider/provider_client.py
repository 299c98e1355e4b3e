"""Calls one provider over gRPC, and waits for the ends of its operations."""

from pathlib import Path

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.patience import wait_until

#: The verbs of a machine's life, and the state that each ends in.
STATES = {
    "create": pb.MACHINE_STATE_IDLE,
    "configure": pb.MACHINE_STATE_CONFIGURED,
    "drain": pb.MACHINE_STATE_IDLE,
    "delete": pb.MACHINE_STATE_SPECULATIVE,
}
VERBS = tuple(STATES)
#: The state that a machine is in meanwhile.
TRANSITIONAL = {
    "create": pb.MACHINE_STATE_CREATING,
    "configure": pb.MACHINE_STATE_CONFIGURING,
    "drain": pb.MACHINE_STATE_DRAINING,
    "delete": pb.MACHINE_STATE_DELETING,
}
CLUSTER = "team-a"
BLOB = b"#!/bin/sh\n"
ENDS = (*STATES.values(), pb.MACHINE_STATE_FAILED)


class ProviderClient:
    """Calls one provider without fencing."""

    def __init__(self, stub: CapacityProviderStub, log: Path) -> None:
        self.stub, self._log = stub, log

    def accept(self, verb: str, machine_id: str) -> str:
        """Begin an operation and return its id."""
        match verb:
            case "create":
                return self.stub.Create(pb.CreateRequest(machine_id=machine_id)).operation_id
            case "configure":
                asked = pb.ConfigureRequest(machine_id=machine_id, cluster_id=CLUSTER, bootstrap_blob=BLOB)
                return self.stub.Configure(asked).operation_id
            case "drain":
                return self.stub.Drain(pb.DrainRequest(machine_id=machine_id)).operation_id
        return self.stub.Delete(pb.DeleteRequest(machine_id=machine_id)).operation_id

    def settled(self, machine_id: str) -> pb.Machine:
        """Return a machine once it is in no transitional state."""
        wait_until(lambda: self.get(machine_id).state in ENDS, lambda: self._log.read_text()[-5000:])
        return self.get(machine_id)

    def get(self, machine_id: str) -> pb.Machine:
        """Return a machine."""
        return self.stub.Get(pb.MachineRef(id=machine_id))

    def live_until(self, verb: str, machine_id: str) -> None:
        """Take a machine through the verbs before this one."""
        for former in VERBS[: VERBS.index(verb)]:
            self.accept(former, machine_id)
            machine = self.settled(machine_id)
            assert machine.state == STATES[former], machine.last_error
