"""The wheels of a release are installed with pip in an empty place, from an index on this disk, and started.

`make release-check` runs these tests with the units of the release's sources, and those of image, units and charts with
the image, the units and the charts of the release.
"""

import tomllib
from pathlib import Path

import pytest

from bigfleet.cli.runtime.kernel_set import KERNELS
from tests.deploy.notified import services_of_a_host
from tests.deploy.systemd_units import settings
from tests.release.installed import EMPTY, install, make_index, needs_release, release_folder, succeed
from tools.image.wheels import ROOT
from tools.release.build import SBOM
from tools.supply_chain import locked, sbom

pytestmark = [pytest.mark.long, needs_release]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
#: With pip, and bytecode of what has run. More is a new dependency, or a larger one: see docs/installing.md.
INSTALLED_BYTES_MAX = 420_000_000


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The index of the release."""
    return make_index(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def commands(index: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the kernels of the release."""
    return install(tmp_path_factory.mktemp("empty") / "environment", index, f"bigfleet[kernels]=={VERSION}")


def test_the_wheel_is_installed_from_an_index_with_its_kernels(commands: Path) -> None:
    assert succeed(str(commands / "bigfleet"), "--version").strip() == f"bigfleet {VERSION}"
    lines = succeed(str(commands / "bigfleet"), "kernels", "check").splitlines()
    place = commands.parent / "lib" / "python3.11" / "site-packages" / "bigfleet_kernels"

    assert lines[-1] == f"{KERNELS} of {KERNELS} kernels for x86-64-v3 from {place}"


def test_what_is_installed_stays_within_its_size(commands: Path) -> None:
    files = [path for path in commands.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)

    print(f"{len(files):,} files, {size / 1e6:.0f} MB")
    assert size <= INSTALLED_BYTES_MAX


def test_its_bill_of_materials_is_that_of_the_lock_file() -> None:
    assert (release_folder() / SBOM).read_bytes() == sbom(locked())


def test_the_services_of_its_units_start_reload_and_stop(commands: Path, tmp_path: Path) -> None:
    """Each reports to a service manager, and nothing of the checkout is run."""
    program = str(commands / "bigfleet")
    succeed(program, "certs", "dev", str(tmp_path / "tls"))
    with services_of_a_host(tmp_path, [program], {**EMPTY, "HOME": str(tmp_path)}) as started:
        loaded = [Path(f"/proc/{each.process.pid}/maps").read_text() for each in started]
        reloaded = [each.name for each in started if "ExecReload" in settings(f"{each.name}.service")]
        for each in started:
            if each.name in reloaded:
                assert any(line.startswith("MONOTONIC_USEC=") for line in each.reload())

    assert all(str(commands.parent) in maps for maps in loaded)
    assert reloaded == ["bigfleet-provider@simulated", "bigfleet-shard@shard-0"]
