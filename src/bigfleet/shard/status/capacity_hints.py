"""Computes capacity hints: what could serve a cluster's needs now, how likely, at what price.

docs/spec/shard.md §10.5. What is on offer is worked out off the loop, once per distinct ask and only when the fleet
moved; what is sent is decided on the loop, only where something changed or a hint grew old. A hint reserves nothing
and no decision ever looks at one.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
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

#: (cluster, fingerprint).
HintKey = tuple[str, str]


class HintOffer(NamedTuple):
    """What is free for one ask."""

    machines: int
    confidence: Confidence
    #: Of the cheapest machine that fits: Idle before Speculative; 0 without one.
    price_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class _Asked:
    profile: Profile
    ask: Ask


class HintOffers:
    """What each cluster asks for, and what is free for it. Used off the loop, by one caller at a time."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, _Asked]] = {}
        self._rows: dict[str, Sequence[Need]] = {}
        #: Who asks it: all and only the asks of `_asked`.
        self._askers: defaultdict[Ask, set[HintKey]] = defaultdict(set)
        self._offers: dict[Ask, tuple[HintOffer, Vector]] = {}
        self._made_from: Classes | None = None

    def update(self, demand: Mapping[str, Sequence[Need]], classes: Classes, fits: Fits) -> set[HintKey]:
        """Take the clusters' rows and the fleet's classes; return what asks differently or is offered otherwise.

        Rows that are the same object as before cost nothing.
        """
        changed = self._take_demand(demand)
        moved = classes is not self._made_from
        self._made_from = classes
        for ask in self._askers:
            known = self._offers.get(ask)
            if known is None or moved:
                made = self._offers[ask] = _offer(ask, classes, fits)
                if known is None or made[0] != known[0]:
                    changed |= self._askers[ask]
        return changed

    def of(self, cluster: str) -> Iterable[str]:
        """Return the fingerprints that a cluster asks for, in the order of its rows."""
        return self._asked.get(cluster, {})

    def hint(self, key: HintKey) -> AvailableCapacity | None:
        """Return the hint of the moment; None when no operator asks for it any more."""
        cluster, fingerprint = key
        asked = self._asked.get(cluster, {}).get(fingerprint)
        if asked is None:
            return None
        offer, supply = self._offers[asked.ask]
        return AvailableCapacity(
            fingerprint=fingerprint,
            requirements=asked.profile.requirements,
            resources=vector.format_vector(supply),
            available_count=offer.machines,
            confidence=offer.confidence,
            price_usd_per_hour=offer.price_usd_per_hour,
        )

    def _take_demand(self, demand: Mapping[str, Sequence[Need]]) -> set[HintKey]:
        changed: set[HintKey] = set()
        for cluster in self._rows.keys() - demand.keys():
            self._forget(cluster)
        # Of thousands of clusters some have reported again, which is seen without a step of Python for each.
        is_new = map(is_not, map(self._rows.get, demand), demand.values())
        for cluster in list(compress(demand, is_new)):
            rows = demand[cluster]
            before = self._asked.get(cluster, {})
            self._forget(cluster)
            self._rows[cluster] = rows
            now = self._asked[cluster] = _asked(rows)
            for fingerprint, asked in now.items():
                self._askers[asked.ask].add((cluster, fingerprint))
                known = before.get(fingerprint)
                if known is None or known.ask != asked.ask:
                    changed.add((cluster, fingerprint))
        for ask in [ask for ask, askers in self._askers.items() if not askers]:
            del self._askers[ask]
            self._offers.pop(ask, None)
        return changed

    def _forget(self, cluster: str) -> None:
        self._rows.pop(cluster, None)
        for fingerprint, asked in self._asked.pop(cluster, {}).items():
            self._askers[asked.ask].discard((cluster, fingerprint))


def _asked(rows: Sequence[Need]) -> dict[str, _Asked]:
    """Return what is asked by fingerprint: a machine that counts must hold the largest min unit among its rows."""
    units: dict[str, tuple[Profile, Vector]] = {}
    for row in rows:
        known = units.get(row.fingerprint)
        if known is None:
            units[row.fingerprint] = (row.profile, row.min_unit)
        elif known[1] is not row.min_unit and known[1] != row.min_unit:
            units[row.fingerprint] = (row.profile, vector.maximum(known[1], row.min_unit))
    return {
        fingerprint: _Asked(profile, Ask(profile.requirements, vector.vector_key(unit)))
        for fingerprint, (profile, unit) in units.items()
    }


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


class _Sent(NamedTuple):
    offer: HintOffer
    at_seconds: float


class CapacityHints:
    """What each connected operator was sent, and what it is to be sent next. Touched by the loop alone.

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
        """Send what differs from what was sent last, as far as rate and room allow; return how many hints were sent."""
        self._gather(changed, offers, now_seconds)
        rooms: dict[str, int] = {}
        later: dict[HintKey, None] = {}
        sent = 0
        for key in self._due:
            cluster, fingerprint = key
            session = sessions.of(cluster)
            hint = offers.hint(key)
            if session is None or hint is None:
                self._sent.get(cluster, {}).pop(fingerprint, None)
                continue
            offer = HintOffer(hint.available_count, hint.confidence, hint.price_usd_per_hour)
            last = self._sent.get(cluster, {}).get(fingerprint)
            age_seconds = now_seconds - last.at_seconds if last is not None else float("inf")
            if last is not None and last.offer == offer and age_seconds < REFRESH_SECONDS:
                continue
            room = rooms.setdefault(cluster, session.outbox.room)
            if age_seconds < self._interval_seconds or room <= 0:
                later[key] = None
                continue
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
