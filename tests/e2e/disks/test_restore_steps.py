"""Backup and restore of shard, provider and coordinator, by the commands of the documentation, word by word.

The commands of a section are run by a shell as they stand there; what the steps say about stopping and starting a
process is done in between. Each state is backed up while its process runs, changed afterwards, and damaged.
"""

import os
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.ids import ClusterId
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.shard.ownership.retired_clusters import RetiredCluster
from bigfleet.shard.ownership.state_file import StateFile
from tests.coordinator.coordinator_process import coordinator
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, run_bigfleet, serving

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
SERVICE = "/bigfleet.v1alpha1.CapacityProvider"


def commands(page: str, title: str) -> list[str]:
    """Return the commands of a section in order: each block that is set in by four blanks or more."""
    section = re.split(r"^#+ ", (DOCS / page).read_text().split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", section, flags=re.MULTILINE)
    assert len(blocks) == 2, "one command that backs up, and one block that restores"
    return blocks


def run_shell(folder: Path, script: str, *, port: int = 7790) -> None:
    """Run commands of the documentation in a directory; `port` is in the place of the default one."""
    program = folder.parent / "bin" / "bigfleet"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {" ".join(bigfleet())} "$@"\n')
    program.chmod(0o755)
    text = script.replace("127.0.0.1:7790", f"127.0.0.1:{port}")
    done = subprocess.run(
        ["/bin/bash", "-euc", text],
        cwd=folder,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr


def damage(path: Path, text: bytes) -> None:
    """Flip a bit of a value, which SQLite does not find."""
    content = path.read_bytes()
    place = content.index(text)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def refusal(*command: str) -> str:
    """Return what a process says that does not start."""
    done = run_bigfleet(*command)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    return done.stderr


# ---- a shard -----------------------------------------------------------------------------------------------------


def shard_flags(folder: Path) -> tuple[str, ...]:
    flags = ("--data-dir", str(folder / "data"), "--metrics-addr", "off", "--fake-provider", "4")
    return ("shard", "--listen", f"127.0.0.1:{free_port()}", *flags)


@contextmanager
def shard(folder: Path) -> Iterator[None]:
    """Run a shard on the directory of the documentation."""
    flags = shard_flags(folder)
    with serving(flags[2], folder.with_suffix(".log"), *flags):
        yield


def epoch_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0])


def retired(folder: Path, *names: str) -> set[str]:
    """Retire clusters in the state of a stopped shard, and return all that are retired."""
    with StateFile.open(folder / "data", shard_id="shard-0", clock=SystemClock()) as file:
        for name in names:
            times = {"since_unix_nanos": 1, "until_unix_nanos": 2**62}
            file.retirements.put(RetiredCluster(cluster=ClusterId(name), owner="", reason="gone", **times))
        return set(map(str, file.retirements.records))


def test_a_shard_is_restored_by_the_documented_steps(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    back_up, restore = commands("operating.md", "Backup and restore of shard.db")
    retired(folder, "before-the-backup")
    with shard(folder):
        run_shell(folder, back_up)
    retired(folder, "after-the-backup")
    with shard(folder):
        pass
    state = folder / "data" / "shard.db"
    former = epoch_of(state)
    damage(state, b"after-the-backup")

    text = refusal(*shard_flags(folder))
    assert f"{state}: damaged: " in text
    assert "; restore the file from a backup, or move shard.db and shard.db.commits away" in text

    run_shell(folder, restore)
    wait_until(lambda: SystemClock().unix_nanos() // 10**9 > former + 1, "the wall clock stands")
    with shard(folder):
        pass
    assert epoch_of(state) > former
    assert retired(folder) == {"before-the-backup"}


# ---- a provider --------------------------------------------------------------------------------------------------


def provider_flags(folder: Path) -> tuple[str, ...]:
    flags = ("--state", str(folder / "provider.db"), "--metrics-addr", "off", "--seed-count", "4", "--calm")
    return ("provider", "simulated", "--addr", f"127.0.0.1:{free_port()}", "--time-scale", "0.001", *flags)


@contextmanager
def provider(folder: Path) -> Iterator[grpc.Channel]:
    """Run a simulated provider on the file of the documentation."""
    flags = provider_flags(folder)
    with serving(flags[3], folder.with_suffix(".log"), *flags), grpc.insecure_channel(flags[3]) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: Any, answer: Any) -> Any:
    stub = channel.unary_unary(f"{SERVICE}/{method}", type(request).SerializeToString, answer.FromString)
    return stub(request, timeout=PATIENCE_SECONDS)


def states(channel: grpc.Channel) -> dict[str, int]:
    listed = call(channel, "List", provider_pb2.ListFilter(), provider_pb2.MachineList)
    return {machine.id: machine.state for machine in listed.machines}


def create(channel: grpc.Channel, machine_id: str, *, epoch: int) -> None:
    """Create a machine, and wait until it is there."""
    request = provider_pb2.CreateRequest(machine_id=machine_id, shard_id="s", shard_epoch=epoch, sequence_number=1)
    call(channel, "Create", request, provider_pb2.TransitionAck)
    wait_until(lambda: states(channel)[machine_id] == provider_pb2.MACHINE_STATE_IDLE, "never created")


def incarnation_of(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as connection:
        return bytes(connection.execute("SELECT value FROM meta WHERE key = 'incarnation'").fetchone()[0])


def test_a_provider_is_restored_by_the_documented_steps(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    back_up, restore = commands("providers-operating.md", "Backups")
    with provider(folder) as channel:
        first, second, *_ = states(channel)
        create(channel, first, epoch=7)
        run_shell(folder, back_up)
        create(channel, second, epoch=7)
    state = folder / "provider.db"
    former = incarnation_of(state)
    damage(state, second.encode())

    text = refusal(*provider_flags(folder))
    assert f"{state}: damaged: " in text
    assert "restore it from a backup" in text

    run_shell(folder, restore)
    with provider(folder) as channel:
        assert states(channel)[first] == provider_pb2.MACHINE_STATE_IDLE
        assert states(channel)[second] == provider_pb2.MACHINE_STATE_SPECULATIVE
        with pytest.raises(grpc.RpcError) as fenced:
            create(channel, first, epoch=6)
        assert fenced.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert incarnation_of(state) != former


# ---- a coordinator -----------------------------------------------------------------------------------------------


def term_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()[0])


def test_a_coordinator_is_restored_by_the_documented_steps(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    state = folder / "coordinator.db"
    back_up, restore = commands("coordinator.md", "Backup and restore of a SQLite store")
    with coordinator(tmp_path, "--store", f"sqlite://{state}") as running:
        running.report("east-0", clusters=["blue"])
        run_shell(folder, back_up, port=running.port)
        running.report("east-0", cycle=2, clusters=["blue", "green"])
    for _ in range(2):
        with coordinator(tmp_path, "--store", f"sqlite://{state}"):
            pass
    former = term_of(state)
    damage(state, b"green")

    text = refusal("coordinator", "--store", f"sqlite://{state}", "--metrics-addr", "off")
    assert f"{state}: damaged: " in text
    assert "; move it and coordinator.db.commits away, then restore a snapshot" in text

    run_shell(folder, restore)
    with coordinator(tmp_path, "--store", f"sqlite://{state}") as running:
        assert [row["cluster"] for row in running.records("get", "bindings")] == ["blue"]
    assert term_of(state) > former
