"""The wheel bigfleet-kernels: what is in it, who can use it, and what is refused. The set is that of these tests."""

import os
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import msgspec
import pytest

from bigfleet.cli.runtime.kernel_build import build_kernels
from bigfleet.cli.runtime.kernel_cache import user_directory
from bigfleet.cli.runtime.kernel_set import KERNELS, MANIFEST, Manifest, current_target, read_manifest
from tests.patience import PATIENCE_SECONDS
from tools.image.wheels import ROOT
from tools.release.faults import ReleaseFault
from tools.release.kernel_wheel import make_kernel_wheel

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture(scope="module")
def own_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the set that the tests use, which is for the processor of this host."""
    directory = user_directory(current_target())
    build_kernels(directory)
    copied = tmp_path_factory.mktemp("set") / "kernels"
    return Path(shutil.copytree(directory, copied, ignore=shutil.ignore_patterns(".lock")))


@pytest.fixture
def copied(own_set: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(own_set, tmp_path / "copied"))


def made(kernels: Path, folder: Path, *, is_portable: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return make_kernel_wheel(
        kernels, folder, version=VERSION, licence=b"a licence", timestamp=1_000_000_000, is_portable=is_portable
    )


def changed(kernels: Path, **fields: str) -> Path:
    """Let the manifest of a set say that it was made from something else."""
    found = read_manifest(kernels)
    assert isinstance(found, Manifest)
    other = msgspec.structs.replace(found, target=msgspec.structs.replace(found.target, **fields))
    (kernels / MANIFEST).write_bytes(msgspec.json.encode(other))
    return kernels


def installed(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel as pip does, into a folder that is then read-only; return the folder of packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    return folder


def check(packages: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the check in a process that finds the packages, and no directory of a user."""
    own = {name: value for name, value in os.environ.items() if name != "BIGFLEET_KERNELS"}
    path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "bigfleet", "kernels", "check"],
        env=own | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


# ---- using it --------------------------------------------------------------------------------------------------------


def test_every_kernel_is_found_in_the_installed_wheel_which_is_only_read(own_set: Path, tmp_path: Path) -> None:
    packages = installed(made(own_set, tmp_path / "wheels"), tmp_path / "elsewhere" / "site-packages")
    before = {path: path.stat().st_mtime_ns for path in packages.rglob("*")}
    done = check(packages)

    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{KERNELS} of {KERNELS} kernels for ")
    assert last.endswith(f" from {packages}/bigfleet_kernels")
    assert {path: path.stat().st_mtime_ns for path in packages.rglob("*")} == before


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("sources", "it was made from other sources; build it again with `bigfleet kernels build`"),
        ("numba", "it was made with numba another, and this is numba "),
        ("python", "it was made with python another, and this is python "),
    ],
)
def test_a_wheel_that_does_not_fit_is_a_miss_with_its_reason(
    own_set: Path, tmp_path: Path, field: str, reason: str
) -> None:
    """As after an upgrade of BigFleet without its kernels. Nothing is compiled, and there is no traceback."""
    packages = tmp_path / "site-packages"
    with zipfile.ZipFile(made(own_set, tmp_path / "wheels")) as archive:
        archive.extractall(packages)
    changed(packages / "bigfleet_kernels", **{field: "another"})
    done = check(packages)

    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith(f"miss: {packages}/bigfleet_kernels: {reason}")
    assert done.stderr.splitlines()[-1].endswith("run: bigfleet kernels build")
    assert "Traceback" not in done.stdout + done.stderr


def test_an_empty_package_of_the_name_is_a_miss_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "bigfleet_kernels").mkdir()
    (tmp_path / "bigfleet_kernels" / "__init__.py").touch()
    done = check(tmp_path)

    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"miss: {tmp_path}/bigfleet_kernels: there is no manifest.json"


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_its_metadata_wants_the_versions_that_the_set_was_made_with(own_set: Path, tmp_path: Path) -> None:
    wheel = made(own_set, tmp_path)
    target = current_target()
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"bigfleet_kernels-{VERSION}.dist-info/METADATA").decode().splitlines()
        described = archive.read(f"bigfleet_kernels-{VERSION}.dist-info/WHEEL").decode().splitlines()
    python = f"cp{target.python.replace('.', '')}"

    assert {
        "Name: bigfleet-kernels",
        f"Version: {VERSION}",
        f"Requires-Python: =={target.python}.*",
        f"Requires-Dist: numba=={target.numba}",
        f"Requires-Dist: llvmlite=={target.llvmlite}",
        f"Requires-Dist: numpy=={target.numpy}",
    } <= set(metadata)
    assert wheel.name.startswith(f"bigfleet_kernels-{VERSION}-{python}-{python}-")
    assert all(line.startswith(f"Tag: {python}-{python}-") for line in described[3:])
    assert len(described) > 3


def test_the_record_lists_every_file_with_its_digest(own_set: Path, tmp_path: Path) -> None:
    """Otherwise pip leaves files behind when it uninstalls the wheel."""
    with zipfile.ZipFile(made(own_set, tmp_path)) as archive:
        names = archive.namelist()
        record = archive.read(f"bigfleet_kernels-{VERSION}.dist-info/RECORD").decode().splitlines()

    assert [line.partition(",")[0] for line in record] == names
    assert [line for line in record if ",sha256=" not in line] == [f"bigfleet_kernels-{VERSION}.dist-info/RECORD,,"]
    assert len([name for name in names if name.endswith(".nbi")]) == KERNELS


def test_equal_sets_make_equal_wheels_wherever_they_are(own_set: Path, copied: Path, tmp_path: Path) -> None:
    for path in copied.rglob("*"):
        os.utime(path, (1, 1))

    first, second = made(own_set, tmp_path / "one"), made(copied, tmp_path / "two")

    assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())


def test_the_extra_names_the_kernels_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["optional-dependencies"]["kernels"] == [f"bigfleet-kernels=={project['version']}"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_set_for_one_host_is_no_release(own_set: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseFault, match=r"was made for the processor .*: bigfleet kernels build --to DIR --cpu"):
        made(own_set, tmp_path, is_portable=True)


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("sources", "was made from other sources; build the set from this commit"),
        ("numba", "the set was made with numba another, and numba .* is installed here; install requirements.lock"),
    ],
)
def test_a_set_of_other_versions_is_refused(copied: Path, tmp_path: Path, field: str, fault: str) -> None:
    with pytest.raises(ReleaseFault, match=fault):
        made(changed(copied, **{field: "another"}), tmp_path)


def test_a_damaged_file_is_named(copied: Path, tmp_path: Path) -> None:
    damaged = next(copied.rglob("*.nbc"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")

    with pytest.raises(ReleaseFault, match=f"{damaged.name} is damaged"):
        made(copied, tmp_path)
    assert list(tmp_path.glob("*.whl")) == []


def test_an_unfinished_set_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / MANIFEST).unlink()

    with pytest.raises(ReleaseFault, match=r"is no set of kernels: there is no manifest\.json"):
        made(copied, tmp_path)
