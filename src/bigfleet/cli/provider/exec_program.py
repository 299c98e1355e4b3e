"""Defines `bigfleet provider exec`: a provider whose backend is a program of the user's.

docs/spec/exec-provider.md. The program describes itself before the state file is opened.
"""

import asyncio
import functools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.serve import serve
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.provider.backend import CONFIGURE_WAITS

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.provider.backend import ConfigureWaits, Ready
    from bigfleet.provider.backends.exec.backend import ExecBackend
    from bigfleet.provider.backends.exec.description import Description
    from bigfleet.provider.programs.orphan_killer import OrphanKiller
    from bigfleet.provider.programs.runner import ProgramRunner

PROGRAM: Final = "program"
INVENTORY: Final = "inventory"
CONFIGURE: Final = "configure"
_READY: Final = (PROGRAM, INVENTORY, CONFIGURE)
CONCURRENCY: Final = 16
_CONCURRENCY_MAX: Final = 1000
#: The provider's own settings are none of the program's business.
_OWN_VARIABLES: Final = "BIGFLEET_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFlags:
    """The flags of `provider exec`, without those of every provider."""

    program: str
    arguments: tuple[str, ...]
    readiness: str
    concurrency: int


@provider_command(without=("use_fake_backend",))
def exec_program(
    flags: ProviderFlags,
    program: Annotated[
        str | None, typer.Option(metavar="PATH", help="Program to run for each call, with a verb.")
    ] = None,
    program_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="Argument before the verb; may be repeated.")
    ] = None,
    ready: Annotated[
        str, typer.Option(help="Source of a node's readiness: program, inventory or configure.")
    ] = PROGRAM,
    concurrency: Annotated[
        int, typer.Option(help="Parallel processes of each verb, unless the program declares a number.")
    ] = CONCURRENCY,
) -> None:
    """Run a provider whose machines are made by a program of your own."""
    if program is None:
        raise UsageFault("--program is missing: name the program that makes machines; start with provider new")
    if ready not in _READY:
        raise UsageFault(f"--ready: {ready!r} is unknown; choose program, inventory or configure")
    if not 1 <= concurrency <= _CONCURRENCY_MAX:
        raise UsageFault(f"--concurrency: {concurrency} is out of range; write 1 to {_CONCURRENCY_MAX}")
    found = shutil.which(program)
    if found is None:
        raise UsageFault(f"--program: {program!r} is not an executable program; name its path, and chmod +x it")
    asked = ProgramFlags(
        # A relative path is resolved once, in the directory of the start.
        program=os.path.abspath(found),
        arguments=tuple(program_arg or ()),
        readiness=ready,
        concurrency=concurrency,
    )
    # Flags are refused before the program is run.
    process, _options = flags.process(name="exec", may_forget=False), flags.options()
    description = _described(process, asked)
    serve(
        flags,
        functools.partial(open_program, asked=asked, description=description),
        name=description.provider,
    )


def _described(process: "ProviderProcessSettings", asked: ProgramFlags) -> "Description":
    """Run the program's `describe`. Raises UsageFault."""
    from bigfleet.provider.backends.exec.description import INVENTORY as INVENTORY_VERB
    from bigfleet.provider.backends.exec.description import READY as READY_VERB
    from bigfleet.provider.backends.exec.description import DescriptionFault, describe

    has_slots = process.offerings_path is not None or process.seed_count is not None
    try:
        description = asyncio.run(
            describe(_runner(asked, None), needs_inventory=not has_slots, concurrency=asked.concurrency)
        )
    except DescriptionFault as fault:
        raise UsageFault(f"--program {asked.program}: {fault}") from fault
    if asked.readiness == PROGRAM and READY_VERB not in description.verbs:
        raise UsageFault(
            "--ready program: the program has no verb ready; give --ready configure if its configure returns when "
            "the node is Ready, or --ready inventory if its inventory says ready_in"
        )
    if asked.readiness == INVENTORY and INVENTORY_VERB not in description.verbs:
        raise UsageFault("--ready inventory: the program has no verb inventory; choose program or configure")
    return description


def _runner(asked: ProgramFlags, orphans: "OrphanKiller | None") -> "ProgramRunner":
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.programs.runner import TERMINATE_SECONDS, ProgramRunner

    return ProgramRunner(
        asked.program,
        asked.arguments,
        clock=SystemClock(),
        environment={name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)},
        terminate_seconds=TERMINATE_SECONDS,
        orphans=orphans,
    )


def open_program(process: "ProviderProcessSettings", asked: ProgramFlags, description: "Description") -> "Substrate":
    """Return the backend that runs the program. Raises StartRefused if programs of a former start do not end."""
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.exec.backend import ExecBackend
    from bigfleet.provider.backends.exec.calls import ProgramCalls
    from bigfleet.provider.programs.orphan_killer import OrphanKiller
    from bigfleet.provider.programs.runner import TERMINATE_SECONDS

    assert process.state_path is not None, "an operation that a kill interrupts is taken up from the file"
    clock = SystemClock()
    orphans = OrphanKiller.of_state(process.state_path, clock=clock, terminate_seconds=TERMINATE_SECONDS)
    calls = ProgramCalls(_runner(asked, orphans), clock=clock)
    backend = ExecBackend(calls, description, clock=clock, concurrency=asked.concurrency)

    def status() -> dict[str, object]:
        return {
            "program": asked.program,
            "verbs": ", ".join(sorted(description.verbs)),
            "program's configuration": backend.fault or "ok",
        }

    return Substrate(
        backend=backend,
        readiness=_readiness(asked.readiness, backend),
        take_offers=backend.take_offers,
        close=orphans.close,
        status=status,
        fault=lambda: backend.fault,
    )


def _readiness(readiness: str, backend: "ExecBackend") -> "Ready | ConfigureWaits":
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.exec.backend import ReadyByInventory, ReadyByProgram

    if readiness == CONFIGURE:
        return CONFIGURE_WAITS
    return ReadyByProgram(backend, SystemClock()) if readiness == PROGRAM else ReadyByInventory(backend)
