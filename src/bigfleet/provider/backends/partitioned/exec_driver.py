"""Drives hosts by running a program for each call, with JSON on standard input and output.

docs/spec/provider.md §22. Exit 0 is done, 75 may be tried again, anything else is final with the last line of standard
error as text. A program that is not done in time is killed with everything that it started. What a program was given
must never reach a log.
"""

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import FoundKind, MachineView, Op, Transient
from bigfleet.provider.backends.partitioned.ports import Carved, Standing

T = TypeVar("T")

TRANSIENT_EXIT_CODE: Final = 75
#: Of a call that is no operation's: `inventory`, `adopt`.
LOOK_SECONDS_MAX: Final = 60.0
OUTPUT_BYTES_MAX: Final = 64 << 20
ERROR_BYTES_RETAINED_MAX: Final = 64 << 10
#: What was killed is waited for so long.
_KILLED_SECONDS_MAX: Final = 5.0
_READ_BYTES: Final = 64 << 10
_READY_INTERVAL_SECONDS: Final = 2.0


class ProgramFailed(Exception):
    """The program failed for good."""


class _Node(msgspec.Struct):
    node_name: str = ""


class _Ready(msgspec.Struct):
    ready: bool


class _Found(msgspec.Struct):
    found: FoundKind


class _Instance(msgspec.Struct):
    host: str
    instance: str
    node_name: str = ""


class _Inventory(msgspec.Struct):
    instances: list[_Instance]


class _Nothing(msgspec.Struct):
    pass


class ExecDriver:
    """Runs `PROGRAM create|configure|drain|delete|ready|adopt|inventory`."""

    ready_interval_seconds = _READY_INTERVAL_SECONDS

    def __init__(self, program: str, *, clock: Clock) -> None:
        self._program = program
        self._clock = clock

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        """Run `create`."""
        return (await self._run("create", self._question(machine, carved, op), _Node)).node_name

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        """Run `configure`; the blob is in base64."""
        more = {"cluster": cluster, "blob": base64.b64encode(blob).decode()}
        return (await self._run("configure", {**self._question(machine, carved, op), **more}, _Node)).node_name

    async def ready(self, machine: MachineView, carved: Carved, cluster: str, op: Op) -> bool:
        """Run `ready`, which answers `{"ready": true}` or false."""
        question = {**self._question(machine, carved, op), "cluster": cluster}
        return (await self._run("ready", question, _Ready)).ready

    async def drain(self, machine: MachineView, carved: Carved, grace_seconds: int, op: Op) -> None:
        """Run `drain`."""
        question = {**self._question(machine, carved, op), "cluster": machine.cluster, "grace_seconds": grace_seconds}
        await self._run("drain", question, _Nothing)

    async def delete(self, machine: MachineView, carved: Carved, op: Op) -> None:
        """Run `delete`."""
        await self._run("delete", self._question(machine, carved, op), _Nothing)

    async def adopt(self, machine: MachineView, carved: Carved) -> FoundKind:
        """Run `adopt`, which answers `{"found": "no_host"}`, clean, serving or dirty."""
        question = {**self._question(machine, carved, None), "cluster": machine.cluster}
        return (await self._run("adopt", question, _Found, seconds=LOOK_SECONDS_MAX)).found

    async def inventory(self) -> Sequence[Standing]:
        """Run `inventory`, which answers `{"instances": [{"host": …, "instance": …, "node_name": …}]}`."""
        answer = await self._run("inventory", {}, _Inventory, seconds=LOOK_SECONDS_MAX)
        return [Standing(host=each.host, instance=each.instance, node_name=each.node_name) for each in answer.instances]

    def _question(self, machine: MachineView, carved: Carved, op: Op | None) -> dict[str, Any]:
        size = carved.size
        disk = {"size_mebibytes": size.disk_mib, "spindles": size.spindles_per_disk}
        question = {
            "machine_id": machine.id,
            "instance_type": machine.instance_type,
            "zone": machine.zone,
            "host": carved.host,
            "instance": carved.instance,
            "memory_mebibytes": size.memory_mib,
            "vcpus": size.vcpus,
            "disks": [disk] * size.disk_count,
        }
        if op is not None:
            left_seconds = op.deadline_monotonic_seconds - self._clock.monotonic_seconds()
            question["operation"] = {"id": op.id, "attempt": op.attempt, "seconds_left": round(left_seconds, 3)}
        return question

    async def _run(self, verb: str, question: Mapping[str, Any], kind: type[T], *, seconds: float | None = None) -> T:
        """Run the program and return its answer. The kit cancels what belongs to an operation at its deadline."""
        try:
            async with asyncio.timeout(seconds):
                code, output, text = await self._outcome(verb, msgspec.json.encode(question))
        except TimeoutError as error:
            raise ProgramFailed(f"{verb} did not end in {seconds:g} s and was killed") from error
        except OSError as error:
            raise ProgramFailed(f"{self._program}: {error.strerror}") from error
        if code == TRANSIENT_EXIT_CODE:
            raise Transient(text or f"{verb} may be tried again")
        if code != 0:
            raise ProgramFailed(text or f"{verb} ended with exit code {code}")
        if len(output) > OUTPUT_BYTES_MAX:
            raise ProgramFailed(f"{verb} wrote more than {OUTPUT_BYTES_MAX >> 20} MiB")
        try:
            return msgspec.json.decode(output.strip() or b"{}", type=kind)
        except msgspec.MsgspecError as error:
            raise ProgramFailed(f"{verb} answered what is not understood: {error}") from error

    async def _outcome(self, verb: str, content: bytes) -> tuple[int, bytes, str]:
        """Return exit code, standard output and the last line of standard error; on the way out nothing is left."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._program, verb, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert process.stdin is not None, "piped"
        assert process.stdout is not None, "piped"
        assert process.stderr is not None, "piped"
        ended = asyncio.gather(
            _feed(process.stdin, content), _head(process.stdout), _tail(process.stderr), process.wait()
        )
        try:
            _, output, errors, code = await asyncio.shield(ended)
        finally:
            # Its group: what it started must not go on working behind our back.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # The pipes close with the last of them, unless one left the group.
            await asyncio.wait({ended}, timeout=_KILLED_SECONDS_MAX)
            ended.cancel()
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        return code, output, lines[-1] if lines else ""


async def _feed(stream: asyncio.StreamWriter, content: bytes) -> None:
    """Write everything; a program may end without having read it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(content)
        await stream.drain()
    stream.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await stream.wait_closed()


async def _head(stream: asyncio.StreamReader) -> bytes:
    """Return what comes, and of more than the bound a little more than that."""
    content = bytearray()
    while chunk := await stream.read(_READ_BYTES):
        if len(content) <= OUTPUT_BYTES_MAX:
            content += chunk
    return bytes(content)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Return the end of what comes."""
    content = bytearray()
    while chunk := await stream.read(_READ_BYTES):
        content += chunk
        del content[:-ERROR_BYTES_RETAINED_MAX]
    return bytes(content)
