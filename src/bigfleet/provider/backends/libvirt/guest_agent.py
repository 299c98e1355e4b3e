"""Bootstraps and drains a guest through its agent: writes a file, runs a program, reads its exit code.

docs/spec/libvirt-provider.md §5. The output of a program is never read, because it may hold bootstrap data.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any, Final

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.libvirt.connections import HostCalls
from bigfleet.provider.backends.libvirt.hypervisor import AgentSilent, HostDown, HostError, Hypervisor

BLOB_PATH: Final = "/opt/bigfleet/bootstrap.blob"
BOOTSTRAP_PROGRAM: Final = "/opt/bigfleet/bootstrap"
DRAIN_PROGRAM: Final = "/opt/bigfleet/drain"
#: Of one answer; a guest that boots gives none.
ANSWER_SECONDS: Final = 5
POLL_SECONDS: Final = 1.0
_CHUNK_BYTES: Final = 64 << 10
_SHELL: Final = "/bin/sh"
#: Makes an empty file that only root can read.
_MAKE_FILE: Final = f"umask 077; rm -f {BLOB_PATH}; : > {BLOB_PATH}"


class GuestFailed(Exception):
    """A program in the guest ended with an exit code above 0, or by a signal."""


class GuestAgent:
    """The agent of one guest. Every method may raise AgentSilent, HostDown and HostError."""

    def __init__(self, host: Callable[[], HostCalls], domain: str, clock: Clock) -> None:
        """`host` returns the calls to the host as it is reached now: its address may change while a program runs."""
        self._host = host
        self._domain = domain
        self._clock = clock

    async def _ask(self, command: str, **arguments: Any) -> Any:
        def job(hypervisor: Hypervisor) -> Any:
            return hypervisor.ask_agent(self._domain, command, arguments, seconds=ANSWER_SECONDS)

        return await self._host().call_agent(job)

    async def wait(self) -> None:
        """Return once the agent answers; the caller bounds the wait."""
        while True:
            try:
                await self._ask("guest-ping")
                return
            except (AgentSilent, HostDown):
                await self._clock.sleep(POLL_SECONDS)

    async def run(self, path: str, arguments: Sequence[str], *, is_patient: bool = False) -> int:
        """Run a program to its end and return its exit code; one ended by a signal has 128 and more.

        A patient run asks again while the agent does not answer whether it has ended; the caller bounds the wait.
        """
        started = await self._ask("guest-exec", **{"path": path, "arg": list(arguments), "capture-output": False})
        while True:
            try:
                status = await self._ask("guest-exec-status", pid=started["pid"])
            except (AgentSilent, HostDown):
                if not is_patient:
                    raise
            else:
                if status["exited"]:
                    return int(status.get("exitcode", 128 + int(status.get("signal", 0))))
            await self._clock.sleep(POLL_SECONDS)

    async def bootstrap(self, cluster: str, blob: bytes) -> None:
        """Write the blob, run the bootstrap program with the cluster, and remove the blob. Raises GuestFailed."""
        if await self.run(_SHELL, ("-c", _MAKE_FILE)) != 0:
            raise GuestFailed(f"the guest cannot write {BLOB_PATH}; its image needs the directory and {_SHELL}")
        try:
            await self._write_blob(blob)
            exit_code = await self.run(BOOTSTRAP_PROGRAM, (cluster,), is_patient=True)
        except HostError:
            await self._remove_blob()
            raise
        await self._remove_blob()
        if exit_code != 0:
            raise GuestFailed(f"{BOOTSTRAP_PROGRAM} ended with exit code {exit_code}; its output is in the guest")

    async def _write_blob(self, blob: bytes) -> None:
        handle = await self._ask("guest-file-open", path=BLOB_PATH, mode="w")
        try:
            for at in range(0, len(blob), _CHUNK_BYTES):
                content = base64.b64encode(blob[at : at + _CHUNK_BYTES]).decode()
                await self._ask("guest-file-write", **{"handle": handle, "buf-b64": content})
        finally:
            await self._ask("guest-file-close", handle=handle)

    async def _remove_blob(self) -> None:
        """Remove the blob once the agent answers; the caller bounds the wait."""
        while True:
            try:
                await self.run(_SHELL, ("-c", f"rm -f {BLOB_PATH}"))
                return
            except (AgentSilent, HostDown):
                await self._clock.sleep(POLL_SECONDS)

    async def drain(self, cluster: str, grace_seconds: int) -> None:
        """Run the drain program if the guest has one. Raises GuestFailed."""
        if await self.run(_SHELL, ("-c", f"test -x {DRAIN_PROGRAM}")) != 0:
            return
        exit_code = await self.run(DRAIN_PROGRAM, (cluster, str(grace_seconds)))
        if exit_code != 0:
            raise GuestFailed(f"{DRAIN_PROGRAM} ended with exit code {exit_code}; its output is in the guest")
