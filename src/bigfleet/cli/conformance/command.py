"""Defines the command line of the suite (docs/spec/provider.md §23).

Exit 0 for CERTIFIED, 1 for FAILED and INCOMPLETE, 2 when the run could not be set up. This module does not run a
behaviour.
"""

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from bigfleet.cli.flags.tls import TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import UsageFault

BlobFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Bootstrap data that the provider's machines can run; by default 'blob'."),
]


def conformance(
    target: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of a running provider; or use --launch.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Profiles to test, or all; by default core,cloud."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 1,
    only: Annotated[
        str | None, typer.Option(metavar="ID,…", help="Test only these behaviours; does not certify.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of report.json and junit.xml.")] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Command that starts a provider; may contain {addr}, {state} and {seeds}. No shell."
        ),
    ] = None,
    launch_fault: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Command that starts a provider for the profile fault, with timeouts of 2 s."),
    ] = None,
    scale_count: Annotated[int, typer.Option(help="Number of machines of the scale profile, more than 500.")] = 8000,
    soak: Annotated[str, typer.Option(help="Duration of the load of the scale profile.")] = "10s",
    patience: Annotated[str, typer.Option(help="Timeout of one step.")] = "15s",
    blob: BlobFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Certify a capacity provider: CERTIFIED, FAILED or INCOMPLETE for each profile."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from bigfleet.cli.conformance.run import run_conformance
    from bigfleet.cli.conformance.settings import (
        ConformanceSettings,
        checked_scale_count,
        parse_command,
        parse_only,
        parse_target,
        profiles_asked,
        read_blob,
    )
    from bigfleet.cli.runtime.console import TerminalConsole
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
            blob=read_blob(blob),
        ),
        target=parse_target(target),
        launch=parse_command(launch, "--launch"),
        launch_fault=parse_command(launch_fault, "--launch-fault"),
        out=out,
        tls=read_tls(tls_cert, tls_key, tls_ca),
    )
    if settings.target is None and settings.launch is None and settings.launch_fault is None:
        raise UsageFault("--target is missing: name a running provider, or give --launch or --launch-fault")
    raise typer.Exit(run_loop(lambda: run_conformance(settings, TerminalConsole())))
