"""An operator in its own process: it dials with a certificate, reports demand and answers; it prints JSON lines.

python -m tests.e2e.tls_operator SHARD_ADDRESS CERTIFICATE KEY AUTHORITY CLUSTER_ID
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from bigfleet.model.frames import (
    Acknowledgement,
    BootstrapRequest,
    BootstrapResponse,
    Hello,
    NodeStateUpdate,
    RollUp,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.states import MachineState
from bigfleet.model.vector import families, parse_vector
from bigfleet.operator.ports import SessionEnded, SessionStream
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths

#: A shard compiles its kernels first when they are new.
PATIENCE_SECONDS = 120.0


def say(step: str, **facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps({"step": step, **facts}), flush=True)


async def until_ack(stream: SessionStream) -> None:
    """Return once the shard acknowledged something."""
    while not isinstance(await stream.receive(), Acknowledgement):
        pass


async def converse(stream: SessionStream, cluster: str) -> None:
    """Be the cluster until a machine serves it; then wait for a line on standard input and say hello again."""
    await stream.send(Hello(cluster_id=cluster))
    # A frame that is sent while the refusal comes would end in gRPC's own words, in place of the shard's.
    await until_ack(stream)
    wanted = Need(
        cluster=ClusterId(cluster),
        profile=Profile(priority=100),
        aggregate=parse_vector({"cpu": "1"}),
        min_unit=parse_vector({"cpu": "1"}),
        families=families({"cpu": "1"}),
    )
    await stream.send(RollUp(cluster_id=cluster, timestamp_unix_nanos=time.time_ns(), needs=(wanted,)))
    while True:
        match await stream.receive():
            case BootstrapRequest() as request:
                await stream.send(BootstrapResponse(request_id=request.request_id, user_data=b"#cloud-config"))
            case NodeStateUpdate() as update if update.state is MachineState.CONFIGURED:
                break
    say("configured", cluster=update.cluster_id)
    await asyncio.to_thread(sys.stdin.readline)
    await stream.send(Hello(cluster_id=cluster))
    await until_ack(stream)
    say("still here")


async def main(address: str, certificate: str, key: str, authority: str, cluster: str) -> None:
    """Hold one session."""
    paths = TlsPaths(certificate=Path(certificate), key=Path(key), authority=Path(authority))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), GrpcSessionDialer(address, TlsFiles(paths)).dial() as stream:
            await converse(stream, cluster)
    except SessionEnded as ended:
        say("ended", kind=ended.kind.value, text=str(ended))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
