"""Declares what a candidate under test does, and lists the candidates by name."""

from collections.abc import Callable
from typing import Final, Protocol

from bench.quality.judges import packed
from bench.quality.values import Instance, Scheduler, Settled, Start


class Candidate(Protocol):
    """Decides which machines each cluster holds.

    A candidate keeps nothing between calls, reads no clock but for its own CPU time, and gives equal answers for equal
    arguments.
    """

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Live through the instance's demands until the last one is at rest, and return what is held then.

        From nothing: no cluster holds a machine, existing machines are idle, and only the last demand is seen. After
        steps: each demand in turn, each until nothing more is decided. `scheduler` is the order that the clusters'
        schedulers use. Cycles, actions and CPU time are those of the last demand.
        """
        ...


class PackerCandidate:
    """The packer's own fleet, planned from nothing whatever was there before."""

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Return the packer's fleet; it knows no steps and no scheduler."""
        del start, scheduler
        return packed(instance)


def _engine() -> Candidate:
    # Importing the engine compiles or loads its kernels, which the packer does not need.
    from bench.quality.engine_candidate import EngineCandidate

    return EngineCandidate()


def _shapes() -> Candidate:
    from bench.quality.shapes_candidate import ShapesCandidate

    return ShapesCandidate()


def _exchanges() -> Candidate:
    from bench.quality.exchanges_candidate import ExchangesCandidate

    return ExchangesCandidate()


CANDIDATES: Final[dict[str, Callable[[], Candidate]]] = {
    "engine": _engine,
    "shapes": _shapes,
    "exchanges": _exchanges,
    "packer": PackerCandidate,
}
