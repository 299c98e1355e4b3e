"""Holds figures against what decisions must reach, and says of each threshold whether it is met.

The thresholds come with the figures that each concerns: how large an instance is, which family it may not be of, where
it begins and which scheduler it is for. A threshold without a figure in a run is not judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench.quality.evaluation import Figure

#: The bound is loose where the pods limit decides.
LOOSE_BOUND: Final = "F8e"
MIXED: Final = "F5"
IMPOSSIBLE: Final = "F8b"


@dataclass(frozen=True, slots=True)
class Criterion:
    """One threshold and what was reached."""

    what: str
    target: str
    reached: str
    #: None where no figure of the run concerns it.
    is_met: bool | None


def criteria(figures: Sequence[Figure]) -> list[Criterion]:
    """Return every threshold in a fixed order."""
    least = [f for f in figures if f.scheduler == "least-allocated"]
    most = [f for f in figures if f.scheduler == "most-allocated"]
    plain = [f for f in figures if f.pods >= 100 and f.family != MIXED]
    bounded = [
        f for f in figures if f.pods >= 500 and f.pods >= 100 * f.clusters and f.family not in (MIXED, LOOSE_BOUND)
    ]
    begun = [f for f in bounded if f.start == "nothing"]
    stepped = [f for f in bounded if f.start == "steps"]
    return [
        _none("claims: rules broken", [f.violations for f in figures if f.violations is not None]),
        _first_fit(figures),
        _share("pods lost, least-allocated", least),
        _share("pods lost, most-allocated", most),
        _none("called short, could be hosted", [f.short_hostable for f in figures]),
        _ratio("÷ packer, ≥ 100 pods, not F5", plain, _over_packer, 0.95, 1.02),
        _ratio("÷ packer, F5", [f for f in figures if f.family == MIXED], _over_packer, 1.00, 1.10),
        _ratio("÷ bound, from nothing, least", _only(begun, least), _over_bound, 1.10, 1.20),
        _ratio("÷ bound, from nothing, most", _only(begun, most), _over_bound, 1.10, 1.18),
        _ratio("÷ bound, ten steps, least", _only(stepped, least), _over_bound, 1.13, 1.23),
        _ratio("÷ bound, ten steps, most", _only(stepped, most), _over_bound, 1.13, 1.21),
        _ratio("÷ best integer, ≤ 300 pods", figures, _over_integer, 1.03, None),
        _none("lost to an impossible pod", [f.lost_to_neighbour for f in figures if f.impossible]),
        _actions(figures),
        _none("did not come to rest", [int(not f.is_at_rest) for f in figures]),
    ]


def _only(figures: Sequence[Figure], of: Sequence[Figure]) -> list[Figure]:
    chosen = {id(figure) for figure in of}
    return [figure for figure in figures if id(figure) in chosen]


def _over_packer(figure: Figure) -> float | None:
    return figure.over_packer


def _over_bound(figure: Figure) -> float | None:
    return figure.over_bound


def _over_integer(figure: Figure) -> float | None:
    return figure.over_integer


def _none(what: str, counts: Sequence[int]) -> Criterion:
    if not counts:
        return Criterion(what, "0", "", None)
    hit = sum(1 for count in counts if count)
    reached = f"{sum(counts)} in {hit} of {len(counts)}"
    return Criterion(what, "0", reached, not hit)


def _first_fit(figures: Sequence[Figure]) -> Criterion:
    what, target = "pods not placeable, first-fit", "0 in 95 %, rest ≤ 0.3 %"
    if not figures:
        return Criterion(what, target, "", None)
    clean = sum(1 for figure in figures if not figure.unplaced)
    worst = max(figure.unplaced / figure.pods for figure in figures)
    is_met = clean >= 0.95 * len(figures) and worst <= 0.003
    return Criterion(what, target, f"0 in {clean / len(figures):.0%}, worst {worst:.1%}", is_met)


def _share(what: str, figures: Sequence[Figure]) -> Criterion:
    if not figures:
        return Criterion(what, "≤ 0.5 %", "", None)
    share = sum(figure.lost for figure in figures) / sum(figure.pods for figure in figures)
    return Criterion(what, "≤ 0.5 %", f"{share:.2%}", share <= 0.005)


def _ratio(
    what: str,
    figures: Sequence[Figure],
    ratio: Callable[[Figure], float | None],
    median_most: float,
    worst_most: float | None,
) -> Criterion:
    target = f"{median_most:.2f}" if worst_most is None else f"{median_most:.2f} / {worst_most:.2f}"
    values = [value for figure in figures if (value := ratio(figure)) is not None]
    if not values:
        return Criterion(what, target, "", None)
    reached = f"{median(values):.3f} / {max(values):.3f}"
    is_met = median(values) <= median_most and (worst_most is None or max(values) <= worst_most)
    return Criterion(what, target, reached, is_met)


def _actions(figures: Sequence[Figure]) -> Criterion:
    what, target = "actions beyond those needed", "≤ 5 %"
    needed = sum(figure.actions - figure.actions_unneeded for figure in figures)
    if not needed:
        return Criterion(what, target, "", None)
    share = sum(figure.actions_unneeded for figure in figures) / needed
    return Criterion(what, target, f"{share:.1%}", share <= 0.05)
