"""An audit log in memory, whose disk can be full."""

import errno
import json
from typing import Any

from bigfleet.shard.audit.log import START, AuditHead, read_line


class MemoryAuditLog:
    """Implements `bigfleet.shard.audit.log.AuditLog`."""

    def __init__(self, head: AuditHead = START) -> None:
        self.head = head
        self.lines: list[bytes] = []
        self.is_full = False
        #: How often a write was refused.
        self.refused = 0

    @property
    def is_new_file(self) -> bool:
        """The whole log is one file."""
        return not self.lines

    def make_room(self, size_bytes: int) -> None:
        """There is always room for a line, unless the disk is full."""
        assert size_bytes > 0

    def append(self, line: bytes) -> None:
        """Keep the line."""
        if self.is_full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.lines.append(line)

    @property
    def end(self) -> AuditHead:
        """The head after what was written."""
        line = read_line(self.lines[-1].removesuffix(b"\n")) if self.lines else None
        return AuditHead(line.sequence, line.chain) if line is not None else self.head

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every record that was written."""
        return [json.loads(line) for line in self.lines]
