"""Defines the command line of the suite (docs/spec/provider.md §23).

Exit 0 for CERTIFIED, 1 for FAILED and INCOMPLETE, 2 when the run could not be set up. Nothing here runs a behaviour.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.flags.tls import TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import UsageFault


def conformance(
    target: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running provider; --launch may stand in for it.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="LIST", help="Profiles, or all; by default core,cloud,delta,spot.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 1,
    only: Annotated[str | None, typer.Option(metavar="ID,…", help="These behaviours alone; never certifies.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of report.json and junit.xml.")] = None,
    launch: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Command of a provider, with {addr}, {state} and {seeds}; no shell."),
    ] = None,
    launch_fault: Annotated[
        str | None, typer.Option(metavar="CMD", help="The same, for one that serves the fault selectors with T = 2s.")
    ] = None,
    scale_count: Annotated[int, typer.Option(help="Machines of the scale profile, more than a page of 500.")] = 8000,
    soak: Annotated[str, typer.Option(help="How long the scale profile churns.")] = "10s",
    patience: Annotated[str, typer.Option(help="How long a step may take.")] = "15s",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Certify a capacity provider: say CERTIFIED, FAILED or INCOMPLETE, and why."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from rich.console import Console

    from bigfleet.cli.conformance.run import run_conformance
    from bigfleet.cli.conformance.settings import (
        ConformanceSettings,
        checked_scale_count,
        parse_command,
        parse_only,
        parse_target,
        profiles_asked,
    )
    from bigfleet.cli.runtime.system import run_loop
    from bigfleet.conformance.lab import Patience
    from bigfleet.conformance.runner import Plan

    ids = None if only is None else parse_only(only)
    settings = ConformanceSettings(
        plan=Plan(
            profiles=profiles_asked(profile, ids),
            seed=seed,
            only=ids,
            scale_count=checked_scale_count(scale_count),
            soak_seconds=parse_positive_duration_seconds(soak, "--soak"),
            patience=Patience(step_seconds=parse_positive_duration_seconds(patience, "--patience")),
        ),
        target=parse_target(target),
        launch=parse_command(launch, "--launch"),
        launch_fault=parse_command(launch_fault, "--launch-fault"),
        out=out,
        tls=read_tls(tls_cert, tls_key, tls_ca),
    )
    if settings.target is None and settings.launch is None and settings.launch_fault is None:
        raise UsageFault("--target is missing: name a running provider, or give --launch or --launch-fault")
    raise typer.Exit(run_loop(lambda: run_conformance(settings, Console())))
