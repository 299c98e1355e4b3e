"""Records Events about objects: deduplicates them, and writes them in a task of its own.

They are core/v1 Events, which `kubectl describe` and `kubectl get events` show. API servers serve core/v1 and
events.k8s.io/v1 from one store; the additional required fields of the latter have no use here. Nothing depends on an
Event: one that cannot be written is counted and dropped, and recording one never waits.
"""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import structlog

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi, Resource
from bigfleet.operator.kubernetes.objects import KubernetesObject, ObjectReference
from bigfleet.operator.kubernetes.resources import EVENTS
from bigfleet.operator.kubernetes.timestamps import rfc3339

log = structlog.get_logger(__name__)

#: Where Events about cluster-scoped objects go.
DEFAULT_NAMESPACE = "default"
#: The API server refuses longer messages.
_MESSAGE_CHARACTERS_MAX = 1024
_NAME_CHARACTERS_MAX = 253
_ATTEMPTS_MAX = 3
_RETRY_SECONDS = 1.0
_LOG_SECONDS = 60.0
#: So many (object, reason) pairs are remembered; beyond that the oldest may be repeated early.
_REMEMBERED_MAX = 100_000


class EventSeverity(Enum):
    """The `type` of an Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


def reference_to(resource: Resource[Any], found: KubernetesObject) -> ObjectReference:
    """Return a reference to an object that was read."""
    return ObjectReference(
        api_version=resource.api_version,
        kind=resource.kind,
        name=found.metadata.name,
        namespace=found.metadata.namespace,
        uid=found.metadata.uid,
    )


@dataclass(frozen=True, slots=True)
class _Recorded:
    about: ObjectReference
    severity: EventSeverity
    reason: str
    message: str
    unix_nanos: int


class EventRecorder:
    """Writes Events in the name of one component."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        component: str,
        instance: str,
        clock: Clock,
        repeat_seconds: float = 600.0,
        waiting_max: int = 1000,
    ) -> None:
        """Take the component's name and that of this process; one Event per object and reason in `repeat_seconds`."""
        self._api = api
        self._component = component
        self._instance = instance
        self._clock = clock
        self._repeat_seconds = repeat_seconds
        self._waiting_max = waiting_max
        self._waiting: deque[_Recorded] = deque()
        self._arrived = asyncio.Event()
        #: When each (object, reason) was last recorded, oldest first.
        self._recorded: OrderedDict[tuple[str, str, str, str, str], float] = OrderedDict()
        self.written_total = 0
        #: Recorded while the queue was full.
        self.dropped_total = 0
        self.failed_total = 0
        self._last_error = ""
        self._logged_failures = 0
        self._logged_seconds: float | None = None

    def record(self, about: ObjectReference, severity: EventSeverity, reason: str, message: str) -> bool:
        """Note an Event to be written; say whether it will be, and is neither a repetition nor one too many.

        `reason` is one word in CamelCase. Messages over 1,024 characters are cut.
        """
        now_seconds = self._clock.monotonic_seconds()
        key = (about.kind, about.namespace, about.name, about.uid, reason)
        self._forget(now_seconds)
        if key in self._recorded:
            return False
        if len(self._waiting) >= self._waiting_max:
            # Not remembered: it may be recorded again as soon as there is room.
            self.dropped_total += 1
            return False
        self._recorded[key] = now_seconds
        self._waiting.append(_Recorded(about, severity, reason, message, self._clock.unix_nanos()))
        self._arrived.set()
        return True

    def _forget(self, now_seconds: float) -> None:
        while self._recorded:
            key, recorded_seconds = next(iter(self._recorded.items()))
            if now_seconds - recorded_seconds < self._repeat_seconds and len(self._recorded) < _REMEMBERED_MAX:
                return
            del self._recorded[key]

    async def run(self) -> None:
        """Write what is recorded, one by one and oldest first, until cancelled."""
        while True:
            while self._waiting:
                await self._write(self._waiting.popleft())
                self._log_failures()
            self._arrived.clear()
            await self._wait()

    async def _write(self, recorded: _Recorded) -> None:
        namespace = recorded.about.namespace or DEFAULT_NAMESPACE
        body = self._body(recorded, namespace)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                await self._api.create(EVENTS, body, namespace=namespace)
            except ApiError as error:
                if error.is_conflict:
                    # Written by an earlier attempt whose answer was lost.
                    break
                if not error.is_transient or attempt == _ATTEMPTS_MAX:
                    self.failed_total += 1
                    self._last_error = str(error)
                    return
                await self._clock.sleep(error.retry_after_seconds or _RETRY_SECONDS * attempt)
            else:
                break
        self.written_total += 1

    async def _wait(self) -> None:
        """Return when an Event has been recorded, or when failures are to be logged."""
        unlogged = self.failed_total + self.dropped_total != self._logged_failures
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._quiet_seconds() if unlogged else None):
                await self._arrived.wait()
        self._log_failures()

    def _quiet_seconds(self) -> float:
        """Return for how long nothing is to be logged yet."""
        if self._logged_seconds is None:
            return 0.0
        return max(self._logged_seconds + _LOG_SECONDS - self._clock.monotonic_seconds(), 0.0)

    def _log_failures(self) -> None:
        """Log at most once a minute what could not be written."""
        lost = self.failed_total + self.dropped_total
        now_seconds = self._clock.monotonic_seconds()
        if lost == self._logged_failures or self._quiet_seconds() > 0:
            return
        log.warning(
            "operator.events_lost",
            events=lost - self._logged_failures,
            failed_total=self.failed_total,
            dropped_total=self.dropped_total,
            error=self._last_error,
        )
        self._logged_failures = lost
        self._logged_seconds = now_seconds

    def _body(self, recorded: _Recorded, namespace: str) -> JsonObject:
        about = recorded.about
        moment = rfc3339(recorded.unix_nanos)
        text = "\0".join((about.kind, about.namespace, about.uid, recorded.reason, str(recorded.unix_nanos)))
        suffix = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = about.name[: _NAME_CHARACTERS_MAX - len(suffix) - 1].rstrip("-.")
        fields = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        }
        message = recorded.message
        if len(message) > _MESSAGE_CHARACTERS_MAX:
            message = message[: _MESSAGE_CHARACTERS_MAX - 1] + "…"
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{name}.{suffix}", "namespace": namespace},
            "involvedObject": {field: value for field, value in fields.items() if value},
            "type": recorded.severity.value,
            "reason": recorded.reason,
            "message": message,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
