"""Runs `bigfleet provider aws` as a process before the strict shim."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.aws.client import BUCKET, REGION, ShimClient
from tests.aws.over_http import PREFIX
from tests.patience import wait_until
from tests.processes import serving

ENDS = (pb.MACHINE_STATE_SPECULATIVE, pb.MACHINE_STATE_IDLE, pb.MACHINE_STATE_CONFIGURED, pb.MACHINE_STATE_FAILED)


def flags(shim: ShimClient, folder: Path, *offerings: Mapping[str, object]) -> list[str]:
    """Return the flags that name the shim and these offerings, and look at it often."""
    (folder / "offerings.json").write_text(json.dumps(list(offerings) or [shim.offering()]))
    return [
        f"--region={REGION}",
        f"--endpoint-url={shim.url}",
        f"--offerings={folder / 'offerings.json'}",
        f"--bootstrap=s3://{BUCKET}/{PREFIX}",
        "--poll-interval=100ms",
        "--launch-rate=1000",
        "--metrics-addr=off",
    ]


class Provider:
    """A served provider with its state in a folder, which may be started again."""

    def __init__(self, shim: ShimClient, folder: Path, address: str, *more: str) -> None:
        key = folder / "key"
        key.write_bytes(bytes(range(32)))
        os.chmod(key, 0o600)
        self._command = (
            "provider",
            "aws",
            *flags(shim, folder),
            f"--state={folder / 's.db'}",
            f"--addr={address}",
            f"--intent-key={key}",
            *more,
        )
        self._address, self.log = address, folder / "log"

    @contextmanager
    def served(self) -> Iterator[tuple["Client", int]]:
        """Yield a client and the process id while it serves."""
        with (
            serving(self._address, self.log, *self._command) as process,
            grpc.insecure_channel(self._address) as channel,
        ):
            yield Client(CapacityProviderStub(channel), self.log), process.pid


class Client:
    """Calls one provider without fencing."""

    def __init__(self, stub: CapacityProviderStub, log: Path) -> None:
        self.stub, self._log = stub, log

    def accept(self, verb: str, machine_id: str) -> str:
        """Begin an operation and return its id."""
        match verb:
            case "create":
                return self.stub.Create(pb.CreateRequest(machine_id=machine_id)).operation_id
            case "configure":
                asked = pb.ConfigureRequest(machine_id=machine_id, cluster_id="team-a", bootstrap_blob=b"#!/bin/sh\n")
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
