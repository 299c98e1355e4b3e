"""The engines that there are, by name.

An engine is a function of (snapshot, demand, options) that returns a Decision (docs/spec/engine.md §2). It is imported
when it is asked for, so that a command line stays quick. Nothing stands here that cannot be run.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from bigfleet.cli.faults import UsageFault
from bigfleet.cli.kernel_cache import keep_kernels

if TYPE_CHECKING:
    from bigfleet.engine.decision import Decision, Options
    from bigfleet.engine.snapshot import Snapshot
    from bigfleet.model.need import Need

Decide = Callable[["Snapshot", "Sequence[Need]", "Options"], "Decision"]

#: Module and function of each engine.
ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "reference": ("bigfleet.engine.reference", "decide"),
    "columnar": ("bigfleet.engine.columnar.engine", "columnar_decide"),
}
DEFAULT_ENGINE: Final = "reference"


def engine_named(name: str) -> Decide:
    """Return an engine. Raises UsageFault for a name that there is not."""
    if name not in ENGINES:
        raise UsageFault(f"--engine: {name!r} is unknown; choose one of {', '.join(ENGINES)}")
    module, function = ENGINES[name]
    if name != DEFAULT_ENGINE:
        keep_kernels()
    return cast(Decide, getattr(import_module(module), function))
