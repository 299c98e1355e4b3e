"""Whole fleets are upgraded from an earlier release and back: state is kept, and no machine that serves is touched.

docs/upgrading.md says the same to administrators.
"""

import shutil
from pathlib import Path

import pytest

from bigfleet.coordinator.stores.sqlite import SCHEMA_VERSION as COORDINATOR_SCHEMA
from bigfleet.provider.storage.sqlite import SCHEMA_VERSION as PROVIDER_SCHEMA
from bigfleet.shard.ownership.state_file import SCHEMA as SHARD_SCHEMA
from tests.upgrade.fleet import ROLES, Fleet, fleet_of
from tests.upgrade.previous import EARLIER_SCHEMA, SAME_SCHEMA, last_release, own_program, program_of

pytestmark = pytest.mark.slow

#: What the release with an earlier schema says of the files of today. A provider reads that of its cloud first.
REFUSALS = {
    "shard": f"shard.db: has schema {SHARD_SCHEMA}, this program knows ",
    "coordinator": f"coordinator.db: has schema {COORDINATOR_SCHEMA}, this program knows ",
    "provider": "provider.db.cloud: this is no simulated cloud that this version reads",
}
OWN_SCHEMAS = {"shard": SHARD_SCHEMA, "coordinator": COORDINATOR_SCHEMA, "provider": PROVIDER_SCHEMA}


def upgrade(fleet: Fleet, program: Path, roles: tuple[str, ...] = ROLES) -> None:
    """Replace one process after another; after each the fleet must be as it was."""
    before = fleet.bound()
    for role in roles:
        epoch = fleet.registered_epoch()
        fleet.replace(role, program)
        fleet.wait_until_met()
        assert fleet.bound() == before, f"{role} changed machines:\n{fleet.log('shard')[-4000:]}"
        fleet.wait_until_registered(epoch + (role == "shard"))


def grow(fleet: Fleet, cluster: str) -> None:
    """Let a cluster ask for more; it gets machines, and keeps those that it has."""
    before = fleet.bound()
    fleet.clusters[cluster].ask_for(fleet.clusters[cluster].cpus + 200)
    fleet.wait_until_met()
    after = fleet.bound()
    assert after.items() > before.items()
    assert {after[machine][0] for machine in after.keys() - before.keys()} == {cluster}


def test_the_last_release_is_upgraded_and_taken_back_while_it_runs(tmp_path: Path) -> None:
    """A server before its clients, and back in the other order, with more demand after each."""
    previous = program_of(last_release(), tmp_path / "previous")
    with fleet_of(previous, tmp_path) as fleet, fleet.watched():
        upgrade(fleet, own_program())
        assert fleet.schemas == OWN_SCHEMAS, "the release has files of another schema: it cannot be taken back"
        grow(fleet, "blue")
        upgrade(fleet, previous, ROLES[::-1])
        assert fleet.schemas == OWN_SCHEMAS
        grow(fleet, "green")

    assert fleet.harmed == []


@pytest.mark.long
def test_files_of_an_earlier_schema_are_taken_over_and_backups_lead_back(tmp_path: Path) -> None:
    """An older program refuses the new files by name, and starts on the backups of before the upgrade."""
    previous = program_of(EARLIER_SCHEMA.commit, tmp_path / "previous")
    with fleet_of(previous, tmp_path) as fleet, fleet.watched():
        back_up(fleet, previous)
        upgrade(fleet, own_program())
        assert fleet.schemas == EARLIER_SCHEMA.schemas
        before = fleet.bound()

        for role in ROLES[::-1]:
            fleet.stop(role)
        assert fleet.schemas == OWN_SCHEMAS
        for role, reason in REFUSALS.items():
            assert reason in fleet.refusal(role, previous)
        restore(fleet, previous)
        for role in ROLES:
            fleet.start(role, previous)
        fleet.wait_until_met()
        assert fleet.bound() == before
        grow(fleet, "green")

    assert fleet.harmed == []


def back_up(fleet: Fleet, program: Path) -> None:
    """Copy the state of a running fleet, as docs/upgrading.md says."""
    fleet.run(program, "shard", "backup", "--data-dir", str(fleet.folder), "backup-shard.db")
    fleet.run(program, "provider", "backup", "--state", "provider.db", "backup-provider.db")
    fleet.run(program, "snapshot", "save", "--addr", fleet.addresses["coordinator"], "backup-coordinator")


def restore(fleet: Fleet, program: Path) -> None:
    """Put the copies in the places of the files, which are moved away."""
    damaged = fleet.folder / "newer"
    damaged.mkdir()
    for name in ("shard", "provider", "coordinator"):
        for file in fleet.folder.glob(f"{name}.db*"):
            file.rename(damaged / file.name)
        for file in fleet.folder.glob(f"backup-{name}.db*"):
            shutil.copy(file, fleet.folder / file.name.removeprefix("backup-"))
    store = f"sqlite://{fleet.folder}/coordinator.db"
    fleet.run(program, "snapshot", "restore", "backup-coordinator", "--store", store)


def test_what_stands_for_releases_has_the_files_that_their_names_say() -> None:
    assert SAME_SCHEMA.schemas == OWN_SCHEMAS
    assert all(EARLIER_SCHEMA.schemas[role] < own for role, own in OWN_SCHEMAS.items())
