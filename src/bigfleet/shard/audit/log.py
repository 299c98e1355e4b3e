"""Writes one audit record for each action, chained so that gaps and edits can be detected.

docs/spec/shard.md §13, docs/adr/0114-the-audit-log-is-a-chain.md. One line of JSON per action that was executed or
suppressed. `chain` is the SHA-256 of the previous chain and of the line without its own.
`bigfleet.shard.audit.log_file` manages the file, `bigfleet.shard.audit.verification` checks it. A failed write is
counted and logged; it must never delay or end anything else.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec
import structlog

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ShardId
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import ActionRecord

#: What the first record of all goes on from.
GENESIS = "0" * 64
#: Characters of a text that comes from outside; everything else in a record is bounded already.
TEXT_CHARACTERS_MAX = 1024
#: Bytes that the field `previous` adds to a line.
_PREVIOUS_BYTES = len(f',"previous":"{GENESIS}"')
_CHAIN = re.compile(rb',"chain":"([0-9a-f]{64})"\}\Z')

_log = structlog.get_logger("bigfleet.shard.audit.log")


class AuditHead(NamedTuple):
    """A place in the chain: the newest record's number and its chain."""

    sequence: int
    chain: str

    def __str__(self) -> str:
        return f"{self.sequence}:{self.chain}"


#: Before the first record of all.
START = AuditHead(0, GENESIS)


class AuditLog(Protocol):
    """Where lines go: an append-only file in production, values in tests. Every method may raise OSError."""

    @property
    def head(self) -> AuditHead:
        """The last record that the log held when it was opened."""
        ...

    def make_room(self, size_bytes: int) -> None:
        """Get ready for a line of that size, in a new file where this one would become too large."""
        ...

    @property
    def is_new_file(self) -> bool:
        """Return whether the next line will be the first of its file."""
        ...

    def append(self, line: bytes) -> None:
        """Hand the line to the operating system as a whole, or leave the log as it was."""
        ...


class AuditLine(NamedTuple):
    """One line taken apart, as far as the chain is concerned."""

    sequence: int
    #: What the record says it goes on from; only the first of a file has to say so.
    previous: str | None
    chain: str
    #: The record without its chain, byte by byte.
    body: bytes

    def follows(self, previous: str) -> bool:
        """Return whether the line is as it was written after a record with that chain."""
        return digest(previous, self.body) == self.chain


class _Link(msgspec.Struct):
    """The two fields that a check reads; everything else counts as bytes."""

    sequence: int
    previous: str | None = None


_LINKS = msgspec.json.Decoder(_Link)


def digest(previous: str, body: bytes) -> str:
    """Return the chain of a record: SHA-256 over the chain before it, as text, and its bytes without its own chain."""
    return hashlib.sha256(previous.encode() + body).hexdigest()


def read_line(line: bytes) -> AuditLine | None:
    """Take a line without its line feed apart; None when it is no record of an audit log."""
    found = _CHAIN.search(line)
    if found is None:
        return None
    body = line[: found.start()] + b"}"
    try:
        link = _LINKS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return AuditLine(link.sequence, link.previous, found.group(1).decode(), body)


def chained(record: dict[str, object], sequence: int, previous: str, *, has_previous: bool) -> tuple[bytes, str]:
    """Return the line of a record, with its line feed, and its chain."""
    fields = record | {"sequence": sequence} | ({"previous": previous} if has_previous else {})
    body = msgspec.json.encode(fields)
    chain = digest(previous, body)
    return body[:-1] + f',"chain":"{chain}"}}\n'.encode(), chain


