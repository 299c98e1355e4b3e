"""Estimates how probable it is that a spot instance is reclaimed within one hour.

docs/spec/aws-provider.md §6. The declared probability comes from the Spot Instance Advisor's data, the learned one from
the reclaims that were seen; the higher is served.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import RUNNING, Ec2Instance

HOURS_PER_MONTH: Final = 730.0
#: Declared for spot without the advisor's data.
UNKNOWN_PROBABILITY: Final = 0.001
#: How many spot-hours of our own weigh as much as the declared probability.
PRIOR_HOURS: Final = 720.0
#: The middle that is taken for the advisor's last, open range.
_OPEN_RANGE_SHARE: Final = 0.30
_SECONDS_PER_HOUR: Final = 3600.0
#: A pause between two inventories that is longer says nothing about the time between.
_GAP_SECONDS_MAX: Final = 900.0


class AdvisorFault(Exception):
    """The advisor's file is not what AWS publishes."""


class _Range(msgspec.Struct):
    index: int
    #: Percent a month, upper end.
    max: float


class _Entry(msgspec.Struct):
    #: Index of a range.
    r: int


class _Advisor(msgspec.Struct):
    ranges: list[_Range]
    spot_advisor: dict[str, dict[str, dict[str, _Entry]]]


def hourly(monthly_share: float) -> float:
    """Return the probability within one hour that follows from the share reclaimed within a month."""
    return 1.0 - math.pow(1.0 - monthly_share, 1.0 / HOURS_PER_MONTH)


def read_advisor(path: Path, region: str) -> dict[str, float]:
    """Return the probability within one hour by instance type, for Linux. Raises AdvisorFault."""
    try:
        advisor = msgspec.json.decode(read_bounded(path, CONFIGURATION_BYTES_MAX), type=_Advisor)
    except OSError as error:
        raise AdvisorFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except msgspec.MsgspecError as error:
        raise AdvisorFault(f"{path}: not the Spot Instance Advisor's data: {error}") from error
    if region not in advisor.spot_advisor:
        raise AdvisorFault(f"{path}: has no data of region {region}; download a current file")
    shares: dict[int, float] = {}
    lower = 0.0
    for each in sorted(advisor.ranges, key=lambda entry: entry.max):
        shares[each.index] = _OPEN_RANGE_SHARE if each.max >= 100 else (lower + each.max) / 200
        lower = each.max
    types = advisor.spot_advisor[region].get("Linux", {})
    unknown = sorted({entry.r for entry in types.values()} - shares.keys())
    if unknown:
        raise AdvisorFault(f"{path}: range {unknown[0]} is used and not declared")
    return {name: hourly(shares[entry.r]) for name, entry in types.items()}


class Interruptions:
    """The probabilities of spot instances by type and zone. What it learned is lost with the process."""

    def __init__(self, clock: Clock, advised: dict[str, float] | None) -> None:
        """`advised` is what `read_advisor` returned."""
        self._clock = clock
        self._advised = advised or {}
        self._hours: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._reclaims: defaultdict[tuple[str, str], int] = defaultdict(int)
        #: Instances whose reclaim was counted.
        self._counted: set[str] = set()
        self._looked_seconds: float | None = None

    def probability(self, instance_type: str, zone: str) -> float:
        """Return the probability within one hour of a spot instance, above 0 and at most 1."""
        declared = self._advised.get(instance_type, UNKNOWN_PROBABILITY)
        hours, reclaims = self._hours[instance_type, zone], self._reclaims[instance_type, zone]
        learned = (declared * PRIOR_HOURS + reclaims) / (PRIOR_HOURS + hours)
        # Digits that differ at each look would make a new revision of each machine at each look.
        return min(1.0, max(float(f"{max(declared, learned):.2g}"), 1e-6))

    def look(self, instances: Iterable[Ec2Instance]) -> None:
        """Add the time since the last look to the hours of the spot instances that run."""
        now_seconds = self._clock.monotonic_seconds()
        last_seconds, self._looked_seconds = self._looked_seconds, now_seconds
        running = [each for each in instances if each.is_spot and each.state == RUNNING]
        self._counted &= {each.id for each in running}
        if last_seconds is None or now_seconds - last_seconds > _GAP_SECONDS_MAX:
            return
        for each in running:
            self._hours[each.instance_type, each.zone] += (now_seconds - last_seconds) / _SECONDS_PER_HOUR

    def note_reclaim(self, instance: Ec2Instance) -> None:
        """Count the reclaim of an instance, once."""
        if instance.is_spot and instance.id not in self._counted:
            self._counted.add(instance.id)
            self._reclaims[instance.instance_type, instance.zone] += 1
