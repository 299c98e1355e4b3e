"""Defines the commands `bigfleet provider …`.

docs/spec/provider.md §16, §19. Exit 2 for a wrong call or file, 1 if the provider cannot start or fails while it runs,
0 after a clean stop. A real backend is never silently replaced with a fake one.
"""

import functools
import math
from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.provider.admin import app as admin_app
from bigfleet.cli.provider.aws import aws
from bigfleet.cli.provider.backup import backup
from bigfleet.cli.provider.exec_program import exec_program
from bigfleet.cli.provider.fault import fault
from bigfleet.cli.provider.flags import ProviderCommand, ProviderFlags, provider_command
from bigfleet.cli.provider.libvirt_hosts import libvirt_hosts
from bigfleet.cli.provider.new import new
from bigfleet.cli.provider.partitioned import partitioned
from bigfleet.cli.provider.serve import serve
from bigfleet.cli.runtime.failures import UsageFault

app = typer.Typer(cls=HelpGroup, help="Run, write or administer a capacity provider.", no_args_is_help=True)
app.add_typer(admin_app, name="admin")
app.command(cls=ProviderCommand)(aws)
app.command(cls=SwitchCommand)(backup)
app.command("exec", cls=ProviderCommand)(exec_program)
app.command(cls=ProviderCommand)(fault)
app.command("libvirt", cls=ProviderCommand)(libvirt_hosts)
app.command(cls=SwitchCommand)(new)
app.command(cls=ProviderCommand)(partitioned)

_Calm = Annotated[
    bool, typer.Option("--calm/--no-calm", help="Simulate no price changes, interruptions, stockouts and faults.")
]


@app.callback()
def provider() -> None:
    """Hold the providers together; each is a command of its own."""


@app.command(cls=ProviderCommand)
@provider_command(without=("offerings",))
def simulated(
    flags: ProviderFlags,
    catalog: Annotated[Path | None, typer.Option(help="CSV file of instance types; a sample is built in.")] = None,
    world: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of the simulated world; every key has a default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 1,
    time_scale: Annotated[float, typer.Option(help="Factor for all durations of the simulation.")] = 1.0,
    calm: _Calm = False,
) -> None:
    """Run a provider with a simulated cloud."""
    from bigfleet.cli.provider.simulated import SimulatedWorld, open_simulated

    if flags.seed_count is not None and world is not None:
        raise UsageFault("--seed-count and --world contradict each other: both say which machines there are")
    given = {"--catalog": catalog is not None, "--world": world is not None, "--calm": calm}
    unused = next((flag for flag, is_given in given.items() if is_given), None)
    if flags.use_fake_backend and unused is not None:
        raise UsageFault(f"--use-fake-backend and {unused} contradict each other: the fake backend simulates no cloud")
    if not 0 < time_scale < math.inf:
        raise UsageFault(f"--time-scale: {time_scale} must be above 0")
    simulation = SimulatedWorld(
        catalogue_path=catalog, world_path=world, seed=seed, time_scale=time_scale, is_calm=calm
    )
    serve(flags, functools.partial(open_simulated, simulation=simulation), name="simulated")