class Audit:
    """Writes one record per end of an action; without a log it writes none.

    Invariants: numbers rise by one per record, written or not, so that a lost one leaves a gap; the chain goes on from
    the last record that was written.
    """

    def __init__(self, *, shard_id: ShardId, epoch: int, log: AuditLog | None, metrics: ShardMetrics) -> None:
        self._shard_id = shard_id
        self._epoch = epoch
        self._log = log
        self._metrics = metrics
        self._sequence, self._chain = log.head if log is not None else START
        #: Records in a row that could not be written.
        self._lost_in_a_row = 0

    @property
    def is_on(self) -> bool:
        """Return whether there is a log."""
        return self._log is not None

    def note(self, record: ActionRecord) -> None:
        """Write the record of an action that ended or was suppressed. Never raises OSError."""
        if self._log is not None:
            self._append(self._log, self._fields(record))

    def note_change(
        self, *, kind: str, cluster: str, reason: str, owner: str, message: str, at_unix_nanos: int
    ) -> None:
        """Write the record of what an administrator changed; `owner` is the URI of the caller. Never raises OSError."""
        facts = {"reason": _text(reason), "owner": _text(owner), "outcome": "success", "message": _text(message)}
        self._note_event(kind, cluster, at_unix_nanos, facts)

    def note_exchange(
        self,
        *,
        kind: str,
        cluster: str,
        machines: int,
        saving_usd_per_hour: float,
        outcome: str,
        message: str,
        at_unix_nanos: int,
    ) -> None:
        """Write the record of an exchange that is proposed, begins or ends. Never raises OSError."""
        facts = {
            "machines": machines,
            "saving_usd_per_hour": round(saving_usd_per_hour, 6),
            "outcome": outcome,
            "message": _text(message),
        }
        self._note_event(kind, cluster, at_unix_nanos, facts)

    def _note_event(self, kind: str, cluster: str, at_unix_nanos: int, facts: Mapping[str, object]) -> None:
        """Write a record that is not of an action."""
        if self._log is None:
            return
        fields: dict[str, object] = {
            "time": _rfc3339(at_unix_nanos),
            "shard": self._shard_id,
            "epoch": self._epoch,
            "kind": kind,
            "cluster": _text(cluster),
            **facts,
        }
        self._append(self._log, fields)

    def _append(self, log: AuditLog, fields: dict[str, object]) -> None:
        self._sequence += 1
        try:
            self._write(log, fields)
        except OSError as error:
            self._metrics.audit_write_errors.inc()
            if not self._lost_in_a_row:
                advice = "free space or correct the file's permissions; records are lost until then"
                _log.error("audit.write_failed", sequence=self._sequence, error=error.strerror, advice=advice)
            self._lost_in_a_row += 1
            return
        if self._lost_in_a_row:
            _log.warning("audit.write_recovered", sequence=self._sequence, lost=self._lost_in_a_row)
            self._lost_in_a_row = 0

    def _write(self, log: AuditLog, fields: dict[str, object]) -> None:
        line, chain = chained(fields, self._sequence, self._chain, has_previous=False)
        log.make_room(len(line) + _PREVIOUS_BYTES)
        if log.is_new_file:
            line, chain = chained(fields, self._sequence, self._chain, has_previous=True)
        log.append(line)
        self._chain = chain

    def _fields(self, record: ActionRecord) -> dict[str, object]:
        action = record.action
        return {
            "time": _rfc3339(record.finished_unix_nanos),
            "shard": self._shard_id,
            "epoch": self._epoch,
            "cycle": record.executed_cycle or record.decided_cycle,
            "decided_cycle": record.decided_cycle,
            "action_id": record.action_id,
            "kind": record.kind_label,
            "machine": _text(action.machine_id),
            "cluster": _text(action.cluster),
            "reason": action.reason,
            "need_fingerprint": _text(record.need_fingerprint),
            "group": _text(record.group),
            "grace_seconds": action.grace_seconds,
            "preemptor_priority": action.preemptor_priority,
            "outcome": record.outcome_label,
            "message": _text(record.message),
            "seconds": round(record.seconds, 6),
            "operation_id": _text(record.operation_id),
            "token_sequence": record.token_sequence,
            "without_session": record.is_without_session,
        }


def _text(text: str) -> str:
    # A lone surrogate has no UTF-8 form, and whatever a provider says must not cost the record.
    return text[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode()


def _rfc3339(unix_nanos: int) -> str:
    seconds, nanos = divmod(unix_nanos, NANOS_PER_SECOND)
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanos // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
