"""Who may call what over TLS: each identity against each RPC, on real gRPC (docs/spec/wire.md §3, §11 point 3)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bigfleet.cli.certs.issuing import Bearer
from bigfleet.model.ids import identifier_fault
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.security.identity import MAY_CALL, Denied, PeerIdentity, PeerRole, identity_in, peer_identity
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.wire.gen import (
    capacity_pb2,
    coordinator_pb2,
    provider_pb2,
    provider_pb2_grpc,
    shard_pb2,
    shardadmin_pb2,
    shardread_pb2,
)
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import CROSSED, LiveShard, live_shard
from tests.rpc.security.tls_world import (
    ADMIN,
    CLUSTER,
    READONLY,
    SHARD,
    Certificates,
    SecureProvider,
    SecureShard,
    renamed,
    secure_channel,
    secure_provider,
    secure_shard,
)

Code = grpc.StatusCode

STRANGERS = [
    pytest.param(renamed(CLUSTER), id="no URI"),
    pytest.param(renamed(CLUSTER, "bigfleet://cluster/c1", "bigfleet://admin"), id="two identities"),
    pytest.param(renamed(CLUSTER, "spiffe://fleet/admin"), id="foreign URI"),
    pytest.param(renamed(CLUSTER, "bigfleet://provider/p1"), id="unknown role"),
    pytest.param(renamed(CLUSTER, "BIGFLEET://admin"), id="upper case"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for this module's peers."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def shard(certificates: Certificates) -> AsyncIterator[SecureShard]:
    """A shard s1 with nothing."""
    async with secure_shard(certificates.files(SHARD)) as served:
        yield served


@pytest.fixture
async def provider(certificates: Certificates) -> AsyncIterator[SecureProvider]:
    """A provider with nine slots."""
    async with secure_provider(certificates.files(Bearer(name="p", hosts=SHARD.hosts))) as served:
        yield served


async def code_of(answer: Any) -> grpc.StatusCode:
    """Return the status of a unary call or of a stream that ends by itself."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            if isinstance(answer, Awaitable):
                await answer
            else:
                async for _ in answer:
                    pass
    except aio.AioRpcError as error:
        return error.code()
    return Code.OK


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uris", "identity"),
    [
        (["bigfleet://cluster/c1"], PeerIdentity(PeerRole.CLUSTER, "c1")),
        (["bigfleet://shard/a/b%20c"], PeerIdentity(PeerRole.SHARD, "a/b%20c")),
        (["bigfleet://admin"], PeerIdentity(PeerRole.ADMIN)),
        (["https://example/", "bigfleet://readonly", "spiffe://fleet/shard"], PeerIdentity(PeerRole.READONLY)),
    ],
)
def test_the_one_uri_of_ours_is_the_identity(uris: list[str], identity: PeerIdentity) -> None:
    """The id stands in it as it is; other schemes are ignored."""
    assert identity_in(uris) == identity


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://fleet/admin"],
        ["bigfleet://admin", "bigfleet://admin"],
        ["bigfleet://admin", "BigFleet://readonly"],
        ["BIGFLEET://admin"],
        ["bigfleet:admin"],
        ["bigfleet:/admin"],
        ["bigfleet://"],
        ["bigfleet://admin/"],
        ["bigfleet://admin/x"],
        ["bigfleet://Admin"],
        ["bigfleet://cluster"],
        ["bigfleet://cluster/"],
        ["bigfleet://cluster/two words"],
        ["bigfleet://cluster/" + "x" * 254],
        ["bigfleet://provider/p"],
        ["xbigfleet://admin"],
    ],
)
def test_anything_else_is_nobody(uris: list[str]) -> None:
    """None, several, a role that is unknown, an id too many or too few."""
    with pytest.raises(Denied):
        identity_in(uris)


@given(st.sampled_from([PeerRole.CLUSTER, PeerRole.SHARD]), st.text(max_size=300))
def test_what_is_read_is_what_was_written(role: PeerRole, identifier: str) -> None:
    """Every id that may be one comes back as it was, every other one is refused."""
    if identifier_fault(identifier):
        with pytest.raises(Denied):
            identity_in([f"bigfleet://{role.value}/{identifier}"])
    else:
        assert identity_in([PeerIdentity(role, identifier).uri]) == PeerIdentity(role, identifier)


@given(st.lists(st.text(max_size=40), max_size=3))
def test_no_name_makes_it_fail_otherwise(uris: list[str]) -> None:
    """Whatever stands in a certificate, the answer is an identity or a refusal."""
    with contextlib.suppress(Denied):
        assert identity_in(uris).uri in uris


