"""What is compiled: kernels cost the first start of every version processor time (docs/adr/0152)."""

from importlib import import_module

from numba.core.registry import CPUDispatcher

MODULES = (
    *(
        f"bigfleet.engine.columnar.{name}"
        for name in ("acquiring", "choosing", "crediting", "kernels", "preemption", "replaying", "sweeps")
    ),
    "bigfleet.planner.compiled",
    "bigfleet.shard.recording_kernel",
)
KERNELS_MAX = 46


def dispatchers() -> dict[str, CPUDispatcher]:
    """Return every function that Numba knows, by its module and name."""
    found = {}
    for name in MODULES:
        for each in vars(import_module(name)).values():
            if isinstance(each, CPUDispatcher):
                found[f"{each.py_func.__module__}.{each.py_func.__name__}"] = each
    return found


def test_no_more_kernels_are_compiled_than_were_measured() -> None:
    compiled = [name for name, each in dispatchers().items() if each.signatures]

    assert 0 < len(compiled) <= KERNELS_MAX, sorted(compiled)


def test_what_kernels_take_in_is_not_compiled_on_its_own() -> None:
    taken_in = [name for name, each in dispatchers().items() if each.targetoptions.get("inline") == "always"]

    assert taken_in
    assert not [name for name in taken_in if dispatchers()[name].signatures]
