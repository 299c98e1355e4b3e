"""The coordinator and an etcd that serves nobody without a certificate (docs/spec/coordinator.md §1), with real files.

Everything is made by `bigfleet certs dev`, and shards report over TLS as well, each for itself alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.cli.coordinator.store_url import read_store_tls
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.commands import AddShard
from bigfleet.coordinator.stores.protocol import LeaderInfo, StoreUnavailable
from bigfleet.link.client import NotAnswered
from bigfleet.model.ids import ShardId
from bigfleet.model.shard_report import ShardReport
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.rpc.etcd.client import EtcdClient, EtcdUnavailable, put
from bigfleet.rpc.etcd.store import EtcdStore
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from tests.commands import run_here
from tests.coordinator.coordinator_process import coordinator
from tests.coordinator.stores.etcd_process import Cluster
from tests.patience import PATIENCE_SECONDS

EAST = ShardId("east-0")


def certificates(folder: Path) -> Path:
    done = run_here("certs", "dev", str(folder), "--shard", "east-0", "--shard", "west-0", "--provider", "etcd")
    assert done.returncode == 0, done.stderr
    return folder


def paths(folder: Path, name: str) -> TlsPaths:
    return TlsPaths(certificate=folder / f"{name}.crt", key=folder / f"{name}.key", authority=folder / "ca.crt")


def shown_to_etcd(folder: Path) -> TlsFiles:
    of = paths(folder, "coordinator")
    tls = read_store_tls(of.certificate, of.key, of.authority)
    assert tls is not None
    return tls


def issue(folder: Path, *, age: timedelta = timedelta()) -> TlsPaths:
    """Write a pair that is good for a day, or was, in place of the one before; return where it is."""
    authority = Authority.load((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())
    issued = authority.issue(Bearer(name="replica", uris=("bigfleet://admin",)), datetime.now(UTC) - age, 1)
    of = paths(folder, "replica")
    of.key.write_bytes(issued.key)
    of.certificate.write_bytes(issued.certificate)
    return of


@pytest.fixture
async def guarded(etcd: str, tmp_path: Path) -> AsyncIterator[tuple[Cluster, Path]]:
    """An etcd that asks for certificates, and where those of an install are."""
    folder = certificates(tmp_path / "certs")
    cluster = Cluster(etcd, tmp_path, 1, paths(folder, "provider-etcd"))
    try:
        cluster.start()
        await cluster.ready(shown_to_etcd(folder))
        yield cluster, folder
    finally:
        cluster.kill()


def store(cluster: Cluster, tls: TlsFiles | None) -> EtcdStore:
    client, me = EtcdClient(cluster.endpoints, tls), LeaderInfo("r0", "r0:7790")
    return EtcdStore(client, prefix="bigfleet", me=me, lease_ttl_seconds=5, clock=SystemClock())


@pytest.mark.rule("coordinator 1/3")
async def test_only_who_has_a_certificate_reads_and_writes(guarded: tuple[Cluster, Path], tmp_path: Path) -> None:
    cluster, folder = guarded
    ours, plain = store(cluster, shown_to_etcd(folder)), store(cluster, None)
    foreign = store(cluster, shown_to_etcd(certificates(tmp_path / "others")))
    await ours.campaign()
    await ours.commit(AddShard(EAST, "east:7780", 3, 10))

    for nobody, told in ((plain, "it may ask for TLS"), (foreign, "CERTIFICATE_VERIFY_FAILED")):
        with pytest.raises(StoreUnavailable, match=f"etcd at {cluster.endpoints[0]}: UNAVAILABLE: .*{told}"):
            await nobody.load()
        await nobody.close()
    assert list((await ours.load()).shards) == [EAST]
    await ours.close()


@pytest.mark.rule("coordinator 1/3")
async def test_a_client_whose_certificate_has_ended_reaches_etcd_again_once_the_files_are_renewed(
    guarded: tuple[Cluster, Path],
) -> None:
    """Without a restart: the next call has a connection with the new certificate."""
    cluster, folder = guarded
    client = EtcdClient(cluster.endpoints, TlsFiles(issue(folder, age=timedelta(days=2))))
    with pytest.raises(EtcdUnavailable):
        await client.range(b"x")

    issue(folder)

    assert (await client.range(b"x")).items == ()
    await client.close()


@pytest.mark.rule("coordinator 1/3")
async def test_a_watch_goes_on_when_the_certificate_is_renewed(guarded: tuple[Cluster, Path]) -> None:
    """On the connection on which it was begun; calls have another one meanwhile."""
    cluster, folder = guarded
    client = EtcdClient(cluster.endpoints, TlsFiles(issue(folder)))
    other = EtcdClient(cluster.endpoints, shown_to_etcd(folder))
    revision = (await client.range(b"watched")).revision
    watch = asyncio.create_task(client.wait_until_changed(b"watched", revision))
    await asyncio.sleep(0)

    issue(folder)
    await client.range(b"watched")
    assert not watch.done()
    await other.txn([], [put(b"watched", b"1")])

    async with asyncio.timeout(PATIENCE_SECONDS):
        await watch
    assert [item.value for item in (await client.range(b"watched")).items] == [b"1"]
    await client.close()
    await other.close()


@pytest.mark.rule("coordinator 1/3", "coordinator 4/2")
async def test_an_install_with_tls_everywhere_and_a_shard_that_says_it_is_another(
    guarded: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, folder = guarded
    of = paths(folder, "coordinator")
    files = {"cert": of.certificate, "key": of.key, "ca": of.authority}
    flags = ["--store", f"etcd://{cluster.endpoints[0]}/bigfleet"]
    for name, path in files.items():
        flags += [f"--tls-{name}", str(path), f"--store-tls-{name}", str(path)]
    with coordinator(tmp_path, *flags) as running:
        link = GrpcCoordinator(tls=TlsFiles(paths(folder, "shard-east-0")))
        answer = await link.report(running.address, ShardReport(shard_id=EAST, epoch=1, cycle=1))
        with pytest.raises(NotAnswered) as forged:
            await link.report(running.address, ShardReport(shard_id=ShardId("west-0"), epoch=1, cycle=1))
        listed = running.run("get", "shards", "-o", "json", *_reader(folder))
        plain = running.run("get", "shards")
        refused = running.run("admin", "assign-domain", "zone=a", "east-0", *_reader(folder))
        metrics = running.page("/metrics")[1]
        log = running.log.read_text()

    assert answer.acknowledged
    assert str(forged.value) == "PERMISSION_DENIED: bigfleet://shard/east-0 may not report for shard 'west-0'"
    assert [row["shard"] for row in json.loads(listed.stdout)] == ["east-0"]
    assert (plain.returncode, len(plain.stderr.splitlines())) == (1, 1)
    assert "the server likely serves TLS: set --tls-cert, --tls-key and --tls-ca here" in plain.stderr
    assert refused.returncode == 1
    assert "bigfleet://readonly may not call AssignDomain" in refused.stderr
    assert 'bigfleet_coordinator_identity_rejected_total{rpc="ReportShard"} 1.0' in metrics
    assert "bigfleet_coordinator_store_certificate_expires_timestamp_seconds" in metrics
    assert "tls.identity_rejected" in log
    assert "bigfleet://shard/east-0" in log


@pytest.mark.rule("coordinator 1/4")
@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        ({"coordinator.crt": "ca.key"}, "coordinator.crt: holds no PEM certificate"),
        ({"coordinator.key": "coordinator.crt"}, "coordinator.key: holds no PEM private key without a password"),
        ({"coordinator.key": "admin.key"}, "coordinator.key: not the key of"),
        ({"ca.crt": "admin.key"}, "ca.crt: holds no PEM certificate"),
        ({"ca.crt": ""}, "ca.crt: No such file or directory"),
    ],
    ids=["no certificate", "no key", "another key", "no authority", "no file"],
)
def test_files_that_make_no_credentials_for_etcd_end_the_start_and_are_named(
    tmp_path: Path, spoiled: dict[str, str], told: str
) -> None:
    """At once: nothing of it would mend itself while the coordinator waits for its store."""
    folder = certificates(tmp_path / "certs")
    for name, source in spoiled.items():
        content = (folder / source).read_bytes() if source else b""
        (folder / name).unlink()
        if source:
            (folder / name).write_bytes(content)
    of = paths(folder, "coordinator")
    flags = [
        "--store-tls-cert",
        str(of.certificate),
        "--store-tls-key",
        str(of.key),
        "--store-tls-ca",
        str(of.authority),
    ]

    done = run_here("coordinator", "--store", "etcd://127.0.0.1:1/bigfleet", *flags)

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "TLS towards etcd: " in done.stderr
    assert told in done.stderr


def _reader(folder: Path) -> list[str]:
    of = paths(folder, "readonly")
    return ["--tls-cert", str(of.certificate), "--tls-key", str(of.key), "--tls-ca", str(of.authority)]
