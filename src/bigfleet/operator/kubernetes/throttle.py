"""Limits how many requests a client sends per second, with a token bucket."""

from bigfleet.model.clock import Clock


class RequestThrottle:
    """Lets `burst` requests through at once and `per_second` on average, in the order in which they came."""

    def __init__(self, *, clock: Clock, per_second: float, burst: int) -> None:
        """Take the rates; a `per_second` of 0 or less means no limit."""
        self._clock = clock
        self._per_second = per_second
        self._burst = max(burst, 1)
        #: Below zero while requests wait: each has its moment already.
        self._tokens = float(self._burst)
        self._filled_seconds: float | None = None

    async def take(self) -> None:
        """Return when the next request may be sent. A cancelled wait uses up its turn."""
        if self._per_second <= 0:
            return
        now_seconds = self._clock.monotonic_seconds()
        if self._filled_seconds is not None:
            self._tokens += (now_seconds - self._filled_seconds) * self._per_second
        self._tokens = min(self._tokens, float(self._burst)) - 1
        self._filled_seconds = now_seconds
        if self._tokens < 0:
            await self._clock.sleep(-self._tokens / self._per_second)
