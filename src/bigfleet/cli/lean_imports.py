"""Imports a library without the optional packages that it would import where they are installed.

Each of them makes a process start later, and no command uses what they add. This module must not hide a package from
anything but the modules that it imports.
"""

import sys
from importlib import import_module


def import_without(absent: str, *modules: str) -> None:
    """Import modules as if a package were not installed; without effect when it is imported already.

    For modules that go on without the package. Everything else can import it afterwards.
    """
    if absent in sys.modules:
        return
    # To import what is None there raises ModuleNotFoundError (Python's reference, the module cache). The type that the
    # stubs declare has modules only. A finder on sys.meta_path would do the same in more lines.
    sys.modules[absent] = None  # type: ignore[assignment]
    try:
        for module in modules:
            import_module(module)
    finally:
        del sys.modules[absent]
