"""Measures the quality of decisions in a small form: five families at the small size, on synthetic data.

`python -m bench.quality` has the whole evaluation (bench/README.md). No figure is a time.
"""

from statistics import median

from bench.harness import Measured, Measurement, Reading
from bench.quality.evaluation import Figure, Task, checksum, evaluate
from bench.quality.reports.criteria import MIXED
from bench.quality.scheduler import ORDERS
from bench.quality.values import Scheduler, Start

FAMILIES = ("F1", "F2", "F5", "F7", "F8b")


def _run() -> Measured:
    """Evaluate the engine from nothing and after ten steps, and return the figures of all families together."""
    figures: list[Figure] = []
    for family in FAMILIES:
        figures += evaluate(
            Task(
                family=family,
                size="small",
                seed=0,
                starts=tuple(Start),
                schedulers=(Scheduler.LEAST_ALLOCATED,),
                candidates=("engine",),
                orders=ORDERS,
                integer_effort=0,
                has_impossible_pod=False,
                data=None,
            )
        )
    assert all(figure.machines for figure in figures), "every cluster holds machines at rest"
    pods = sum(figure.pods for figure in figures)
    over_packer = [f.over_packer for f in figures if f.over_packer is not None and f.family != MIXED]
    over_bound = [f.over_bound for f in figures if f.over_bound is not None and f.family != MIXED]
    readings = (
        Reading("completed cost ÷ packer, median", median(over_packer), "", most=0.95),
        Reading("completed cost ÷ packer, worst", max(over_packer), "", most=1.02),
        # The threshold of the bound is for 500 pods and more; these instances are smaller.
        Reading("completed cost ÷ LP bound, median", median(over_bound), ""),
        Reading("pods lost, least-allocated", 100 * sum(f.lost for f in figures) / pods, "%", most=0.5),
        Reading("pods not placeable, first-fit", 100 * sum(f.unplaced for f in figures) / pods, "%", most=0.3),
        Reading("called short, could be hosted", sum(f.short_hostable for f in figures), "pods", most=0),
    )
    return Measured(readings, checksum(figures))


QUALITY = (Measurement(name="W16 quality of decisions", size="5 families, small, both starts", run=_run),)
