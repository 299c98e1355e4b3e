"""Reads the audit log of an API server: the author of each change, and the server's answer.

Tests judge evictions by it, because the API server writes it and not the evicting process.
"""

from pathlib import Path

import msgspec


class AuditUser(msgspec.Struct, rename="camel"):
    """Who sent a request."""

    username: str = ""


class AuditObject(msgspec.Struct, rename="camel"):
    """What a request was about."""

    resource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""
    subresource: str = ""


class AuditAnswer(msgspec.Struct, rename="camel"):
    """How a request was answered."""

    code: int = 0
    reason: str = ""


class AuditedRequest(msgspec.Struct, rename="camel"):
    """One request that was answered."""

    verb: str = ""
    user: AuditUser = msgspec.field(default_factory=AuditUser)
    object_ref: AuditObject = msgspec.field(default_factory=AuditObject)
    response_status: AuditAnswer = msgspec.field(default_factory=AuditAnswer)
    user_agent: str = ""
    #: RFC 3339 with microseconds.
    stage_timestamp: str = ""

    @property
    def is_eviction(self) -> bool:
        """Return whether it asked for the eviction of a pod."""
        return self.object_ref.resource == "pods" and self.object_ref.subresource == "eviction"


def read_audit_log(path: Path) -> list[AuditedRequest]:
    """Return the requests of an audit log in the order in which they were answered.

    A line that is being written is left out. Raises msgspec.DecodeError when a complete line is no audit event.
    """
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(AuditedRequest)
    complete, _separator, _being_written = path.read_bytes().rpartition(b"\n")
    return [decoder.decode(line) for line in complete.splitlines() if line]
