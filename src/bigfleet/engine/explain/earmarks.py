"""Computes which free machines were earmarked for gangs in a finished decision (docs/spec/aggregates.md §5.3).

An earmark hides a machine from the choices of later gangs and leaves no other trace in a decision, so it is worked out
again from what each gang chose and was credited with. This module does not choose a domain.
"""

from dataclasses import dataclass

import numpy as np

from bigfleet.engine.explain.decided_fleet import DecidedFleet, Ints
from bigfleet.model import vector
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.vector import Vector


@dataclass(slots=True)
class _Offers:
    """The free machines of one domain that one kind of gang may count on, in order; those in front are all taken."""

    rows: list[int]
    first: int = 0


class EarmarkReplay:
    """Walks through the gangs in processing order as far as somebody asks."""

    def __init__(self, fleet: DecidedFleet) -> None:
        self._fleet = fleet
        self._by = np.full(len(fleet.state), -1, np.int64)
        self._next_rank = 0
        self._offers: dict[object, dict[str, _Offers]] = {}

    def before(self, rank: int) -> Ints:
        """Return, by machine, the place of the row that had earmarked it before the turn of a rank, -1 for none.

        Ranks are asked in ascending order. Cost: the gangs in between that were not credited with all they want.
        """
        assert rank >= self._next_rank, "ranks are asked in ascending order"
        for place in self._fleet.in_order[self._next_rank : rank]:
            if self._fleet.counts_on_free[place]:
                self._earmark(place)
        self._next_rank = rank
        return self._by.copy()

    def _earmark(self, place: int) -> None:
        fleet = self._fleet
        result = fleet.results[place]
        claimed = fleet.rows_of(result.claimed)
        credited = fleet.supply(claimed[~fleet.is_free[claimed]])
        remaining: Vector = vector.subtract(result.need.aggregate, credited)
        offers = self._offers_for(result.need).get(result.domain)
        if offers is None:
            return
        rows = offers.rows
        while offers.first < len(rows) and self._by[rows[offers.first]] >= 0:
            offers.first += 1
        for row in rows[offers.first :]:
            if not remaining:
                return
            if self._by[row] < 0:
                supply = fleet.supply_at(row)
                if vector.is_useful(supply, remaining):
                    self._by[row] = place
                    remaining = vector.subtract(remaining, supply)

    def _offers_for(self, need: Need) -> dict[str, _Offers]:
        key = (need.fingerprint, vector.vector_key(need.min_unit), frozenset(need.aggregate))
        known = self._offers.get(key)
        if known is None:
            known = self._offers[key] = self._sorted_by_domain(need)
        return known

    def _sorted_by_domain(self, need: Need) -> dict[str, _Offers]:
        fleet, same_key = self._fleet, need.profile.same_key
        assert same_key is not None, "only gangs earmark"
        numbers, values = fleet.values(same_key)
        fits = fleet.fits(need.profile, need.min_unit) & fleet.useful(need.aggregate) & (numbers >= 0)
        dollars = bucket_upper_dollars(need.profile.interruption_bucket)
        rows = np.concatenate([fleet.by_price(), fleet.by_cost(dollars)])
        rows = rows[~fleet.hidden[rows] & fits[fleet.shape[rows]]]
        domains = numbers[fleet.shape[rows]]
        order = np.argsort(domains, kind="stable")
        bounds = np.searchsorted(domains[order], np.arange(len(values) + 1))
        return {
            value: _Offers(rows[order[bounds[number] : bounds[number + 1]]].tolist())
            for number, value in enumerate(values)
        }
