"""A provider over a program: what each verb is asked, what its answer and exit code become, and what is never run.

docs/spec/exec-provider.md. The programs are real ones; their answers are files beside them.
"""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import structlog

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import (
    Adopts,
    Compensates,
    Deletes,
    Feeds,
    FoundKind,
    Host,
    LateResult,
    Limits,
    MachineView,
    Op,
    PartialFacts,
    Slot,
    Stockout,
    Transient,
)
from bigfleet.provider.backends.exec.backend import (
    READY_MACHINES_ADVISED_MAX,
    ExecBackend,
    ReadyByInventory,
    ReadyByProgram,
)
from bigfleet.provider.backends.exec.calls import ProgramCalls
from bigfleet.provider.backends.exec.description import Description, describe
from bigfleet.provider.inventory.offers import seed_offers
from bigfleet.provider.inventory.reconcile import MISSING_PASSES
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.programs.runner import TERMINATE_SECONDS, ProgramFailed, ProgramRunner
from bigfleet.provider.records.kinds import Kind
from tests.patience import wait_until_async
from tests.provider.harness import make_core, metric, started

ALL = ("inventory", "create", "configure", "drain", "delete", "adopt", "ready", "compensate", "feed")
FEW = ("inventory", "create", "configure", "drain")
BLOB = b"#cloud-config\nruncmd: [[kubeadm, join, --token, abcdef.0123456789abcdef]]\n"
#: Answers `VERB.out`, exits with `VERB.code`, says `VERB.err`, and keeps what it was asked in `VERB.in`.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
echo "$1" >> runs
cat > "$1.in"
if [ -f "$1.out" ]; then cat "$1.out"; fi
if [ -f "$1.err" ]; then cat "$1.err" >&2; fi
if [ -f "$1.code" ]; then exit "$(cat "$1.code")"; fi
"""
MACHINE = Machine(
    id=MachineId("r/0"),
    state=MachineState.CONFIGURING,
    host=HostRef("rack-7", "bmc-0"),
    cluster=ClusterId("team-a"),
    instance_type="r640",
    zone="row-1",
    capacity_type=CapacityType.BARE_METAL,
    labels={"rack": "7"},
    node_name="n0",
)
SLOT_LINE = '{"slot": {"id": "r/0", "instance_type": "r640", "zone": "row-1", "capacity_type": "bare_metal"}}\n'
END_LINE = '{"end": true}\n'


class Rack:
    """A folder with a program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "program"
        program.write_text(PROGRAM)
        program.chmod(0o700)
        self.answer("inventory", SLOT_LINE + END_LINE)
        runner = ProgramRunner(str(program), clock=SystemClock(), terminate_seconds=TERMINATE_SECONDS)
        self.calls = ProgramCalls(runner, clock=SystemClock())

    def answer(self, verb: str, text: str = "", *, code: int = 0, errors: str = "") -> None:
        (self.folder / f"{verb}.out").write_text(text)
        (self.folder / f"{verb}.err").write_text(errors)
        (self.folder / f"{verb}.code").write_text(str(code))

    def asked(self, verb: str) -> dict[str, Any]:
        question: dict[str, Any] = json.loads((self.folder / f"{verb}.in").read_text())
        return question

    def runs(self, verb: str) -> int:
        runs = self.folder / "runs"
        return runs.read_text().split().count(verb) if runs.exists() else 0

    async def described(self, verbs: tuple[str, ...] = ALL, **more: object) -> Description:
        self.answer(
            "describe", json.dumps({"api": 1, "provider": "rack-7", "verbs": verbs, "reset": "reimage", **more})
        )
        return await describe(self.calls.runner, needs_inventory="inventory" in verbs, concurrency=16)

    async def backend(self, verbs: tuple[str, ...] = ALL) -> ExecBackend:
        return ExecBackend(self.calls, await self.described(verbs), clock=SystemClock(), concurrency=16)


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    return Rack(tmp_path)


def op(kind: Kind = Kind.CREATE) -> Op:
    deadline_seconds = SystemClock().monotonic_seconds() + 60
    return Op(id="op-1", kind=kind, attempt=2, deadline_monotonic_seconds=deadline_seconds)


