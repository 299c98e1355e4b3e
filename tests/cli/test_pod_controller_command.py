"""`bigfleet pod-controller`: its flags, its files, and what is said when one of them is wrong."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.cli.main import RootGroup
from bigfleet.cli.pod_controller.command import PodControllerFlags
from bigfleet.cli.runtime.failures import UsageFault
from tests.patience import PATIENCE_SECONDS
from tests.processes import run_bigfleet

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "operator.md"


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """Return a kubeconfig of a server that does not run."""
    path = tmp_path / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev", "namespace": "fleet"}}],
        "clusters": [{"name": "dev", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "dev", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_the_flags_are_those_of_the_specification() -> None:
    section = SPEC.read_text(encoding="utf-8").split("## 11. Pod controller")[1].split("\n## ")[0]
    assert all(f"--{field.name.replace('_', '-')}" in section for field in fields(PodControllerFlags))


def test_defaults_are_those_of_the_specification(kubeconfig: Path) -> None:
    process = PodControllerFlags(kubeconfig=kubeconfig).process()

    assert (process.qps, process.burst, process.workers, process.cache_sync_seconds) == (200, 400, 16, 600)
    assert process.metrics_address == ("0.0.0.0", 8080)
    assert process.endpoint.server == "http://127.0.0.1:1"


def test_the_lease_is_in_the_namespace_of_the_context_unless_another_is_named(kubeconfig: Path) -> None:
    assert PodControllerFlags(kubeconfig=kubeconfig).process().namespace == "fleet"
    assert PodControllerFlags(kubeconfig=kubeconfig, namespace="other").process().namespace == "other"


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"log_level": "loud"}, "--log-level: 'loud' is unknown; choose one of debug"),
        ({"qps": -1.0}, "--qps: -1.0 is not a rate"),
        ({"qps": float("nan")}, "--qps: nan is not a rate"),
        ({"lease_name": ""}, "--lease-name: '' is not the name of a Lease"),
        ({"namespace": "A B"}, "--namespace: 'A B' is not the name of a namespace"),
        ({"metrics_addr": "8080"}, "--metrics-addr: '8080' is not an address"),
        ({"cache_sync_timeout": "soon"}, "--cache-sync-timeout: 'soon' is not a duration"),
        ({"cache_sync_timeout": "0"}, "--cache-sync-timeout: '0' must be longer than zero"),
        ({"kubeconfig": Path("absent")}, "absent"),
        ({"annotated_penalty_max": "-1"}, "--annotated-penalty-max: '-1' is negative"),
        ({"priority_class_defaults": Path("absent.yaml")}, "--priority-class-defaults: absent.yaml: cannot be read"),
    ],
)
def test_a_wrong_flag_is_named(wrong: dict[str, Any], part: str, kubeconfig: Path) -> None:
    given: dict[str, Any] = {"kubeconfig": kubeconfig, **wrong}
    with pytest.raises(UsageFault) as caught:
        PodControllerFlags(**given).process()

    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_defaults_file_is_exit_2_with_line_and_place(kubeconfig: Path, tmp_path: Path) -> None:
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text("high:\n  interruptionPenalty: $20\n", encoding="utf-8")
    done = run_bigfleet("pod-controller", "--kubeconfig", str(kubeconfig), "--priority-class-defaults", str(defaults))

    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"--priority-class-defaults: {defaults}:2: high.interruptionPenalty: '$20' is no quantity" in line


#: Waits for an API server for three seconds in place of two minutes.
IMPATIENT = (
    "import sys; from bigfleet.cli.runtime import kubernetes; kubernetes.AWAY_SECONDS_MAX = 3.0;"
    "from bigfleet.cli.main import main; sys.argv[0] = 'bigfleet'; main()"
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(("-c", IMPATIENT), marks=pytest.mark.slow), pytest.param(("-m", "bigfleet"), marks=pytest.mark.long)],
    ids=["three-seconds", "two-minutes"],
)
def test_a_server_that_is_away_at_start_is_exit_1_in_one_line(kubeconfig: Path, program: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, *program, "pod-controller", "--kubeconfig", str(kubeconfig), "--metrics-addr", "off"],
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("bigfleet: API server of context dev of")


def test_the_command_is_listed() -> None:
    assert "pod-controller" in RootGroup.sources
