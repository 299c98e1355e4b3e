"""Checks the flags of `bigfleet up --kubernetes` before anything is started."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bigfleet
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.up.settings import RunIdentity
from bigfleet.demo.fleet import MACHINES_PER_CLUSTER_MIN
from bigfleet.demo.kubernetes.control_plane import ControlPlaneError, program_from

#: A control plane takes 0.7 GB of memory, and most of a core while it starts.
PLANES_MAX: Final = 6
MACHINES_DEFAULT: Final = 60
MACHINES_MAX: Final = 500
#: Machines boot in seconds in place of minutes.
TIME_SCALE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """One run on real control planes. It is never resumed: the planes start empty."""

    planes: int
    #: None runs until it is stopped.
    for_seconds: float | None
    machines: int
    seed: int
    state_dir: Path
    fresh: bool
    #: What `make controlplane` builds.
    program: Path
    #: The folder with the custom resource definitions and the manifests.
    deploy: Path

    @property
    def identity(self) -> RunIdentity:
        """What the state directory is made for."""
        return RunIdentity(self.planes, self.machines, self.seed, "", kubernetes=self.planes)

    @property
    def cluster_ids(self) -> tuple[str, ...]:
        """The clusters' ids, `cluster-0` and so on."""
        return tuple(f"cluster-{number}" for number in range(self.planes))


def kubernetes_settings(
    planes: int,
    *,
    for_duration: str | None,
    machines: int | None,
    seed: int,
    state_dir: Path,
    fresh: bool,
    environment: dict[str, str],
) -> KubernetesSettings:
    """Return the settings. Raises UsageFault naming the flag, RunFault for what is not there."""
    if not 1 <= planes <= PLANES_MAX:
        raise UsageFault(f"--kubernetes: {planes} must be from 1 to {PLANES_MAX}; each is a whole control plane")
    if seed < 0 or seed >= 2**63:
        raise UsageFault(f"--seed: {seed} must be from 0 to 2^63 - 1")
    count = MACHINES_DEFAULT * max(1, planes // 2) if machines is None else machines
    least = planes * MACHINES_PER_CLUSTER_MIN
    if not least <= count <= MACHINES_MAX:
        raise UsageFault(
            f"--machines: {count} must be from {least} ({MACHINES_PER_CLUSTER_MIN} a cluster) to {MACHINES_MAX}"
        )
    try:
        program = program_from(environment)
    except ControlPlaneError as error:
        raise RunFault(f"--kubernetes: {error}; `make kubernetes-demo` does both") from error
    return KubernetesSettings(
        planes=planes,
        for_seconds=parse_positive_duration_seconds(for_duration, "--for") if for_duration is not None else None,
        machines=count,
        seed=seed,
        state_dir=state_dir,
        fresh=fresh,
        program=program,
        deploy=_deploy_folder(),
    )


def _deploy_folder() -> Path:
    """Return the folder `deploy` of the source checkout that this runs from. Raises RunFault."""
    folder = Path(bigfleet.__file__).resolve().parents[2] / "deploy"
    if not (folder / "crds").is_dir():
        raise RunFault(
            f"--kubernetes: {folder} has no custom resource definitions; run it from a source checkout of BigFleet"
        )
    return folder
