"""Decides whether a run may begin: it is the account that was named, and the most that it can cost is in the budget.

It must never launch anything.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.backend import LAUNCHES_BURST
from bigfleet.provider.backends.aws.offerings import AwsOffering

#: EC2 bills an instance for at least a minute: aws.amazon.com/ec2/pricing/on-demand.
BILLED_SECONDS_MIN: Final = 60.0
_SECONDS_PER_HOUR: Final = 3600.0


class CertifyFault(Exception):
    """Why a run does not begin, or did not end as it should; one line."""


class Prices(Protocol):
    """The call to the Price List. Raises AwsError."""

    async def on_demand(self, instance_type: str) -> float | None:
        """Return USD per hour, None when it lists none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What holds a run within its bound."""

    #: From its start until the suite is ended.
    run_seconds: float
    #: After it, until what it launched has ended.
    clean_up_seconds: float
    launches_per_second: float
    #: Volume, public address and requests of one instance, for one hour.
    extra_usd_per_hour: float

    @property
    def hours(self) -> float:
        """How long an instance can run at most."""
        return (self.run_seconds + self.clean_up_seconds) / _SECONDS_PER_HOUR

    @property
    def launches_max(self) -> int:
        """How many instances can be launched one after the other."""
        return LAUNCHES_BURST + int(self.run_seconds * self.launches_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What one entry of the offerings can have running at a time, and the most that one of them costs."""

    count: int
    instance_type: str
    zone: str
    capacity_type: str
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a run can launch and cost."""

    offered: tuple[Offered, ...]
    limits: Limits

    @property
    def instances_max(self) -> int:
        """How many instances can run at a time."""
        return sum(each.count for each in self.offered)

    @property
    def usd(self) -> float:
        """Every slot for the whole time, and a minute at the dearest price for each launch.

        An instance that runs for less than a minute is billed for one, so that a slot can cost more than its time.
        """
        extra = self.limits.extra_usd_per_hour
        slots = sum(each.count * (each.usd_per_hour + extra) for each in self.offered) * self.limits.hours
        dearest = max((each.usd_per_hour for each in self.offered), default=0.0) + extra
        return slots + self.limits.launches_max * dearest * BILLED_SECONDS_MIN / _SECONDS_PER_HOUR


def check_account(arn: str, account: str) -> None:
    """Raise CertifyFault unless the caller belongs to the account."""
    actual = arn.split(":")[4] if arn.count(":") >= 5 else ""
    if actual != account:
        raise CertifyFault(f"the credentials are those of {arn}, not of account {account}; nothing was started")


def bound_of(offerings: Iterable[AwsOffering], prices: Prices, limits: Limits) -> Bound:
    """Return the most that a run with these offerings can cost. Raises CertifyFault for a type without a price.

    The dearer one of the file's price and the on-demand price counts: EC2 sells spot for no more than that.
    """
    known: dict[str, float | None] = {}
    offered = []
    for each in offerings:
        if each.instance_type not in known:
            known[each.instance_type] = _on_demand(prices, each.instance_type)
        found = [usd for usd in (known[each.instance_type], each.price_usd_per_hour) if usd is not None]
        if not found:
            text = "the Price List has no price for it; write price_per_hour into the offering"
            raise CertifyFault(f"{each.instance_type}: {text}; nothing was started")
        offered.append(
            Offered(
                count=each.offering.count,
                instance_type=each.instance_type,
                zone=each.zone,
                capacity_type=each.capacity_type.name.lower().replace("_", " "),
                usd_per_hour=max(found),
            )
        )
    return Bound(offered=tuple(offered), limits=limits)


def _on_demand(prices: Prices, instance_type: str) -> float | None:
    try:
        return asyncio.run(_asked(prices, instance_type))
    except AwsError:
        # Without the right to ask, the file's price counts.
        return None


async def _asked(prices: Prices, instance_type: str) -> float | None:
    return await prices.on_demand(instance_type)


def check_budget(bound: Bound, budget_usd: float) -> None:
    """Raise CertifyFault unless the bound is within a budget that is a number."""
    if not bound.usd <= budget_usd < math.inf:
        text = "offer fewer or cheaper machines, or shorten the run"
        raise CertifyFault(
            f"the run can cost {bound.usd:.2f} USD, the budget is {budget_usd:.2f}; {text}; nothing was started"
        )


def described(bound: Bound, *, tag: str, profiles: str, budget_usd: float) -> Sequence[str]:
    """Return what a run would start and the most that it can cost, one fact a line."""
    limits = bound.limits
    return [
        f"profiles: {profiles}",
        f"at most {bound.instances_max} instances at a time, each with the tag {tag}:",
        *(
            f"  {each.count} x {each.instance_type} {each.capacity_type} in {each.zone}, "
            f"at most {each.usd_per_hour:g} USD an hour"
            for each in bound.offered
        ),
        f"at most {limits.run_seconds / 60:.0f} min, and {limits.clean_up_seconds / 60:.0f} min to end what is left",
        f"at most {limits.launches_max} launches, each billed for at least {BILLED_SECONDS_MIN:.0f} s",
        f"{limits.extra_usd_per_hour:g} USD an hour of an instance for its volume, address and requests",
        f"in all at most {bound.usd:.2f} USD of a budget of {budget_usd:.2f}; traffic is not in it",
    ]
