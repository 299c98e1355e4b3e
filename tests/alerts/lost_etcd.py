"""Faults of etcd: the store of the coordinator's replicas is killed."""

import shutil

import pytest

from tests.alerts.faults import Course, Fault
from tests.alerts.programs import Fleet
from tests.coordinator.stores.etcd_process import MISSING, Cluster

#: Replicas of one coordinator; an alert tells coordinators apart by their job.
REPLICAS = ("replica-0", "replica-1")


def build(fleet: Fleet) -> None:
    """Two replicas of a coordinator on one member of etcd, and a shard."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip(MISSING)
    fleet.etcd = etcd = Cluster(program, fleet.folder, 1)
    etcd.start()
    for name in REPLICAS:
        fleet.coordinator(name, "--store", f"etcd://{etcd.endpoints[0]}/bigfleet", "--lease-ttl", "1s")
    fleet.shard("shard")


LOST_ETCD = Course(
    build,
    stages=(
        (
            Fault(
                "etcd is killed",
                {"BigFleetCoordinatorWithoutLeader": "coordinator"},
                lambda fleet: fleet.kill_etcd(),
                lambda fleet: fleet.start_etcd(),
            ),
        ),
    ),
)
