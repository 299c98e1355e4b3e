"""Imports libraries without others that they import only because those are installed.

A process that starts pays for each of them, and no command uses what they add. This module must not hide a package from
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
    # So documented: to import what is None here raises ModuleNotFoundError.
    sys.modules[absent] = None  # type: ignore[assignment]
    try:
        for module in modules:
            import_module(module)
    finally:
        del sys.modules[absent]
