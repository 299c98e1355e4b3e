"""Renders templates in a process of its own: `python -m bigfleet.operator.bootstrap.worker`.

Reads one JSON object a line and answers each with one. The process bounds what a rendering may cost: memory by a
resource limit, time by an alarm that ends the process even inside a long computation. It must never write anything but
answers to its standard output, and nothing anywhere else.
"""

import contextlib
import json
import resource
import signal
import sys
from typing import Any, BinaryIO, Final

from bigfleet.operator.bootstrap.rendering import RenderingFault, render

MEMORY_BYTES_MAX: Final = 256 * 1024 * 1024


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return `text`, or `error` and `line`."""
    try:
        return {"text": render(request["source"], request["path"], request["variables"])}
    except RenderingFault as fault:
        return {"error": fault.text, "line": fault.line}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end; the first line says that the worker is ready."""
    _write(answers, {"ready": True})
    for line in requests:
        request = json.loads(line)
        # Left at its default the signal ends the process. The parent's timer comes first; this one holds without it.
        signal.alarm(request["alarm_seconds"])
        reply = answer(request)
        signal.alarm(0)
        _write(answers, reply)


def _write(answers: BinaryIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value).encode("ascii") + b"\n")
    answers.flush()


def limit_memory() -> None:
    """Bound the memory of this process; some systems know no such limit, and time stays bounded there."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    with contextlib.suppress(ValueError, OSError):
        # A dump would hold tokens.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    limit_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
