"""Holds what was measured in one week, and computes the figures that are compared between modes."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Final

from bench.week.paths import MINUTES_PER_DAY, POOLS, Paths
from bigfleet.exchange.course import ExchangeEnd
from bigfleet.shard.exchange.exchange_records import ExchangeRecord
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS
from bigfleet.sim.packing.comparison import packed_cost

#: Clusters begin with nothing; what the first hour costs is not counted.
WARM_UP_MINUTES: Final = 60


class Why(Enum):
    """Why pods lost their machine."""

    EXCHANGE = "exchange"
    RECLAIM = "reclaim"
    FAILURE = "failure"
    INTERRUPTION = "interruption"
    #: Another cause, such as a higher priority.
    OTHER = "other"


@dataclass(slots=True)
class WeekFigures:
    """What was measured in one run; money in dollars."""

    mode: str
    seed: int
    minutes: int
    cost_usd: float = 0.0
    #: Sums over minutes, after the first hour.
    machine_minutes: int = 0
    pod_minutes: int = 0
    pending_pod_minutes: int = 0
    #: Pods that lost their machine, and of those the ones that waited for another machine afterwards.
    evicted: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    stranded: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    #: Evicted pods for which the other nodes had no room, by the operator's own reckoning.
    without_room: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    records: list[ExchangeRecord] = field(default_factory=list)
    #: By cluster and day: machine-minutes.
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    #: Cluster-minutes with an exchange under way.
    busy_minutes: int = 0
    #: At the beginning of exchanges: what the other proposals of their clusters would have saved by the hour if they
    #: had begun as well, those that were ready and those that only the budget kept back.
    passed_over_usd_per_hour: float = 0.0
    #: Each call that the provider took.
    calls: list[tuple[int, str, str, str]] = field(default_factory=list)
    #: The cost of each hour.
    by_hour_usd: list[float] = field(default_factory=list)
    failed_cycles: int = 0

    @property
    def checksum(self) -> str:
        """Return a digest of every call and of the cost of each hour; the mode is not part of it."""
        content = repr((self.calls, [usd.hex() for usd in self.by_hour_usd])).encode()
        return hashlib.sha256(content).hexdigest()[:12]

    @property
    def machines(self) -> float:
        """Return how many machines served on average."""
        return self.machine_minutes / max(1, self.minutes - WARM_UP_MINUTES)

    @property
    def pending_share(self) -> float:
        """Return the share of the pods' time in which they had no machine."""
        return self.pending_pod_minutes / max(1, self.pod_minutes)

    def evictions_per_pod_day(self, why: Why) -> float:
        """Return how often a pod lost its machine in a day, for one reason."""
        return self.evicted[why] * MINUTES_PER_DAY / max(1, self.pod_minutes)

    def exchanges_per_machine_day(self) -> list[float]:
        """Return, of each cluster and day, how many machines were to go in exchanges for each machine held."""
        gone: Counter[tuple[str, int]] = Counter()
        for record in self.records:
            minute = (record.begun_unix_nanos / 1e9 - START_UNIX_SECONDS) / 60
            gone[record.cluster, int(minute // MINUTES_PER_DAY)] += len(record.goes_ids)
        return [gone[key] * MINUTES_PER_DAY / minutes for key, minutes in sorted(self.held.items())]

    @property
    def busy_share(self) -> float:
        """Return the share of the clusters' time with an exchange under way."""
        clusters = len({cluster for cluster, _day in self.held})
        return self.busy_minutes / max(1, clusters * (self.minutes - WARM_UP_MINUTES))

    @property
    def exchanged_median(self) -> float:
        """Return the median over clusters and days."""
        return median(self.exchanges_per_machine_day() or [0.0])

    @property
    def ended(self) -> list[ExchangeRecord]:
        """The exchanges that ended."""
        return [record for record in self.records if record.ended_unix_nanos]

    @property
    def done(self) -> list[ExchangeRecord]:
        """The exchanges that were not abandoned."""
        return [record for record in self.ended if record.end == ExchangeEnd.DONE.value]

    @property
    def promised_usd_per_hour(self) -> float:
        """Return what all exchanges that ended had promised."""
        return sum(record.promised_usd_per_hour for record in self.ended)

    @property
    def realised_usd_per_hour(self) -> float:
        """Return what came of them."""
        return sum(record.realised_usd_per_hour for record in self.ended)

    @property
    def ends(self) -> Counter[str]:
        """How many exchanges ended for each reason."""
        return Counter(record.end for record in self.ended)


def packer_cost_usd(paths: Paths, *, slots: int) -> float:
    """Return what the packer pays that repacks everything from nothing each hour and whose moves cost nothing.

    It takes every machine on offer at the prices of the hour, but none of a pool that is sold out.
    """
    prices: dict[str, float] = {}
    total = 0.0
    for minute in range(paths.minutes):
        prices |= {pool.name: usd for pool, usd in paths.prices.get(minute, ())}
        if minute < WARM_UP_MINUTES or (minute - WARM_UP_MINUTES) % 60:
            continue
        on_offer = [
            pool.machine(number, prices[pool.name])
            for pool in POOLS
            if not paths.is_sold_out(pool, minute)
            for number in range(slots)
        ]
        requests = {
            cluster: [
                paths.templates[cluster][name].request
                for name, pods in paths.pods_at(cluster, minute).items()
                for _ in range(pods)
            ]
            for cluster in paths.clusters
        }
        packed = packed_cost(requests, on_offer)
        assert not packed.unhosted, f"minute {minute}: the offers are too few for {packed.unhosted} pods"
        # The last hour may be cut off.
        total += packed.usd_per_hour * min(60, paths.minutes - minute) / 60
    return total
