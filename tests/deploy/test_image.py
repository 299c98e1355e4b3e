"""The whole image: two builds have one digest, and its user starts a fleet with the kernels that it brings."""

import json
import os
from pathlib import Path

import pytest

from bigfleet.cli.runtime.kernel_set import KERNELS
from tests.deploy.images import built, needs_root, printed_inside
from tools.image.build import build
from tools.image.layout import Described, unpack_layout

#: The kernels are compiled twice.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Described]:
    """A layout, and what its build said of it."""
    target = tmp_path_factory.mktemp("first") / "layout"
    return target, built(lambda: build(target, os.environ, print))


@pytest.fixture(scope="module")
def root(first: tuple[Path, Described], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked") / "root"
    config = unpack_layout(first[0], folder)
    assert (config["User"], config["Entrypoint"]) == ("65532:65532", ["bigfleet"])
    return folder


def test_two_builds_have_one_digest(first: tuple[Path, Described], tmp_path: Path) -> None:
    assert build(tmp_path / "layout", os.environ, print) == first[1]


@needs_root
def test_its_user_finds_every_kernel_compiled(root: Path) -> None:
    printed = printed_inside(root, "bigfleet", "kernels", "check")

    assert printed.splitlines()[-1] == f"{KERNELS} of {KERNELS} kernels for x86-64-v3 from /opt/bigfleet/kernels"
    assert "miss" not in printed


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
