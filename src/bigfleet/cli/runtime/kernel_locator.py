"""Names the directory in which Numba stores the compiled form of each kernel.

Numba's own locators name directories after the path of the source, so that a set that is copied to another path, or
used by another user, is never found. This one depends on the sources' contents alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numba

from bigfleet.cli.runtime.kernel_set import source_digest

_CONFIG: Final[Any] = numba.config
_PACKAGE: Final = "bigfleet."


class KernelLocator:
    """Locates the files of one function, as Numba asks for it; `numba.config.CACHE_DIR` is the set."""

    def __init__(self, directory: Path, line: int) -> None:
        self._directory = directory
        self._line = line

    @classmethod
    def from_function(cls, function: Callable[..., object], _file: str) -> "KernelLocator | None":
        """Return the locator of one of this program's functions; None leaves another package's to Numba."""
        if not _CONFIG.CACHE_DIR or not function.__module__.startswith(_PACKAGE):
            return None
        return cls(Path(_CONFIG.CACHE_DIR) / function.__module__, function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """Return the directory of the function's files."""
        return str(self._directory)

    def ensure_cache_path(self) -> None:
        """Make the directory. Numba asks for it before it writes, which it never does in a complete set."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        """Return what a cached file must be made from: a kernel inlines functions of other modules (ADR 0110)."""
        return source_digest()

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name in one module."""
        return str(self._line)
