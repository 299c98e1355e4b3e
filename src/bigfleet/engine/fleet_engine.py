"""Selects the engine of each decision: over pods when any row has shapes, over aggregates otherwise.

Both ways serve all rows of a cycle, because rows of both kinds compete for the same machines (docs/spec/engine.md
§2.4). Importing this module loads the kernels of both.
"""

from collections.abc import Callable, Sequence

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columnar.kernels import pod_credit
from bigfleet.engine.columnar.verification import Divergence, Verified
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, PhaseListener, unheard
from bigfleet.engine.shapes.decide import decide, says_pods
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.model.need import Need


class FleetEngine:
    """Decides cycle after cycle. One engine serves one caller at a time; equal input gives equal answers from any."""

    def __init__(
        self,
        *,
        is_incremental: bool = True,
        verify_every_cycles: int = 0,
        on_divergence: Callable[[Divergence], None] | None = None,
    ) -> None:
        """Make an engine that knows nothing yet.

        With `verify_every_cycles` above 0 every so many decisions of each kind are made a second time from nothing; if
        the two differ, `on_divergence` is called and the second is the answer. If a decision raises, it is called as
        well, and the plain form of the engine decides, which is slow for large fleets.
        """
        self._over_aggregates = ColumnarEngine(
            is_incremental=is_incremental, verify_every_cycles=verify_every_cycles, on_divergence=on_divergence
        )
        self._over_pods = Verified(
            lambda: PodEngine(is_incremental=is_incremental, loops=pod_credit),
            plainly=lambda view, demand, options, _on_phase: decide(snapshot_of(view), demand, options),
            every_cycles=verify_every_cycles,
            on_divergence=on_divergence,
        )
        #: The demand of the last decision, and whether it says pods: most cycles decide on the same demand again.
        self._last: tuple[Sequence[Need], bool] | None = None

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, *, on_phase: PhaseListener = unheard
    ) -> Decision:
        """Decide one cycle; `demand` is in list order and is not changed while it is the argument of later calls."""
        if self._last is None or self._last[0] is not demand:
            self._last = (demand, says_pods(demand))
        if not self._last[1]:
            return self._over_aggregates.decide(view, demand, options, on_phase=on_phase)
        return self._over_pods.decide(view, demand, options, on_phase=on_phase)
