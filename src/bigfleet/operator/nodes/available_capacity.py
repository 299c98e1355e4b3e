"""Shows the shard's capacity hints in the cluster as AvailableCapacity objects (docs/spec/operator.md §9).

Each hint is applied when it arrives and carries the moment at which it expires. A sweep deletes expired ones while a
session stands, and once the last session has been over for 15 minutes: a shard that is lost must not erase its hints at
once. A hint is never a reservation.
"""

import math
from decimal import Decimal
from typing import Final

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.frames import AvailableCapacity, Confidence
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.api import ApiError, Json, KubernetesApi
from bigfleet.operator.kubernetes.objects import AvailableCapacityObject
from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES, FIELD_MANAGER, MANAGED_BY
from bigfleet.operator.kubernetes.timestamps import rfc3339, unix_seconds
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.nodes.names import available_capacity_name
from bigfleet.operator.work_queue import WorkQueue, is_retried

log = structlog.get_logger(__name__)

#: Shards repeat hints that did not change every 5 minutes.
HINT_SECONDS: Final = 15 * 60
SWEEP_SECONDS: Final = 60.0
#: How long hints stay as they are after a session ended.
SESSION_GRACE_SECONDS: Final = 15 * 60.0
_PRICE_STEP: Final = Decimal("0.0001")
_PRICE_USD_PER_HOUR_MAX: Final = 1e9
_COUNT_MAX: Final = 2**31 - 1
_AVAILABILITY: Final = {
    Confidence.UNSPECIFIED: "None",
    Confidence.NONE: "None",
    Confidence.LOW: "Low",
    Confidence.MEDIUM: "Medium",
    Confidence.HIGH: "High",
}


class AvailableCapacities:
    """The hints of one cluster."""

    def __init__(
        self, *, api: KubernetesApi, stored: ObjectView[AvailableCapacityObject], queue: WorkQueue, clock: Clock
    ) -> None:
        self._api = api
        self._stored = stored
        self._queue = queue
        self._clock = clock
        #: Hints that are not written yet, by object name; the newest of each.
        self._hints: dict[str, AvailableCapacity] = {}
        #: When a hint was last written, by object name: the view may not show it yet.
        self._written_seconds: dict[str, float] = {}
        #: When the last session ended; None while one stands.
        self._ended_seconds: float | None = clock.monotonic_seconds()

    def session_opened(self) -> None:
        """Note that a session is open."""
        self._ended_seconds = None

    def session_closed(self) -> None:
        """Hear that it is over; a second call changes nothing."""
        if self._ended_seconds is None:
            self._ended_seconds = self._clock.monotonic_seconds()

    def available(self, hint: AvailableCapacity) -> None:
        """Show a hint; a newer one of the same key replaces it."""
        if not 0.0 <= hint.price_usd_per_hour <= _PRICE_USD_PER_HOUR_MAX:
            log.warning(
                "operator.hint_skipped", fingerprint=hint.fingerprint, reason=f"price {hint.price_usd_per_hour}"
            )
            return
        name = available_capacity_name(hint.supersedes_key)
        self._hints[name] = hint
        self._queue.put(self._reconcile, name)

    async def run(self) -> None:
        """Delete expired hints until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            self._sweep()

    def _sweep(self) -> None:
        ended_seconds = self._ended_seconds
        if ended_seconds is not None and self._clock.monotonic_seconds() - ended_seconds < SESSION_GRACE_SECONDS:
            return
        for stored in self._stored:
            if _is_ours(stored) and self._is_expired(stored):
                self._queue.put(self._reconcile, stored.metadata.name)

    def _is_expired(self, stored: AvailableCapacityObject) -> bool:
        written_seconds = self._written_seconds.get(stored.metadata.name)
        if written_seconds is not None and self._clock.monotonic_seconds() - written_seconds < HINT_SECONDS:
            return False
        expires_seconds = unix_seconds(stored.status.expires_at)
        if expires_seconds is None:
            # The process ended between spec and status.
            expires_seconds = (unix_seconds(stored.metadata.creation_timestamp) or 0.0) + HINT_SECONDS
        return expires_seconds <= self._clock.unix_nanos() / NANOS_PER_SECOND

    async def _reconcile(self, name: str) -> None:
        """Write the hint that waits for this object, else delete the object if it has expired."""
        hint = self._hints.get(name)
        if hint is not None:
            try:
                await self._write(name, hint)
            except ApiError as error:
                if not is_retried(error):
                    # Its object expires with the last hint that was written.
                    self._forget(name, hint)
                raise
            self._forget(name, hint)
            return
        stored = self._stored.get(name)
        if stored is not None and self._is_expired(stored):
            await self._delete(stored)

    def _forget(self, name: str, hint: AvailableCapacity) -> None:
        if self._hints.get(name) is hint:
            del self._hints[name]

    async def _write(self, name: str, hint: AvailableCapacity) -> None:
        head: dict[str, Json] = {"apiVersion": AVAILABLE_CAPACITIES.api_version, "kind": AVAILABLE_CAPACITIES.kind}
        metadata: dict[str, Json] = {"name": name, "labels": {MANAGED_BY: FIELD_MANAGER}}
        body: dict[str, Json] = {**head, "metadata": metadata, "spec": _spec(hint)}
        await self._api.apply(AVAILABLE_CAPACITIES, name, body, field_manager=FIELD_MANAGER)
        now_nanos = self._clock.unix_nanos()
        status: dict[str, Json] = {
            "lastUpdated": rfc3339(now_nanos),
            "expiresAt": rfc3339(now_nanos + HINT_SECONDS * NANOS_PER_SECOND),
        }
        body = {**head, "metadata": {"name": name}, "status": status}
        await self._api.apply(AVAILABLE_CAPACITIES.status, name, body, field_manager=FIELD_MANAGER)
        self._written_seconds[name] = self._clock.monotonic_seconds()

    async def _delete(self, stored: AvailableCapacityObject) -> None:
        try:
            await self._api.delete(AVAILABLE_CAPACITIES, stored.metadata.name, uid=stored.metadata.uid)
        except ApiError as error:
            if not error.is_not_found and not error.is_conflict:
                raise
        self._written_seconds.pop(stored.metadata.name, None)


def _is_ours(stored: AvailableCapacityObject) -> bool:
    return (stored.metadata.labels or {}).get(MANAGED_BY) == FIELD_MANAGER


def _spec(hint: AvailableCapacity) -> dict[str, Json]:
    resources: dict[str, Json] = {name: text for name, text in sorted(hint.resources.items()) if _is_quantity(text)}
    requirements: list[Json] = [
        {"key": r.key, "operator": r.operator.label, "values": list(r.values)} for r in hint.requirements
    ]
    return {
        "availability": _AVAILABILITY.get(hint.confidence, "None"),
        "availableCount": max(0, min(hint.available_count, _COUNT_MAX)),
        "cost": price_quantity(hint.price_usd_per_hour),
        "resources": resources,
        "requirements": requirements,
    }


def price_quantity(price_usd_per_hour: float) -> str:
    """Return a price as a decimal number with at most 4 places and no trailing zeros."""
    if not math.isfinite(price_usd_per_hour):
        raise ValueError(f"{price_usd_per_hour} is no price")
    rounded = Decimal(repr(price_usd_per_hour)).quantize(_PRICE_STEP)
    text = f"{rounded:f}".rstrip("0").rstrip(".")
    return text if text not in ("", "-0") else "0"


def _is_quantity(text: str) -> bool:
    try:
        return parse_quantity(text) >= 0
    except QuantityError:
        return False
