"""Fetches the prices of instances: on-demand prices from the Price List, spot prices from EC2's history.

docs/spec/aws-provider.md §6. Prices that are due are fetched while the inventory is read; if one cannot be fetched, the
old one stays. A price of 0 is never served.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.aws.api import AwsError, Ec2, PriceList
from bigfleet.provider.backends.aws.errors import is_without_answer

_log = structlog.get_logger("bigfleet.provider.backends.aws.prices")

ON_DEMAND_SECONDS: Final = 3600.0
SPOT_SECONDS: Final = 300.0
#: A failed question for prices is asked again so much later.
RETRY_SECONDS: Final = 60.0
#: How far back the history is read; EC2 always adds the price that held at its beginning.
SPOT_HISTORY_SECONDS: Final = 3600.0
#: A spot price outside of these shares of the on-demand price is rejected.
SPOT_SHARE_MIN: Final = 0.01
SPOT_SHARE_MAX: Final = 1.2
#: What reserved capacity costs of the on-demand price when the offering does not say.
RESERVED_SHARE: Final = 0.6


class _PricesFile(msgspec.Struct):
    """The on-demand prices of FILE.prices."""

    region: str
    on_demand_usd_per_hour: dict[str, float]


class AwsPrices:
    """The prices of one region."""

    def __init__(self, ec2: Ec2, price_list: PriceList, clock: Clock, *, region: str, path: Path | None) -> None:
        """`path` holds the on-demand prices for the next start; None keeps them in memory."""
        self._ec2 = ec2
        self._price_list = price_list
        self._clock = clock
        self._region = region
        self._path = path
        self._on_demand = _read(path, region)
        self._spot: dict[tuple[str, str], float] = {}
        #: When each type's on-demand price is asked for again; absent: now.
        self._due_seconds: dict[str, float] = {}
        self._spot_due_seconds = float("-inf")
        self._spot_types: frozenset[str] = frozenset()
        self._noticed: set[str] = set()
        #: Spot prices that were rejected.
        self.refused = 0

    def price(self, instance_type: str, zone: str, capacity_type: CapacityType) -> float | None:
        """Return USD per hour, None when there is none yet; the absence is logged once."""
        on_demand = self._on_demand.get(instance_type)
        if capacity_type is CapacityType.SPOT:
            usd = self._spot.get((instance_type, zone))
        elif capacity_type is CapacityType.RESERVED:
            usd = None if on_demand is None else on_demand * RESERVED_SHARE
            if usd is not None and self._is_first(f"reserved {instance_type}"):
                text = f"{RESERVED_SHARE:g} of the on-demand price is served; write price_per_hour into the offering"
                _log.warning("aws.reserved_price_assumed", instance_type=instance_type, advice=text)
        else:
            usd = on_demand
        if usd is None and self._is_first(f"missing {capacity_type.name} {instance_type} {zone}"):
            _log.warning(
                "aws.price_missing",
                instance_type=instance_type,
                zone=zone,
                capacity_type=capacity_type.name.lower(),
                advice="it is not offered until AWS has a price; write price_per_hour into the offering to offer it",
            )
        return usd

    def _is_first(self, subject: str) -> bool:
        """Return whether this is noticed for the first time."""
        is_first = subject not in self._noticed
        self._noticed.add(subject)
        return is_first

    # ---- questions -----------------------------------------------------------------------------------------------

    async def refresh(self, types: Iterable[str], spot_types: Iterable[str]) -> None:
        """Ask for the prices of these types that are due. Spot prices are asked for once on-demand ones are known."""
        spot_types = frozenset(spot_types)
        await self._refresh_on_demand({*types, *spot_types})
        now_seconds = self._clock.monotonic_seconds()
        if spot_types and (now_seconds >= self._spot_due_seconds or not spot_types <= self._spot_types):
            await self._refresh_spot(spot_types, now_seconds)

    async def _refresh_on_demand(self, types: Iterable[str]) -> None:
        now_seconds = self._clock.monotonic_seconds()
        has_changed = False
        for instance_type in sorted(types):
            if now_seconds < self._due_seconds.get(instance_type, float("-inf")):
                continue
            try:
                usd = await self._price_list.on_demand(instance_type)
            except (AwsError, ValueError, KeyError, TypeError) as error:
                self._due_seconds[instance_type] = now_seconds + RETRY_SECONDS
                _log.warning("aws.price_unread", instance_type=instance_type, error=str(error))
                if isinstance(error, AwsError) and is_without_answer(error):
                    # The next ones would wait for as long, and the inventory with them.
                    break
                continue
            self._due_seconds[instance_type] = now_seconds + ON_DEMAND_SECONDS
            if usd is not None and usd > 0 and self._on_demand.get(instance_type) != usd:
                self._on_demand[instance_type] = usd
                has_changed = True
        if has_changed:
            self._write()

    async def _refresh_spot(self, types: frozenset[str], now_seconds: float) -> None:
        since = self._clock.unix_nanos() / NANOS_PER_SECOND - SPOT_HISTORY_SECONDS
        try:
            history = await self._ec2.spot_prices(sorted(types), since)
        except AwsError as error:
            self._spot_due_seconds = now_seconds + RETRY_SECONDS
            _log.warning("aws.spot_prices_unread", error=str(error))
            return
        self._spot_due_seconds, self._spot_types = now_seconds + SPOT_SECONDS, types
        for each in sorted(history, key=lambda price: price.at_unix_seconds):
            on_demand = self._on_demand.get(each.instance_type)
            if on_demand is None:
                continue
            if SPOT_SHARE_MIN * on_demand <= each.usd_per_hour <= SPOT_SHARE_MAX * on_demand:
                self._spot[each.instance_type, each.zone] = each.usd_per_hour
            else:
                self.refused += 1
                if self._is_first(f"refused {each.instance_type} {each.zone}"):
                    bounds = f"{SPOT_SHARE_MIN:.0%} to {SPOT_SHARE_MAX:.0%} of the on-demand price {on_demand:g}"
                    text = f"{each.usd_per_hour:g} USD is not within {bounds}"
                    place = {"instance_type": each.instance_type, "zone": each.zone}
                    _log.warning("aws.spot_price_refused", **place, reason=text)

    # ---- file ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        if self._path is None:
            return
        content = msgspec.json.encode(_PricesFile(self._region, dict(sorted(self._on_demand.items()))))
        draft = self._path.with_name(self._path.name + ".new")
        try:
            draft.write_bytes(content)
            os.replace(draft, self._path)
        except OSError as error:
            _log.warning("aws.prices_not_written", path=str(self._path), error=error.strerror)


def _read(path: Path | None, region: str) -> dict[str, float]:
    """Return the prices of the last start; a file that cannot be read is no obstacle, as AWS is asked anyway."""
    if path is None or not path.exists():
        return {}
    try:
        read = msgspec.json.decode(read_bounded(path, CONFIGURATION_BYTES_MAX), type=_PricesFile)
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("aws.prices_file_unread", path=str(path), error=str(error))
        return {}
    known: Mapping[str, float] = read.on_demand_usd_per_hour if read.region == region else {}
    return {name: usd for name, usd in known.items() if usd > 0}
