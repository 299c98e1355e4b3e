"""What a person may do to a running provider (docs/spec/provider.md §13, §14)."""

import asyncio
import json
import stat
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer

from bigfleet.cli.provider.admin_server import serve_admin
from bigfleet.cli.provider.admin_socket import admin_path
from bigfleet.cli.provider.command import app
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import ExistingHost, Host, MachineView, Op, Slot
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.administration import AdminRefused
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.lifecycle import failed, recovered_serving
from bigfleet.provider.records.record import ErrorCode
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.ledger import Change
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from tests.patience import PATIENCE_SECONDS
from tests.provider.harness import (
    SLOT,
    bring_to,
    fake_core,
    make_core,
    metric,
    refusal_of,
    settle,
    started,
    state_of,
    token,
)

S = MachineState
WHO = "uid 1000 (ada)"
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)


async def lost(core: CapacityCore, machine_id: str = SLOT) -> None:
    await core.feed.report_lost(machine_id, "pulled out")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("is_bound", "target", "is_confirmed", "expected"),
    [
        (False, "speculative", False, S.SPECULATIVE),
        (False, "idle", False, S.IDLE),
        (False, "configured", False, "bound to no cluster"),
        (True, "speculative", False, "--confirm-out-of-service"),
        (True, "speculative", True, S.SPECULATIVE),
        (True, "idle", False, "--confirm-out-of-service"),
        (True, "idle", True, S.IDLE),
        (True, "configured", False, S.CONFIGURED),
    ],
)
async def test_a_person_brings_a_failed_machine_out(
    is_bound: bool, target: str, is_confirmed: bool, expected: MachineState | str
) -> None:
    core, _ = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, S.CONFIGURED if is_bound else S.IDLE)
    await core.create(SLOT, token=token(7)) if not is_bound else None
    await lost(core)
    before = (await core.list()).revision
    call = core.administration.recover(WHO, SLOT, target, is_out_of_service=is_confirmed)
    if isinstance(expected, str):
        with pytest.raises(AdminRefused, match=expected):
            await call
        assert (await core.list((), 0, before)).records == ()
        return
    await call
    record = await core.get(SLOT)
    assert (record.state, record.machine.last_error, record.operation) == (expected, "", None)
    assert bool(record.machine.cluster) == (expected is S.CONFIGURED)
    assert record.machine.host.is_present == (expected is not S.SPECULATIVE)
    assert len((await core.list((), 0, before)).records) == 1
    assert metric(core, "recoveries_total", by="admin", result=target) == 1


@pytest.mark.virtual_time
async def test_marks_survive_a_recovery_by_hand() -> None:
    core, _ = await fake_core(options=NO_WAY_OUT)
    await core.create(SLOT, token=token(7))
    await settle()
    await lost(core)
    await core.administration.recover(WHO, SLOT, "idle", is_out_of_service=False)
    assert (await refusal_of(core.drain(SLOT, 0, token=token(7))))[0] is Code.FAILED_PRECONDITION


@pytest.mark.virtual_time
async def test_what_is_not_failed_has_no_host_or_is_in_a_call_is_left_alone() -> None:
    class Stubborn(FakeBackend):
        async def create(self, machine: MachineView, op: Op) -> Host:
            try:
                await asyncio.sleep(10_000)
            except asyncio.CancelledError:
                await asyncio.sleep(500)
            raise RuntimeError("at last")

    core = await started(make_core(Stubborn(2), options=NO_WAY_OUT))
    recover = core.administration.recover
    with pytest.raises(AdminRefused, match="only a FAILED machine"):
        await recover(WHO, SLOT, "speculative", is_out_of_service=True)
    with pytest.raises(AdminRefused, match="no machine"):
        await recover(WHO, "nobody", "speculative", is_out_of_service=True)
    with pytest.raises(AdminRefused, match="no state to recover to"):
        await recover(WHO, SLOT, "failed", is_out_of_service=True)
    await core.create(SLOT)
    await asyncio.sleep(400)
    with pytest.raises(AdminRefused, match="still under way"):
        await recover(WHO, SLOT, "speculative", is_out_of_service=True)
    await asyncio.sleep(500)
    with pytest.raises(AdminRefused, match="has no host"):
        await recover(WHO, SLOT, "idle", is_out_of_service=True)
    await recover(WHO, SLOT, "speculative", is_out_of_service=False)
    assert await state_of(core) is S.SPECULATIVE


