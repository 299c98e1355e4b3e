"""Encodes one call to a program as JSON and interprets its exit code and its answer.

docs/spec/exec-provider.md §2, §3. A blob is sent on standard input only; metadata of a binding is never sent. This
module must never store what was sent.
"""

import base64
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import FoundKind, MachineView, Op, Stockout, Transient
from bigfleet.provider.programs.redaction import redacted
from bigfleet.provider.programs.runner import (
    TRANSIENT_EXIT_CODE,
    ProgramFailed,
    ProgramNotStarted,
    ProgramResult,
    ProgramRunner,
    decoded,
    operation_asked,
)

T = TypeVar("T")
#: Of sysexits.h: EX_UNAVAILABLE and EX_CONFIG.
STOCKOUT_EXIT_CODE: Final = 69
CONFIGURATION_EXIT_CODE: Final = 78
ANSWER_BYTES_MAX: Final = 1 << 20
#: A program that asks for more is asked again by then.
RETRY_SECONDS_MAX: Final = 3600.0


class CreateAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The host that `create` made; what is left out stays as the slot says."""

    host_ref: str
    node_name: str = ""
    allocatable: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    price_usd_per_hour: float | None = None


class ConfigureAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The node of `configure`, if it is known."""

    node_name: str = ""


class ReadyAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the node is Ready in the cluster of the machine."""

    ready: bool


class AdoptAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What `adopt` found; without a host_ref it is the one that the machine has."""

    found: FoundKind
    host_ref: str = ""


class EmptyAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing: the verb ended well."""


class _RetryAnswer(msgspec.Struct):
    retry_after_seconds: float | None = None


class ProgramCalls:
    """Runs a program for a machine and translates how that ended."""

    def __init__(self, runner: ProgramRunner, *, clock: Clock) -> None:
        self.runner = runner
        self._clock = clock
        #: The program's last word was that it is configured wrongly: its text, else "".
        self.configuration_fault = ""
        #: Why the program could not be started when it was last run, else "".
        self.start_fault = ""

    @property
    def fault(self) -> str:
        """Why no call can succeed now, "" for nothing known."""
        if self.start_fault:
            return f"the program cannot be started: {self.start_fault}"
        return f"the program is configured wrongly: {self.configuration_fault}" if self.configuration_fault else ""

    async def run(self, verb: str, question: Mapping[str, Any], **bounds: Any) -> ProgramResult:
        """Run the program to its end, as `ProgramRunner.run` does, and note whether it could be started."""
        try:
            result = await self.runner.run(verb, question, **bounds)
        except ProgramNotStarted as error:
            self.start_fault = str(error)
            raise
        self.start_fault = ""
        return result

    def question(self, machine: MachineView, op: Op | None) -> dict[str, Any]:
        """Return the part of the JSON input that all verbs of a machine have."""
        question: dict[str, Any] = {
            "machine": {
                "id": machine.id,
                "instance_type": machine.instance_type,
                "zone": machine.zone,
                "capacity_type": machine.capacity_type.name.lower(),
                "labels": dict(machine.labels),
                "host_ref": machine.host.ref,
                "cluster": machine.cluster,
                "node_name": machine.node_name,
            }
        }
        if op is not None:
            question["operation"] = operation_asked(op, self._clock)
        return question

    async def ask(
        self,
        verb: str,
        question: Mapping[str, Any],
        kind: type[T],
        *,
        op: Op | None = None,
        seconds: float | None = None,
        blob: bytes = b"",
    ) -> T:
        """Run a verb and return its answer. Raises Transient, Stockout or ProgramFailed."""
        whole = {**question, "blob": base64.b64encode(blob).decode()} if verb == "configure" else question
        result = await self.run(
            verb,
            whole,
            seconds=seconds,
            deadline_monotonic_seconds=None if op is None else op.deadline_monotonic_seconds,
            secret=blob,
            output_bytes_max=ANSWER_BYTES_MAX,
        )
        self.check(verb, result)
        answer: T = decoded(verb, result.output, kind, secret=blob)
        return answer

    def check(self, verb: str, result: ProgramResult) -> None:
        """Return if the exit code says that the verb ended well. Raises Transient, Stockout or ProgramFailed."""
        code, text = result.exit_code, result.error_line
        if code == 0:
            self.configuration_fault = ""
            return
        if code == TRANSIENT_EXIT_CODE:
            raise Transient(text or f"{verb} may be tried again", _retry_seconds(result.output))
        if code == STOCKOUT_EXIT_CODE:
            raise Stockout(text or f"{verb} found no capacity", _retry_seconds(result.output))
        if code == CONFIGURATION_EXIT_CODE:
            self.configuration_fault = f"{verb}: {text or 'the program is configured wrongly'}"
            raise ProgramFailed(f"configuration error: {text or 'the program gave no text'}")
        if code < 0:
            raise ProgramFailed(text or f"{verb} was ended by signal {-code}")
        raise ProgramFailed(text or f"{verb} ended with exit code {code}")


def _retry_seconds(output: bytes) -> float | None:
    """Return how long the program asks to wait; anything else on its output says nothing."""
    try:
        seconds = msgspec.json.decode(output.strip() or b"{}", type=_RetryAnswer).retry_after_seconds
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if seconds is None or seconds < 0 else min(seconds, RETRY_SECONDS_MAX)


def node_name_without(blob: bytes, name: str) -> str:
    """Return the name. Raises ProgramFailed for one that holds a part of the blob: a name is shown everywhere."""
    if redacted(name.encode("utf-8", "replace"), blob) != name:
        raise ProgramFailed("configure answered a node_name with a part of the blob")
    return name
