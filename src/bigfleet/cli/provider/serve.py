"""Serves a provider from its flags to a clean stop, for the shipped providers and for those of other authors.

docs/spec/provider.md §16, §19.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from bigfleet.cli.provider.flags import ProviderCommand, ProviderFlags, provider_command
from bigfleet.cli.runtime.program import run_program
from bigfleet.provider.backend import CONFIGURE_WAITS
from bigfleet.provider.operations.invoke import BACKEND_THREADS

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import OpenSubstrate, Substrate
    from bigfleet.provider.backend import Backend, ConfigureWaits, Ready, Slot

#: How long functions of a backend that are on their way may take to return when the provider stops.
_THREADS_SECONDS_MAX = 1.0
#: Default number of slots of a fake.
FAKE_SEED_COUNT = 256


def run(backend: "Backend", *, readiness: "Ready | ConfigureWaits") -> NoReturn:
    """Be the whole main program of a provider: command line, gRPC, TLS, health, reflection, metrics, signals.

    `readiness` is a checker, or CONFIGURE_WAITS (docs/spec/provider.md §7). Ends the process: 0 after a clean stop, 1
    for a failure while running, 2 for a wrong call or file, which is reported in one line.
    """
    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command(cls=ProviderCommand, help=f"Serve the {backend.provider} provider.")(_command(backend, readiness))
    run_program(program, Path(sys.argv[0]).name)


def _command(backend: "Backend", readiness: "Ready | ConfigureWaits") -> Callable[..., None]:
    @provider_command()
    def serve_backend(flags: ProviderFlags) -> None:
        from bigfleet.cli.provider.substrate import Substrate
        from bigfleet.provider.backends.fake import FakeBackend

        is_fake = isinstance(backend, FakeBackend)
        serve(
            flags,
            lambda _process: Substrate(backend=backend, readiness=readiness),
            name=backend.provider,
            may_forget=is_fake,
        )

    return serve_backend


def serve(flags: ProviderFlags, open_substrate: "OpenSubstrate", *, name: str, may_forget: bool = False) -> NoReturn:
    """Serve until a signal what a command's flags and its substrate say, then end the command.

    `name` is the backend's; `may_forget` lets it run without a state file. Raises UsageFault, RunFault, typer.Exit.
    """
    # gRPC's core prints a line of its own for a port in use; ours says what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from bigfleet.cli.provider.process import serve_process
    from bigfleet.cli.runtime.system import configure_logging, run_loop

    if flags.use_fake_backend:
        open_substrate, may_forget = _open_fake, True
    process, options = flags.process(name=name, may_forget=may_forget), flags.options()
    configure_logging("provider", flags.log_level)
    code = run_loop(lambda: serve_process(process, options, open_substrate))
    _leave_threads(code)
    raise typer.Exit(code)


def _leave_threads(code: int) -> None:
    """End the process when a backend's function does not return: the next start takes its operation up.

    Python would wait for it at the exit, and a substrate that hangs would make every stop a kill.
    """
    deadline_seconds = time.monotonic() + _THREADS_SECONDS_MAX
    for thread in threading.enumerate():
        if thread.name.startswith(BACKEND_THREADS):
            thread.join(max(0.0, deadline_seconds - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


def _open_fake(process: "ProviderProcessSettings") -> "Substrate":
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.provider.backends.fake import FakeBackend

    backend = FakeBackend(0 if process.offerings_path is not None else process.seed_count or FAKE_SEED_COUNT)

    def take_slots(slots: "Iterable[Slot]") -> None:
        # It shows the hosts of slots that it knows.
        if process.offerings_path is not None:
            backend.slots = list(slots)

    return Substrate(
        backend=backend,
        readiness=CONFIGURE_WAITS,
        seeds_itself=True,
        take_offers=take_slots,
    )
