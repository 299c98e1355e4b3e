"""Computes capacity hints: what could serve a cluster's needs now, with which likelihood and price.

docs/spec/shard.md §10.5. Available capacity is computed off the loop, once per distinct request and only if the fleet
changed. The loop decides what is sent: only hints that changed by much or are about to expire. A hint reserves nothing
and no decision reads one.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not
from typing import NamedTuple

import numpy as np

from bigfleet.model import vector
from bigfleet.model.frames import AvailableCapacity, Confidence
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.machine_shapes import Ask, Classes, Fits
from bigfleet.shard.sessions.registry import Sessions

#: An unchanged hint is sent again after this, so that receivers can expire what they hold.
REFRESH_SECONDS = 300.0
#: A count that differs by less than this part of the one that was sent is sent with the next repetition: in a large
#: fleet every count changes in every cycle.
COUNT_CHANGE_MIN = 0.25

#: (cluster, fingerprint).
HintKey = tuple[str, str]


class HintOffer(NamedTuple):
    """What is free for one ask."""

    machines: int
    confidence: Confidence
    #: Of the cheapest machine that fits: Idle before Speculative; 0 without one.
    price_usd_per_hour: float


@dataclass(slots=True, eq=False)
class _Offered:
    """One distinct ask: who asks it, and what is free for it."""

    ask: Ask
    #: Never empty, but for the time in which rows are exchanged.
    askers: set[HintKey] = field(default_factory=set)
    #: None before it was worked out.
    offer: HintOffer | None = None
    #: What the machine that is priced offers.
    supply: Vector = field(default_factory=lambda: vector.ZERO)


class _Asked(NamedTuple):
    """What a cluster asks under one fingerprint."""

    profile: Profile
    #: The largest min unit among its rows.
    unit: Vector
    offered: _Offered


class HintOffers:
    """What each cluster asks for, and what is free for it. Used off the loop, by one caller at a time."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, _Asked]] = {}
        self._rows: dict[str, Sequence[Need]] = {}
        #: All and only the asks of `_asked`.
        self._offered: dict[Ask, _Offered] = {}
        self._made_from: Classes | None = None

    def update(self, demand: Mapping[str, Sequence[Need]], classes: Classes, fits: Fits) -> set[HintKey]:
        """Take the clusters' rows and the fleet's classes; return what asks differently or is offered otherwise.

        Rows that are the same object as before cost nothing.
        """
        changed = self._take_demand(demand)
        moved = classes is not self._made_from
        self._made_from = classes
        for offered in self._offered.values():
            known = offered.offer
            if known is None or moved:
                offered.offer, offered.supply = _offer(offered.ask, classes, fits)
                if offered.offer != known:
                    changed |= offered.askers
        return changed

    def of(self, cluster: str) -> Iterable[str]:
        """Return the fingerprints that a cluster asks for, in the order of its rows."""
        return self._asked.get(cluster, {})

    def offer(self, key: HintKey) -> HintOffer | None:
        """Return what is free for a cluster's ask at the moment; None when no operator asks for it any more."""
        asked = self._asked.get(key[0], {}).get(key[1])
        return None if asked is None else asked.offered.offer

    def hint(self, key: HintKey) -> AvailableCapacity | None:
        """Return the hint of the moment; None when no operator asks for it any more."""
        cluster, fingerprint = key
        asked = self._asked.get(cluster, {}).get(fingerprint)
        if asked is None:
            return None
        offer = asked.offered.offer
        assert offer is not None, "what is asked for has an offer since the last update"
        return AvailableCapacity(
            fingerprint=fingerprint,
            requirements=asked.profile.requirements,
            resources=vector.format_vector(asked.offered.supply),
            available_count=offer.machines,
            confidence=offer.confidence,
            price_usd_per_hour=offer.price_usd_per_hour,
        )

    def _take_demand(self, demand: Mapping[str, Sequence[Need]]) -> set[HintKey]:
        changed: set[HintKey] = set()
        for cluster in self._rows.keys() - demand.keys():
            self._exchange(cluster, {})
            del self._rows[cluster], self._asked[cluster]
        # Of thousands of clusters some have reported again, which is seen without a step of Python for each.
        is_new = map(is_not, map(self._rows.get, demand), demand.values())
        for cluster in list(compress(demand, is_new)):
            self._rows[cluster] = rows = demand[cluster]
            before = self._asked.get(cluster, {})
            now = self._exchange(cluster, _units(rows))
            for fingerprint, asked in now.items():
                known = before.get(fingerprint)
                if known is None or known.offered is not asked.offered:
                    changed.add((cluster, fingerprint))
        for offered in [offered for offered in self._offered.values() if not offered.askers]:
            del self._offered[offered.ask]
        return changed

    def _exchange(self, cluster: str, units: Mapping[str, tuple[Profile, Vector]]) -> dict[str, _Asked]:
        """Put what a cluster asks in the place of what it asked before, and return it.

        A row that stays the same object costs next to nothing: a change of one among 20,000 is a change of one.
        """
        before = self._asked.get(cluster, {})
        now: dict[str, _Asked] = {}
        for fingerprint, (profile, unit) in units.items():
            known = before.get(fingerprint)
            if known is not None and known.profile is profile and known.unit is unit:
                now[fingerprint] = known
                continue
            ask = Ask(profile.requirements, vector.vector_key(unit))
            offered = self._offered.get(ask)
            if offered is None:
                offered = self._offered[ask] = _Offered(ask)
            offered.askers.add((cluster, fingerprint))
            now[fingerprint] = _Asked(profile, unit, offered)
        for fingerprint, known in before.items():
            asked = now.get(fingerprint)
            if asked is None or asked.offered is not known.offered:
                known.offered.askers.discard((cluster, fingerprint))
        self._asked[cluster] = now
        return now


