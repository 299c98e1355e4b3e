"""`bigfleet provider exec` while a disk is full: that of its state at each step of each verb, and that of its program.

docs/spec/provider.md §11, docs/spec/exec-provider.md. The disk is a real file system that has no block left.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from tests.cli.provider.bmc_stubs import write_stubs
from tests.cli.provider.exec_examples import example
from tests.cli.provider.provider_client import BLOB, CLUSTER, STATES, TRANSITIONAL, VERBS
from tests.cli.provider.rack_program import BEFORE, MACHINE, ExecProvider, Rack, intent_key
from tests.e2e.disks.small_disk import SmallDisk, needs_small_disk, small_disk
from tests.patience import PATIENCE_SECONDS, wait_until

FORMER = dict(zip(VERBS, (pb.MACHINE_STATE_SPECULATIVE, *STATES.values()), strict=False))
slow = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a disk with room."""
    with small_disk(tmp_path / "disk") as made:
        yield made


def check_commit_failed(provider: ExecProvider) -> None:
    """Wait for a commit that the disk refused, whose log line names the file."""
    wait_until(lambda: provider.events("store.commit_failed"), provider.log.read_text)
    for line in provider.events("store.commit_failed"):
        assert str(line["error"]).startswith(f"{provider.state}: "), line


# ---- the disk of the state -------------------------------------------------------------------------------------


@slow
@needs_small_disk
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_refuses_the_call_and_nothing_is_run(verb: str, disk: SmallDisk, tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack")
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path), disk=disk)
    with provider.served() as (client, _pid):
        client.live_until(verb, MACHINE)
        before = client.get(MACHINE)
        disk.fill()
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                client.accept(verb, MACHINE)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        check_commit_failed(provider)
        assert client.get(MACHINE) == before
        assert rack.asked(verb) == []
        disk.make_room()
        wait_until(lambda: provider.events("store.became_available"), provider.log.read_text)
        operation_id = client.accept(verb, MACHINE)
        rack.check_end(verb, client.settled(MACHINE))
    assert [(each.id, each.attempt) for each in rack.asked(verb)] == [(operation_id, 1)]
    assert rack.effects(verb) == [operation_id]


@slow
@needs_small_disk
@pytest.mark.parametrize("verb", VERBS)
def test_a_result_waits_for_room_and_nothing_is_run_again(verb: str, disk: SmallDisk, tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack")
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path), disk=disk)
    with provider.served() as (client, _pid):
        client.live_until(verb, MACHINE)
        rack.hold(BEFORE, verb)
        operation_id = client.accept(verb, MACHINE)
        rack.wait_until_stopped(BEFORE, verb)
        disk.fill()
        rack.go_on(BEFORE, verb)
        check_commit_failed(provider)
        assert rack.effects(verb) == [operation_id]
        assert client.get(MACHINE).state == TRANSITIONAL[verb]
        disk.make_room()
        rack.check_end(verb, client.settled(MACHINE))
        assert client.accept(verb, MACHINE) == operation_id
    assert [(each.id, each.attempt) for each in rack.asked(verb)] == [(operation_id, 1)]
    assert rack.effects(verb) == [operation_id]


@slow
@needs_small_disk
@pytest.mark.parametrize("verb", VERBS)
def test_a_result_that_no_disk_took_is_found_by_the_program_after_a_kill(
    verb: str, disk: SmallDisk, tmp_path: Path
) -> None:
    rack = Rack(tmp_path / "rack")
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path), disk=disk)
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        rack.hold(BEFORE, verb)
        operation_id = client.accept(verb, MACHINE)
        rack.wait_until_stopped(BEFORE, verb)
        disk.fill()
        rack.go_on(BEFORE, verb)
        check_commit_failed(provider)
        os.kill(pid, signal.SIGKILL)
    assert rack.effects(verb) == [operation_id]
    disk.make_room()
    with provider.served() as (client, _pid):
        rack.check_end(verb, client.settled(MACHINE))
        assert client.accept(verb, MACHINE) == operation_id
    assert [(each.id, each.attempt) for each in rack.asked(verb)] == [(operation_id, 1), (operation_id, 2)]
    assert rack.effects(verb) == [operation_id]