class FakeContext:
    """A call with these facts about its connection."""

    def __init__(self, **facts: str) -> None:
        self._facts = {name: [value.encode()] for name, value in facts.items()}

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what gRPC would."""
        return self._facts


@pytest.mark.parametrize("version", ["TLSv1.2", "", "TLSv1.30"])
def test_an_older_tls_is_refused(version: str) -> None:
    """Where the process did not rule it out, nobody gets in by it."""
    context: Any = FakeContext(transport_security_type="ssl", ssl_tls_version=version, peer_uri="bigfleet://admin")
    with pytest.raises(Denied, match=r"TLS 1\.3"):
        peer_identity(context)


def test_a_connection_that_says_nothing_of_itself_is_refused() -> None:
    """Checks are skipped for what is known to be plain text, and for nothing else."""
    nothing: Any = FakeContext()
    plain: Any = FakeContext(transport_security_type="insecure")
    with pytest.raises(Denied):
        peer_identity(nothing)
    assert peer_identity(plain) is None


# ---- the shard --------------------------------------------------------------------------------------------------

READS = {
    "InspectNeeds": shardread_pb2.InspectNeedsRequest(),
    "ListMachines": shardread_pb2.ListMachinesRequest(),
    "ListActions": shardread_pb2.ListActionsRequest(),
    "ListSessions": shardread_pb2.ListSessionsRequest(),
    "ListExchanges": shardread_pb2.ListExchangesRequest(),
    "ExplainNeed": shardread_pb2.ExplainNeedRequest(cluster_id="c1", profile_fingerprint="f"),
    "ExplainMachine": shardread_pb2.ExplainMachineRequest(machine_id="m1"),
}


async def code_of_session(live: LiveShard) -> grpc.StatusCode:
    """Return how a session of cluster c1 ends; a refusal may come before its Hello and cross it."""
    while True:
        peer = live.dial()
        await peer.try_to_say(hello=shard_pb2.Hello(cluster_id="c1"))
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await peer.stop_talking()
        code, details = await peer.end()
        if (code, details) != CROSSED:
            return code


async def calls_of_shard(live: LiveShard) -> dict[str, grpc.StatusCode]:
    """Call every RPC of a shard's server once, Session as cluster c1; return the status of each."""
    codes = {"Session": await code_of_session(live)}
    for name, request in READS.items():
        codes[name] = await code_of(getattr(live.read, name)(request))
    health: Any = health_pb2_grpc.HealthStub(live.channel)
    codes["Health"] = await code_of(health.Check(health_pb2.HealthCheckRequest()))
    codes["Reflection"] = await code_of_reflection(live)
    return codes


async def code_of_reflection(live: LiveShard) -> grpc.StatusCode:
    """Return how a list of services ends; a refusal may come before its request and cross it."""
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    while True:
        call = reflection.ServerReflectionInfo(iter([asked]))
        code = await code_of(call)
        if (code, await call.details()) != CROSSED:
            return code


def let_in(codes: dict[str, grpc.StatusCode]) -> set[str]:
    """Return the RPCs that did not refuse the caller for who it is."""
    return {name for name, code in codes.items() if code is not Code.PERMISSION_DENIED}


ALWAYS = {"Health", "Reflection"}


@pytest.mark.rule("shard 12/1")
@pytest.mark.parametrize(
    ("bearer", "allowed"),
    [
        (CLUSTER, {"Session"} | ALWAYS),
        (SHARD, ALWAYS),
        (ADMIN, set(READS) | ALWAYS),
        (READONLY, set(READS) | ALWAYS),
    ],
    ids=lambda value: value.name if isinstance(value, Bearer) else "",
)
async def test_each_role_calls_of_a_shard_what_the_table_says(
    certificates: Certificates, shard: SecureShard, bearer: Bearer, allowed: set[str]
) -> None:
    """Each refusal is counted under its RPC, Session under its own name."""
    async with shard.dial(certificates.files(bearer)) as live:
        codes = await calls_of_shard(live)

    assert let_in(codes) == allowed
    refused_reads = {name for name in READS if shard.rejected(name) == 1}
    assert refused_reads == set(READS) - allowed
    assert (shard.world.metric("session_identity_rejected_total") == 0) is ("Session" in allowed)
    assert shard.rejected("Session") == 0


@pytest.mark.parametrize("bearer", STRANGERS)
async def test_a_certificate_without_one_identity_calls_nothing_of_a_shard(
    certificates: Certificates, shard: SecureShard, bearer: Bearer
) -> None:
    """Not even health (docs/tls.md)."""
    async with shard.dial(certificates.files(bearer)) as live:
        codes = await calls_of_shard(live)

    assert let_in(codes) == set(), codes


async def test_no_rpc_of_a_shard_is_missing_from_the_table(shard: SecureShard) -> None:
    """What a server serves is what the table knows, method by method."""
    known = {rpc.rpartition("/")[2] for rpc in MAY_CALL}
    files = (shard_pb2, shardread_pb2, shardadmin_pb2, provider_pb2, coordinator_pb2)
    served = {
        method.name
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }

    assert known == served


