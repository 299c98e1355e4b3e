"""Finds compiled kernels on disk, so that only the first start of a version compiles them.

Looked for in this order: the directory in BIGFLEET_KERNELS and no other that was shipped, or else `kernels` beside the
interpreter's prefix (as images ship it) and the package bigfleet_kernels (as the wheel of that name installs it); then
the user's cache directory. What was shipped is only read. Without a directory that can be written nothing is cached,
and each process compiles for itself.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from bigfleet.cli.lean_imports import import_without
from bigfleet.cli.runtime.kernel_set import INCOMPLETE, KernelTarget, current_target, examine

#: Numba asks these in turn; the rest serve other packages of the process.
_LOCATORS: Final = (
    "bigfleet.cli.runtime.kernel_locator.KernelLocator,UserProvidedCacheLocator,InTreeCacheLocator,UserWideCacheLocator"
)
SHIPPED_VARIABLE: Final = "BIGFLEET_KERNELS"
#: What the wheel bigfleet-kernels installs: a set, and an empty module that makes it a package.
SHIPPED_PACKAGE: Final = "bigfleet_kernels"

_log = structlog.get_logger("bigfleet.cli.runtime.kernel_cache")


class KernelCache(msgspec.Struct, frozen=True):
    """Where compiled kernels are found and stored."""

    directory: Path
    #: Whether it holds a whole set, so that nothing will be compiled.
    is_complete: bool


def keep_kernels() -> KernelCache | None:
    """Cache kernels that are compiled from now on on disk; return where, or None when no directory can be written.

    Must be called before `bigfleet.engine.columnar.kernels.base` or `bigfleet.planner.compiled` is imported. A set that
    was shipped is used where it fits this process; if it does not, one line says why.
    """
    wanted = current_target()
    for directory in shipped_directories():
        found = examine(directory, wanted)
        if not isinstance(found, str):
            use_set(directory, found.target)
            return KernelCache(directory, is_complete=True)
        _log.warning("kernels.set_rejected", directory=str(directory), reason=found, advice="kernels are compiled here")
    directory = user_directory(wanted)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_complete = _is_sound(directory, wanted)
    except OSError:
        _config().CACHE_DIR = ""
        return None
    use_set(directory, wanted)
    return KernelCache(directory, is_complete)


def use_set(directory: Path, target: KernelTarget) -> None:
    """Have Numba read and write the files of one set, and compile for its processor."""
    config = _config()
    # Numba would import both to compile calls of C and products of matrices, which no kernel has: 0.2 s and 15 MiB.
    import_without("cffi", "numba.core.typing.cffi_utils")
    import_without("scipy.linalg", "numba.np.arraymath")
    config.CACHE_LOCATOR_CLASSES = _LOCATORS
    config.CACHE_DIR = str(directory)
    config.CPU_NAME, config.CPU_FEATURES = target.cpu, target.features


def shipped_directories() -> list[Path]:
    """Return the directories, where there are any, whose kernels came with the installation, in the order of use."""
    named = os.environ.get(SHIPPED_VARIABLE)
    if named:
        return [Path(named)]
    installed = importlib.util.find_spec(SHIPPED_PACKAGE)
    packages = installed.submodule_search_locations if installed else None
    beside = Path(sys.prefix) / "kernels"
    return [*([beside] if beside.is_dir() else []), *(Path(each) for each in packages or [])]


def user_directory(target: KernelTarget) -> Path:
    """Return this user's directory of kernels for a target: below NUMBA_CACHE_DIR, or the user's cache directory."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bigfleet"
    return base / f"kernels-{target.key}"


def _is_sound(directory: Path, wanted: KernelTarget) -> bool:
    """Return whether a directory of our own holds a whole set; remove a damaged one, as after a crash of the host."""
    found = examine(directory, wanted)
    if isinstance(found, str) and found != INCOMPLETE:
        _log.warning("kernels.set_damaged", directory=str(directory), reason=found, advice="kernels are compiled again")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
    return not isinstance(found, str)


def _config() -> Any:
    import numba

    return numba.config
