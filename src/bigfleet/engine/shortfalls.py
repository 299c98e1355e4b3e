"""Keeps the ledger of shortfalls: what the fleet lacks, and for how long (docs/spec/engine.md §10).

A ledger is a plain value that each cycle replaces: what was unresolved in the last cycle, by fingerprint, summed over
clusters and groups. A row that victims cover is no shortfall. This module does not decide what is done about one.
"""

from collections.abc import Iterable, Mapping

from bigfleet.engine.decision import RowResult
from bigfleet.model import vector
from bigfleet.model.ids import Fingerprint
from bigfleet.model.profile import Profile
from bigfleet.model.shard_report import Shortfall
from bigfleet.model.vector import Vector

#: Entries of one report; a coordinator acts on the most urgent ones first anyway.
REPORT_ENTRIES_MAX = 100
#: Smallest age of each age class, oldest first.
_AGE_CLASSES = ((300, "300+"), (60, "60-299"), (10, "10-59"), (1, "1-9"))
#: Smallest priority of each priority class, highest first.
_PRIORITY_CLASSES = ((1_000_000, "critical"), (1_000, "service"), (100, "batch"))


Ledger = Mapping[Fingerprint, Shortfall]

#: Labels of the gauges, in the order of the classes.
AGE_CLASSES = tuple(label for _smallest, label in reversed(_AGE_CLASSES))
PRIORITY_CLASSES = (*(label for _smallest, label in _PRIORITY_CLASSES), "other")


def age_class(age_cycles: int) -> str:
    """Return the gauge's label: `1-9`, `10-59`, `60-299` or `300+`."""
    return next(label for smallest, label in _AGE_CLASSES if age_cycles >= smallest)


def priority_class(priority: int) -> str:
    """Return `critical` from 1,000,000, `service` from 1,000, `batch` from 100, else `other`."""
    return next((label for smallest, label in _PRIORITY_CLASSES if priority >= smallest), "other")


def shortfall_of(profile: Profile, *, deficit: Vector, min_unit: Vector, age_cycles: int) -> Shortfall:
    """Return what one profile lacks."""
    return Shortfall(
        fingerprint=profile.fingerprint,
        requirements=profile.requirements,
        deficit=deficit,
        min_unit=min_unit,
        priority=profile.priority,
        age_cycles=age_cycles,
        interruption_bucket=profile.interruption_bucket,
        is_topology_constrained=profile.same_key is not None,
    )


def record(ledger: Ledger, results: Iterable[RowResult], *, advance: bool) -> dict[Fingerprint, Shortfall]:
    """Return the ledger after a cycle; rows that Phase 2 resolved are passed over.

    What is new has age 1; what was present ages by one when `advance` is True (a timer cycle) and keeps its age
    otherwise; what is absent is dropped in any cycle, so a relapse starts at 1.
    """
    profiles: dict[Fingerprint, Profile] = {}
    deficits: dict[Fingerprint, Vector] = {}
    units: dict[Fingerprint, Vector] = {}
    for result in results:
        unresolved = result.unresolved
        if not unresolved:
            continue
        profile, unit = result.need.profile, result.need.min_unit
        fingerprint = profile.fingerprint
        if fingerprint not in profiles:
            profiles[fingerprint], deficits[fingerprint], units[fingerprint] = profile, unresolved, unit
            continue
        deficits[fingerprint] = vector.add(deficits[fingerprint], unresolved)
        if units[fingerprint] is not unit:
            units[fingerprint] = vector.maximum(units[fingerprint], unit)
    return {
        fingerprint: shortfall_of(
            profile,
            deficit=deficits[fingerprint],
            min_unit=units[fingerprint],
            age_cycles=ledger[fingerprint].age_cycles + int(advance) if fingerprint in ledger else 1,
        )
        for fingerprint, profile in profiles.items()
    }


def report(ledger: Ledger) -> list[Shortfall]:
    """Return the first 100 by priority descending, age descending, fingerprint."""
    order = sorted(ledger.values(), key=lambda s: (-s.priority, -s.age_cycles, s.fingerprint))
    return order[:REPORT_ENTRIES_MAX]