def _units(rows: Sequence[Need]) -> dict[str, tuple[Profile, Vector]]:
    """Return what is asked by fingerprint: a machine that counts must hold the largest min unit among its rows."""
    units: dict[str, tuple[Profile, Vector]] = {}
    for row in rows:
        profile, unit = row.profile, row.min_unit
        fingerprint = profile.fingerprint
        known = units.get(fingerprint)
        if known is None:
            units[fingerprint] = (profile, unit)
        elif known[1] is not unit and known[1] != unit:
            units[fingerprint] = (profile, vector.maximum(known[1], unit))
    return units


def _offer(ask: Ask, classes: Classes, fits: Fits) -> tuple[HintOffer, Vector]:
    """Return what is free for an ask, and what the machine that is priced offers."""
    places = np.flatnonzero(fits.fitting(ask))
    idle, speculative = int(classes.idle[places].sum()), int(classes.speculative[places].sum())
    if not idle + speculative:
        return HintOffer(0, Confidence.NONE, 0.0), vector.ZERO
    prices = (classes.idle_price_usd_per_hour if idle else classes.speculative_price_usd_per_hour)[places]
    cheapest = int(prices.argmin())
    confidence = Confidence.HIGH if idle else Confidence.MEDIUM
    return HintOffer(idle + speculative, confidence, float(prices[cheapest])), fits.supply(int(places[cheapest]))


def _is_news(sent: HintOffer, offer: HintOffer) -> bool:
    """Return whether an offer differs so much from the one that was sent that it is not left to the repetition."""
    if (sent.confidence, sent.price_usd_per_hour) != (offer.confidence, offer.price_usd_per_hour):
        return True
    change = abs(offer.machines - sent.machines)
    return change > 0 and change >= COUNT_CHANGE_MIN * sent.machines


class _Sent(NamedTuple):
    offer: HintOffer
    at_seconds: float


class CapacityHints:
    """The hints that each operator was sent, and those to send next. Only the loop touches it.

    Invariants: only clusters with a session have a memory; what waits in `_due` is asked for by some cluster, once.
    """

    def __init__(self, *, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._sent: dict[str, dict[str, _Sent]] = {}
        #: Sessions that have been sent nothing yet.
        self._fresh: set[str] = set()
        #: What to look at in the next cycle, in order.
        self._due: dict[HintKey, None] = {}
        #: (when it was sent, what) in this order, for the refresh.
        self._ageing: deque[tuple[float, HintKey]] = deque()

    def send_again(self, cluster: str) -> None:
        """Send a cluster everything again: its session is new, or frames to it were dropped."""
        self._sent.pop(cluster, None)
        self._fresh.add(cluster)

    def session_ended(self, cluster: str) -> None:
        """Drop the memory of what the cluster was sent."""
        self._sent.pop(cluster, None)
        self._fresh.discard(cluster)

    def publish(self, changed: Set[HintKey], offers: HintOffers, sessions: Sessions, *, now_seconds: float) -> int:
        """Send what differs enough from what was sent last, as far as rate and room allow; return how many hints."""
        self._gather(changed, offers, now_seconds)
        rooms: dict[str, int] = {}
        later: dict[HintKey, None] = {}
        sent = 0
        for key in self._due:
            cluster, fingerprint = key
            session = sessions.of(cluster)
            offer = offers.offer(key)
            if session is None or offer is None:
                self._sent.get(cluster, {}).pop(fingerprint, None)
                continue
            last = self._sent.get(cluster, {}).get(fingerprint)
            age_seconds = now_seconds - last.at_seconds if last is not None else float("inf")
            if last is not None and not _is_news(last.offer, offer) and age_seconds < REFRESH_SECONDS:
                continue
            room = rooms.get(cluster)
            if room is None:
                room = rooms[cluster] = session.outbox.room
            if age_seconds < self._interval_seconds or room <= 0:
                later[key] = None
                continue
            # Made only for what is sent: of a session without room tens of thousands may wait.
            hint = offers.hint(key)
            assert hint is not None, "an offer has a hint"
            rooms[cluster] = room - 1
            session.outbox.put(hint)
            self._sent.setdefault(cluster, {})[fingerprint] = _Sent(offer, now_seconds)
            self._ageing.append((now_seconds, key))
            sent += 1
        self._due = later
        return sent

    def _gather(self, changed: Set[HintKey], offers: HintOffers, now_seconds: float) -> None:
        while self._ageing and now_seconds - self._ageing[0][0] >= REFRESH_SECONDS:
            at_seconds, key = self._ageing.popleft()
            last = self._sent.get(key[0], {}).get(key[1])
            # A later hint of the same key has an entry of its own.
            if last is not None and last.at_seconds == at_seconds:
                self._due[key] = None
        for cluster in sorted(self._fresh):
            self._due.update(dict.fromkeys((cluster, fingerprint) for fingerprint in offers.of(cluster)))
        self._fresh.clear()
        self._due.update(dict.fromkeys(sorted(changed)))