async def test_every_verb_is_asked_about_the_machine_and_the_operation(rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("create", '{"host_ref": "bmc-0", "allocatable": {"cpu": "8"}, "price_usd_per_hour": 1}')
    assert await backend.create(MACHINE, op()) == Host(ref="bmc-0", allocatable={"cpu": "8"}, price_usd_per_hour=1.0)
    question = rack.asked("create")
    assert 0 < question["operation"].pop("seconds_left") <= 60
    machine = {
        "id": "r/0",
        "instance_type": "r640",
        "zone": "row-1",
        "capacity_type": "bare_metal",
        "labels": {"rack": "7"},
        "host_ref": "bmc-0",
        "cluster": "team-a",
        "node_name": "n0",
    }
    assert question == {"machine": machine, "operation": {"id": "op-1", "attempt": 2}}

    rack.answer("configure", '{"node_name": "n1"}')
    assert await backend.configure(MACHINE, "team-a", BLOB, op(Kind.CONFIGURE)) == "n1"
    assert base64.b64decode(rack.asked("configure")["blob"]) == BLOB
    await backend.drain(MACHINE, 30, op(Kind.DRAIN))
    assert rack.asked("drain")["grace_seconds"] == 30
    await backend.delete(MACHINE, op(Kind.DELETE))
    assert "blob" not in rack.asked("delete")
    rack.answer("adopt", '{"found": "serving"}')
    assert (await backend.adopt(MACHINE)).host == Host(ref="bmc-0", node_name="n0")
    assert "operation" not in rack.asked("adopt")
    rack.answer("adopt", '{"found": "no_host"}')
    assert (await backend.adopt(MACHINE)).kind is FoundKind.NO_HOST
    await backend.compensate(MACHINE, LateResult(op=op(), host=Host(ref="bmc-9")))
    assert rack.asked("compensate")["late"] == {"verb": "create", "host_ref": "bmc-9"}


async def test_a_verb_that_is_not_named_does_not_exist_for_the_kit(rack: Rack) -> None:
    few, every = await rack.backend(FEW), await rack.backend(ALL)
    for protocol in (Deletes, Adopts, Compensates, Feeds):
        assert not isinstance(few, protocol)
        assert isinstance(every, protocol)


@pytest.mark.parametrize(
    ("code", "output", "error", "text"),
    [
        (75, '{"retry_after_seconds": 7}', Transient, "the array is busy"),
        (69, '{"retry_after_seconds": 7}', Stockout, "the array is busy"),
        (78, "", ProgramFailed, "configuration error: the array is busy"),
        (1, "", ProgramFailed, "the array is busy"),
        (64, "", ProgramFailed, "the array is busy"),
        (0, '{"host_ref": "h", "colour": 1}', ProgramFailed, "unknown field `colour`"),
        (0, "{}", ProgramFailed, "missing required field `host_ref`"),
        (0, "garbage", ProgramFailed, "create answered what is not understood"),
    ],
)
async def test_what_an_exit_code_means(code: int, output: str, error: type[Exception], text: str, rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("create", output, code=code, errors="a warning\nthe array is busy\n\n")
    with pytest.raises(error) as raised:
        await backend.create(MACHINE, op())
    assert text in str(raised.value)
    if isinstance(raised.value, Transient | Stockout):
        assert raised.value.retry_after_seconds == 7.0
    assert bool(backend.configuration_fault) is (code == 78)
    rack.answer("create", '{"host_ref": "h"}')
    await backend.create(MACHINE, op())
    assert backend.configuration_fault == ""


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "not executable"])
async def test_a_program_that_cannot_be_started_is_a_fault_until_it_can(is_missing: bool, rack: Rack) -> None:
    backend = await rack.backend()
    program = rack.folder / "program"
    away = rack.folder / "away"
    if is_missing:
        program.rename(away)
    else:
        program.chmod(0o644)
    for call in (backend.create(MACHINE, op()), backend.inventory()):
        with pytest.raises(ProgramFailed):
            await call
        assert backend.fault.startswith("the program cannot be started: ")
        assert str(program) in backend.fault
    if is_missing:
        away.rename(program)
    else:
        program.chmod(0o755)
    rack.answer("create", "", code=1)
    with pytest.raises(ProgramFailed):
        await backend.create(MACHINE, op())
    assert backend.fault == ""


async def test_a_node_name_with_a_part_of_the_blob_is_refused(rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("configure", json.dumps({"node_name": BLOB[20:50].decode()}))
    with pytest.raises(ProgramFailed, match=r"^configure answered a node_name with a part of the blob$"):
        await backend.configure(MACHINE, "team-a", BLOB, op(Kind.CONFIGURE))


async def test_the_blob_is_in_no_argument_and_no_environment(rack: Rack) -> None:
    program = rack.folder / "program"
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\ncat "/proc/$$/cmdline" "/proc/$$/environ" > seen\ncat > /dev/null\n'
    )
    backend = ExecBackend(
        rack.calls,
        Description(provider="r", verbs=frozenset(FEW), limits=Limits(), inventory_seconds_max=60.0),
        clock=SystemClock(),
        concurrency=1,
    )
    await backend.configure(MACHINE, "team-a", BLOB, op(Kind.CONFIGURE))
    seen = (rack.folder / "seen").read_bytes()
    assert b"configure" in seen
    for form in (BLOB, base64.b64encode(BLOB)):
        assert form[:16] not in seen


