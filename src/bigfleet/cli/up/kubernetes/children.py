"""Defines the processes of a run on real control planes, in their start order. This module does not start a process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bigfleet.cli.up.kubernetes.settings import TIME_SCALE, KubernetesSettings
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.cli.up.supervisor import ChildSpec
from bigfleet.demo.fleet import REGION, ZONES, DemoFleet

PROVIDER: Final = "provider"
SHARD: Final = "shard"


class PlaneAccess(NamedTuple):
    """How the programs of one cluster reach its API server."""

    operator: Path
    pod_controller: Path


def port_names(settings: KubernetesSettings) -> tuple[str, ...]:
    """Return the names of the ports that the run needs, those of the control planes apart."""
    programs = (f"{kind}-{cluster}" for cluster in settings.cluster_ids for kind in ("operator", "pods"))
    return (PROVIDER, f"{PROVIDER}_metrics", SHARD, f"{SHARD}_metrics", *programs)


def fleet_specs(
    settings: KubernetesSettings, state: StateDir, ports: Mapping[str, int], fleet: DemoFleet
) -> list[ChildSpec]:
    """Return provider and shard; writes the world that the provider reads."""
    world = state.write_text("world.json", json.dumps({"region": REGION, "zones": ZONES, "pools": fleet.pools}) + "\n")
    provider = (
        "provider", "simulated",
        "--addr", _loopback(ports[PROVIDER]),
        "--metrics-addr", _loopback(ports[f"{PROVIDER}_metrics"]),
        "--state", str((state.path / "provider.db").absolute()),
        "--world", str(world.absolute()),
        "--seed", str(settings.seed),
        "--time-scale", repr(TIME_SCALE),
        "--failed-hold", "30s",
        "--reconcile-interval", "3s",
    )  # fmt: skip
    shard = (
        "shard",
        "--listen", _loopback(ports[SHARD]),
        "--metrics-addr", _loopback(ports[f"{SHARD}_metrics"]),
        "--data-dir", str((state.path / SHARD).absolute()),
        "--provider-addr", _loopback(ports[PROVIDER]),
        "--cycle-interval", "2s",
        "--reclaim-after", "10s",
        "--reclaim-cap-fraction", "0",
    )  # fmt: skip
    return [_spec(state, PROVIDER, provider, ports[PROVIDER]), _spec(state, SHARD, shard, ports[SHARD])]


def cluster_specs(
    settings: KubernetesSettings, state: StateDir, ports: Mapping[str, int], access: Mapping[str, PlaneAccess]
) -> list[ChildSpec]:
    """Return the operator and the pod controller of each cluster."""
    specs = []
    for cluster in settings.cluster_ids:
        operator_port, pods_port = ports[f"operator-{cluster}"], ports[f"pods-{cluster}"]
        operator = (
            "operator",
            "--cluster-id", cluster,
            "--shard-addr", _loopback(ports[SHARD]),
            "--kubeconfig", str(access[cluster].operator),
            "--namespace", "bigfleet-system",
            "--metrics-addr", _loopback(operator_port),
            "--rollup-interval", "5s",
            "--bootstrap-stub",
        )  # fmt: skip
        pod_controller = (
            "pod-controller",
            "--kubeconfig", str(access[cluster].pod_controller),
            "--namespace", "bigfleet-system",
            "--metrics-addr", _loopback(pods_port),
        )  # fmt: skip
        specs.append(_spec(state, f"operator-{cluster}", operator, operator_port))
        specs.append(_spec(state, f"pod-controller-{cluster}", pod_controller, pods_port))
    return specs


def _spec(state: StateDir, name: str, arguments: tuple[str, ...], port: int) -> ChildSpec:
    return ChildSpec(
        name=name,
        arguments=arguments,
        port=port,
        log=state.logs / f"{name}.log",
        pid_file=state.path / f"{name}.pid",
    )


def _loopback(port: int) -> str:
    return f"127.0.0.1:{port}"
