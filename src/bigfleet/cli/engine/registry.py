"""Lists the engines by name.

An engine is a function of (snapshot, demand, options, reporter) that returns a Decision (docs/spec/aggregates.md). It
is imported when it is asked for, so that a command line stays quick. Nothing stands here that cannot be run.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.kernel_cache import keep_kernels

if TYPE_CHECKING:
    from bigfleet.engine.decision import Decision, Options
    from bigfleet.engine.explain.records import Reporter
    from bigfleet.engine.snapshot import Snapshot
    from bigfleet.model.need import Need

#: What a case asks of an engine.
Decide = Callable[["Snapshot", "Sequence[Need]", "Options"], "Decision"]


class NamedEngine(Protocol):
    """Decides one cycle, and notifies a reporter when there is one."""

    def __call__(
        self,
        snapshot: "Snapshot",
        demand: "Sequence[Need]",
        options: "Options",
        reporter: "Reporter | None" = None,
        /,
    ) -> "Decision":
        """Return the decision; equal arguments give equal decisions, with a reporter or without."""
        ...


#: Module and function of each engine.
ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "reference": ("bigfleet.engine.plain_engine", "decide"),
    "columnar": ("bigfleet.cli.engine.columns", "decide_from_columns"),
}
DEFAULT_ENGINE: Final = "reference"
#: Every engine, held to one answer (`bigfleet.cli.engine.both`).
BOTH: Final = "both"
CHOICES: Final = (*ENGINES, BOTH)


def engine_named(name: str) -> NamedEngine:
    """Return one engine. Raises UsageFault for a name that there is not."""
    if name not in ENGINES:
        raise UsageFault(f"--engine: {name!r} is unknown; choose one of {', '.join(CHOICES)}")
    module, function = ENGINES[name]
    if name != DEFAULT_ENGINE:
        keep_kernels()
    return cast(NamedEngine, getattr(import_module(module), function))
