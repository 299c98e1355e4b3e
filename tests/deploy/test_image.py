"""The whole image: two builds have one digest, and its user starts a fleet with the kernels that it brings.

`make release-check` runs these tests with the archive of a release in place of a build.
"""

import json
import os
import tomllib
from pathlib import Path

import pytest

from bigfleet.cli.runtime.kernel_set import KERNELS
from tests.deploy.images import built, needs_root, printed_inside, process_inside, unpack_release
from tests.processes import free_port
from tests.release.installed import RELEASE_VARIABLE
from tools.image.build import build
from tools.image.layout import Described, unpack_layout
from tools.image.wheels import ROOT

#: The kernels are compiled twice.
pytestmark = pytest.mark.long

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
CYCLES = "bigfleet_shard_cycle_duration_seconds_count"
#: Loading kernels takes a third of it, and compiling them ten times as much.
START_PROCESSOR_SECONDS_MAX = 10.0
#: 325 MiB more are needed by a process that compiles.
START_MEMORY_BYTES_MAX = 300_000_000


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Described]:
    """A layout, and what its build said of it."""
    target = tmp_path_factory.mktemp("first") / "layout"
    return target, built(lambda: build(target, os.environ, print))


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout in the archive of a release, else one that is built."""
    if not os.environ.get(RELEASE_VARIABLE):
        found: tuple[Path, Described] = request.getfixturevalue("first")
        return found[0]
    return unpack_release(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def root(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked") / "root"
    config = unpack_layout(layout, folder)
    assert (config["User"], config["Entrypoint"]) == ("65532:65532", ["bigfleet"])
    return folder


@pytest.mark.skipif(bool(os.environ.get(RELEASE_VARIABLE)), reason="a release is not built again when it is checked")
def test_two_builds_have_one_digest(first: tuple[Path, Described], tmp_path: Path) -> None:
    again = build(tmp_path / "layout", os.environ, print)
    print(again.digest, first[1].digest)

    assert again == first[1]


@needs_root
def test_its_user_runs_the_version_of_the_project(root: Path) -> None:
    assert printed_inside(root, "bigfleet", "--version").strip() == f"bigfleet {VERSION}"


@needs_root
def test_its_user_finds_every_kernel_compiled(root: Path) -> None:
    printed = printed_inside(root, "bigfleet", "kernels", "check")

    assert printed.splitlines()[-1] == f"{KERNELS} of {KERNELS} kernels for x86-64-v3 from /opt/bigfleet/kernels"
    assert "miss" not in printed


@needs_root
def test_a_shard_decides_at_once_compiles_nothing_and_stops_in_order(root: Path, tmp_path: Path) -> None:
    state, metrics = tmp_path / "state", f"127.0.0.1:{free_port()}"
    state.mkdir(0o700)
    with process_inside(
        root, state, "bigfleet", "shard", "--fake-provider=100", "--data-dir=/var/lib/bigfleet",
        "--listen=127.0.0.1:0", f"--metrics-addr={metrics}", "--cycle-interval=200ms",
    ) as shard:  # fmt: skip
        shard.wait_for_metric(metrics, CYCLES, 1)
        first = shard.processor_seconds
        shard.wait_for_metric(metrics, "bigfleet_shard_kernels_compiled_ratio", 1)
        shard.wait_for_metric(metrics, CYCLES, shard.metric(metrics, CYCLES) + 1)
        compiled, memory = shard.processor_seconds, shard.memory_bytes_max
        print(f"processor time: {first:.1f} s to the first decision, {compiled:.1f} s to one with kernels")
        print(f"memory: {memory / 1e6:.0f} MB at most")
        code = shard.stop()

    log = shard.log.read_text()
    assert code == 0, log
    assert "kernels.build_started" not in log
    assert compiled < START_PROCESSOR_SECONDS_MAX
    assert memory < START_MEMORY_BYTES_MAX


@needs_root
def test_its_user_runs_a_fleet_that_decides(root: Path, tmp_path: Path) -> None:
    folder = "/var/lib/bigfleet"
    printed_inside(
        root, "bigfleet", "up", "--for=20s", f"--state-dir={folder}/up", f"--report={folder}/report.json",
        state=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))

    assert report["cycles"] > 0
    assert report["actions"]
