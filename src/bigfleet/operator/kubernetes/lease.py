"""Elects one leader among processes by a Lease, and runs the leader's work while it leads.

Clocks of two machines are never compared: a candidate measures on its own monotonic clock how long the Lease has been
unchanged. If clocks run at the same rate, two processes never lead at once: a leader stops `renew_seconds_max` after
the start of its last stored renewal, a candidate waits `lease_seconds` after it first saw that renewal, and the
leader's work must end within the difference.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, Rng
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi
from bigfleet.operator.kubernetes.objects import LeaseObject
from bigfleet.operator.kubernetes.resources import LEASES
from bigfleet.operator.kubernetes.timestamps import rfc3339_micro

log = structlog.get_logger(__name__)

#: Candidates do not ask in step.
_CANDIDATE_JITTER = 0.2
_RELEASE_SECONDS_MAX = 5.0
_UNANSWERED = "no answer in time"
#: A candidate that fails for the same reason again and again says so this often.
_REPEAT_SECONDS = 60.0


class LeadershipLost(Exception):
    """Another process may lead now; the message says why.

    `is_forbidden`: the Lease could not be renewed for want of a right.
    """

    def __init__(self, message: str, *, is_forbidden: bool = False) -> None:
        super().__init__(message)
        self.is_forbidden = is_forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionSettings:
    """Times of an election; each must be longer than the next."""

    #: For how long candidates honour a Lease that they see unchanged.
    lease_seconds: int = 15
    #: A leader that could not renew for this long gives up.
    renew_seconds_max: float = 10.0
    retry_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_seconds > self.renew_seconds_max > self.retry_seconds > 0:
            raise ValueError(
                f"lease {self.lease_seconds} s, renewal {self.renew_seconds_max:g} s, retry {self.retry_seconds:g} s: "
                "each must be longer than the next"
            )


class LeaderElector:
    """One candidate for a Lease."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        namespace: str,
        name: str,
        host: str,
        ids: IdSource,
        clock: Clock,
        rng: Rng,
        settings: ElectionSettings | None = None,
    ) -> None:
        """Take the Lease's place and name. `host` makes the identity readable; an id makes it unique."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self.identity = f"{host}_{ids.new_id()}"
        self._clock = clock
        self._rng = rng
        self._settings = settings or ElectionSettings()
        #: The Lease as last seen, and when that version was first seen.
        self._seen: LeaseObject | None = None
        self._seen_seconds = 0.0
        #: The failure that was logged last, and when.
        self._logged = ("", 0.0)
        #: Whether the last answer to a renewal was that a right is missing.
        self._is_forbidden = False
        #: Until when this process leads; None when it does not.
        self._leads_until_seconds: float | None = None

    @property
    def is_leader(self) -> bool:
        """Return whether this process leads at this moment; never true later than its Lease allows."""
        until_seconds = self._leads_until_seconds
        return until_seconds is not None and self._clock.monotonic_seconds() < until_seconds

    @property
    def holder(self) -> str:
        """The identity of the leader as last seen, "" when there is none."""
        return (self._seen.spec.holder_identity or "") if self._seen is not None else ""

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait until this process leads, then run `lead`; return when that returns.

        Raises LeadershipLost after `lead` has been cancelled because the Lease was lost, and what `lead` raises. When
        it ends otherwise, also by cancellation, the Lease is released after `lead` has ended, so that the next leader
        need not wait. `lead` must end within `lease_seconds` - `renew_seconds_max` of its cancellation.
        """
        await self._acquire()
        log.info("operator.leadership_acquired", lease=f"{self._namespace}/{self._name}", identity=self.identity)
        work: asyncio.Task[None] = asyncio.create_task(_awaited(lead))
        renewal = asyncio.create_task(self._renew())
        lost = False
        try:
            await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
            lost = not work.done()
        finally:
            try:
                # The Lease is renewed while the work ends.
                await _end(work)
            finally:
                renewal.cancel()
                self._leads_until_seconds = None
            if not lost:
                await self._release()
        failure = None if work.cancelled() else work.exception()
        if lost:
            reason = renewal.result()
            log.warning("operator.leadership_lost", lease=f"{self._namespace}/{self._name}", reason=reason)
            text = f"lease {self._namespace}/{self._name}: {reason}"
            raise LeadershipLost(text, is_forbidden=self._is_forbidden) from failure
        if failure is not None:
            raise failure

    # ---- acquiring and renewing ---------------------------------------------------------------------------------

    async def _acquire(self) -> None:
        while True:
            started_seconds = self._clock.monotonic_seconds()
            try:
                async with asyncio.timeout(self._settings.renew_seconds_max):
                    acquired = await self._try()
            except (ApiError, TimeoutError) as error:
                acquired = False
                if not (isinstance(error, ApiError) and error.is_conflict):
                    self._log_failure(str(error) or _UNANSWERED)
            if acquired:
                self._leads_until_seconds = started_seconds + self._settings.renew_seconds_max
                if self.is_leader:
                    return
                self._leads_until_seconds = None
            await self._clock.sleep(self._settings.retry_seconds * (1 + self._rng.uniform(0.0, _CANDIDATE_JITTER)))

    def _log_failure(self, text: str) -> None:
        now_seconds = self._clock.monotonic_seconds()
        last_text, last_seconds = self._logged
        if text != last_text or now_seconds - last_seconds >= _REPEAT_SECONDS:
            self._logged = (text, now_seconds)
            log.warning("operator.election_failed", error=text)

    async def _renew(self) -> str:
        """Renew until the Lease is lost; return why."""
        reason, self._is_forbidden = "", False
        while True:
            await self._clock.sleep(min(self._settings.retry_seconds, self._left_seconds()))
            if self._left_seconds() <= 0:
                return f"not renewed within {self._settings.renew_seconds_max:g} s: {reason or _UNANSWERED}"
            started_seconds = self._clock.monotonic_seconds()
            left_seconds = self._left_seconds()
            try:
                async with asyncio.timeout(left_seconds):
                    is_ours = await self._try()
                    reason, self._is_forbidden = "", False
                    if not is_ours:
                        return f"{self.holder or 'another process'} holds it"
                self._leads_until_seconds = started_seconds + self._settings.renew_seconds_max
            except ApiError as error:
                # Also a conflict: the next look shows whose the Lease is.
                reason, self._is_forbidden = str(error), error.is_forbidden
            except TimeoutError:
                # The last attempt may have had no time for an answer; then the one before says why.
                if not reason or left_seconds >= self._settings.retry_seconds:
                    reason, self._is_forbidden = _UNANSWERED, False

    def _left_seconds(self) -> float:
        return (self._leads_until_seconds or 0.0) - self._clock.monotonic_seconds()

    async def _try(self) -> bool:
        """Write this process into the Lease if that is allowed; say whether it was. Raises ApiError."""
        try:
            found = await self._api.get(LEASES, self._name, namespace=self._namespace)
        except ApiError as error:
            if not error.is_not_found:
                raise
            if self._is_honoured():
                # Deleted by somebody while its holder leads.
                return False
            self._note(await self._api.create(LEASES, self._body(None), namespace=self._namespace))
            return True
        self._note(found)
        if self._is_honoured():
            return False
        self._note(await self._api.replace(LEASES, self._name, self._body(found), namespace=self._namespace))
        return True

    def _note(self, found: LeaseObject) -> None:
        seen = self._seen
        if seen is None or seen.metadata.resource_version != found.metadata.resource_version:
            self._seen_seconds = self._clock.monotonic_seconds()
        self._seen = found

    def _is_honoured(self) -> bool:
        """Return whether another process may lead, as far as is known."""
        if self._seen is None or self.holder in ("", self.identity):
            return False
        lease_seconds = self._seen.spec.lease_duration_seconds or self._settings.lease_seconds
        return self._clock.monotonic_seconds() < self._seen_seconds + lease_seconds

    async def _release(self) -> None:
        """Give the Lease away if it is ours still; failing that it runs out by itself."""
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS_MAX):
                # A renewal whose answer was not waited for may have been stored in between.
                while not await self._try_release():
                    await self._clock.sleep(0)

    async def _try_release(self) -> bool:
        """Release the Lease; say whether that is done or needless. Raises ApiError."""
        found = await self._api.get(LEASES, self._name, namespace=self._namespace)
        self._note(found)
        if found.spec.holder_identity != self.identity:
            return True
        try:
            body = self._body(found, releases=True)
            self._note(await self._api.replace(LEASES, self._name, body, namespace=self._namespace))
        except ApiError as error:
            if not error.is_conflict:
                raise
            return False
        return True

    def _body(self, former: LeaseObject | None, *, releases: bool = False) -> JsonObject:
        """Return the Lease as this process writes it, over `former` and only over that version of it."""
        now = rfc3339_micro(self._clock.unix_nanos())
        is_ours = former is not None and former.spec.holder_identity == self.identity
        transitions = (former.spec.lease_transitions or 0) if former is not None else 0
        metadata: JsonObject = {"name": self._name, "namespace": self._namespace}
        if former is not None:
            # What others wrote into the metadata stays.
            metadata = msgspec.to_builtins(former.metadata)
        spec: JsonObject = {
            "holderIdentity": "" if releases else self.identity,
            "leaseDurationSeconds": 1 if releases else self._settings.lease_seconds,
            "acquireTime": (former.spec.acquire_time or now) if former is not None and is_ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if is_ours or former is None else transitions + 1,
        }
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}


async def _awaited(lead: Callable[[], Awaitable[None]]) -> None:
    await lead()


async def _end(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait until it has ended, also when the caller is cancelled meanwhile."""
    task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            interrupted = error
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.error("operator.leader_failed", error=repr(failure))
    if interrupted is not None:
        raise interrupted
