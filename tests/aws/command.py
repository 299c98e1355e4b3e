"""Runs `bigfleet provider aws` as a process before the strict shim."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc

from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.aws.client import BUCKET, REGION, ShimClient
from tests.aws.over_http import PREFIX
from tests.cli.provider.provider_client import ProviderClient
from tests.e2e.disks.small_disk import SmallDisk
from tests.processes import bigfleet, serving_command


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

    def __init__(self, shim: ShimClient, folder: Path, address: str, *more: str, disk: SmallDisk | None = None) -> None:
        """The state is in the folder, or on the disk if there is one."""
        key = folder / "key"
        key.write_bytes(bytes(range(32)))
        os.chmod(key, 0o600)
        self.state = (folder if disk is None else disk.folder) / "s.db"
        command = bigfleet(
            "provider",
            "aws",
            *flags(shim, folder),
            f"--state={self.state}",
            f"--addr={address}",
            f"--intent-key={key}",
            *more,
        )
        self._command = command if disk is None else disk.command(command)
        self._address, self.log = address, folder / "log"

    @contextmanager
    def served(self) -> Iterator[tuple[ProviderClient, int]]:
        """Yield a client and the process id while it serves."""
        with (
            serving_command(self._address, self.log, self._command) as process,
            grpc.insecure_channel(self._address) as channel,
        ):
            yield ProviderClient(CapacityProviderStub(channel), self.log), process.pid

    def events(self, event: str) -> list[dict[str, object]]:
        """Return the log lines of an event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]
