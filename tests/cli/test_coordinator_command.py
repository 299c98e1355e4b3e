"""`bigfleet coordinator` as a process, and `bigfleet get`, `admin` and `snapshot` against it."""

import signal
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.cli.coordinator.command import CoordinatorFlags
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.rpc.servers.coordinator import SERVICE_NAME
from tests.commands import run_here
from tests.coordinator.coordinator_process import Running, coordinator
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "coordinator.md"
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("coordinator")
    with coordinator(folder, "--store", f"sqlite://{folder}/c.db", "--id", "r0") as one:
        one.report("east-0", clusters=["blue"])
        one.report("east-1")
        yield one


@pytest.mark.rule("coordinator 4/15")
def test_what_administrators_set_is_what_lists_show(running: Running) -> None:
    steps = [
        ("assign-domain", f"{ZONE}=a", "east-0"),
        ("assign-domain", f"{ZONE}=b", "east-1"),
        ("unassign-domain", f"{ZONE}=b"),
        ("set-provider", "aws", "provider:9100", "--region", "eu-west-1"),
        ("set-quota", "aws", "eu-west-1", "east-0=100", "east-1=300"),
        ("bind-cluster", "green", "east-1"),
    ]
    for step in steps:
        done = running.run("admin", *step)
        assert done.returncode == 0, done.stderr

    assert [(row["shard"], row["alive"], row["epoch"]) for row in running.records("get", "shards")] == [
        ("east-0", True, 1),
        ("east-1", True, 1),
    ]
    assert running.records("get", "domains") == [
        {"key": ZONE, "value": "a", "shard": "east-0", "state": "assigned"},
        {"key": ZONE, "value": "b", "shard": "east-1", "state": "releasing"},
    ]
    assert running.records("get", "quotas") == [
        {"provider": "aws", "region": "eu-west-1", "shard": "east-0", "slots": 100},
        {"provider": "aws", "region": "eu-west-1", "shard": "east-1", "slots": 300},
    ]
    assert running.records("get", "providers") == [
        {"provider": "aws", "address": "provider:9100", "region": "eu-west-1"}
    ]
    assert [(row["cluster"], row["shard"]) for row in running.records("get", "bindings")] == [
        ("blue", "east-0"),
        ("green", "east-1"),
    ]


@pytest.mark.parametrize("what", ["shards", "domains", "quotas", "providers", "bindings", "instructions", "moves"])
def test_every_list_has_a_table(running: Running, what: str) -> None:
    done = running.run("get", what)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == (1 + len(running.records("get", what)) if done.stdout else 0)


@pytest.mark.rule("coordinator 1/6")
def test_metrics_readiness_and_health_are_served(running: Running) -> None:
    assert running.page("/healthz") == (200, "ok\n")
    assert running.page("/readyz") == (200, "ready\n")
    text = running.page("/metrics")[1]
    assert "bigfleet_coordinator_leader 1.0" in text
    assert 'bigfleet_coordinator_pending_instructions{shard="east-0"}' in text
    assert 'bigfleet_coordinator_rebalance_skipped_total{reason="cooldown"} 0.0' in text
    assert 'bigfleet_coordinator_identity_rejected_total{rpc="ReportShard"} 0.0' in text


