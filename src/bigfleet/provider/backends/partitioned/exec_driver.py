"""Drives hosts by running a program for each call, with JSON on standard input and output.

docs/spec/provider.md §22. Exit 0 is done, 75 may be retried, any other code is final; the last line of standard error
is its text. A program that exceeds its time is killed with everything that it started. The program's input must never
reach a log.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import FoundKind, MachineView, Op, Transient
from bigfleet.provider.backends.partitioned.ports import Carved, Standing
from bigfleet.provider.programs.orphan_killer import OrphanKiller
from bigfleet.provider.programs.runner import (
    LOOK_SECONDS_MAX,
    TRANSIENT_EXIT_CODE,
    ProgramFailed,
    ProgramRunner,
    decoded,
    operation_asked,
)

T = TypeVar("T")

_READY_INTERVAL_SECONDS: Final = 2.0


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

    def __init__(self, program: str, *, clock: Clock, orphans: OrphanKiller | None = None) -> None:
        """`orphans` ends programs that run when this process is killed; without it they run on."""
        self._runner = ProgramRunner(program, clock=clock, orphans=orphans)
        self._clock = clock

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        """Run `create`."""
        return (await self._run("create", self._question(machine, carved, op), _Node)).node_name

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        """Run `configure`; the blob is in base64."""
        more = {"cluster": cluster, "blob": base64.b64encode(blob).decode()}
        question = {**self._question(machine, carved, op), **more}
        return (await self._run("configure", question, _Node, secret=blob)).node_name

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
            question["operation"] = operation_asked(op, self._clock)
        return question

    async def _run(
        self,
        verb: str,
        question: Mapping[str, Any],
        kind: type[T],
        *,
        seconds: float | None = None,
        secret: bytes = b"",
    ) -> T:
        """Run the program and return its answer. The kit cancels what belongs to an operation at its deadline."""
        result = await self._runner.run(verb, question, seconds=seconds, secret=secret)
        if result.exit_code == TRANSIENT_EXIT_CODE:
            raise Transient(result.error_line or f"{verb} may be tried again")
        if result.exit_code != 0:
            raise ProgramFailed(result.error_line or f"{verb} ended with exit code {result.exit_code}")
        answer: T = decoded(verb, result.output, kind, secret=secret)
        return answer
