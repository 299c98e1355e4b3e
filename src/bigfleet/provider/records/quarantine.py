"""Stores rejected facts with their reasons; the last good record stays (docs/spec/provider.md §9).

An entry is dropped when a good fact for the same id arrives. This module must not touch a record.
"""

import functools
from collections import Counter
from collections.abc import Mapping

import structlog

from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.validate import Fault, Reason

_log = structlog.get_logger("bigfleet.provider.records.quarantine")

FAULTS_MAX = 10_000
_ID_CHARACTERS_SHOWN_MAX = 260


class FactsQuarantine:
    """Refused facts by machine id."""

    def __init__(self, metrics: ProviderMetrics) -> None:
        self._faults: dict[str, Fault] = {}
        self._counts: Counter[Reason] = Counter()
        for reason in Reason:
            metrics.quarantined.labels(reason.value).set_function(functools.partial(self._counts.__getitem__, reason))

    @property
    def faults(self) -> Mapping[str, Fault]:
        """The refused facts, by the id they came with."""
        return self._faults

    def put(self, machine_id: str, fault: Fault) -> None:
        """Remember a refused fact and say so once."""
        # What is half of a surrogate pair cannot be printed.
        shown = machine_id[:_ID_CHARACTERS_SHOWN_MAX].encode("utf-8", "backslashreplace").decode()
        before = self._faults.get(shown)
        if before == fault or (before is None and len(self._faults) >= FAULTS_MAX):
            return
        if before is not None:
            self._counts[before.reason] -= 1
        self._faults[shown] = fault
        self._counts[fault.reason] += 1
        _log.warning("inventory.fact_quarantined", machine=shown, reason=fault.reason.value, error=fault.text)

    def clear(self, machine_id: str) -> None:
        """Forget a refused fact: a good one came."""
        fault = self._faults.pop(machine_id, None)
        if fault is not None:
            self._counts[fault.reason] -= 1
