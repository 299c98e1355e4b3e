"""Searches the fleet with the least completed cost: starts, then rounds of moves, judged by simulations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import Core
from bigfleet.planner.moves import FleetMoves
from bigfleet.planner.packing import SEQUENCE, FirstFit
from bigfleet.planner.starts import completed, is_fixed, merged, packable, paid_anyway, starting_fleets
from bigfleet.planner.valuation import Valuation

#: Numbers of orders: of the starts, of the rounds, and of the final comparison. They differ: a fleet that was chosen
#: in some orders is compared in others.
_START_ORDERS: Final = range(2)
_ROUND_ORDERS: Final = 10
_TRIAL_ORDERS: Final = range(2, 6)
_FINAL_ORDERS: Final = 100_000
#: Starts with different leaders that are improved for some rounds each; the best of them is improved further.
_TRIALS: Final = 8
_TRIAL: Final = 3
#: Candidates that are completed where simple packers fill none of them.
_COMPLETED: Final = 4
#: Children of a round that are checked for a packing.
_CHECKED: Final = 6
#: Orders of first-fit-decreasing in a round, out of the first so many of the sequence.
_NUMBERS: Final = 3
_NUMBERS_OF: Final = 9
#: Work of one round: machines times pods that are simulated, machines times parts that are packed.
_SIMULATED: Final = 1 << 22
_PROPOSED: Final = 1 << 21
_PROPOSALS_LEAST: Final = 48
_SIMULATED_LEAST: Final = 6
_STARTS_LEAST: Final = 12
#: Rounds times pods of a small cluster.
_SMALL_ROUNDS: Final = 4000
#: Nano-dollars an hour by which machines of one price may differ, and numbers that are tried when machines are dropped.
_ALIKE: Final = 20_000
_FEWER: Final = 24
#: Machines of the fleets that are all looked at, how many such fleets there may be, and how many are compared.
_FEW_MACHINES: Final = 5
_FEW_FLEETS: Final = 3000
_FEW_CHECKED: Final = 64
#: Pods from which on all of the effort is spent.
_WHOLE_EFFORT: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the planner tries; every number is a count, none is a time."""

    #: Starts that are completed until they host everything, and compared once more.
    starts: int = 32
    #: Rounds of moves: three quarters of them for starts with different leaders, the others for the best of those.
    rounds: int = 48
    #: Proposals of a round, and how many of them are simulated; fewer for fleets of many machines.
    proposals: int = 800
    simulated: int = 24
    #: Orders of the queue in a round; each round has orders of its own, so that no fleet is fitted to a few of them.
    orders: int = 4
    #: Orders in the final comparison, and fleets that take part in it.
    final_orders: int = 8
    finalists: int = 8
    #: How many times as many rounds a small cluster has. More rounds make the fleets of larger ones little cheaper.
    small_rounds: int = 1
    #: Clusters of up to so many pods are planned as a whole, larger ones on a sample of so many pods.
    whole: int = 2000
    sample: int = 800

    def scaled(self, pods: int) -> "Effort":
        """Return the effort for a cluster of so many pods: a small one has fewer fleets, and there are more of them."""
        if pods >= _WHOLE_EFFORT:
            return self
        part = max(pods, _WHOLE_EFFORT // 4)
        return replace(
            self,
            starts=max(_STARTS_LEAST, self.starts * part // _WHOLE_EFFORT),
            # A round over few pods is cheap, and needed: one machine more or less is a large part of a small fleet.
            rounds=self.small_rounds
            * min(self.rounds, max(self.rounds * part // _WHOLE_EFFORT, _SMALL_ROUNDS // max(pods, 1))),
            proposals=max(8, self.proposals * part // _WHOLE_EFFORT),
            # So is one lost pod: more orders separate luck from slack.
            orders=min(2 * self.orders, self.orders * _WHOLE_EFFORT // part),
            final_orders=self.final_orders * _WHOLE_EFFORT // part,
        )


@dataclass(frozen=True, slots=True, order=True)
class FleetCandidate:
    """A fleet that hosts everything, with its value in the final comparison."""

    value: int
    fleet: Fleet
    lost_millipods: int


class Search:
    """Searches fleets of one core that contain what is held, or that are free to drop it."""

    def __init__(self, core: Core, effort: Effort) -> None:
        """Prepare simulations and packings."""
        self.core = core
        self.effort = effort.scaled(int(core.count.sum()))
        self.first_fit = FirstFit(core)
        self.valuation = Valuation(core)

    def run(self, base: Fleet, wanted: Int) -> list[FleetCandidate]:
        """Return fleets that add machines to a base for the wanted pods, best first; none where none hosts them all."""
        fleets = self._starts(base, wanted)
        if not fleets:
            return []
        moves = FleetMoves(self.core, self.first_fit)
        # Three quarters of the rounds go to trials of different leaders, the others to the best of them.
        number = max(1, min(_TRIALS, self.effort.rounds * 3 // 4 // _TRIAL))
        leaders = [self._packable(fleet) for fleet in self._leaders(fleets)[:number]]
        trials = [self._improve(moves, start, _TRIAL * n, _TRIAL) for n, start in enumerate(leaders)]
        finals = [history[-1] for history in trials]
        values, _ = self.valuation.values(finals, _TRIAL_ORDERS)
        _, chosen = min(zip(values, finals, strict=True))
        done = _TRIAL * len(trials)
        history = self._improve(moves, chosen, done, max(0, self.effort.rounds - done))
        found = self.packable_first(self.compare([*history, *finals], self._leaders(fleets)))
        few = self._small(base, found[0].value)
        return self.packable_first(sorted({*found, *self.compare(few)})) if few else found

    def improved(self, fleet: Fleet, rounds: int) -> list[FleetCandidate]:
        """Return the fleet and those that so many rounds of moves made of it, best first."""
        return self.compare(self._improve(FleetMoves(self.core, self.first_fit), fleet, 0, rounds))

    def packable_first(self, found: Sequence[FleetCandidate]) -> list[FleetCandidate]:
        """Return the candidates with the best of those that simple packers can fill, too, before the others.

        Where none of them is such a fleet, the best are completed until they are.
        """
        first = next((each for each in found if self.first_fit.fits(each.fleet)), None)
        if first is None:
            best = [each.fleet for each in found[:_COMPLETED]]
            first = next(iter(self.compare(packable(self.core, self.first_fit, best))), found[0])
        return [first, *(each for each in found if each != first)]

    def prune(self, fleet: Fleet) -> list[FleetCandidate]:
        """Return the fleet and its parts without machines that are not needed, held ones included, best first.

        The dearest machines go first; of equally dear ones the emptier, then those of the later key.
        """
        history, best = [fleet], fleet
        columns = sorted((c for c, _ in fleet), key=lambda c: (-(int(self.core.cost[c]) // _ALIKE), self._use(c), -c))
        for column in columns:
            fewer = [best, *_with_fewer(best, column)]
            values, _ = self.valuation.values(fewer, range(_ROUND_ORDERS, _ROUND_ORDERS + self.effort.orders))
            ranked = (fleet for _, fleet in sorted(zip(values, fewer, strict=True)))
            best = next(fleet for fleet in ranked if fleet == best or self.first_fit.fits(fleet))
            if best not in history:
                history.append(best)
        return self.compare(history[-self.effort.finalists :])

    def _use(self, column: int) -> int:
        """Return how full the machines of a held column are on average, in thousandths; acquired ones are empty."""
        of = self.core.columns[column]
        use = self.core.problem.classes[of.machine_class].held_use
        return sum(use) // max(1, len(use)) if of.is_held else 0

    def _starts(self, base: Fleet, wanted: Int) -> list[Fleet]:
        """Return completed starts, best first."""
        if not self.core.count.any():
            return [()]
        found = set(starting_fleets(self.core, base, wanted))
        paid = merged(base, paid_anyway(self.core))
        if paid != base:
            left = self.first_fit.pack(paid).left
            found.update(starting_fleets(self.core, paid, left))
        fleets = self._ranked(sorted(found))[: self.effort.starts]
        ranked = self._ranked(completed(self.core, self.first_fit, fleets))
        # Those that a scheduler may not place, either, come last: the search may start from them all the same.
        checked = {fleet for fleet in ranked[:_CHECKED] if self.first_fit.fits(fleet)}
        return sorted(ranked, key=lambda fleet: fleet not in checked)

    def _ranked(self, fleets: Sequence[Fleet]) -> list[Fleet]:
        values, _ = self.valuation.values(fleets, _START_ORDERS)
        return [fleet for _, fleet in sorted(zip(values, fleets, strict=True))]

    def _leaders(self, fleets: Iterable[Fleet]) -> list[Fleet]:
        """Return the first fleet of each leading kind."""
        first: dict[int, Fleet] = {}
        for fleet in fleets:
            if fleet:
                first.setdefault(leader(self.core, fleet), fleet)
        return list(first.values())

    def _packable(self, fleet: Fleet) -> Fleet:
        """Return the fleet, with greedy machines if simple packers do not fill it."""
        if self.first_fit.fits(fleet):
            return fleet
        return next(iter(packable(self.core, self.first_fit, [fleet])), fleet)

    def _improve(self, moves: FleetMoves, start: Fleet, begin: int, rounds: int) -> list[Fleet]:
        """Return the fleets that were best after some round, the last ones of them."""
        effort, best = self.effort, start
        values, _ = self.valuation.values([best], _START_ORDERS)
        value, history = values[0], [best]
        for number in range(begin, begin + rounds):
            first = _ROUND_ORDERS + number * effort.orders
            numbers = [SEQUENCE[(_NUMBERS * number + k) % _NUMBERS_OF] for k in range(_NUMBERS)]
            machines = max(1, sum(count for _, count in best))
            tried = _PROPOSED // (machines * _NUMBERS * len(self.core.parts))
            proposals = min(effort.proposals, max(_PROPOSALS_LEAST, tried))
            simulated = _SIMULATED // (machines * effort.orders * int(self.core.count.sum()))
            simulated = min(effort.simulated, max(_SIMULATED_LEAST, simulated))
            both = [best, *moves.neighbours(best, value, proposals, simulated, numbers)]
            values, _ = self.valuation.values(both, range(first, first + effort.orders))
            ranked = sorted(range(len(both)), key=lambda n: (values[n], both[n]))
            better = ranked[: ranked.index(0)][:_CHECKED]
            chosen = next((n for n in better if self.first_fit.fits(both[n])), 0)
            best, value = both[chosen], values[chosen]
            if best not in history:
                history.append(best)
        return history[-effort.finalists :]

    def compare(self, fleets: Iterable[Fleet], others: Iterable[Fleet] = ()) -> list[FleetCandidate]:
        """Return the finalists in the order of their values in fresh orders, with the best of each other leader.

        Interruptions cost here what they cost in the packing of each fleet.
        """
        final = sorted({*fleets, *others})
        orders = range(_FINAL_ORDERS, _FINAL_ORDERS + self.effort.final_orders)
        values, lost = self.valuation.values(final, orders)
        values = [value + self._risk(fleet) for value, fleet in zip(values, final, strict=True)]
        return sorted(FleetCandidate(*each) for each in zip(values, final, lost, strict=True))

    def _risk(self, fleet: Fleet) -> int:
        """Return what the interruptions of a fleet's packing cost beyond the mean that its price has."""
        core = self.core
        if not any(core.risk[c] for c, _ in fleet):
            return 0
        mean = sum(int(core.mean_risk[c]) * count for c, count in fleet)
        return core.interruptions(fleet, self.first_fit.pack(fleet).on) - mean

    def _small(self, base: Fleet, below: int) -> list[Fleet]:
        """Return the cheapest of all fleets of few machines beside a base that cost less than `below` and may suffice.

        Fleets of one machine more are looked at as long as there are few of them.
        """
        core = self.core
        addable = [int(c) for c in np.flatnonzero(is_fixed(core) == 0)]
        wanted = np.array(
            [
                max(0, int(whole) - sum(count * int(core.supply[c, d]) for c, count in base))
                for d, whole in enumerate(core.demand)
            ],
            np.int64,
        )
        start = sum(int(core.cost[c]) * count for c, count in base)
        found: list[tuple[int, Fleet]] = []
        level: list[tuple[int, ...]] = [()]
        for _ in range(_FEW_MACHINES):
            if len(level) * len(addable) > _FEW_FLEETS:
                break
            level = [
                (*some, c)
                for some in level
                for c in addable
                if (not some or some[-1] <= c) and some.count(c) < core.stock[c]
            ]
            for some in level:
                price = start + sum(int(core.cost[c]) for c in some)
                if price < below and (core.supply[list(some)].sum(axis=0) >= wanted).all():
                    found.append((price, merged(base, *(((c, 1),) for c in some))))
        return [fleet for _, fleet in sorted(found)[:_FEW_CHECKED] if self.first_fit.fits(fleet)]


def leader(core: Core, fleet: Fleet) -> int:
    """Return the first column of the kind with the largest part of the cost; a kind is a type in any zone."""
    spent: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for column, count in fleet:
        kind = (tuple(core.supply[column].tolist()), int(core.cost[column]))
        entry = spent.setdefault(kind, [0, column])
        entry[0] -= int(core.cost[column]) * count
    return min(spent.values())[1]


def _with_fewer(fleet: Fleet, column: int) -> list[Fleet]:
    """Return the fleet with fewer machines of a column: every number, or some between none and all but one."""
    counts = dict(fleet)
    most = counts[column]
    numbers = sorted({most * n // min(most, _FEWER) for n in range(min(most, _FEWER))} | {most - 1})
    return [tuple(sorted((c, n) for c, n in {**counts, column: number}.items() if n)) for number in numbers]
