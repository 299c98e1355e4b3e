"""Where compiled kernels are looked for and kept; the sets here are copies of the one that the tests run on."""

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding
import msgspec
import numba
import pytest

from bigfleet.cli.runtime import kernel_cache, kernel_set
from bigfleet.cli.runtime.kernel_build import KernelBuildFault, build_kernels
from bigfleet.cli.runtime.kernel_cache import KernelCache
from bigfleet.cli.runtime.kernel_set import KERNELS, MANIFEST, KernelTarget, Manifest, current_target, examine
from tests.patience import PATIENCE_SECONDS

config: Any = numba.config


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    names = ("CACHE_DIR", "CPU_NAME", "CPU_FEATURES", "CACHE_LOCATOR_CLASSES")
    before = {name: getattr(config, name) for name in names}
    yield
    for name, value in before.items():
        setattr(config, name, value)


@pytest.fixture(scope="session")
def own_set() -> Path:
    """Return this user's complete set; what it lacks is compiled."""
    directory = kernel_cache.user_directory(current_target())
    build_kernels(directory)
    return directory


@pytest.fixture
def copied(own_set: Path, tmp_path: Path) -> Path:
    """Return a copy of the set under another path."""
    return Path(shutil.copytree(own_set, tmp_path / "another" / "kernels"))


@dataclass(frozen=True)
class Checked:
    """What `bigfleet kernels check` answered."""

    code: int
    lines: list[str]


