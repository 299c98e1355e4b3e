"""`bigfleet provider …`: the providers that are shipped, each from its flags to a clean stop.

docs/spec/provider.md §19. Exit 2 for a wrong call or file, 1 when it cannot start or fails while running, 0 after a
clean stop. A real backend is never silently a fake one.
"""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.faults import UsageFault
from bigfleet.cli.switches import SwitchCommand
from bigfleet.cli.tls_flags import TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.values import (
    parse_address,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.model.ids import identifier_fault

app = typer.Typer(help="Capacity providers: who makes machines real.", no_args_is_help=True)

_StateSync = Annotated[str, typer.Option(help="full survives a lost power supply, normal a killed process only.")]
_Provider = Annotated[str, typer.Option(help="Name of the provider: of its hosts, and before its ids.")]
_Calm = Annotated[bool, typer.Option("--calm/--no-calm", help="No price walks, interruptions, stockouts and faults.")]
_SeedCount = Annotated[
    int | None, typer.Option(min=1, help="That many slots in the mix of the fake backend, in place of the pools.")
]
_MetricsAddr = Annotated[str, typer.Option(help="Address of /metrics, /healthz, /readyz; off closes it.")]
_TransitionTimeout = Annotated[
    str | None, typer.Option(help="Timeout of all four kinds of call; by default each has its own.")
]
_Certify = Annotated[
    bool, typer.Option("--certify", help="Let an admin change machines with any token, for a conformance run.")
]


@app.callback()
def provider() -> None:
    """Hold the providers together; each is a command of its own."""


@app.command(cls=SwitchCommand)
def simulated(
    addr: Annotated[str, typer.Option(help="Address of the gRPC server.")] = "127.0.0.1:9100",
    state: Annotated[Path | None, typer.Option(help="State file; the cloud is kept in FILE.cloud. Required.")] = None,
    state_sync: _StateSync = "full",
    provider: _Provider = "simulated",
    catalog: Annotated[Path | None, typer.Option(help="CSV of instance types; a sample is built in.")] = None,
    world: Annotated[Path | None, typer.Option(help="YAML or JSON of the world; every key has a default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 1,
    time_scale: Annotated[float, typer.Option(help="Multiplies every duration of the world.")] = 1.0,
    calm: _Calm = False,
    seed_count: _SeedCount = None,
    metrics_addr: _MetricsAddr = "127.0.0.1:9101",
    reflection: Annotated[bool, typer.Option("--reflection/--no-reflection", help="Serve gRPC reflection.")] = True,
    transition_timeout: _TransitionTimeout = None,
    reconcile_interval: Annotated[str, typer.Option(help="Time between inventory passes.")] = "60s",
    failed_hold: Annotated[str, typer.Option(help="Hold before the way out of FAILED; 0 switches it off.")] = "10m",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    certify: _Certify = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run a provider over a simulated cloud: machines that boot, join, cost money and are taken away."""
    # gRPC's core prints a line of its own for a port in use; ours says what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from bigfleet.cli.provider_process import ProviderPlace, SimulatedWorld, serve_simulated
    from bigfleet.cli.runtime import configure_logging, run_loop
    from bigfleet.provider.options import CoreOptions

    if state is None:
        raise UsageFault("--state is missing: the provider owns the truth about machines and needs a file to keep it")
    if seed_count is not None and world is not None:
        raise UsageFault("--seed-count and --world contradict each other: both say which machines there are")
    _check_values(state_sync, provider, time_scale, log_level)
    tls = read_tls(tls_cert, tls_key, tls_ca)
    if certify and tls is None:
        raise UsageFault(
            "--certify is about certificates: without --tls-cert, --tls-key and --tls-ca nobody is refused"
        )
    place = ProviderPlace(
        address=parse_address(addr, "--addr"),
        metrics_address=parse_optional_address(metrics_addr, "--metrics-addr"),
        state_path=state,
        is_power_safe=state_sync == "full",
        provider=provider,
        reflect=reflection,
        tls=tls,
        certify=certify,
    )
    options = CoreOptions(
        transition_timeout_seconds=None
        if transition_timeout is None
        else parse_positive_duration_seconds(transition_timeout, "--transition-timeout"),
        reconcile_interval_seconds=parse_positive_duration_seconds(reconcile_interval, "--reconcile-interval"),
        failed_hold_seconds=parse_duration_seconds(failed_hold, "--failed-hold"),
    )
    simulation = SimulatedWorld(
        catalogue_path=catalog,
        world_path=world,
        seed=seed,
        time_scale=time_scale,
        is_calm=calm,
        seed_count=seed_count,
    )
    configure_logging("provider", log_level)
    raise typer.Exit(run_loop(lambda: serve_simulated(place, options, simulation)))


def _check_values(state_sync: str, provider: str, time_scale: float, log_level: str) -> None:
    if state_sync not in ("full", "normal"):
        raise UsageFault(f"--state-sync: {state_sync!r} is unknown; choose full or normal")
    fault = identifier_fault(provider)
    if fault:
        raise UsageFault(f"--provider {fault}")
    if not 0 < time_scale < math.inf:
        raise UsageFault(f"--time-scale: {time_scale} must be above 0")
    if log_level not in ("debug", "info", "warning", "error"):
        raise UsageFault(f"--log-level: {log_level!r} is unknown; choose debug, info, warning or error")
