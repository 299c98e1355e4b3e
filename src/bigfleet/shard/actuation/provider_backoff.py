"""Backs off from a provider that rejects all calls, until it reports that it is ready (docs/spec/shard.md §9.6).

A provider that starts, stops or cannot write its state rejects every mutating call. During the back-off no action
starts, so no operator is asked for bootstrap data that no machine would get. Reads continue.
"""

import structlog

from bigfleet.model.clock import Clock
from bigfleet.shard.ports import Provider, SaysReadiness

FIRST_SECONDS = 5.0
MAX_SECONDS = 60.0

_log = structlog.get_logger("bigfleet.shard.actuation.provider_backoff")


class ProviderBackoff:
    """The back-off of a shard's one provider. Only the shard's loop uses it."""

    def __init__(self, clock: Clock, provider: Provider) -> None:
        self._clock = clock
        self._provider = provider
        #: None while the provider takes calls, as far as is known.
        self._until_seconds: float | None = None
        self._next_seconds = FIRST_SECONDS

    @property
    def is_active(self) -> bool:
        """Return whether no action may start."""
        return self._until_seconds is not None

    def refused(self) -> None:
        """A call was answered with "not ready": 5 s, doubled to a minute; answers of one back-off double nothing."""
        if self._until_seconds is None:
            _log.warning("provider.became_unready", backoff_seconds=self._next_seconds)
            self._begin()

    def accepted(self) -> None:
        """A call was accepted: the next back-off is a short one."""
        if self._until_seconds is None:
            self._next_seconds = FIRST_SECONDS

    async def look(self) -> bool:
        """Return whether actions may start; when the back-off is over the provider is asked whether it is ready."""
        if self._until_seconds is None:
            return True
        if self._clock.monotonic_seconds() < self._until_seconds:
            return False
        if isinstance(self._provider, SaysReadiness) and not await self._provider.accepts_calls():
            self._begin()
            return False
        self._until_seconds = None
        _log.info("provider.became_ready")
        return True

    def _begin(self) -> None:
        self._until_seconds = self._clock.monotonic_seconds() + self._next_seconds
        self._next_seconds = min(2 * self._next_seconds, MAX_SECONDS)
