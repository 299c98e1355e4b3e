"""Defines when demand is equal: a profile, its canonical form, and the fingerprint stored on machines.

docs/spec/model.md §7. The fingerprint is durable: it is stored in every provider's metadata. Never change its text:
running fleets would no longer recognise which machine serves which row.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Final

from bigfleet.model.ids import Fingerprint


class Operator(IntEnum):
    """How a requirement compares. The numbers are those of the wire and of the fingerprint."""

    UNSPECIFIED = 0
    IN = 1
    NOT_IN = 2
    EXISTS = 3
    DOES_NOT_EXIST = 4
    SAME = 5

    @property
    def label(self) -> str:
        """The Kubernetes spelling, such as `NotIn`."""
        return "".join(part.capitalize() for part in self.name.split("_"))


class SpreadMode(IntEnum):
    """What to do when a spread cannot be satisfied. The numbers are those of the wire and of the fingerprint."""

    UNSPECIFIED = 0
    DO_NOT_SCHEDULE = 1
    SCHEDULE_ANYWAY = 2


@dataclass(frozen=True, slots=True, order=True)
class Requirement:
    """One node selector requirement; `values` are sorted and without duplicates."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(set(self.values))))

    def holds(self, value: str | None) -> bool:
        """Return whether an attribute satisfies this; None is an absent one (docs/spec/model.md §9)."""
        match self.operator:
            case Operator.IN:
                return value is not None and value in self.values
            case Operator.NOT_IN:
                return value is None or value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.DOES_NOT_EXIST:
                return value is None
            case Operator.SAME:
                return value is not None and (not self.values or value in self.values)
            case _:
                return False


@dataclass(frozen=True, slots=True, order=True)
class TopologySpread:
    """One topology spread constraint."""

    topology_key: str
    skew_max: int
    mode: SpreadMode


@dataclass(frozen=True, slots=True)
class Profile:
    """Requirements, spreads, priority and penalty buckets, in canonical order. No resources, no cluster, no group.

    Equal fingerprints mean equal profiles; the constructor sorts and drops exact duplicates.
    """

    requirements: tuple[Requirement, ...] = ()
    spreads: tuple[TopologySpread, ...] = ()
    priority: int = 0
    interruption_bucket: int = 0
    reclamation_bucket: int = 0
    #: The canonical text, derived from the other fields; it identifies the profile everywhere.
    fingerprint: Fingerprint = field(init=False, compare=False)
    #: Key of the first Same requirement in canonical order, or None; derived, because every cycle asks it of every row
    #: that is short.
    same_key: str | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requirements", tuple(sorted(set(self.requirements))))
        object.__setattr__(self, "spreads", tuple(sorted(set(self.spreads))))
        object.__setattr__(self, "fingerprint", _fingerprint(self))
        same_key = next((r.key for r in self.requirements if r.operator is Operator.SAME), None)
        object.__setattr__(self, "same_key", same_key)

    @property
    def precedence(self) -> tuple[int, int, int]:
        """(priority, interruption ordinal, reclamation ordinal): higher is served first (§7)."""
        return (self.priority, self.interruption_bucket, self.reclamation_bucket)

    @property
    def strict_spread(self) -> TopologySpread | None:
        """The first DoNotSchedule spread with its skew at least 1, of a profile without Same; else None."""
        if self.same_key is not None:
            return None
        for spread in self.spreads:
            if spread.mode is SpreadMode.DO_NOT_SCHEDULE:
                return TopologySpread(spread.topology_key, max(1, spread.skew_max), spread.mode)
        return None


_SEPARATORS = frozenset(":;,|=%")


#: Texts that are remembered are shorter: values of labels have at most 63 characters, and most keys as many.
_REMEMBERED_CHARACTERS_MAX: Final = 128


def _escape(text: str) -> str:
    return _escaped_short(text) if len(text) <= _REMEMBERED_CHARACTERS_MAX else _escaped(text)


@lru_cache(maxsize=65536)
def _escaped_short(text: str) -> str:
    return _escaped(text)


def _escaped(text: str) -> str:
    if all(c not in _SEPARATORS and unicodedata.category(c) != "Cc" for c in text):
        return text
    return "".join(
        "".join(f"%{byte:02X}" for byte in c.encode()) if c in _SEPARATORS or unicodedata.category(c) == "Cc" else c
        for c in text
    )


def _escape_values(values: Iterable[str]) -> str:
    # An empty value is a lone %, so that one empty value and no value read differently.
    return ",".join(_escape(value) or "%" for value in values)


def _fingerprint(profile: Profile) -> Fingerprint:
    requirements = "".join(
        f"{_escape(r.key)}:{r.operator.value}:{_escape_values(r.values)};" for r in profile.requirements
    )
    spreads = "".join(f"{_escape(s.topology_key)}:{s.skew_max}:{s.mode.value};" for s in profile.spreads)
    return Fingerprint(
        f"p={profile.priority}|ipb={profile.interruption_bucket}|rpb={profile.reclamation_bucket}"
        f"|reqs={requirements}|spr={spreads}"
    )