def check(**environment: str) -> Checked:
    """Run the check in a process whose user has no cache directory."""
    done = subprocess.run(
        [sys.executable, "-m", "bigfleet", "kernels", "check"],
        env=os.environ | {"NUMBA_CACHE_DIR": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return Checked(done.returncode, (done.stdout + done.stderr).splitlines())


# ---- a set that was copied -----------------------------------------------------------------------------------------


def test_a_set_is_used_from_another_path_and_only_read(copied: Path) -> None:
    """As an image ships it: every kernel comes from disk, and no file of the set changes."""
    for path in [copied, *copied.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    answer = check(BIGFLEET_KERNELS=str(copied))

    assert (answer.code, answer.lines[-1].split(" for ")[0]) == (0, f"{KERNELS} of {KERNELS} kernels")
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_a_set_for_another_processor_is_a_miss_with_a_reason(copied: Path) -> None:
    """Nothing is compiled to find that out, and nobody sees a traceback."""
    answer = check(BIGFLEET_KERNELS=str(copied), NUMBA_CPU_NAME="x86-64-v2")

    assert answer.code == 1
    assert answer.lines[0].endswith("and NUMBA_CPU_NAME asks for x86-64-v2")
    assert answer.lines[-1].endswith("run: bigfleet kernels build")


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("sources", "it was made from other sources; build it again with `bigfleet kernels build`"),
        ("python", "it was made with python another"),
        ("numba", "it was made with numba another"),
        ("llvmlite", "it was made with llvmlite another"),
        ("numpy", "it was made with numpy another"),
        ("cpu", "it was made for the processor another"),
        ("features", "it was made for the processor"),
    ],
)
def test_whatever_kernels_depend_on_is_compared(field: str, reason: str, copied: Path) -> None:
    found = kernel_set.read_manifest(copied)
    assert isinstance(found, Manifest)
    other = msgspec.structs.replace(found, target=msgspec.structs.replace(found.target, **{field: "another"}))
    (copied / MANIFEST).write_bytes(msgspec.json.encode(other))
    answer = examine(copied, found.target)

    assert isinstance(answer, str)
    assert answer.startswith(reason)


def test_a_level_can_be_used_where_the_host_has_its_instructions(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made for x86-64-v3 it serves every newer processor; without AVX2 it is refused by name."""
    found = kernel_set.read_manifest(copied)
    assert isinstance(found, Manifest)
    level = msgspec.structs.replace(found.target, cpu="x86-64-v3", features="")
    (copied / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(found, target=level)))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    full = dict.fromkeys(kernel_set.LEVELS["x86-64-v4"], True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: full)
    assert isinstance(examine(copied, found.target), Manifest)

    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: full | {"avx2": False})
    assert examine(copied, found.target) == "it was made for x86-64-v3, and this processor lacks avx2"

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert examine(copied, found.target) == "it was made for x86-64-v3, and this processor lacks x86-64 (it is aarch64)"


def test_a_damaged_file_makes_the_set_unusable(copied: Path) -> None:
    """As after a crash of the host, which may leave any part of a file empty."""
    damaged = next(copied.rglob("*.nbc"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    target = current_target()
    assert examine(copied, target) == f"{damaged.relative_to(copied)} is damaged"

    damaged.unlink()
    assert examine(copied, target) == f"{damaged.relative_to(copied)} cannot be read: No such file or directory"

    (copied / MANIFEST).write_text("{")
    assert str(examine(copied, target)).startswith("manifest.json is damaged: ")


# ---- the user's directory ------------------------------------------------------------------------------------------


def test_the_directory_is_named_by_what_kernels_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source is another directory, so that no kernel outlives a change of one that it takes in."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("BIGFLEET_KERNELS", raising=False)
    first = kernel_cache.keep_kernels()
    monkeypatch.setattr(kernel_set, "source_digest", lambda: "another")
    second = kernel_cache.keep_kernels()

    assert first is not None
    assert second is not None
    assert first.directory != second.directory
    assert str(second.directory) == config.CACHE_DIR


def test_without_a_writable_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only place is no failure: each process compiles for itself."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))

    assert kernel_cache.keep_kernels() is None
    assert config.CACHE_DIR == ""


def test_a_damaged_set_of_the_user_is_built_again(
    own_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    place = kernel_cache.user_directory(current_target())
    shutil.copytree(own_set, place)
    assert kernel_cache.keep_kernels() == KernelCache(place, is_complete=True)

    next(place.rglob("*.nbc")).write_bytes(b"")
    assert kernel_cache.keep_kernels() == KernelCache(place, is_complete=False)
    assert list(place.rglob("*.nb[ci]")) == []


def test_a_shipped_set_that_does_not_fit_is_passed_over(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's directory is used in its place, and the shipped one stays as it is."""
    (copied / MANIFEST).write_text("{}")
    monkeypatch.setenv("BIGFLEET_KERNELS", str(copied))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    used = kernel_cache.keep_kernels()
    assert used is not None
    assert used.directory == kernel_cache.user_directory(current_target())
    assert list(copied.rglob("*.nbc"))


USES_KERNELS = """
import sys
from bigfleet.cli.runtime.kernel_cache import keep_kernels

keep_kernels()
import bigfleet.engine.columnar.kernels.base
print({"scipy.linalg", "cffi"} & set(sys.modules))
import cffi, scipy.linalg
"""


def test_numba_imports_neither_scipy_nor_cffi_and_others_can() -> None:
    """They are half of the time that Numba takes to import; no kernel multiplies matrices or calls C."""
    done = subprocess.run([sys.executable, "-c", USES_KERNELS], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


# ---- building ------------------------------------------------------------------------------------------------------


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(KernelBuildFault, match=r"holds thesis\.txt, which is not a kernel; choose an empty directory"):
        build_kernels(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "thesis.txt"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(KernelBuildFault, match=re.escape(str(blocked))):
        build_kernels(blocked)


def test_a_complete_set_is_not_built_again(copied: Path) -> None:
    built: list[str] = []
    manifest = build_kernels(copied, on_compiled=lambda module, _count, _seconds: built.append(module))

    assert (manifest.count, built) == (KERNELS, [])


@pytest.mark.long
def test_files_that_nobody_vouches_for_are_compiled_again(copied: Path) -> None:
    """A build that was cut off has left a torn file: the next one ends with a sound set."""
    (copied / MANIFEST).unlink()
    torn = next((copied / "bigfleet.recording.kernel").glob("*.nbi"))
    torn.write_bytes(b"")
    manifest = build_kernels(copied)

    assert manifest.count == KERNELS
    assert isinstance(examine(copied, current_target()), Manifest)


@pytest.mark.long
def test_two_builds_at_once_end_with_one_sound_set(copied: Path) -> None:
    """As two shards that start on one host; the second waits for the first."""
    (copied / MANIFEST).unlink()
    command = [sys.executable, "-m", "bigfleet", "kernels", "build", "--to", str(copied)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=10 * PATIENCE_SECONDS)[0].splitlines() for each in both]

    assert [each.returncode for each in both] == [0, 0]
    assert min(len(lines) for lines in said) == 1
    assert isinstance(examine(copied, current_target()), Manifest)


#: Compiles a module whose kernels call others, as a build does.
COMPILING = """
import sys
from pathlib import Path
from bigfleet.cli.runtime.kernel_build import _compile
from bigfleet.cli.runtime.kernel_set import current_target
_compile("bigfleet.recording.kernel", Path(sys.argv[1]), current_target())
"""


@pytest.mark.slow
def test_equal_sources_compile_to_equal_files(tmp_path: Path) -> None:
    """An image with kernels has one digest."""
    contents = []
    for name in ("one", "two"):
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        (tmp_path / name).mkdir()
        subprocess.run([sys.executable, "-c", COMPILING, str(tmp_path / name)], env=environment, check=True)
        files = (tmp_path / name).rglob("*.nbc")
        contents.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})

    assert contents[0] == contents[1] != {}


def test_no_compiled_file_holds_an_address(own_set: Path) -> None:
    """A function of Python that a kernel calls is named with its address: with `np.full` no two builds are equal."""
    files = list(own_set.rglob("*.nbc"))
    # A process that compiled a kernel before the set was built wrote the addresses of other kernels; a build does not.
    address = re.compile(rb"(?<!CPUDispatcher\()<[\w-]+ [^<>]+ at 0x[0-9a-f]+")

    assert len(files) >= KERNELS
    assert [path.name for path in files if address.search(path.read_bytes())] == []


def test_targets_have_keys_of_their_own() -> None:
    target = current_target()
    keys = {msgspec.structs.replace(target, **{field: "another"}).key for field in KernelTarget.__struct_fields__} | {
        target.key
    }

    assert len(keys) == len(KernelTarget.__struct_fields__) + 1
