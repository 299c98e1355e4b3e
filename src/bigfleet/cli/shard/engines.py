"""Builds a shard's engine, and decides without compiled kernels until they are available.

On the first start of a version the kernels are compiled in another process. Meanwhile the plain engine decides for a
small fleet; for a large fleet the decision waits. All engines give the same answer, so no decision changes when the
compiled one takes over (docs/spec/engine.md).
"""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge

from bigfleet.cli.runtime.code_pages import give_code_back
from bigfleet.cli.runtime.kernel_build import BackgroundBuild, KernelBuildFault
from bigfleet.cli.runtime.kernel_cache import keep_kernels
from bigfleet.cli.runtime.kernel_set import KERNELS
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, PhaseListener
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.model.need import Need
from bigfleet.shard.cycle.engine_runner import DecisionEngine, EngineDivergence, fleet_engine

#: The plain engine decides a cycle of this size in about a second (docs/spec/benchmarks.md).
PLAIN_MACHINES_MAX: Final = 2_000
PLAIN_ROWS_MAX: Final = 500
#: The file of llvmlite's compiler.
COMPILER_LIBRARY: Final = "libllvmlite.so"

_log = structlog.get_logger("bigfleet.cli.shard.engines")


class Build(Protocol):
    """Builds kernels in another process."""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, well or not."""
        ...

    def wait(self) -> bool:
        """Wait for its end; return whether the kernels are on disk."""
        ...


class UncompiledEngine:
    """Decides from the first moment, with the compiled engine as soon as there is one."""

    def __init__(self, build: Build, make: Callable[[], DecisionEngine]) -> None:
        """`make` returns the compiled engine; it is called once, when the build is over."""
        self._build = build
        self._make = make
        self._compiled: DecisionEngine | None = None
        self._over_pods = PodEngine()
        #: Whether a decision waits for the build.
        self.is_waiting = False
        #: Whether the process ends, so that nothing more is compiled.
        self.is_closed = False

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, /, *, on_phase: PhaseListener
    ) -> Decision:
        """Decide one cycle; waits for the compiled engine where the plain one would take too long."""
        if self._compiled is None and self._build.is_over:
            self._take_compiled()
        if self._compiled is None and not says_pods(demand) and not _is_small(view, demand):
            self.is_waiting = True
            try:
                self._take_compiled()
            finally:
                self.is_waiting = False
        if self._compiled is not None:
            return self._compiled.decide(view, demand, options, on_phase=on_phase)
        if says_pods(demand):
            return self._over_pods.decide(view, demand, options, on_phase=on_phase)
        return reference.decide(snapshot_of(view), demand, options, on_phase=on_phase)

    def _take_compiled(self) -> None:
        is_built = self._build.wait()
        if self.is_closed:
            raise KernelBuildFault("the shard has stopped")
        if not is_built:
            advice = "set NUMBA_CACHE_DIR to a directory that can be written"
            _log.error("kernels.build_failed", advice=f"the shard compiles for itself; {advice}")
        self._compiled = self._make()


def _is_small(view: ColumnSnapshot, demand: Sequence[Need]) -> bool:
    return len(view.ids) <= PLAIN_MACHINES_MAX and len(demand) <= PLAIN_ROWS_MAX


class ShardEngines:
    """Makes the engine of one shard process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Look at nothing yet: finding the compiler takes a second."""
        self._build: BackgroundBuild | None = None
        self._engine: UncompiledEngine | None = None
        self._is_ready = False
        ratio = Gauge(
            "bigfleet_shard_kernels_compiled_ratio",
            "Share of the engine's kernels that are compiled; 1 when the compiled engine decides",
            registry=registry,
        )
        ratio.set_function(lambda: self.compiled / KERNELS)

    def make(self, *, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> DecisionEngine:
        """Return an engine that can be asked at once; starts the build where there are no kernels for this process."""

        def compiled() -> DecisionEngine:
            engine = fleet_engine(verify_every_cycles=verify_every_cycles, on_divergence=on_divergence)
            # Loading kernels leaves garbage, and nothing else collects it.
            gc.collect()
            # Only loading and compiling takes the compiler, more than 60 MiB of code.
            give_code_back(COMPILER_LIBRARY)
            self._is_ready = True
            return engine

        cache = keep_kernels()
        if cache is None:
            _log.warning("kernels.cache_failed", advice="set NUMBA_CACHE_DIR to a directory that can be written")
            return compiled()
        if cache.is_complete:
            return compiled()
        return self._begin(cache.directory, compiled)

    def _begin(self, directory: Path, compiled: Callable[[], DecisionEngine]) -> DecisionEngine:
        self._build = BackgroundBuild(directory)
        self._build.start()
        _log.info("kernels.build_started", directory=str(directory), advice="once per version, about a minute")
        self._engine = UncompiledEngine(self._build, compiled)
        return self._engine

    @property
    def why_waiting(self) -> str:
        """Why no decision is made now, or "" when that is for no reason of the engine's."""
        if self._engine is None or not self._engine.is_waiting:
            return ""
        return f"compiling kernels, {self.compiled} of {KERNELS}"

    @property
    def compiled(self) -> int:
        """How many of the `KERNELS` are compiled; all only when the compiled engine decides."""
        if self._is_ready:
            return KERNELS
        return min(KERNELS - 1, self._build.compiled) if self._build is not None else 0

    def close(self) -> None:
        """End the build, if it runs."""
        if self._engine is not None:
            self._engine.is_closed = True
        if self._build is not None:
            self._build.stop()
