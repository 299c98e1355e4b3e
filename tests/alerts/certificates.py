"""Faults of certificates and of plain text: what expires, who is not who they say, what is open to all."""

from datetime import UTC, datetime, timedelta

import grpc
import pytest

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.rpc.wire.gen import coordinator_pb2, coordinator_pb2_grpc, shardread_pb2, shardread_pb2_grpc
from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired
from tests.processes import open_channel, run_bigfleet

#: A certificate is good for a day: issued so long ago, it ends in an hour.
NEARLY_A_DAY = timedelta(hours=23)
#: The identity of each program that has a certificate.
HOLDERS = {
    "shard": "bigfleet://shard/s1",
    "provider": "bigfleet://provider/simulated",
    "replica": "bigfleet://admin",
    "operator": "bigfleet://cluster/c1",
}


def build(fleet: Fleet) -> None:
    """A shard, a provider and a coordinator with certificates, and a shard and a coordinator in plain text."""
    make_certificates(fleet)
    provider = fleet.provider("provider", "simulated", "--calm", "--seed-count", "4", *tls(fleet, "provider"))
    replica = fleet.coordinator("replica", *tls(fleet, "replica"))
    linked = ("--provider-addr", provider.address, "--coordinator-addr", replica.address)
    fleet.shard("shard", "--id", "s1", *linked, *tls(fleet, "shard"))
    fleet.shard("plain-shard")
    fleet.coordinator("plain-replica")


def make_certificates(fleet: Fleet) -> None:
    """Make an authority, and a certificate for each holder."""
    made = run_bigfleet("certs", "dev", str(fleet.folder / "certs"), "--shard", "s1", "--cluster", "c1")
    assert made.returncode == 0, made.stderr
    for name in HOLDERS:
        issue(fleet, name, timedelta())


def tls(fleet: Fleet, name: str) -> tuple[str, ...]:
    """Return the flags of a holder."""
    certs = fleet.folder / "certs"
    return ("--tls-cert", f"{certs}/{name}.crt", "--tls-key", f"{certs}/{name}.key", "--tls-ca", f"{certs}/ca.crt")


def issue(fleet: Fleet, name: str, age: timedelta) -> None:
    """Write a certificate of a holder that was issued so long ago; a running process reads it."""
    certs = fleet.folder / "certs"
    authority = Authority.load((certs / "ca.crt").read_bytes(), (certs / "ca.key").read_bytes())
    bearer = Bearer(name=name, uris=(HOLDERS[name],), hosts=("127.0.0.1", "localhost"))
    issued = authority.issue(bearer, datetime.now(UTC) - age, 1)
    for path, content in ((certs / f"{name}.crt", issued.certificate), (certs / f"{name}.key", issued.key)):
        draft = path.with_suffix(".draft")
        draft.write_bytes(content)
        draft.replace(path)


def expire_soon(alert: str, name: str) -> Fault:
    """The certificate of a process was not renewed."""
    return Fault(
        f"the certificate of the {name} ends in an hour",
        {alert: name},
        lambda fleet: issue(fleet, name, NEARLY_A_DAY),
        lambda fleet: issue(fleet, name, timedelta()),
    )


def call_as_cluster(fleet: Fleet) -> None:
    """Read a shard and a coordinator with the certificate of a cluster."""
    files = (fleet.folder / "certs" / name for name in ("ca.crt", "cluster-c1.key", "cluster-c1.crt"))
    cluster = grpc.ssl_channel_credentials(*(path.read_bytes() for path in files))
    with open_channel(fleet["shard"].address, cluster) as channel, pytest.raises(grpc.RpcError, match="PERMISSION"):
        list(shardread_pb2_grpc.ShardReadStub(channel).ListSessions(shardread_pb2.ListSessionsRequest()))
    with open_channel(fleet["replica"].address, cluster) as channel, pytest.raises(grpc.RpcError, match="PERMISSION"):
        coordinator_pb2_grpc.CoordinatorStub(channel).ListShards(coordinator_pb2.ListShardsRequest())


CERTIFICATES = Course(
    build,
    stages=(
        (
            expire_soon("BigFleetShardCertificateExpires", "shard"),
            expire_soon("BigFleetProviderCertificateExpires", "provider"),
            expire_soon("BigFleetCoordinatorCertificateExpires", "replica"),
            Fault(
                "a reader has the certificate of a cluster",
                {"BigFleetShardIdentityRejected": "shard", "BigFleetCoordinatorIdentityRejected": "replica"},
                nothing,
                nothing,
                again=call_as_cluster,
            ),
            Fault(
                "a shard serves other hosts in plain text",
                {"BigFleetShardInsecure": "plain-shard"},
                lambda fleet: fleet["plain-shard"].restart("--listen", ":{port}", "--insecure"),
                lambda fleet: fleet["plain-shard"].restart(),
            ),
            Fault(
                "a coordinator serves other hosts in plain text",
                {"BigFleetCoordinatorInsecure": "plain-replica"},
                lambda fleet: fleet["plain-replica"].restart("--listen", ":{port}", "--insecure"),
                lambda fleet: fleet["plain-replica"].restart(),
            ),
        ),
        (
            Fault(
                "a provider was left as it was certified",
                {"BigFleetProviderInsecure": "provider"},
                lambda fleet: fleet["provider"].restart("--certify"),
                lambda fleet: fleet["provider"].restart(),
            ),
        ),
    ),
    also=frozenset(
        {
            Fired("BigFleetShardDown", "plain-shard"),
            Fired("BigFleetCoordinatorDown", "plain-replica"),
            Fired("BigFleetProviderDown", "provider"),
        }
    ),
)
