"""Faults of disks and files: full, deleted under a running process, wiped, changed into what cannot be read."""

from contextlib import suppress

import grpc

from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired
from tests.alerts.provider_calls import create_all
from tests.processes import run_bigfleet

POLICY, BROKEN_POLICY = "clusters: {}\n", "clusters: [\n"
ZONE = "topology.kubernetes.io/zone=zone-a"


def build(fleet: Fleet) -> None:
    """A shard with everything that it can write, and processes whose files are taken away."""
    provider = fleet.provider("full-provider", "breakable")
    served = fleet.provider("provider", "breakable")
    replica = fleet.coordinator("replica")
    written = ("--audit-log", "{dir}/audit.log", "--record", "{dir}/recording")
    linked = ("--provider-addr", served.address, "--coordinator-addr", replica.address)
    fleet.shard("full-shard", "--id", "full", *linked, *written)
    fleet.coordinator("full-replica")
    fleet.shard("lost-shard")
    fleet.provider("lost-provider", "breakable")
    fleet.coordinator("lost-replica")
    wiped = fleet.coordinator("wiped-replica")
    (fleet.folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
    policy = ("--cluster-policy", str(fleet.folder / "policy.yaml"))
    fleet.shard("wiped-shard", "--provider-addr", provider.address, "--coordinator-addr", wiped.address, *policy)
    fleet.cluster("full", "full-shard")


def fill_shard(fleet: Fleet) -> None:
    """Give a shard no room; then ask it for machines, and have the coordinator give it a domain."""
    fleet["full-shard"].fill_disk()
    fleet.clusters["full"].report({"cpu": 20})
    done = run_bigfleet("admin", "assign-domain", ZONE, "full", "--addr", fleet["replica"].address)
    assert done.returncode == 0, done.stderr


def fill_provider(fleet: Fleet) -> None:
    """Give a provider no room, and have it make machines."""
    fleet["full-provider"].fill_disk()
    with suppress(grpc.RpcError):
        create_all(fleet["full-provider"].address)


def change_tables(fleet: Fleet) -> None:
    """Change the tables of a coordinator that has no room."""
    done = run_bigfleet("admin", "set-provider", "aws", "127.0.0.1:9", "--addr", fleet["full-replica"].address)
    assert done.returncode == 1, "it stored what there is no room for"


def set_policy(fleet: Fleet, text: str) -> None:
    """Change the cluster policy of a shard."""
    (fleet.folder / "policy.yaml").write_text(text, encoding="utf-8")
    fleet["wiped-shard"].reload()


def lost(alert: str, name: str, file: str) -> Fault:
    """The state file of a process is moved away while it runs, and back."""
    return Fault(
        f"{file} is gone while its process runs",
        {alert: name},
        lambda fleet: fleet[name].lose(file),
        lambda fleet: fleet[name].find(file),
    )


FULL_DISKS = Course(
    build,
    stages=(
        (
            Fault(
                "the disk of a shard is full",
                {
                    "BigFleetShardAuditWriteErrors": "full-shard",
                    "BigFleetShardRecordingEnded": "full-shard",
                    "BigFleetShardInstructionsFail": "full-shard",
                    "BigFleetCoordinatorInstructionsFail": "replica",
                },
                fill_shard,
                lambda fleet: fleet["full-shard"].make_room(),
            ),
            Fault(
                "the disk of a provider is full",
                {"BigFleetProviderStoreErrors": "full-provider"},
                fill_provider,
                lambda fleet: fleet["full-provider"].make_room(),
            ),
            Fault(
                "the disk of a coordinator is full",
                {"BigFleetCoordinatorStoreErrors": "full-replica"},
                lambda fleet: fleet["full-replica"].fill_disk(),
                lambda fleet: fleet["full-replica"].make_room(),
                again=change_tables,
            ),
            lost("BigFleetShardStateFileLost", "lost-shard", "shard.db"),
            lost("BigFleetProviderStateFileLost", "lost-provider", "p.db"),
            lost("BigFleetCoordinatorStateFileLost", "lost-replica", "c.db"),
            Fault(
                "the store of a coordinator is wiped",
                {"BigFleetCoordinatorTermRaised": "wiped-replica"},
                lambda fleet: fleet["wiped-replica"].start_anew(),
                nothing,
            ),
            Fault(
                "the cluster policy of a shard is changed into what cannot be read",
                {"BigFleetShardClusterPolicyRefused": "wiped-shard"},
                nothing,
                lambda fleet: set_policy(fleet, POLICY),
                again=lambda fleet: set_policy(fleet, BROKEN_POLICY),
            ),
        ),
    ),
    # What starts again is down for as long as a start takes.
    also=frozenset(
        {
            Fired("BigFleetCoordinatorDown", "wiped-replica"),
            Fired("BigFleetShardReportsUnanswered", "wiped-shard"),
        }
    ),
)