@pytest.mark.rule("coordinator 4/15")
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("admin", "assign-domain", "zone", "east-0"), 2, "'zone' is not a domain; use KEY=VALUE"),
        (("admin", "assign-domain", f"{ZONE}=z", "west"), 1, "shard 'west' is not registered"),
        (("admin", "assign-domain", "rack=r1", "we st"), 2, "shard_id: has the character ' '"),
        (("admin", "remove-shard", "east-0"), 1, "shard 'east-0' reported within the last 90 s"),
        (("admin", "set-quota", "aws", "eu", "east-0"), 2, "'east-0' is not a share of a quota"),
        (
            ("admin", "set-quota", "aws", "eu", "east-0=1", "east-0=2"),
            2,
            "'east-0' is given twice; name each shard once",
        ),
        (("admin", "set-quota", "aws", "eu", f"east-0={2**31}"), 2, "is not a share of a quota"),
        (("admin", "set-quota", "aws", "eu", "east-0=" + "9" * 5_000), 2, "is not a share of a quota"),
        (("admin", "set-quota", "a\udcff", "eu"), 2, "'a\\udcff' is not UTF-8"),
        (("admin", "assign-domain", "rack=\udcff", "east-0"), 2, "is not UTF-8"),
        (("get", "instructions", "--shard", "we st"), 2, "--shard has the character ' '"),
        (("get", "moves", "--shard", "a\udcff"), 2, "--shard has the character"),
        (("admin", "set-provider", "aws", "nowhere"), 2, "'nowhere' is no host:port"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(running: Running, arguments: tuple[str, ...], code: int, told: str) -> None:
    done = running.run(*arguments)

    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.rule("coordinator 3/12")
def test_a_second_process_on_the_file_exits_and_names_the_first(running: Running, tmp_path: Path) -> None:
    store = next(running.log.parent.glob("c.db"))
    done = run_here("coordinator", "--store", f"sqlite://{store}", "--listen", "127.0.0.1:0", "--metrics-addr", "off")

    assert done.returncode == 1
    assert f"c.db: held by process {running.process.pid} on " in done.stderr


@pytest.mark.rule("coordinator 10/6")
def test_a_snapshot_is_saved_restored_and_led_from_under_a_higher_term(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--store", f"sqlite://{tmp_path}/one.db") as first:
        before = first.report("east-0", clusters=["blue"])
        saved = first.run("snapshot", "save", str(tmp_path / "saved"))
        assert saved.returncode == 0, saved.stderr
        again = first.run("snapshot", "save", str(tmp_path / "saved"))
        assert (again.returncode, "exists already" in again.stderr) == (2, True)
    restore = ("snapshot", "restore", str(tmp_path / "saved"), "--store", f"sqlite://{tmp_path}/two.db")
    done = run_here(*restore)
    assert done.returncode == 0, done.stderr
    assert "1 clusters, 1 shards" in done.stdout
    refused = run_here(*restore)
    assert (refused.returncode, "the file has 2 rows already; --force replaces them" in refused.stderr) == (1, True)
    assert run_here(*restore, "--force").returncode == 0

    with coordinator(tmp_path, "--store", f"sqlite://{tmp_path}/two.db") as second:
        after = second.report("east-0", 2, coordinator_term=before.coordinator_term)
        assert after.coordinator_term > before.coordinator_term + 1_000_000
        assert [row["cluster"] for row in second.records("get", "bindings")] == ["blue"]
        held = run_here(*restore, "--force")
        assert (held.returncode, "held by process" in held.stderr) == (1, True)


@pytest.mark.rule("coordinator 1/7")
def test_an_unreachable_store_keeps_it_waiting_with_a_clear_log_and_not_ready(tmp_path: Path) -> None:
    url = f"etcd://127.0.0.1:{free_port()}/bigfleet"
    with coordinator(tmp_path, "--store", url, wait_for="/healthz") as waiting:
        wait_until(lambda: "etcd.campaign_failed" in waiting.log.read_text(), waiting.log.read_text)
        assert waiting.page("/readyz")[0] == 503
        with grpc.insecure_channel(waiting.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            of_service = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            of_process = health.Check(health_pb2.HealthCheckRequest(service=""))
        serving, other = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert (of_process.status, of_service.status) == (serving, other)
        done = waiting.run("get", "shards")
        assert done.returncode == 1
        assert "this replica is not the leader; it does not know the leader yet" in done.stderr
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(PATIENCE_SECONDS) == 0


def test_a_damaged_file_ends_the_start_and_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"this is no database at all, and never was one" * 100)
    before = path.read_bytes()

    done = run_here("coordinator", "--store", f"sqlite://{path}", "--listen", "127.0.0.1:0", "--metrics-addr", "off")

    assert done.returncode == 1
    assert "file is not a database; move it and " in done.stderr
    assert done.stderr.rstrip().endswith(" away, then restore a snapshot or start empty")
    assert path.read_bytes() == before


@pytest.mark.rule("coordinator 1/1")
def test_the_flags_and_defaults_are_those_of_the_page() -> None:
    """docs/spec/coordinator.md §1, but for what every process has."""
    section = SPEC.read_text(encoding="utf-8").split("## 1. Process")[1].split("\n---")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| --")]
    ours = {"--" + field.name.replace("_", "-") for field in fields(CoordinatorFlags)}
    told: set[str] = set()
    for cell in cells:
        first, *others = cell.split(", ")
        told.add(first)
        for other in others:
            # `-keep` beside `--snapshot-export-dir` is `--snapshot-export-keep`.
            parts = first.split("-")
            spelled = {other} | {"-".join(parts[:length]) + other for length in range(3, len(parts))}
            assert len(spelled & ours) == 1, f"{other} of {cell}"
            told |= spelled & ours

    assert ours - told == {"--log-level"}
    assert told <= ours
    assert CoordinatorFlags().listen == ":7790"
    assert CoordinatorFlags().metrics_addr == ":8790"
    assert CoordinatorFlags(store="sqlite:///x").settings() == CoordinatorSettings()


@pytest.mark.rule("coordinator 1/2")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--store is missing: write etcd://HOST:PORT"),
        (("--store", "redis://x"), "--store: 'redis://x' is not a store"),
        (("--store", "etcd://host/bigfleet"), "is not a store"),
        (("--store", "etcd://h:2379"), "is not a store"),
        (("--store", "etcd://h:99999/bigfleet"), "--store: 'h:99999' is not an address"),
        (("--store", "etcd://h:0/bigfleet"), "is not a store"),
        (("--store", "sqlite:///x", "--store-tls-cert", "c"), "--store-tls-key and --store-tls-ca missing"),
        (("--store", "sqlite:///x", "--lease-ttl", "1500ms"), "--lease-ttl: '1500ms' must be whole seconds"),
        (("--store", "sqlite:///x", "--lease-ttl", "9" * 400), "must be whole seconds"),
        (
            ("--store", "sqlite:///x", "--rebalance-min-benefit", "1e999999999"),
            "'1e999999999' is not a number; use a number such as 0.1",
        ),
        (("--store", "sqlite:///x", "--rebalance-min-benefit", "2"), "--rebalance-min-benefit: '2' must be from 0"),
        (("--store", "sqlite:///x", "--rebalance-margin-fraction", "x"), "--rebalance-margin-fraction: 'x' is no"),
        (("--store", "sqlite:///x", "--id", "a b"), "--id has the character ' '"),
        (("--store", "sqlite:///x", "--log-level", "loud"), "--log-level: 'loud' is unknown"),
        (("--store", "sqlite:///x", "--report-interval", "0"), "--report-interval: '0' must be longer than zero"),
        (("--store", "sqlite:///x", "--tls-cert", "c"), "--tls-key and --tls-ca missing"),
        (("--store", "sqlite:///x", "--advertise-addr", "me"), "--advertise-addr: 'me' is not an address"),
        (("--store", "sqlite:///x", "--advertise-addr", ":5"), "--advertise-addr: ':5' cannot be dialled"),
    ],
)
def test_a_wrong_flag_exits_2_and_is_named(flags: tuple[str, ...], told: str) -> None:
    done = run_here("coordinator", *flags)

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert told in done.stderr


@pytest.mark.parametrize("flag", ["--listen", "--metrics-addr"])
def test_an_address_in_use_ends_the_start_in_one_line(tmp_path: Path, flag: str) -> None:
    addresses = {"--listen": "127.0.0.1:0", "--metrics-addr": "127.0.0.1:0"}
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        addresses[flag] = f"127.0.0.1:{holder.getsockname()[1]}"
        flags = [part for pair in addresses.items() for part in pair]
        # In a process of its own: what its end may leave behind is told when everything is taken down.
        done = run_here("coordinator", "--store", f"sqlite://{tmp_path}/c.db", *flags)

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert flag in done.stderr


def test_nobody_at_the_address_is_said_in_one_line() -> None:
    done = run_here("get", "shards", "--addr", f"127.0.0.1:{free_port()}")

    assert done.returncode == 1
    assert "cannot reach a coordinator at 127.0.0.1:" in done.stderr
    assert len(done.stderr.splitlines()) == 1