async def test_an_rpc_that_nobody_put_into_the_table_is_refused(certificates: Certificates) -> None:
    """A new service is closed until it is in it."""

    async def answer(_request: bytes, _context: Any) -> bytes:
        raise AssertionError("nobody may get here")

    handler = grpc.method_handlers_generic_handler("x.New", {"Do": grpc.unary_unary_rpc_method_handler(answer)})
    server = GrpcServer(
        services=(), register=lambda it: it.add_generic_rpc_handlers((handler,)), tls=certificates.files(SHARD)
    )
    port = await server.start("127.0.0.1", 0)
    try:
        async with secure_channel(port, certificates.files(ADMIN)) as channel:
            assert await code_of(channel.unary_unary("/x.New/Do", None, None)(b"")) is Code.PERMISSION_DENIED
    finally:
        await server.stop(0)


# ---- sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/2", "shard 15/19")
async def test_a_forged_cluster_id_is_refused_and_nothing_of_it_processed(
    certificates: Certificates, shard: SecureShard
) -> None:
    """The certificate of c1 and the Hello of c2: no session, no demand, a log line with who it was."""
    with capture_logs() as logs:
        async with shard.dial(certificates.files(CLUSTER)) as live:
            peer = live.dial()
            await peer.say(hello=shard_pb2.Hello(cluster_id="c2"))
            need = capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "1"}, min_unit={"cpu": "1"})
            demand = capacity_pb2.ClusterCapacityNeeds(cluster_id="c2", timestamp_unix_nanos=1, needs=[need])
            # The refusal may be quicker.
            await peer.try_to_say(rollup=demand)
            ended = await peer.end()

    why = "bigfleet://cluster/c1 may not speak for cluster 'c2'"
    assert ended in ((Code.PERMISSION_DENIED, why), CROSSED)
    assert len(shard.world.shard.sessions) == 0
    assert shard.world.shard.intake.table.clusters == set()
    assert shard.world.metric("session_lifecycle_total", event="installed") == 0
    assert shard.world.metric("session_identity_rejected_total") == 1
    (line,) = [line for line in logs if line["event"] == "tls.identity_rejected"]
    assert (line["presented"], line["rpc"]) == ("bigfleet://cluster/c1", "/bigfleet.v1alpha1.Shard/Session")
    assert line["reason"] == why


async def test_the_rightful_cluster_keeps_its_session_when_another_claims_its_name(
    certificates: Certificates, shard: SecureShard
) -> None:
    """A forged Hello replaces nobody."""
    other = renamed(CLUSTER, "bigfleet://cluster/c2")
    async with shard.dial(certificates.files(CLUSTER)) as live, shard.dial(certificates.files(other)) as forger:
        peer = await live.connect("c1")
        forged = forger.dial()
        await forged.say(hello=shard_pb2.Hello(cluster_id="c1"))
        assert (await forged.end())[0] is Code.PERMISSION_DENIED
        await peer.say(hello=shard_pb2.Hello(cluster_id="c1"))
        await peer.hear_ack("hello")

    assert shard.world.metric("session_lifecycle_total", event="replaced") == 0


@pytest.mark.rule("shard 10.1/2")
@pytest.mark.parametrize("hello", [{"rollup": capacity_pb2.ClusterCapacityNeeds()}, {"hello": shard_pb2.Hello()}])
async def test_a_session_is_judged_by_its_certificate_before_its_frame(
    certificates: Certificates, shard: SecureShard, hello: dict[str, Any]
) -> None:
    """Identity, first frame, arguments (docs/spec/wire.md §4)."""
    async with shard.dial(certificates.files(ADMIN)) as live:
        peer = live.dial()
        await peer.try_to_say(**hello)
        assert (await peer.end())[0] in (Code.PERMISSION_DENIED, CROSSED[0])
    async with shard.dial(certificates.files(CLUSTER)) as live:
        peer = live.dial()
        await peer.say(**hello)
        assert (await peer.end())[0] is (Code.PERMISSION_DENIED if "hello" in hello else Code.INVALID_ARGUMENT)


# ---- the provider -----------------------------------------------------------------------------------------------

Stub = Any
TOKEN: Any = {"shard_epoch": 1, "sequence_number": 1}
MUTATIONS: dict[str, Callable[[str], Any]] = {
    "Create": lambda shard: provider_pb2.CreateRequest(machine_id="none", shard_id=shard, **TOKEN),
    "Configure": lambda shard: provider_pb2.ConfigureRequest(machine_id="none", shard_id=shard, **TOKEN),
    "Drain": lambda shard: provider_pb2.DrainRequest(machine_id="none", shard_id=shard, **TOKEN),
    "Delete": lambda shard: provider_pb2.DeleteRequest(machine_id="none", shard_id=shard, **TOKEN),
}


