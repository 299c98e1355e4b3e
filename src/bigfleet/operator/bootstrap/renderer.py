"""Renders templates in worker processes that can be killed, so that no template stops the operator.

A template is code: two nested loops, one power of a large number, or one long repetition can keep a thread busy for
hours, and a thread cannot be stopped. Jinja's sandbox bounds `range` only. A process has limits of memory and time that
also hold inside a single operation. Workers are reused; a later rendering costs about a millisecond. This module must
not wait for a rendering longer than its limit.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from bigfleet.operator.bootstrap.rendering import OUTPUT_BYTES_MAX

log = structlog.get_logger(__name__)

RENDERING_SECONDS_MAX: Final = 5.0
#: A worker imports little; on a machine that is busy with other things that may still take seconds.
START_SECONDS_MAX: Final = 20.0
WORKERS_MAX: Final = 4
#: How much later than the parent's timer the worker's own ends it.
_ALARM_MARGIN_SECONDS: Final = 2
#: An output in JSON: each byte of it may become six.
_LINE_BYTES_MAX: Final = 6 * OUTPUT_BYTES_MAX + 4096
#: What a worker inherits: enough to start Python, and nothing that could be secret.
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a template and the path that errors name."""

    path: str
    text: str


class TemplateFault(Exception):
    """A template that cannot be used; the message names the file, the line where it is known, and the cause."""


class TemplateRenderer(Protocol):
    """Renders templates within bounds of size, memory and time."""

    async def render(self, source: TemplateSource, variables: Mapping[str, Any]) -> str:
        """Return the rendered text; raises TemplateFault."""
        ...


class _Worker:
    """One worker process; it takes one rendering at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_Worker":
        """Start a process and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "bigfleet.operator.bootstrap.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_BYTES_MAX,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            # An interrupt of the operator's terminal is the operator's business.
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                await worker._answer()
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer; EOFError when the process ends without one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise EOFError from None
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                log.debug("operator.bootstrap_worker_ended", process=self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


class SubprocessRenderer:
    """Renders in up to `workers_max` processes, which it starts when it needs them and replaces when they hang."""

    def __init__(self, *, seconds_max: float = RENDERING_SECONDS_MAX, workers_max: int = WORKERS_MAX) -> None:
        self._seconds_max = seconds_max
        self._slots = asyncio.Semaphore(workers_max)
        self._idle: list[_Worker] = []
        self.killed_total = 0

    async def render(self, source: TemplateSource, variables: Mapping[str, Any]) -> str:
        """Return the rendered text; raises TemplateFault."""
        request = {
            "path": source.path,
            "source": source.text,
            "variables": dict(variables),
            "alarm_seconds": math.ceil(self._seconds_max) + _ALARM_MARGIN_SECONDS,
        }
        async with self._slots:
            answer = await self._ask(source, request)
        if "text" in answer:
            return str(answer["text"])
        place = f"{source.path}:{answer['line']}" if answer["line"] else source.path
        raise TemplateFault(f"{place}: {answer['error']}")

    async def _ask(self, source: TemplateSource, request: Mapping[str, Any]) -> dict[str, Any]:
        worker = await self._take(source)
        try:
            async with asyncio.timeout(self._seconds_max):
                answer = await worker.ask(request)
        except TimeoutError:
            await self._kill(worker)
            raise TemplateFault(f"{source.path}: rendering took longer than {self._seconds_max:g} s") from None
        except (EOFError, ValueError):
            await self._kill(worker)
            raise TemplateFault(
                f"{source.path}: the process that renders has ended; the template may need too much memory or recursion"
            ) from None
        except BaseException:
            # Cancelled in the middle: what it writes later belongs to no request.
            await asyncio.shield(self._kill(worker))
            raise
        self._idle.append(worker)
        return answer

    async def _take(self, source: TemplateSource) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:
                return worker
            await worker.end()
        try:
            return await _Worker.start()
        except (TimeoutError, EOFError, OSError, ValueError) as fault:
            cause = str(fault) or type(fault).__name__
            raise TemplateFault(f"{source.path}: no process could be started that renders: {cause}") from None

    async def _kill(self, worker: _Worker) -> None:
        self.killed_total += 1
        await worker.end()

    async def close(self) -> None:
        """End the workers that are idle."""
        while self._idle:
            await self._idle.pop().end()
