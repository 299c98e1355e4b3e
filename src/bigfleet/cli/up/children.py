"""Defines the processes of a run in their start order: names, arguments, addresses.

A single shard is called `shard` and has no coordinator. Several shards have ids of their own, one zone of the fleet
each, and a coordinator on a SQLite file or on an etcd that is started as well. The coordinator's waits are short enough
to watch. This module does not start a process.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from bigfleet.cli.up.settings import StoreChoice, UpSettings
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.cli.up.supervisor import ChildSpec
from bigfleet.demo.fleet import REGION, ZONES, DemoFleet, zones_named

SMALL_FLEET_MACHINES: Final = 500
PROVIDER: Final = "provider"
COORDINATOR: Final = "coordinator"
ETCD: Final = "etcd"
_WORLD_FAILED_HOLD_SECONDS: Final = 600.0
_WORLD_RECONCILE_SECONDS: Final = 60.0
#: The shortest that keeps shards fresh on a machine that is busy with all of them.
REPORT_INTERVAL: Final = "2s"
#: In place of minutes: a move is to follow its shortfall within seconds of a demonstration.
_COORDINATOR_PACE: Final = (
    "--report-interval", REPORT_INTERVAL,
    "--lease-ttl", "5s",
    "--rebalance-interval", "2s",
    "--rebalance-cooldown", "6s",
    "--rebalance-age", "3",
    "--rebalance-preempt-age", "12",
)  # fmt: skip


def zones_of(settings: UpSettings) -> tuple[str, ...]:
    """Return the zones of the run's fleet: one for each of several shards, in their order."""
    return zones_named(settings.shards) if settings.shards > 1 else ZONES


def shard_names(settings: UpSettings) -> dict[str, str]:
    """Return what each shard's process, directory and log are called, by shard id."""
    if settings.shards == 1:
        return {settings.shard_ids[0]: "shard"}
    return {shard_id: shard_id for shard_id in settings.shard_ids}


def port_names(settings: UpSettings) -> tuple[str, ...]:
    """Return the names of the ports that the run needs; `<name>_metrics` is a child's HTTP."""
    children = [PROVIDER, *shard_names(settings).values()]
    if settings.shards > 1:
        children.append(COORDINATOR)
    names = [name for child in children for name in (child, f"{child}_metrics")]
    return (*names, ETCD, f"{ETCD}_peer") if settings.store is StoreChoice.ETCD else tuple(names)


def child_specs(
    settings: UpSettings, state: StateDir, ports: Mapping[str, int], fleet: DemoFleet, scale: float
) -> tuple[ChildSpec, ...]:
    """Return the children in start order; writes the world that the provider reads."""
    zones = zones_of(settings)
    world: dict[str, Any] = {"region": REGION, "zones": zones, "pools": fleet.pools}
    world_path = state.write_text("world.json", json.dumps(world, indent=1) + "\n")
    provider = (
        "provider", "simulated",
        "--addr", _loopback(ports[PROVIDER]),
        "--metrics-addr", _loopback(ports[f"{PROVIDER}_metrics"]),
        "--state", _absolute(state, "provider.db"),
        "--world", str(world_path.absolute()),
        "--seed", str(settings.seed),
        "--time-scale", repr(scale),
        "--failed-hold", f"{max(1.0, _WORLD_FAILED_HOLD_SECONDS * scale):.3f}s",
        "--reconcile-interval", f"{max(2.0, _WORLD_RECONCILE_SECONDS * scale):.3f}s",
    )  # fmt: skip
    specs = [_spec(state, PROVIDER, provider, ports)]
    if settings.shards > 1:
        specs += _coordinator_specs(settings, state, ports)
    for shard_id, name in shard_names(settings).items():
        specs.append(_spec(state, name, _shard_arguments(settings, state, ports, shard_id, name), ports))
    return tuple(specs)


def _shard_arguments(
    settings: UpSettings, state: StateDir, ports: Mapping[str, int], shard_id: str, name: str
) -> tuple[str, ...]:
    arguments = (
        "shard",
        "--id", shard_id,
        "--listen", _loopback(ports[name]),
        "--metrics-addr", _loopback(ports[f"{name}_metrics"]),
        "--data-dir", _absolute(state, name),
        "--provider-addr", _loopback(ports[PROVIDER]),
        "--cycle-interval", _cycle_interval(settings),
        "--wake-min-gap", "200ms",
        "--reclaim-after", reclaim_after(settings),
    )  # fmt: skip
    if settings.shards == 1:
        return arguments
    return (
        *arguments,
        "--advertise-addr", _loopback(ports[name]),
        "--coordinator-addr", _loopback(ports[COORDINATOR]),
        "--ownership", "assigned",
        "--report-interval", REPORT_INTERVAL,
    )  # fmt: skip


def _coordinator_specs(settings: UpSettings, state: StateDir, ports: Mapping[str, int]) -> list[ChildSpec]:
    specs: list[ChildSpec] = []
    store = f"sqlite://{_absolute(state, 'coordinator.db')}"
    if settings.store is StoreChoice.ETCD:
        store = f"etcd://{_loopback(ports[ETCD])}/bigfleet"
        specs.append(_spec(state, ETCD, _etcd_arguments(state, ports), ports, program=settings.etcd_program))
    coordinator = (
        "coordinator",
        "--id", COORDINATOR,
        "--listen", _loopback(ports[COORDINATOR]),
        "--metrics-addr", _loopback(ports[f"{COORDINATOR}_metrics"]),
        "--advertise-addr", _loopback(ports[COORDINATOR]),
        "--store", store,
        *_COORDINATOR_PACE,
    )  # fmt: skip
    specs.append(_spec(state, COORDINATOR, coordinator, ports))
    return specs


def _etcd_arguments(state: StateDir, ports: Mapping[str, int]) -> tuple[str, ...]:
    client, peer = f"http://{_loopback(ports[ETCD])}", f"http://{_loopback(ports[f'{ETCD}_peer'])}"
    return (
        "--name", "bigfleet",
        "--data-dir", _absolute(state, "etcd"),
        "--listen-client-urls", client,
        "--advertise-client-urls", client,
        "--listen-peer-urls", peer,
        "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"bigfleet={peer}",
        "--logger", "zap",
        "--log-level", "warn",
    )  # fmt: skip


def _spec(
    state: StateDir, name: str, arguments: tuple[str, ...], ports: Mapping[str, int], *, program: str = ""
) -> ChildSpec:
    return ChildSpec(
        name=name,
        arguments=arguments,
        port=ports[name],
        log=state.logs / f"{name}.log",
        pid_file=state.path / f"{name}.pid",
        program=program,
    )


def reclaim_after(settings: UpSettings) -> str:
    """Return how long excess is held: far shorter than a shard's default, so that a run shows reclaims."""
    return "2s" if settings.trace is None else "0s"


def _cycle_interval(settings: UpSettings) -> str:
    if settings.trace is None:
        return "1s"
    # Each sample waits for a decision; a small fleet is decided in milliseconds.
    return "200ms" if settings.machines <= SMALL_FLEET_MACHINES else "500ms"


def _loopback(port: int) -> str:
    return f"127.0.0.1:{port}"


def _absolute(state: StateDir, name: str) -> str:
    return str((state.path / name).absolute())