async def calls_of_provider(port: int, files: TlsFiles, shard: str) -> dict[str, grpc.StatusCode]:
    """Call every RPC of a provider once, with the token of a shard; return the status of each."""
    async with secure_channel(port, files) as channel:
        stub: Stub = provider_pb2_grpc.CapacityProviderStub(channel)
        codes = {
            "Get": await code_of(stub.Get(provider_pb2.MachineRef(id="none"))),
            "List": await code_of(stub.List(provider_pb2.ListFilter())),
        }
        for name, request in MUTATIONS.items():
            codes[name] = await code_of(getattr(stub, name)(request(shard)))
    return codes


EVERYTHING = {"Get", "List", *MUTATIONS}


@pytest.mark.parametrize(
    ("bearer", "token", "allowed"),
    [
        pytest.param(SHARD, "s1", EVERYTHING, id="shard, its token"),
        pytest.param(SHARD, "s2", {"Get", "List"}, id="shard, another's token"),
        pytest.param(SHARD, "", {"Get", "List"}, id="shard, no token"),
        pytest.param(ADMIN, "s1", {"Get", "List"}, id="admin, a token"),
        pytest.param(ADMIN, "", {"Get", "List"}, id="admin, no token"),
        pytest.param(READONLY, "s1", {"Get", "List"}, id="readonly, a token"),
        pytest.param(CLUSTER, "c1", set(), id="cluster"),
    ],
)
async def test_each_role_calls_of_a_provider_what_the_table_says(
    certificates: Certificates, provider: SecureProvider, bearer: Bearer, token: str, allowed: set[str]
) -> None:
    """A shard changes machines with its own token only (docs/spec/provider.md §17)."""
    codes = await calls_of_provider(provider.port, certificates.files(bearer), token)

    assert let_in(codes) == allowed
    assert {rpc for rpc in EVERYTHING if provider.rejected(rpc) == 1} == EVERYTHING - allowed
    told = provider.core.metrics.registry.get_sample_value(
        "bigfleet_provider_rpc_requests_total", {"method": "Create", "code": "PERMISSION_DENIED"}
    )
    assert (told or 0) == ("Create" not in allowed)


@pytest.mark.parametrize("bearer", STRANGERS)
async def test_a_certificate_without_one_identity_calls_nothing_of_a_provider(
    certificates: Certificates, provider: SecureProvider, bearer: Bearer
) -> None:
    """With any token."""
    assert let_in(await calls_of_provider(provider.port, certificates.files(bearer), "s1")) == set()


async def test_a_refused_call_moves_no_fence_mark(certificates: Certificates, provider: SecureProvider) -> None:
    """Identity comes before the fence: another shard's token leaves no trace."""

    def create(sequence: int) -> provider_pb2.CreateRequest:
        return provider_pb2.CreateRequest(machine_id="fake-0", shard_id="s1", shard_epoch=1, sequence_number=sequence)

    other = certificates.files(renamed(SHARD, "bigfleet://shard/s2"))
    async with (
        secure_channel(provider.port, other) as forged,
        secure_channel(provider.port, certificates.files(SHARD)) as own,
    ):
        forger: Stub = provider_pb2_grpc.CapacityProviderStub(forged)
        assert await code_of(forger.Create(create(99))) is Code.PERMISSION_DENIED
        owner: Stub = provider_pb2_grpc.CapacityProviderStub(own)
        assert await code_of(owner.Create(create(1))) is Code.OK


@pytest.mark.parametrize(
    ("bearer", "token", "allowed"),
    [
        pytest.param(ADMIN, "anybody", EVERYTHING, id="admin, a token"),
        pytest.param(ADMIN, "", EVERYTHING, id="admin, no token"),
        pytest.param(SHARD, "s2", {"Get", "List"}, id="shard, another's token"),
        pytest.param(READONLY, "s1", {"Get", "List"}, id="readonly"),
        pytest.param(CLUSTER, "c1", set(), id="cluster"),
    ],
)
async def test_certify_lets_an_admin_send_any_token_and_nobody_else(
    certificates: Certificates, bearer: Bearer, token: str, allowed: set[str]
) -> None:
    """For a conformance run over TLS."""
    files = certificates.files(Bearer(name="p", hosts=SHARD.hosts))
    async with secure_provider(files, certify=True) as provider:
        assert let_in(await calls_of_provider(provider.port, certificates.files(bearer), token)) == allowed


# ---- plain text -------------------------------------------------------------------------------------------------


async def test_in_plain_text_nobody_is_asked_who_it_is() -> None:
    """Every check is skipped."""
    async with live_shard() as live:
        assert let_in(await calls_of_shard(live)) == {"Session", *READS, *ALWAYS}
