"""Limits how many kernels there are, because the first start of a version compiles all of them (docs/adr/0152)."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import walk_packages

import pytest
from numba.core.registry import CPUDispatcher

import bigfleet.engine.columnar
from bigfleet.cli.runtime.kernel_set import KERNELS, source_modules

MODULES = (
    *(module.name for module in walk_packages(bigfleet.engine.columnar.__path__, "bigfleet.engine.columnar.")),
    "bigfleet.planner.compiled",
    "bigfleet.recording.kernel",
)


@pytest.fixture(scope="module")
def dispatchers() -> Mapping[str, CPUDispatcher]:
    """Return every function that Numba handles, by its module and name."""
    values = [value for module in MODULES for value in vars(import_module(module)).values()]
    found = [value for value in values if isinstance(value, CPUDispatcher)]
    return {f"{each.py_func.__module__}.{each.py_func.__name__}": each for each in found}


def test_no_more_kernels_are_compiled_than_were_measured(dispatchers: Mapping[str, CPUDispatcher]) -> None:
    compiled = [name for name, each in dispatchers.items() if each.signatures]

    assert len(compiled) == KERNELS, sorted(compiled)


def test_an_inlined_function_has_no_compiled_copy(dispatchers: Mapping[str, CPUDispatcher]) -> None:
    inlined = [each for each in dispatchers.values() if each.targetoptions.get("inline") == "always"]

    assert inlined
    assert not any(each.signatures for each in inlined)


def test_the_cache_of_kernels_follows_every_module_that_holds_one(dispatchers: Mapping[str, CPUDispatcher]) -> None:
    """Numba itself compares the one file that a kernel stands in, not those of the functions that it inlines."""
    modules = {each.py_func.__module__ for each in dispatchers.values()}
    digested = {f"bigfleet.{name.removesuffix('.py').replace('/', '.')}" for name in source_modules()}

    assert modules <= digested
