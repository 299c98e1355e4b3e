"""Guests that join and leave through their agent (docs/spec/libvirt-provider.md §5), on hosts in memory."""

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.libvirt.guest_agent import BLOB_PATH, BOOTSTRAP_PROGRAM, DRAIN_PROGRAM
from bigfleet.provider.backends.libvirt.hosts_file import parse_kvm_hosts
from bigfleet.provider.backends.libvirt.hypervisor import AgentSilent, HostError
from bigfleet.provider.backends.libvirt.names import domain_name
from tests.provider.backends.libvirt.memory_host import Nodes, Provider, document
from tests.provider.harness import state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
SMALL = "p/z/h/small/000"
BLOB = bytes(range(256)) * 1024


class Guest:
    """A guest's agent: files, programs, and what was run."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.open: dict[int, str] = {}
        self.runs: list[tuple[str, ...]] = []
        self.exit_codes = {BOOTSTRAP_PROGRAM: 0, DRAIN_PROGRAM: 0}
        self.has_drain = True
        self.seen_blob = b""
        self.is_silent = False
        #: Called when the bootstrap program begins.
        self.on_bootstrap: Callable[[], None] = lambda: None
        self.ended: dict[int, int] = {}

    def answer(self, _domain: str, command: str, arguments: Mapping[str, Any]) -> Any:
        if self.is_silent:
            raise AgentSilent("QEMU guest agent is not connected")
        if command == "guest-file-open":
            assert (arguments["path"], arguments["mode"]) == (BLOB_PATH, "w")
            assert arguments["path"] in self.files, "the file was made with mode 0600 before it was filled"
            self.open[1] = arguments["path"]
            self.files[BLOB_PATH] = b""
            return 1
        if command == "guest-file-write":
            self.files[self.open[arguments["handle"]]] += base64.b64decode(arguments["buf-b64"])
        if command == "guest-file-close":
            del self.open[arguments["handle"]]
        if command == "guest-exec":
            assert arguments["capture-output"] is False
            return {"pid": self._run(arguments["path"], arguments["arg"])}
        if command == "guest-exec-status":
            if arguments["pid"] not in self.ended:
                raise HostError(f"PID {arguments['pid']} does not exist")
            return {"exited": True, "exitcode": self.ended[arguments["pid"]]}
        return {}

    def _run(self, path: str, arguments: list[str]) -> int:
        exit_code = self.exit_codes.get(path, 0)
        if path == "/bin/sh":
            script = arguments[1]
            if "umask 077" in script:
                self.files[BLOB_PATH] = b""
            elif script.startswith("rm -f"):
                self.files.pop(BLOB_PATH, None)
            elif script.startswith("test -x"):
                exit_code = 0 if self.has_drain else 1
        else:
            self.runs.append((path, *arguments))
        if path == BOOTSTRAP_PROGRAM:
            self.seen_blob = self.files[BLOB_PATH]
            self.on_bootstrap()
        self.ended[len(self.ended)] = exit_code
        return len(self.ended) - 1


async def started(nodes: Nodes | None = None) -> tuple[Provider, Guest]:
    provider, guest = Provider(by_agent=True, nodes=nodes), Guest()
    provider.host.agent = guest.answer
    return await provider.start(), guest


async def test_a_running_machine_is_bootstrapped_as_it_is_and_the_blob_is_removed() -> None:
    provider, guest = await started()
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED
    assert guest.runs == [(BOOTSTRAP_PROGRAM, "team-a")]
    assert guest.seen_blob == BLOB
    assert guest.files == {}
    assert len(provider.host.only.boots) == 1
    assert (await provider.core.get(SMALL)).machine.node_name == domain_name(SMALL)
    assert not provider.host.holds(BLOB[:64])


async def test_a_drained_machine_boots_from_a_new_disk_before_it_is_bootstrapped_again() -> None:
    provider, guest = await started()
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    await provider.drain(SMALL, 30)
    assert guest.runs[1:] == [(DRAIN_PROGRAM, "team-a", "30")]
    assert not provider.host.only.is_active
    await provider.configure(SMALL, "team-b", BLOB)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED
    assert len(provider.host.only.boots) == 2
    assert not provider.host.holds(b"team-a")


async def test_with_clusters_to_ask_the_node_has_the_name_of_the_domain_and_decides() -> None:
    nodes = Nodes()
    nodes.are_ready = False
    provider, _guest = await started(nodes)
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    assert await state_of(provider.core, SMALL) is S.CONFIGURING
    nodes.ready.add(("team-a", domain_name(SMALL)))
    await asyncio.sleep(3)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED


async def test_a_create_waits_for_the_agent() -> None:
    provider, guest = await started()
    guest.is_silent = True
    await provider.create(SMALL)
    await asyncio.sleep(30)
    assert await state_of(provider.core, SMALL) is S.CREATING
    guest.is_silent = False
    await asyncio.sleep(3)
    assert await state_of(provider.core, SMALL) is S.IDLE


async def interrupted(provider: Provider, guest: Guest, trouble: str) -> None:
    """Configure a machine whose agent, or whose host, answers nothing while the bootstrap program runs.

    With trouble `address` the host has another one afterwards.
    """

    def interrupt() -> None:
        guest.is_silent = trouble != "host"
        provider.host.is_down = trouble == "host"
        if trouble == "address":
            provider.backend.replace_hosts(parse_kvm_hosts(document(h={"uri": "test:///other"})))

    guest.on_bootstrap = interrupt
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    assert await state_of(provider.core, SMALL) is S.CONFIGURING
    await asyncio.sleep(30)
    assert await state_of(provider.core, SMALL) is S.CONFIGURING


@pytest.mark.parametrize("trouble", ["agent", "host", "address"])
async def test_a_program_outlives_an_agent_or_a_host_that_does_not_answer(trouble: str) -> None:
    """A saturated guest, an agent that the program restarts, an upgrade of libvirtd."""
    provider, guest = await started()
    await interrupted(provider, guest, trouble)
    guest.is_silent = provider.host.is_down = False
    await asyncio.sleep(5)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED
    assert guest.runs == [(BOOTSTRAP_PROGRAM, "team-a")]
    assert guest.files == {}


async def test_a_program_whose_exit_code_the_agent_forgot_fails_its_configure_and_the_blob_is_removed() -> None:
    provider, guest = await started()
    await interrupted(provider, guest, "agent")
    guest.ended.clear()
    guest.is_silent = False
    await asyncio.sleep(5)
    record = await provider.core.get(SMALL)
    assert record.state is S.FAILED
    assert "PID" in record.machine.last_error
    assert guest.files == {}


async def test_an_agent_that_never_answers_again_ends_in_a_timeout() -> None:
    provider, guest = await started()
    await interrupted(provider, guest, "agent")
    await asyncio.sleep(300)
    assert (await provider.core.get(SMALL)).machine.last_error.startswith("TIMEOUT: timeout: configure")


@pytest.mark.parametrize("program", [BOOTSTRAP_PROGRAM, DRAIN_PROGRAM])
async def test_a_program_that_fails_fails_the_operation_with_its_exit_code(program: str) -> None:
    provider, guest = await started()
    guest.exit_codes[program] = 7
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    if program == DRAIN_PROGRAM:
        await provider.drain(SMALL, 30)
    record = await provider.core.get(SMALL)
    assert record.state is S.FAILED
    assert f"{program} ended with exit code 7" in record.machine.last_error
    assert guest.files == {}


@pytest.mark.parametrize("trouble", ["is_silent", "has_drain"])
async def test_a_guest_without_agent_or_drain_program_is_shut_down_all_the_same(trouble: str) -> None:
    provider, guest = await started()
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    setattr(guest, trouble, trouble == "is_silent")
    await provider.drain(SMALL, 30)
    assert await state_of(provider.core, SMALL) is S.IDLE
    assert not provider.host.only.is_active
