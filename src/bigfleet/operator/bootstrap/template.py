"""Manages the bootstrap template of a cluster: reads the file, checks it with sample values, and reloads it.

A changed file is reloaded when it is used, and every few seconds. A new version that does not parse or render is logged
and counted, and the previous one stays in use: a typing mistake must never stop machines from joining.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.operator.bootstrap.renderer import TemplateFault, TemplateRenderer, TemplateSource
from bigfleet.operator.bootstrap.variables import sample_variables

log = structlog.get_logger(__name__)

SOURCE_BYTES_MAX: Final = 1024 * 1024
POLL_SECONDS: Final = 10.0

#: Device, inode, size and time of change: a mounted ConfigMap swaps a link, an editor may keep the inode.
_Stamp = tuple[int, int, int, int]


class BootstrapTemplate:
    """One template file; `load` comes first."""

    def __init__(self, path: Path, *, renderer: TemplateRenderer, cluster_id: str, with_token: bool) -> None:
        """Name the file; `with_token` says whether templates get a token, in the check as later."""
        self._path = path
        self._renderer = renderer
        self._sample = sample_variables(cluster_id, with_token=with_token)
        self._source: TemplateSource | None = None
        self._seen: _Stamp | None = None
        self._refreshing = asyncio.Lock()
        #: Versions of the file that were not taken into use.
        self.reload_errors_total = 0

    async def load(self) -> None:
        """Read and check the file; raises TemplateFault, which names the file and the line."""
        self._seen = _stamp(self._path)
        self._source = await self._checked(_read(self._path))

    async def refresh(self) -> None:
        """Take a changed file into use if it renders; log it once if it does not."""
        async with self._refreshing:
            stamp = _stamp(self._path)
            if stamp == self._seen:
                return
            try:
                self._source = await self._checked(_read(self._path))
            except TemplateFault as fault:
                self.reload_errors_total += 1
                log.error("operator.template_rejected", error=str(fault), advice="the previous template stays in use")
            else:
                log.info("operator.template_reloaded", path=str(self._path))
            # Only now: a check that was cancelled has judged nothing. A change after the stamp has another one.
            self._seen = stamp

    async def render(self, variables: Mapping[str, Any]) -> bytes:
        """Return what the file in use makes of the variables; raises TemplateFault."""
        await self.refresh()
        assert self._source is not None, "load comes first"
        return (await self._renderer.render(self._source, variables)).encode()

    async def watch(self, clock: Clock) -> None:
        """Refresh every few seconds until cancelled, so that a mistake shows before a machine needs the template."""
        while True:
            await clock.sleep(POLL_SECONDS)
            await self.refresh()

    async def _checked(self, source: TemplateSource) -> TemplateSource:
        if not (await self._renderer.render(source, self._sample)).strip():
            # A file that was saved empty, or an `if` around everything: machines would start and never join.
            raise TemplateFault(f"{source.path}: renders to nothing; a machine needs instructions to join the cluster")
        return source


def _stamp(path: Path) -> _Stamp | None:
    """Return what changes when the file does, None when it is absent."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _read(path: Path) -> TemplateSource:
    try:
        with path.open("rb") as file:
            text = file.read(SOURCE_BYTES_MAX + 1)
    except OSError as fault:
        raise TemplateFault(f"{path}: cannot be read: {fault.strerror}; check the path and its permissions") from None
    if len(text) > SOURCE_BYTES_MAX:
        raise TemplateFault(f"{path}: is larger than {SOURCE_BYTES_MAX} bytes")
    try:
        return TemplateSource(str(path), text.decode("utf-8"))
    except UnicodeDecodeError as fault:
        line = text.count(b"\n", 0, fault.start) + 1
        raise TemplateFault(f"{path}:{line}: is not UTF-8 at byte {fault.start}") from None
