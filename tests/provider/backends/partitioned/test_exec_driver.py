"""A program that carves: what it is given, what its exit codes mean, and that it never outlives its time.

docs/spec/provider.md §22. The program is a real one.
"""

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import FoundKind, Op, Transient
from bigfleet.provider.backends.partitioned.exec_driver import ExecDriver
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize, Standing
from bigfleet.provider.operations.invoke import DeadlinePassed, within
from bigfleet.provider.programs.runner import ProgramFailed
from bigfleet.provider.records.kinds import Kind
from tests.patience import wait_until_async
from tests.provider.backends.partitioned.hosts import Provider, document, node
from tests.provider.harness import metric

#: Longer than a busy machine takes to run a small program, as short as a test can wait for that to pass.
TRANSITION_SECONDS = 8.0
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
cat > "$1.in"
if [ -f hang ]; then sleep 600 & echo $! > child; wait; fi
if [ -f "$1.err" ]; then cat "$1.err" >&2; exit "$(cat code)"; fi
if [ -f "$1.out" ]; then cat "$1.out"; fi
"""
CARVED = Carved("n1", "g-z-half-000", CarveSize(memory_mib=15_960, vcpus=2, disk_mib=49_980, disks=2, spindles=3))
MACHINE = Machine(
    id=MachineId("p/g/z/half/000"),
    state=MachineState.CREATING,
    instance_type="half",
    zone="z",
    capacity_type=CapacityType.BARE_METAL,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = tmp_path / "carve"
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def driver_in(folder: Path) -> ExecDriver:
    return ExecDriver(str(folder / "carve"), clock=SystemClock())


def op(kind: Kind = Kind.CREATE) -> Op:
    return Op(id="op-1", kind=kind, attempt=2, deadline_monotonic_seconds=SystemClock().monotonic_seconds() + 60)


def given(folder: Path, verb: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"{verb}.in").read_text())
    return read


async def test_a_create_tells_host_instance_and_size_and_answers_a_node_name(folder: Path) -> None:
    (folder / "create.out").write_text('{"node_name": "node-1", "more": [1]}\n')
    assert await driver_in(folder).create(MACHINE, CARVED, op()) == "node-1"
    told = given(folder, "create")
    assert 0 < told["operation"].pop("seconds_left") <= 60
    assert told == {
        "machine_id": "p/g/z/half/000",
        "instance_type": "half",
        "zone": "z",
        "host": "n1",
        "instance": "g-z-half-000",
        "memory_mebibytes": 15_960,
        "vcpus": 2,
        "disks": [{"size_mebibytes": 49_980, "spindles": 2}] * 2,
        "operation": {"id": "op-1", "attempt": 2},
    }


async def test_each_verb_has_its_own_question_and_answer(folder: Path) -> None:
    driver = driver_in(folder)
    assert await driver.configure(MACHINE, CARVED, "c-1", b"\x00blob", op(Kind.CONFIGURE)) == ""
    assert (given(folder, "configure")["cluster"], given(folder, "configure")["blob"]) == ("c-1", "AGJsb2I=")
    (folder / "ready.out").write_text('{"ready": true}')
    assert await driver.ready(MACHINE, CARVED, "c-1", op(Kind.CONFIGURE))
    await driver.drain(MACHINE, CARVED, 30, op(Kind.DRAIN))
    assert given(folder, "drain")["grace_seconds"] == 30
    await driver.delete(MACHINE, CARVED, op(Kind.DELETE))
    (folder / "adopt.out").write_text('{"found": "serving"}')
    assert await driver.adopt(MACHINE, CARVED) is FoundKind.SERVING
    (folder / "inventory.out").write_text('{"instances": [{"host": "n1", "instance": "i", "node_name": "k"}]}')
    assert await driver.inventory() == [Standing(host="n1", instance="i", node_name="k")]


async def test_exit_75_may_be_tried_again_and_the_last_line_of_the_errors_is_the_text(folder: Path) -> None:
    (folder / "create.err").write_text("a warning\nthe array is busy\n")
    (folder / "code").write_text("75")
    with pytest.raises(Transient, match=r"^the array is busy$"):
        await driver_in(folder).create(MACHINE, CARVED, op())
    (folder / "code").write_text("3")
    with pytest.raises(ProgramFailed, match=r"^the array is busy$"):
        await driver_in(folder).create(MACHINE, CARVED, op())
    (folder / "create.err").write_text("")
    with pytest.raises(ProgramFailed, match=r"^create ended with exit code 3$"):
        await driver_in(folder).create(MACHINE, CARVED, op())


@pytest.mark.parametrize("answer", ["no json", '{"ready": "yes"}', "{}"])
async def test_an_answer_that_is_not_understood_is_a_failure(answer: str, folder: Path) -> None:
    (folder / "ready.out").write_text(answer)
    with pytest.raises(ProgramFailed, match="ready answered what is not understood"):
        await driver_in(folder).ready(MACHINE, CARVED, "c-1", op())


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] not in "ZX"


async def test_a_program_that_overruns_is_killed_with_what_it_started(folder: Path) -> None:
    (folder / "hang").write_text("")
    left: list[asyncio.Task[str]] = []
    with pytest.raises(DeadlinePassed):
        await within(driver_in(folder).create(MACHINE, CARVED, op()), 1.0, left.append)
    await asyncio.wait(left)
    assert left[0].cancelled()
    child = int((folder / "child").read_text())

    # The kernel ends what has been killed when it gets a processor.
    async def is_gone() -> bool:
        return not is_running(child)

    await wait_until_async(is_gone)


async def test_a_program_that_is_gone_is_a_failure_that_names_it(folder: Path) -> None:
    os.unlink(folder / "carve")
    with pytest.raises(ProgramFailed, match="carve: No such file or directory"):
        await driver_in(folder).create(MACHINE, CARVED, op())


async def settled(provider: Provider, machine_id: str) -> Machine:
    """Return the machine once it rests."""

    async def is_at_rest() -> bool:
        return (await provider.core.get(machine_id)).state is not MachineState.CREATING

    await wait_until_async(is_at_rest)
    return (await provider.core.get(machine_id)).machine


async def test_a_provider_over_a_program_succeeds_retries_fails_and_times_out(folder: Path) -> None:
    before = asyncio.all_tasks()
    (folder / "inventory.out").write_text('{"instances": []}')
    body = document({"n": node("g")})
    provider = Provider(body, driver=driver_in(folder), transition_timeout_seconds=TRANSITION_SECONDS)
    await provider.start()
    names = [f"p/g/z/quarter/00{number}" for number in range(4)]
    await provider.core.create(names[0])
    assert (await settled(provider, names[0])).host.ref == "n/g-z-quarter-000"

    (folder / "create.err").write_text("the array is busy\n")
    (folder / "code").write_text("75")
    await provider.core.create(names[1])

    async def was_retried() -> bool:
        return metric(provider.core, "retries_total", kind="create") > 0

    await wait_until_async(was_retried)
    (folder / "code").write_text("9")
    failed = await settled(provider, names[1])
    assert (failed.state, failed.last_error) == (MachineState.FAILED, "BACKEND: ProgramFailed: the array is busy")

    (folder / "create.err").unlink()
    (folder / "hang").write_text("")
    await provider.core.create(names[2])
    hung = await settled(provider, names[2])
    assert hung.last_error == "TIMEOUT: timeout: create did not end in 8 s"
    # All three keep their room.
    assert await provider.ids(MachineState.SPECULATIVE) == [names[3]]
    await provider.core.stop()
    # What the deadline left behind kills its program and waits for its end: no loop may close before.
    if left := asyncio.all_tasks() - before:
        await asyncio.wait(left)
