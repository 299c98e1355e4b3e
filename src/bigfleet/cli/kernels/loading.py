"""Loads every kernel and says which came from disk."""

from importlib import import_module
from typing import Any

from numba.core.registry import CPUDispatcher

from bigfleet.cli.runtime.kernel_build import KERNEL_MODULES


def loaded_kernels() -> dict[str, bool]:
    """Return, by the name of each kernel, whether it came from disk; a kernel that did not is compiled by the call."""
    found: dict[str, bool] = {}
    for name in KERNEL_MODULES:
        for value in vars(import_module(name)).values():
            if isinstance(value, CPUDispatcher) and value.signatures and value.py_func.__module__ == name:
                stats: Any = value.stats
                hits = sum(stats.cache_hits.values())
                found[f"{name}.{value.py_func.__name__}"] = hits == len(value.signatures)
    return found
