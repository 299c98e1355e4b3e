"""The table of docs/tls.md: each RPC of shard, provider and coordinator, called with each kind of certificate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import grpc
from grpc import aio

from bigfleet.cli.certs.issuing import Bearer
from bigfleet.rpc.security.identity import MAY_CALL, REPORT, SESSION
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.wire.gen import shard_pb2
from tests.coordinator.replica_world import report, serving, sqlite_store
from tests.rpc.live_shard import CROSSED, dial
from tests.rpc.security.test_identity import MUTATIONS, code_of
from tests.rpc.security.tls_world import (
    ADMIN,
    CLUSTER,
    HOSTS,
    PROVIDER,
    READONLY,
    SHARD,
    Certificates,
    renamed,
    secure_channel,
    secure_provider,
    secure_shard,
)

PAGE = Path(__file__).parents[3] / "docs" / "tls.md"
SESSION_OF_C1 = shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id="c1")).SerializeToString()
#: What names a cluster or a shard; every other RPC gets bytes that are no message, and checks who calls before.
CONTENTS = {
    REPORT: report("s1").SerializeToString(),
    **{f"/bigfleet.v1alpha1.CapacityProvider/{name}": ask("s1").SerializeToString() for name, ask in MUTATIONS.items()},
}
GARBAGE = b"\xff\xff\xff"
#: Kinds of certificates that get a connection, in the order of the table.
KNOWN = {
    "readonly": READONLY,
    "cluster": CLUSTER,
    "other cluster": Bearer(name="c2", uris=("bigfleet://cluster/c2",)),
    "shard": SHARD,
    "other shard": Bearer(name="s2", uris=("bigfleet://shard/s2",), hosts=HOSTS),
    "coordinator": Bearer(name="coordinator", uris=("bigfleet://admin",), hosts=HOSTS),
    "admin": ADMIN,
}
#: Those that are to get nothing.
STRANGERS = ("none", "expired", "other authority", "provider", "NUL")
COLUMNS = (*STRANGERS, *KNOWN)


@asynccontextmanager
async def channel_of(kind: str, port: int, certificates: Certificates) -> AsyncIterator[aio.Channel]:
    """Open a channel with a kind of certificate."""
    match kind:
        case "none":
            authority = grpc.ssl_channel_credentials(certificates.paths("x").authority.read_bytes())
            own = (("grpc.use_local_subchannel_pool", 1),)
            opened = aio.secure_channel(f"127.0.0.1:{port}", authority, options=own)
        case "expired":
            opened = secure_channel(port, certificates.files(ADMIN, age=timedelta(days=2)))
        case "other authority":
            other = Certificates.make(certificates.folder / "other").issue(ADMIN)
            opened = secure_channel(port, TlsFiles(certificates.write("forged", other)))
        case "provider":
            opened = secure_channel(port, certificates.files(PROVIDER))
        case "NUL":
            opened = secure_channel(port, certificates.files(renamed(ADMIN, "bigfleet://admin\0.evil")))
        case _:
            opened = secure_channel(port, certificates.files(KNOWN[kind]))
    async with opened as channel:
        yield channel


async def status_of_session(channel: aio.Channel) -> grpc.StatusCode:
    """Return how a session as cluster c1 ends, of which the operator ends its side at once."""
    while True:
        peer = dial(channel)
        await peer.try_to_say_bytes(SESSION_OF_C1)
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await peer.stop_talking()
        code, details = await peer.end()
        # A refusal may come before the frame and cross it.
        if (code, details) != CROSSED:
            return code


async def answers(channel: aio.Channel, rpc: str) -> grpc.StatusCode:
    """Call an RPC and return its status."""
    if rpc == SESSION:
        return await status_of_session(channel)
    return await code_of(channel.unary_stream(rpc, bytes, bytes)(CONTENTS.get(rpc, GARBAGE)))


def table(rows: dict[str, dict[str, bool]]) -> str:
    """Return the table of the page: which kinds of certificates may call each RPC."""
    lines = [f"| RPC | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for rpc, who in rows.items():
        service, _, name = rpc.removeprefix("/bigfleet.v1alpha1.").partition("/")
        lines.append(f"| {service}.{name} | {' | '.join('yes' if who[kind] else '' for kind in COLUMNS)} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


async def test_every_rpc_answers_every_certificate_as_the_page_says(tmp_path: Path) -> None:
    """Who gets in is refused or answered for what was sent; all others get no connection or PERMISSION_DENIED."""
    certificates = Certificates.make(tmp_path / "certificates")
    own, replica = certificates.files(SHARD), certificates.files(KNOWN["coordinator"])
    rows: dict[str, dict[str, bool]] = {rpc: {} for rpc in MAY_CALL}
    async with AsyncExitStack() as stack:
        shard = await stack.enter_async_context(secure_shard(own))
        provider = await stack.enter_async_context(secure_provider(certificates.files(PROVIDER)))
        served = await stack.enter_async_context(serving(sqlite_store(tmp_path / "c.db"), tls=replica, dial_as=own))
        await served.led()
        ports = {"Shard": shard.port, "ShardRead": shard.port, "ShardAdmin": shard.port}
        ports |= {"CapacityProvider": provider.port, "Coordinator": served.port}
        for kind in COLUMNS:
            for service, port in ports.items():
                async with channel_of(kind, port, certificates) as channel:
                    for rpc in (each for each in MAY_CALL if each.split("/")[1].endswith(f".{service}")):
                        code = await answers(channel, rpc)
                        is_out = code is grpc.StatusCode.PERMISSION_DENIED
                        if kind in ("none", "expired", "other authority", "provider"):
                            assert code is grpc.StatusCode.UNAVAILABLE, (kind, rpc, code)
                            is_out = True
                        rows[rpc][kind] = not is_out

    assert not any(rows[rpc][kind] for rpc in rows for kind in STRANGERS)
    found = table(rows)
    assert found in PAGE.read_text(encoding="utf-8"), f"docs/tls.md must have this table:\n{found}"
