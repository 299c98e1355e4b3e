"""Changes the simulated world over time: prices, stockouts, interruptions of spot hosts.

docs/spec/provider.md §21. Everything is a function of (seed, subject, time since the world began), so a restart changes
nothing. This module must not store a draw that it could not repeat.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.fleet import Market, SimulatedOffer
from bigfleet.provider.backends.simulated.world import CloudWorld, Dwell, parse_capacity_type

_SECONDS_PER_HOUR = 3600.0
#: The random walk of prices: how much of a deviation stays at the next step, and how strong one step is.
_WALK_MEMORY = 0.9
_WALK_STEP = 0.03
#: A warning comes this long after the host runs at the earliest: earlier, there is no host that one could warn of.
_WARNED_AFTER_SECONDS = 1.0
#: Steps that still count; what is older has faded to a thousandth.
_WALK_STEPS = 64
_PROBABILITY_MAX = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a host will end; Unix nanoseconds, None when there is no such warning."""

    dies_unix_nanos: int
    notice_unix_nanos: int | None
    hint_unix_nanos: int | None


class Economy:
    """The world's own course."""

    def __init__(
        self, world: CloudWorld, draws: KeyedDraws, *, time_scale: float, is_calm: bool, began_unix_nanos: int
    ) -> None:
        self._world = world
        self._draws = draws
        self._time_scale = time_scale
        self._is_calm = is_calm
        self._began_unix_nanos = began_unix_nanos
        #: Market to the end of its last known spell (seconds of the world), the spell's number; a cache of draws.
        self._spells: dict[Market, tuple[float, float, int]] = {}

        #: Type and zone to the latest step whose factor was asked for, and the factor; a cache of draws.
        self._spot_factors: dict[str, tuple[int, float]] = {}

    @property
    def _price_step_nanos(self) -> int:
        return max(1, self.scaled_nanos(self._world.price.step_seconds))

    @property
    def world_second_nanos(self) -> int:
        """A second of the world on the real clock."""
        return max(1, self.scaled_nanos(1.0))

    def unix_nanos_at(self, world_seconds: float) -> int:
        """Return when the world is that old."""
        return self._began_unix_nanos + self.scaled_nanos(world_seconds)

    def scaled_nanos(self, world_seconds: float) -> int:
        """Return a duration of the world on the real clock."""
        return round(world_seconds * self._time_scale * NANOS_PER_SECOND)

    def _world_seconds(self, unix_nanos: int) -> float:
        return (unix_nanos - self._began_unix_nanos) / NANOS_PER_SECOND / self._time_scale

    # ---- prices --------------------------------------------------------------------------------------------------

    def price_step(self, unix_nanos: int) -> int:
        """Return the number of the spot price that holds."""
        return max(0, unix_nanos - self._began_unix_nanos) // self._price_step_nanos

    def next_price_unix_nanos(self, unix_nanos: int) -> int:
        """Return when the next spot price is drawn."""
        return self._began_unix_nanos + (self.price_step(unix_nanos) + 1) * self._price_step_nanos

    def price_usd_per_hour(self, offer: SimulatedOffer, unix_nanos: int) -> float:
        """Return what an hour of the machine costs now."""
        if offer.own_price_usd_per_hour is not None:
            return offer.own_price_usd_per_hour
        on_demand = offer.on_demand_usd_per_hour or 0.0
        match offer.slot.capacity_type:
            case CapacityType.BARE_METAL:
                return 0.0
            case CapacityType.RESERVED:
                return round(on_demand * self._world.price.reserved_factor, 6)
            case CapacityType.SPOT:
                return round(on_demand * self._spot_factor(offer, self.price_step(unix_nanos)), 6)
            case _:
                return on_demand

    def _spot_factor(self, offer: SimulatedOffer, step: int) -> float:
        price = self._world.price
        if self._is_calm:
            return price.spot_mean
        subject = f"{offer.slot.instance_type}/{offer.slot.zone}"
        known_step, factor = self._spot_factors.get(subject, (-1, 0.0))
        if known_step == step:
            return factor
        deviation = 0.0
        for back in range(min(step, _WALK_STEPS)):
            deviation += _WALK_MEMORY**back * _WALK_STEP * self._draws.normal("spot price", subject, step - back)
        factor = min(price.spot_max, max(price.spot_min, price.spot_mean + deviation))
        self._spot_factors[subject] = (step, factor)
        return factor

    def has_walking_price(self, offer: SimulatedOffer) -> bool:
        """Return whether the machine's price changes with time."""
        is_spot = offer.slot.capacity_type is CapacityType.SPOT
        return is_spot and offer.own_price_usd_per_hour is None and not self._is_calm

    # ---- interruption --------------------------------------------------------------------------------------------

    def probability(self, offer: SimulatedOffer) -> float:
        """Return the declared probability of an interruption within one hour."""
        if offer.own_probability is not None:
            return offer.own_probability
        if offer.slot.capacity_type is not CapacityType.SPOT:
            return 0.0
        choices = self._world.interruption.probabilities
        subject = f"{offer.slot.instance_type}/{offer.slot.zone}"
        return choices[int(self._draws.uniform("declared probability", subject, 0) * len(choices))]

    def fate(
        self, offer: SimulatedOffer, host_number: int, *, requested_unix_nanos: int, running_unix_nanos: int
    ) -> Fate | None:
        """Return how a host ends, by whatever takes it first, or None when nothing does."""
        if self._is_calm:
            return None
        outage = self._outage_unix_nanos(offer, requested_unix_nanos)
        taken = [
            self._hazard_unix_nanos(offer, host_number, running_unix_nanos),
            *self._waves_unix_nanos(offer, host_number, requested_unix_nanos),
        ]
        dies = min((at for at in (outage, *taken) if at is not None), default=None)
        if dies is None:
            return None
        if dies == outage:
            return Fate(dies_unix_nanos=dies, notice_unix_nanos=None, hint_unix_nanos=None)
        rules, machine_id = self._world.interruption, offer.slot.id
        first = running_unix_nanos + self.scaled_nanos(_WARNED_AFTER_SECONDS)
        notice = hint = None
        if not self._draws.happens(rules.without_notice_share, "no notice", machine_id, host_number):
            notice = min(dies, max(first, dies - self.scaled_nanos(rules.notice_seconds)))
        if self._draws.happens(rules.hint_share, "hint", machine_id, host_number):
            hint = min(dies, max(first, dies - self.scaled_nanos(rules.hint_seconds)))
        return Fate(dies_unix_nanos=dies, notice_unix_nanos=notice, hint_unix_nanos=hint)

    def _hazard_unix_nanos(self, offer: SimulatedOffer, host_number: int, running_unix_nanos: int) -> int | None:
        if offer.slot.capacity_type is not CapacityType.SPOT:
            return None
        declared, truth_factor = self.probability(offer), self._world.interruption.truth_factor
        hazard_per_hour = -math.log(1.0 - min(_PROBABILITY_MAX, declared * truth_factor))
        if hazard_per_hour <= 0:
            return None
        mean_seconds = _SECONDS_PER_HOUR / hazard_per_hour
        life_seconds = self._draws.exponential(mean_seconds, "interruption", offer.slot.id, host_number)
        return running_unix_nanos + self.scaled_nanos(life_seconds)

    def _waves_unix_nanos(self, offer: SimulatedOffer, host_number: int, requested_unix_nanos: int) -> Iterator[int]:
        for number, wave in enumerate(self._world.interruption.waves):
            at = self.unix_nanos_at(wave.at_seconds)
            if wave.pool != offer.pool or at < requested_unix_nanos:
                continue
            if self._draws.happens(wave.share, f"wave {number}", offer.slot.id, host_number):
                yield at

    def _outage_unix_nanos(self, offer: SimulatedOffer, requested_unix_nanos: int) -> int | None:
        """Return when the first outage of the zone meets a host that is requested then."""
        met = [
            max(requested_unix_nanos, self.unix_nanos_at(outage.from_seconds))
            for outage in self._world.interruption.zone_outages
            if outage.zone == offer.slot.zone and requested_unix_nanos < self.unix_nanos_at(outage.to_seconds)
        ]
        return min(met, default=None)

    # ---- stockouts -----------------------------------------------------------------------------------------------

    def is_stocked_out(self, market: Market, unix_nanos: int) -> bool:
        """Return whether there is no capacity of that kind now: sold out, or its zone is down."""
        if self._is_calm:
            return False
        now_seconds = self._world_seconds(unix_nanos)
        for outage in self._world.interruption.zone_outages:
            if outage.zone == market[1] and outage.from_seconds <= now_seconds < outage.to_seconds:
                return True
        if self._world.stockouts is None:
            return self._is_drawn_out(market, now_seconds)
        for planned in self._world.stockouts:
            wanted = (planned.instance_type, planned.zone, parse_capacity_type(planned.capacity_type))
            is_hit = all(not want or want == have for want, have in zip(wanted, market, strict=True))
            if is_hit and planned.from_seconds <= now_seconds < planned.to_seconds:
                return True
        return False

    def _is_drawn_out(self, market: Market, now_seconds: float) -> bool:
        """Follow the alternating spells of available and out; the last one found is cached."""
        rules = self._world.stockout
        if rules.out_seconds_mean == 0:
            return False
        subject = f"{market[0]}/{market[1]}/{market[2].name}"
        begin_seconds, end_seconds, number = self._spells.get(market, (0.0, 0.0, -1))
        if now_seconds < begin_seconds:
            begin_seconds, end_seconds, number = 0.0, 0.0, -1
        while end_seconds <= now_seconds:
            number += 1
            mean = rules.out_seconds_mean if number % 2 else rules.available_seconds_mean
            begin_seconds = end_seconds
            end_seconds += self._draws.exponential(mean, "stockout", subject, number)
        self._spells[market] = (begin_seconds, end_seconds, number)
        return number % 2 == 1

    # ---- durations -----------------------------------------------------------------------------------------------

    def dwell_nanos(self, dwell: Dwell, topic: str, machine_id: str, number: int) -> int:
        """Return how long something takes this time."""
        seconds = self._draws.log_normal(dwell.median_seconds, dwell.p99_seconds, topic, machine_id, number)
        if self._draws.happens(self._world.dwell.slow_share, f"slow {topic}", machine_id, number):
            seconds *= self._world.dwell.slow_factor
        return self.scaled_nanos(seconds)
