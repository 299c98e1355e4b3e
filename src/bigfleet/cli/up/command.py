"""Defines `bigfleet up`: checks its flags and starts the run.

Exit 2 for a wrong call or a wrong file, 1 for a run that failed, 0 after a run that ended or was stopped.
"""

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from rich.console import Console


def up(
    for_duration: Annotated[
        str | None,
        typer.Option("--for", help="Duration of the run; by default until Ctrl-C, for a trace 120s."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(help="Virtual seconds per second; by default 60, for a trace the speed that fits --for."),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Number of simulated clusters; by default 3, for a trace 4.")
    ] = None,
    machines: Annotated[
        int | None, typer.Option(help="Number of machines of the demonstration; by default 120.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload and of the simulated cloud.")] = 1,
    state_dir: Annotated[Path, typer.Option(help="Directory for the state of the run; a later run resumes it.")] = Path(
        ".bigfleet"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the state of an earlier run, then start.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file at the end.")] = None,
    shards: Annotated[int, typer.Option(help="Shards of the demonstration, at most 8; several get a coordinator.")] = 1,
    store: Annotated[
        str | None, typer.Option(help="Store of the coordinator's tables: sqlite (default) or etcd.")
    ] = None,
    kubernetes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Run N real Kubernetes control planes with operators, on simulated machines."),
    ] = None,
    nodes: Annotated[Path | None, typer.Option(help="CSV of a trace's nodes; needs --pods.")] = None,
    pods: Annotated[Path | None, typer.Option(help="CSV of a trace's pods; needs --nodes.")] = None,
) -> None:
    """Run a provider, shards and simulated clusters on this machine, and watch them.

    Excess machines are reclaimed after 2 s, with a trace at once. The default of a shard is 10 minutes.
    """
    from bigfleet.cli.up.run import run_up
    from bigfleet.cli.up.settings import settings_from_flags

    if kubernetes is not None:
        _reject_beside_kubernetes(
            {
                "--speed": speed,
                "--clusters": clusters,
                "--report": report,
                "--store": store,
                "--nodes": nodes,
                "--pods": pods,
                "--shards": shards if shards != 1 else None,
            }
        )
        _run_kubernetes(
            kubernetes, for_duration=for_duration, machines=machines, seed=seed, state_dir=state_dir, fresh=fresh
        )
    settings = settings_from_flags(
        for_duration=for_duration,
        speed=speed,
        clusters=clusters,
        machines=machines,
        seed=seed,
        state_dir=state_dir,
        fresh=fresh,
        report=report,
        nodes=nodes,
        pods=pods,
        shards=shards,
        store=store,
    )
    _run(lambda console: run_up(settings, console))


def _reject_beside_kubernetes(given: Mapping[str, object]) -> None:
    """Refuse flags that mean nothing on real control planes."""
    for flag, value in given.items():
        if value is not None:
            raise UsageFault(f"{flag} and --kubernetes contradict each other: leave one out")


def _run_kubernetes(
    planes: int, *, for_duration: str | None, machines: int | None, seed: int, state_dir: Path, fresh: bool
) -> NoReturn:
    from bigfleet.cli.up.kubernetes.run import run_kubernetes
    from bigfleet.cli.up.kubernetes.settings import kubernetes_settings

    settings = kubernetes_settings(
        planes,
        for_duration=for_duration,
        machines=machines,
        seed=seed,
        state_dir=state_dir,
        fresh=fresh,
        environment=dict(os.environ),
    )
    _run(lambda console: run_kubernetes(settings, console))


def _run(main: "Callable[[Console], Coroutine[Any, Any, int]]") -> NoReturn:
    """Run on this terminal, or at a fixed width where there is none, and exit."""
    import logging

    import structlog

    from bigfleet.cli.runtime.console import TerminalConsole
    from bigfleet.cli.runtime.system import run_loop
    from bigfleet.cli.up.run import SUMMARY_WIDTH

    # What the clusters' sessions would log is in the view; the children's logs are files of their own.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    console = TerminalConsole()
    if not console.is_terminal:
        console = TerminalConsole(width=SUMMARY_WIDTH)
    raise typer.Exit(run_loop(lambda: main(console)))
