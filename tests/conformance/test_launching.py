"""A provider that the suite starts: placeholders filled, killed without warning, started again over the same state."""

import os
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bigfleet.cli.conformance.launching import LaunchedSite, RunningSite
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.conformance.ports import CallToken, Create, Get, List, SiteFault, Status
from bigfleet.model.states import MachineState
from tests.processes import bigfleet, free_port

COMMAND = (
    *bigfleet("provider", "simulated", "--calm", "--time-scale", "0.001", "--metrics-addr", "off"),
    *shlex.split("--seed-count={seeds} --addr {addr} --state {state}"),
)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[LaunchedSite]:
    launched = LaunchedSite(COMMAND, seeds=9, tls=None, clock=SystemClock(), log=tmp_path / "log")
    await launched.start()
    yield launched
    await launched.close()


async def test_a_killed_provider_comes_back_with_what_it_told(site: LaunchedSite) -> None:
    one, two = site.connections
    first_pid = site.pid
    token = CallToken("shard", 1, 1)
    listing = (await one.call(List())).listing
    assert listing is not None
    machine_id = listing.machines[0].id
    assert len(listing.machines) == 9
    created = await one.call(Create(machine_id, token))
    assert created.status is Status.OK, created.details
    await site.restart()

    assert site.pid != first_pid
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)
    read = await two.call(Get(machine_id))
    assert read.machine is not None
    assert read.machine.state is not MachineState.SPECULATIVE
    assert (await one.call(Create(machine_id, token))).is_fenced


async def test_a_closed_site_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    launched = LaunchedSite(COMMAND, seeds=1, tls=None, clock=SystemClock(), log=tmp_path / "log")
    await launched.start()
    pid, folder = launched.pid, launched.folder
    await launched.close()

    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_provider_that_does_not_serve_in_its_time_is_a_fault_and_leaves_no_process(tmp_path: Path) -> None:
    launched = LaunchedSite(
        ("sleep", "600"), seeds=1, tls=None, clock=SystemClock(), log=tmp_path / "log", start_seconds_max=0.5
    )
    with pytest.raises(SiteFault, match=r"did not serve within 0\.5 s"):
        await launched.start()
    await launched.close()
    with pytest.raises(ProcessLookupError):
        os.kill(launched.pid, 0)


async def test_a_running_provider_is_not_restarted() -> None:
    running = RunningSite(f"127.0.0.1:{free_port()}", None)
    with pytest.raises(SiteFault, match="give --launch"):
        await running.restart()
    await running.close()
