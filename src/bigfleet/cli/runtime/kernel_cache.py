"""Where compiled kernels are kept between processes, so that only the first start after an upgrade compiles.

Numba looks at the time and size of one source file to tell whether a kernel is stale, but kernels take parts of each
other in, and files from a package carry the same time in every version (ADR 0110). So the directory is named by a
digest of all of them. Without a directory nothing is kept, and each process compiles for itself.
"""

import hashlib
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

_PACKAGE = "bigfleet.engine.columnar"
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


def source_digest() -> str:
    """Return a digest of every module of the columnar engine, and of the planner's compiled loops."""
    digest = hashlib.sha256()
    modules = [entry for entry in files(_PACKAGE).iterdir() if entry.name.endswith(".py")]
    modules.append(files("bigfleet.planner") / "compiled.py")
    for module in sorted(modules, key=lambda entry: entry.name):
        digest.update(module.name.encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
