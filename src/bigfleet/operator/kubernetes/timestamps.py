"""Formats and parses moments as Kubernetes writes them: RFC 3339 in UTC.

Moments are Unix nanoseconds, as a Clock counts them; what a format does not show is cut off, never rounded up.
"""

from datetime import UTC, datetime

from bigfleet.model.clock import NANOS_PER_SECOND


def rfc3339(unix_nanos: int) -> str:
    """Return a moment with whole seconds, a `metav1.Time`: `2026-11-24T12:00:00Z`."""
    return f"{_seconds_text(unix_nanos)}Z"


def rfc3339_milli(unix_nanos: int) -> str:
    """Return a moment with milliseconds: `2026-11-24T12:00:00.250Z`."""
    return f"{_seconds_text(unix_nanos)}.{unix_nanos % NANOS_PER_SECOND // 1_000_000:03d}Z"


def rfc3339_micro(unix_nanos: int) -> str:
    """Return a moment with microseconds, a `metav1.MicroTime`: `2026-11-24T12:00:00.250000Z`."""
    return f"{_seconds_text(unix_nanos)}.{unix_nanos % NANOS_PER_SECOND // 1_000:06d}Z"


def unix_seconds(text: str | None) -> float | None:
    """Return the moment of an RFC 3339 text; None for any other text, such as one without an offset."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


def _seconds_text(unix_nanos: int) -> str:
    return datetime.fromtimestamp(unix_nanos // NANOS_PER_SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S")