# ---- the disk of the program -----------------------------------------------------------------------------------


@slow
@needs_small_disk
@pytest.mark.parametrize("name", ["folder.sh", "folder.py"])
@pytest.mark.parametrize("verb", ["create", "configure", "drain"])
def test_a_program_without_room_fails_its_operation_and_leaves_the_machine_as_it_was(
    name: str, verb: str, disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(disk.folder / "machines"))
    monkeypatch.setenv("SLOTS", "1")
    machine_id, hosts = "folder-000", disk.inside / "machines"
    program = example(name, tmp_path / "program")
    provider = ExecProvider(tmp_path, program, "--failed-hold=1s", state=tmp_path / "s.db", disk=disk)
    with provider.served() as (client, _pid):
        client.live_until(verb, machine_id)
        disk.fill()
        failed_id = client.accept(verb, machine_id)
        # Each verb before it has settled, too.
        wait_until(lambda: len(provider.events("operation.settled")) > VERBS.index(verb), provider.log.read_text)
        settled = provider.events("operation.settled")[-1]
        assert (settled["operation_id"], settled["state_to"]) == (failed_id, "FAILED")
        assert re.fullmatch("BACKEND: .*No space left on device.*", str(settled["error"]))
        # What is there is looked at after the hold, which needs no room.
        wait_until(lambda: client.get(machine_id).state == FORMER[verb], provider.log.read_text)
        assert len(list(hosts.iterdir())) == (0 if verb == "create" else 1), "no draft is left"
        disk.make_room()
        assert client.accept(verb, machine_id) != failed_id
        machine = client.settled(machine_id)
        assert machine.state == STATES[verb], machine.last_error
    (host,) = hosts.iterdir()
    content = json.loads(host.read_text())
    assert content["host_ref"] == machine.host.ref
    assert content.get("cluster", "") == machine.cluster == (CLUSTER if verb == "configure" else "")


@slow
@needs_small_disk
@pytest.mark.parametrize("name", ["folder.sh", "folder.py"])
def test_a_delete_needs_no_room(name: str, disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(disk.folder / "machines"))
    monkeypatch.setenv("SLOTS", "1")
    provider = ExecProvider(tmp_path, example(name, tmp_path / "program"), state=tmp_path / "s.db", disk=disk)
    with provider.served() as (client, _pid):
        client.live_until("delete", "folder-000")
        disk.fill()
        client.accept("delete", "folder-000")
        machine = client.settled("folder-000")
        assert machine.state == pb.MACHINE_STATE_SPECULATIVE, machine.last_error
    assert list((disk.inside / "machines").iterdir()) == []


@needs_small_disk
def test_the_ipmi_example_serves_no_data_of_a_configure_that_had_no_room(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rack = tmp_path / "rack"
    program = example("ipmi.sh", rack)
    (rack / "hosts").write_text("r1 r1 r640 row-1 8 64Gi\n")
    (rack / "password").write_text("secret")
    for name, value in write_stubs(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RACK_SEEDS", str(disk.folder / "seeds"))
    question = {"machine": {"id": "r1", "cluster": CLUSTER}, "operation": {"id": "op-1"}, "blob": "IyEvYmluL3NoCg=="}
    seeds = disk.inside / "seeds" / "r1"

    def run(verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            disk.command([str(program), verb]),
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    assert run("create").returncode == 0
    # There is room for the data, and none for the last file.
    disk.fill()
    disk.make_room(blocks=1)
    failed = run("configure")
    assert failed.returncode not in (0, 75, 69, 78)
    assert "No space left on device" in failed.stderr or "I/O error" in failed.stderr, failed.stderr
    assert list(seeds.iterdir()) == [], "what booting hosts fetch is not there, and no draft"
    assert json.loads(run("adopt").stdout) == {"found": "clean"}
    disk.make_room()
    done = run("configure")
    assert done.returncode == 0, done.stderr
    assert (seeds / "user-data").read_bytes() == BLOB
    assert sorted(path.name for path in seeds.iterdir()) == ["meta-data", "user-data"]
