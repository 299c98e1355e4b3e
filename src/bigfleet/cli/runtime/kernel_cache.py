"""Keeps compiled kernels on disk between processes, so that only the first start of a version compiles.

Numba compares one source file to tell whether a kernel is stale, but kernels inline functions of other modules
(ADR 0110). So the directory is named by a digest of all of them. Without a directory nothing is kept, and each process
compiles for itself.
"""

import hashlib
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

#: Beside the columnar engine.
_MODULES = ("model/states.py", "planner/compiled.py", "recording/kernel.py")
_DIGEST_CHARACTERS = 16


def keep_kernels() -> Path | None:
    """Have kernels that are compiled from now on kept on disk; return where, or None when no directory can be written.

    Must be called before `bigfleet.engine.columnar.kernels.base` or `bigfleet.planner.compiled` is imported. The
    directory stands below NUMBA_CACHE_DIR when that is set, else below the user's cache directory.
    """
    import numba

    config: Any = numba.config
    named = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bigfleet"
    directory = base / f"kernels-{source_digest()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        config.CACHE_DIR = ""
        return None
    config.CACHE_DIR = str(directory)
    return directory


def source_modules() -> dict[str, Traversable]:
    """Return the modules that kernels are made of, by their paths in the package: kernels, and the values they fix."""
    found: dict[str, Traversable] = {}
    root = files("bigfleet")
    waiting = [("engine/columnar", root / "engine" / "columnar")]
    while waiting:
        name, folder = waiting.pop()
        for entry in folder.iterdir():
            path = f"{name}/{entry.name}"
            if entry.is_dir():
                waiting.append((path, entry))
            elif entry.name.endswith(".py"):
                found[path] = entry
    return found | {name: root.joinpath(*name.split("/")) for name in _MODULES}


def source_digest() -> str:
    """Return a digest of `source_modules`, names and contents."""
    digest = hashlib.sha256()
    for name, module in sorted(source_modules().items()):
        digest.update(name.encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
