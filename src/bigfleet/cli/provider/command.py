"""`bigfleet provider …`: the providers that are shipped, each from its flags to a clean stop; and `run` for all others.

docs/spec/provider.md §16, §19. Exit 2 for a wrong call or file, 1 when it cannot start or fails while running, 0 after
a clean stop. A real backend is never silently a fake one.
"""

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.provider.admin import app as admin_app
from bigfleet.cli.provider.fault import fault
from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.new import new
from bigfleet.cli.provider.partitioned import partitioned
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.program import run_program
from bigfleet.provider.backend import CONFIGURE_WAITS
from bigfleet.provider.operations.invoke import BACKEND_THREADS

if TYPE_CHECKING:
    from bigfleet.cli.provider.serving import ProviderPlace
    from bigfleet.cli.provider.substrate import OpenSubstrate, Substrate
    from bigfleet.provider.backend import Backend, ConfigureWaits, Ready, Slot

app = typer.Typer(help="Capacity providers: who makes machines real.", no_args_is_help=True)
app.add_typer(admin_app, name="admin")
app.command(cls=SwitchCommand)(fault)
app.command(cls=SwitchCommand)(new)
app.command(cls=SwitchCommand)(partitioned)

#: How long functions of a backend that are on their way may take to return when the provider stops.
_THREADS_SECONDS_MAX = 1.0
#: Slots of a fake that was not told how many.
FAKE_SEED_COUNT = 256

_Calm = Annotated[bool, typer.Option("--calm/--no-calm", help="No price walks, interruptions, stockouts and faults.")]


def run(backend: "Backend", *, readiness: "Ready | ConfigureWaits") -> NoReturn:
    """Be the whole main program of a provider: command line, gRPC, TLS, health, reflection, metrics, signals.

    `readiness` is a checker, or CONFIGURE_WAITS (docs/spec/provider.md §7). Ends the process: 0 after a clean stop, 1
    for a failure while running, 2 for a wrong call or file, which is told in one line.
    """
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command(cls=SwitchCommand, help=f"Serve the {backend.provider} provider.")(_command(backend, readiness))
    run_program(program, Path(sys.argv[0]).name)


def _command(backend: "Backend", readiness: "Ready | ConfigureWaits") -> Callable[..., None]:
    @provider_command()
    def serve_backend(flags: ProviderFlags) -> None:
        from bigfleet.cli.provider.substrate import Substrate
        from bigfleet.provider.backends.fake import FakeBackend

        is_fake = isinstance(backend, FakeBackend)
        serve(
            flags,
            lambda _place: Substrate(backend=backend, readiness=readiness),
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
    from bigfleet.cli.provider.process import serve_place
    from bigfleet.cli.runtime.system import configure_logging, run_loop

    if flags.use_fake_backend:
        open_substrate, may_forget = _open_fake, True
    place, options = flags.place(name=name, may_forget=may_forget), flags.options()
    configure_logging("provider", flags.log_level)
    code = run_loop(lambda: serve_place(place, options, open_substrate))
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


def _open_fake(place: "ProviderPlace") -> "Substrate":
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.provider.backends.fake import FakeBackend

    backend = FakeBackend(0 if place.offerings_path is not None else place.seed_count or FAKE_SEED_COUNT)

    def take_slots(slots: "Iterable[Slot]") -> None:
        # It shows the hosts of slots that it knows.
        if place.offerings_path is not None:
            backend.slots = list(slots)

    return Substrate(
        backend=backend,
        readiness=CONFIGURE_WAITS,
        seeds_itself=True,
        take_offers=take_slots,
    )


@app.callback()
def provider() -> None:
    """Hold the providers together; each is a command of its own."""


@app.command(cls=SwitchCommand)
@provider_command(without=("offerings",))
def simulated(
    flags: ProviderFlags,
    catalog: Annotated[Path | None, typer.Option(help="CSV of instance types; a sample is built in.")] = None,
    world: Annotated[Path | None, typer.Option(help="YAML or JSON of the world; every key has a default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 1,
    time_scale: Annotated[float, typer.Option(help="Multiplies every duration of the world.")] = 1.0,
    calm: _Calm = False,
) -> None:
    """Run a provider over a simulated cloud: machines that boot, join, cost money and are taken away."""
    from bigfleet.cli.provider.simulated import SimulatedWorld, open_simulated

    if flags.seed_count is not None and world is not None:
        raise UsageFault("--seed-count and --world contradict each other: both say which machines there are")
    if not 0 < time_scale < math.inf:
        raise UsageFault(f"--time-scale: {time_scale} must be above 0")
    simulation = SimulatedWorld(
        catalogue_path=catalog, world_path=world, seed=seed, time_scale=time_scale, is_calm=calm
    )
    serve(flags, functools.partial(open_simulated, simulation=simulation), name="simulated")