@pytest.mark.virtual_time
async def test_losses_are_accepted_by_name_and_the_brake_takes_the_rest() -> None:
    core, backend = await fake_core(40, options=NO_WAY_OUT)
    for number in range(30):
        await core.create(f"fake-{number}")
    await settle()
    with pytest.raises(AdminRefused, match="not engaged"):
        core.administration.accept_losses(WHO)
    gone = {f"fake-{number}": backend.hosts.pop(f"fake-{number}") for number in range(15)}
    await asyncio.sleep(210)
    status = core.administration.status(WHO)
    assert status["brake"]["engaged"]
    assert status["brake"]["held"] == len(status["brake"]["losses"]) == 15
    assert metric(core, "machines", state="FAILED", capacity_type="ON_DEMAND") == 0
    assert set(core.administration.accept_losses(WHO)) == set(gone)
    await settle()
    assert core.administration.status(WHO)["machines"] == {"SPECULATIVE": 10, "IDLE": 15, "FAILED": 15}
    assert core.administration.status(WHO)["failed"][0]["error"].startswith("HOST_LOST")


@pytest.mark.virtual_time
async def test_the_brake_ends_when_the_facts_come_back() -> None:
    core, backend = await fake_core(40, options=NO_WAY_OUT)
    slots, backend.slots = backend.slots, []
    await asyncio.sleep(300)
    assert metric(core, "reconcile_brake_engaged") == 1
    backend.slots = slots
    await asyncio.sleep(70)
    assert metric(core, "reconcile_brake_engaged") == 0
    assert core.administration.status(WHO)["machines"] == {"SPECULATIVE": 40}


@pytest.mark.virtual_time
async def test_reset_cursors_ends_every_cursor_for_good(tmp_path: Path) -> None:
    store = SqliteProviderStore(tmp_path / "s.db", is_power_safe=False)
    core, _ = await fake_core(store=store)
    old = (await core.list()).revision
    await core.administration.reset_cursors(WHO)
    listing = await core.list((), 0, old)
    assert (listing.tombstones, len(listing.records)) == (False, 6)
    new = listing.revision
    await core.stop()
    core, _ = await fake_core(store=SqliteProviderStore(tmp_path / "s.db", is_power_safe=False))
    assert (await core.list((), 0, new)).tombstones
    assert not (await core.list((), 0, old)).tombstones
    assert metric(core, "cursor_rejections_total", reason="incarnation") == 1
    await core.stop()


@pytest.mark.virtual_time
async def test_each_command_is_one_audit_line() -> None:
    core, _ = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, S.CONFIGURED)
    await lost(core)
    with structlog.testing.capture_logs() as lines:
        core.administration.status(WHO)
        core.administration.quarantine(WHO)
        await core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True)
        await core.administration.reset_cursors(WHO)
    audits = [line for line in lines if line["event"] == "admin.command_executed"]
    assert [(line["who"], line["what"]) for line in audits] == [
        (WHO, what) for what in ("status", "quarantine", "recover", "reset-cursors")
    ]
    assert audits[2]["before"] == {
        "state": "FAILED",
        "host": "host-fake-0",
        "cluster": "c-1",
        "error": "HOST_LOST: pulled out",
    }
    assert audits[2]["after"] == {"state": "IDLE", "host": "host-fake-0", "cluster": "", "error": ""}


class Marked(FakeBackend):
    """Shows hosts in a cluster by a mark of its own; removing it takes a while, or fails."""

    def __init__(self) -> None:
        super().__init__(2)
        self.marks: dict[str, str] = {}
        self.error: Exception | None = None
        self.seconds = 0.0
        self.removals = 0

    async def inventory(self) -> Iterable[Slot]:
        return [
            replace(fact, in_cluster=self.marks.get(fact.id, "")) if isinstance(fact, ExistingHost) else fact
            for fact in await super().inventory()
        ]

    async def mark_out_of_service(self, machine: MachineView) -> None:
        self.removals += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.marks.pop(machine.id, None)


async def marked_core() -> tuple[CapacityCore, Marked]:
    """Return a core with a failed machine that is bound, and whose host the backend shows in its cluster."""
    backend = Marked()
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await bring_to(core, S.CONFIGURED)
    backend.marks[SLOT] = "c-1"
    await lost(core)
    return core, backend


