"""`bigfleet shard`: its flags, checked one by one, and what they mean to the process.

docs/spec/shard.md §1. Exit 2 for a wrong call, 1 when it cannot start or fails while running, 0 after a clean stop. The
process itself is put together in `bigfleet.cli.shard_process`.
"""

import math
from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.faults import UsageFault
from bigfleet.cli.values import (
    parse_address,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.model.ids import ShardId, identifier_fault

LOG_LEVELS = ("debug", "info", "warning", "error")

_ProviderAddr = Annotated[str, typer.Option(metavar="HOST:PORT", help="The capacity provider. Required.")]
_Id = Annotated[str, typer.Option("--id", metavar="ID", help="Id of this shard.")]
_Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of Session and ShardRead.")]
_MetricsAddr = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address of /metrics, /healthz and /readyz; off closes it.")
]
_DataDir = Annotated[Path, typer.Option(metavar="DIR", help="Directory of shard.db.")]
_CycleInterval = Annotated[str, typer.Option(metavar="DURATION", help="Time between timer cycles.")]
_WakeMinGap = Annotated[
    str, typer.Option(metavar="DURATION", help="Least time between starts of woken cycles; off: timer cycles alone.")
]
_Concurrency = Annotated[int, typer.Option(min=1, help="Worker slots; the action queue holds twice as many.")]
_WaitingMax = Annotated[int, typer.Option(min=0, help="Actions that wait for an operator without holding a slot.")]
_ExecuteTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Deadline of one provider call.")]
_BootstrapTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Deadline of one bootstrap request.")]
_ListTimeout = Annotated[str, typer.Option(metavar="DURATION", help="Deadline of one List.")]
_MaxActions = Annotated[int, typer.Option(min=0, help="Most actions of one cycle; 0 is unlimited.")]
_VerifyEvery = Annotated[
    int,
    typer.Option(
        metavar="CYCLES", min=0, help="Cycles between those whose decision is checked against a full pass; 0 is off."
    ),
]
_Incremental = Annotated[
    bool, typer.Option("--incremental-reconcile", help="Read changes instead of the whole inventory.")
]
_FullListEvery = Annotated[
    int, typer.Option(min=1, help="Cycles between full Lists, of a provider that tells no removals.")
]
_CapFraction = Annotated[
    float, typer.Option(help="Share of a cluster's machines that one period may reclaim; 0 switches the rail off.")
]
_Guard = Annotated[
    bool, typer.Option("--empty-rollup-guard/--no-empty-rollup-guard", help="Hold roll-ups that lose most rows.")
]
_Brake = Annotated[
    bool, typer.Option("--removal-brake/--no-removal-brake", help="Do not believe a sudden loss of machines.")
]
_Paused = Annotated[bool, typer.Option("--actuation-paused", help="Decide and report, carry out nothing.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="As the pause, with each action logged.")]
_Outbox = Annotated[int, typer.Option(min=16, help="Frames that may wait for one operator.")]
_History = Annotated[int, typer.Option(min=1, help="Actions kept for readers.")]
_LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")]


def shard(
    provider_addr: _ProviderAddr = "",
    id: _Id = "shard-0",
    listen: _Listen = ":7780",
    metrics_addr: _MetricsAddr = ":8780",
    data_dir: _DataDir = Path("data"),
    cycle_interval: _CycleInterval = "10s",
    wake_min_gap: _WakeMinGap = "500ms",
    execute_concurrency: _Concurrency = 64,
    execute_waiting_max: _WaitingMax = 1024,
    execute_timeout: _ExecuteTimeout = "30s",
    bootstrap_timeout: _BootstrapTimeout = "30s",
    list_timeout: _ListTimeout = "120s",
    max_actions_per_cycle: _MaxActions = 0,
    engine_verify_every: _VerifyEvery = 100,
    incremental_reconcile: _Incremental = False,
    full_list_every: _FullListEvery = 30,
    reclaim_cap_fraction: _CapFraction = 0.05,
    empty_rollup_guard: _Guard = True,
    removal_brake: _Brake = True,
    actuation_paused: _Paused = False,
    dry_run: _DryRun = False,
    outbox_frames: _Outbox = 1024,
    action_history: _History = 10_000,
    log_level: _LogLevel = "info",
) -> None:
    """Run one shard: it owns machines, learns demand from cluster operators, decides and actuates."""
    from bigfleet.cli.runtime import configure_logging, run_loop
    from bigfleet.cli.shard_process import ShardPlace, serve_shard
    from bigfleet.shard.ports import ShardSettings

    _check(provider_addr, id, reclaim_cap_fraction, log_level)
    settings = ShardSettings(
        cycle_interval_seconds=parse_positive_duration_seconds(cycle_interval, "--cycle-interval"),
        wake_gap_seconds=None if wake_min_gap == "off" else parse_duration_seconds(wake_min_gap, "--wake-min-gap"),
        execute_concurrency_max=execute_concurrency,
        execute_waiting_max=execute_waiting_max,
        execute_timeout_seconds=parse_positive_duration_seconds(execute_timeout, "--execute-timeout"),
        bootstrap_timeout_seconds=parse_positive_duration_seconds(bootstrap_timeout, "--bootstrap-timeout"),
        list_timeout_seconds=parse_positive_duration_seconds(list_timeout, "--list-timeout"),
        actions_per_cycle_max=max_actions_per_cycle,
        engine_verify_every_cycles=engine_verify_every,
        incremental_reconcile=incremental_reconcile,
        full_list_every_cycles=full_list_every,
        reclaim_cap_fraction=reclaim_cap_fraction,
        empty_rollup_guard=empty_rollup_guard,
        removal_brake=removal_brake,
        actuation_paused=actuation_paused,
        dry_run=dry_run,
        outbox_frames_max=outbox_frames,
        action_history_max=action_history,
    )
    place = ShardPlace(
        shard_id=ShardId(id),
        data_dir=data_dir,
        provider_address=parse_address(provider_addr, "--provider-addr"),
        listen_address=parse_address(listen, "--listen"),
        metrics_address=parse_optional_address(metrics_addr, "--metrics-addr"),
    )
    configure_logging("shard", log_level)
    raise typer.Exit(run_loop(lambda: serve_shard(place, settings)))


def _check(provider_addr: str, shard_id: str, reclaim_cap_fraction: float, log_level: str) -> None:
    if not provider_addr:
        raise UsageFault("--provider-addr is missing: name the HOST:PORT of the capacity provider")
    fault = identifier_fault(shard_id)
    if fault:
        raise UsageFault(f"--id {fault}")
    if not (math.isfinite(reclaim_cap_fraction) and 0 <= reclaim_cap_fraction <= 1):
        raise UsageFault(f"--reclaim-cap-fraction: {reclaim_cap_fraction} must be 0 or in (0, 1]")
    if log_level not in LOG_LEVELS:
        raise UsageFault(f"--log-level: {log_level!r} is unknown; choose one of {', '.join(LOG_LEVELS)}")