async def test_an_inventory_that_fails_is_discarded(rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("inventory", SLOT_LINE + END_LINE, code=1, errors="no route to host")
    with pytest.raises(ProgramFailed, match="no route to host"):
        await backend.inventory()


async def test_without_the_verb_inventory_no_host_is_ever_lost(rack: Rack) -> None:
    backend = await rack.backend(("create", "configure", "drain"))
    assert await backend.inventory() == PartialFacts(facts=(), unread_host_prefixes=("",))
    assert rack.runs("inventory") == 0


async def test_a_host_that_no_inventory_shows_stays_idle(rack: Rack) -> None:
    """Slots come from elsewhere, and the program cannot list hosts: passes say nothing about them."""
    backend = await rack.backend(("create", "configure", "drain"))
    rack.answer("create", '{"host_ref": "bmc-0"}')
    slot = Slot(id="r/0", instance_type="t", zone="z", capacity_type=CapacityType.BARE_METAL)
    options = CoreOptions(offers=seed_offers([slot]), reconcile_interval_seconds=0.01, is_inline=True)
    core = await started(make_core(backend, options=options))
    await core.create("r/0")

    async def is_created() -> bool:
        return (await core.get("r/0")).machine.state is MachineState.IDLE

    await wait_until_async(is_created)
    before = metric(core, "reconcile_duration_seconds_count", outcome="ok")

    async def have_passed() -> bool:
        return metric(core, "reconcile_duration_seconds_count", outcome="ok") > before + 2 * MISSING_PASSES

    await wait_until_async(have_passed)
    machine = (await core.get("r/0")).machine
    assert (machine.state, machine.host.ref) == (MachineState.IDLE, "bmc-0")
    await core.stop()


async def test_readiness_by_program_is_asked_until_it_is_true(rack: Rack) -> None:
    backend = await rack.backend()
    readiness = ReadyByProgram(backend, SystemClock())
    rack.answer("ready", '{"ready": false}')
    assert not await readiness.ready(MACHINE, "team-a", op(Kind.CONFIGURE))
    rack.answer("ready", '{"ready": true}')
    assert await readiness.ready(MACHINE, "team-a", op(Kind.CONFIGURE))


async def test_readiness_by_inventory_needs_one_that_began_after_the_configure(rack: Rack) -> None:
    backend = await rack.backend()
    readiness = ReadyByInventory(backend)
    host = '{"host": {"id": "r/0", "host_ref": "bmc-0", "ready_in": "team-a"}}\n'
    rack.answer("inventory", SLOT_LINE + host + END_LINE)
    await backend.inventory()
    await backend.configure(MACHINE, "team-a", BLOB, op(Kind.CONFIGURE))
    rack.answer("inventory", SLOT_LINE + END_LINE)
    assert not await readiness.ready(MACHINE, "team-a", op(Kind.CONFIGURE))
    assert rack.runs("inventory") == 2
    # One that was read a moment ago serves every machine.
    rack.answer("inventory", SLOT_LINE + host + END_LINE)
    assert not await readiness.ready(MACHINE, "team-a", op(Kind.CONFIGURE))
    assert rack.runs("inventory") == 2


async def test_readiness_by_inventory_is_false_while_the_inventory_fails(rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("inventory", "", code=1, errors="down")
    with pytest.raises(Transient, match="down"):
        await ReadyByInventory(backend).ready(MACHINE, "team-a", op(Kind.CONFIGURE))


class ReadyByName(ExecBackend):
    """A backend that runs no program: one machine is ready."""

    def __init__(self) -> None:
        pass

    async def is_ready_by_program(self, machine: MachineView, op: Op) -> bool:
        return machine.id == "ready"


def configuring(name: str) -> Machine:
    return Machine(id=MachineId(name), state=MachineState.CONFIGURING)


async def test_many_machines_that_wait_are_logged_once_with_advice() -> None:
    readiness = ReadyByProgram(ReadyByName(), SystemClock())
    with structlog.testing.capture_logs() as logs:
        for number in range(READY_MACHINES_ADVISED_MAX):
            await readiness.ready(configuring(f"m-{number}"), "c", op())
            # One that became ready waits no longer.
            await readiness.ready(configuring("ready"), "c", op())
        assert logs == []
        for number in range(3):
            await readiness.ready(configuring(f"n-{number}"), "c", op())
    assert [log["event"] for log in logs] == ["backend.readiness_polled_often"]


async def test_a_provider_over_a_program_goes_through_the_life_of_a_machine(rack: Rack) -> None:
    backend = await rack.backend()
    rack.answer("create", '{"host_ref": "bmc-0"}')
    rack.answer("ready", '{"ready": true}')
    core = await started(make_core(backend, readiness=ReadyByProgram(backend, SystemClock())))

    async def reaches(state: MachineState) -> None:
        async def is_there() -> bool:
            return (await core.get("r/0")).state is state

        await wait_until_async(is_there)

    await core.create("r/0")
    await reaches(MachineState.IDLE)
    await core.configure("r/0", "team-a", BLOB, {"secret": "metadata-value"})
    await reaches(MachineState.CONFIGURED)
    assert "metadata-value" not in (rack.folder / "configure.in").read_text()
    await core.drain("r/0", 0)
    await reaches(MachineState.IDLE)
    rack.answer("configure", "", code=1, errors=f"bad: {BLOB[14:60].decode()}")
    await core.configure("r/0", "team-b", BLOB, {})
    await reaches(MachineState.FAILED)
    error = (await core.get("r/0")).machine.last_error
    assert error == "BACKEND: ProgramFailed: bad: [redacted]"
    os.unlink(rack.folder / "program")
    await core.stop()