@pytest.mark.virtual_time
@pytest.mark.parametrize(("target", "removals"), [("idle", 1), ("speculative", 1), ("configured", 0)])
async def test_a_backend_hears_which_machine_a_person_takes_out_of_service(target: str, removals: int) -> None:
    core, backend = await marked_core()
    await core.administration.recover(WHO, SLOT, target, is_out_of_service=True)
    assert backend.removals == removals
    await asyncio.sleep(1000)
    # What is a slot with a host is an orphan: IDLE.
    assert await state_of(core) is (S.CONFIGURED if target == "configured" else S.IDLE)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("error", "seconds", "cause"),
    [(RuntimeError("no route to host"), 0.0, "RuntimeError: no route to host"), (None, 1000.0, "no answer in 20 s")],
    ids=["error", "timeout"],
)
async def test_a_mark_that_is_not_removed_refuses_the_recovery_and_changes_nothing(
    error: Exception | None, seconds: float, cause: str
) -> None:
    core, backend = await marked_core()
    before = await core.get(SLOT)
    backend.error, backend.seconds = error, seconds
    with pytest.raises(AdminRefused) as refusal:
        await core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True)
    assert str(refusal.value) == (
        f"the backend did not mark host host-fake-0 of {SLOT} as out of service: {cause}; "
        "the machine is still FAILED, repeat the command"
    )
    assert await core.get(SLOT) == before
    await settle()
    backend.error, backend.seconds = None, 0.0
    await core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True)
    assert await state_of(core) is S.IDLE


@pytest.mark.virtual_time
async def test_two_people_do_not_take_a_machine_out_of_service_at_once() -> None:
    """The second removal could meet the mark of the next Configure. Calls for other machines go on."""
    core, backend = await marked_core()
    backend.seconds = 10.0
    first = asyncio.ensure_future(core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True))
    await settle()
    with pytest.raises(AdminRefused, match="still under way"):
        await core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True)
    await core.create("fake-1")
    await settle()
    assert await state_of(core, "fake-1") is S.IDLE
    await first
    assert (await state_of(core), backend.removals) == (S.IDLE, 1)


@pytest.mark.virtual_time
async def test_a_machine_that_failed_again_during_the_command_is_left_alone() -> None:
    """The person spoke of the cluster of before."""
    core, backend = await marked_core()
    backend.seconds = 10.0
    call = asyncio.ensure_future(core.administration.recover(WHO, SLOT, "idle", is_out_of_service=True))
    await settle()
    async with core._ledger.turn(SLOT) as record:
        assert record is not None
        serving = recovered_serving(record, Host(ref=record.machine.host.ref), "fake", 0)
        await core._ledger.commit(Change(record=serving))
        await core._ledger.commit(Change(record=failed(serving, ErrorCode.HOST_LOST, "again", 0)))
    with pytest.raises(AdminRefused, match="changed during the command; check it"):
        await call
    assert (await core.get(SLOT)).machine.last_error == "HOST_LOST: again"


# ---- the socket and the command -----------------------------------------------------------------------------------


def run(state: Path, *arguments: str) -> None:
    command = typer.main.get_command(app)
    command.main(["admin", "--state", str(state), *arguments], "bigfleet provider", standalone_mode=False)


def test_a_state_that_no_machine_is_recovered_to_is_a_wrong_call_and_reaches_no_provider(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="--to: 'Ready' is unknown; choose speculative, idle, configured"):
        run(tmp_path / "none.db", "recover", SLOT, "--to", "Ready")


class Served:
    """A provider with its admin socket, on a loop of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    async def _serve(self) -> None:
        core, _ = await fake_core(options=NO_WAY_OUT)
        await bring_to(core, S.CONFIGURED)
        await lost(core)
        async with serve_admin(self.state, core.administration, lambda: {"billed hours": 1.5}):
            self._ready.set()
            await self._stop.wait()
        await core.stop()

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


@pytest.mark.parametrize("folder", ["", "x" * 120], ids=["short path", "path longer than an address"])
def test_the_command_reaches_the_provider_over_its_socket(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    state = place / "s.db"
    with Served(state), structlog.testing.capture_logs() as lines:
        assert stat.S_IMODE(admin_path(state).stat().st_mode) == 0o600
        assert stat.S_ISSOCK(admin_path(state).stat().st_mode)
        capsys.readouterr()
        run(state, "--output", "json", "status")
        status: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status["machines"] == {"SPECULATIVE": 5, "FAILED": 1}
        assert status["substrate"] == {"billed hours": 1.5}
        run(state, "status")
        shown = capsys.readouterr().out
        assert "HOST_LOST" in shown
        assert "fake-0" in shown
        with pytest.raises(RunFault, match="--confirm-out-of-service"):
            run(state, "recover", SLOT, "--to", "idle")
        run(state, "recover", SLOT, "--to", "idle", "--confirm-out-of-service")
        run(state, "quarantine")
        run(state, "reset-cursors")
        with pytest.raises(RunFault, match="not engaged"):
            run(state, "accept-losses")
    whos = {line["who"] for line in lines if line["event"] == "admin.command_executed"}
    assert len(whos) == 1
    assert whos.pop().startswith("uid ")
    assert not admin_path(state).exists()


def test_nobody_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunFault, match="no provider answers at"):
        run(tmp_path / "s.db", "status")
    with pytest.raises(UsageFault, match="--output"):
        run(tmp_path / "s.db", "--output", "xml", "status")
