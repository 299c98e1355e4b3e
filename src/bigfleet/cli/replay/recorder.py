"""Manages the recorder of a shard process: opens it before the shard starts and closes it after the shard stopped.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. Records are written off the shard's loop. A file that cannot be
used ends the start; a later failure pauses or ends the recording, never the shard.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

import bigfleet
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.model.clock import Clock
from bigfleet.model.compute import Compute
from bigfleet.recording.file import RecordingFault, RecordingFile
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import FORMAT, RecordingHead
from bigfleet.shard.ports import ShardSettings


@asynccontextmanager
async def open_recorder(
    process: ShardProcessSettings,
    epoch: int,
    settings: ShardSettings,
    clock: Clock,
    registry: CollectorRegistry,
    compute: Compute,
) -> AsyncIterator[Recorder | None]:
    """Yield a recorder that writes while the context lasts, None where nothing is to be recorded.

    Raises RunFault for a wrong file.
    """
    path = process.record
    if path is None:
        yield None
        return
    try:
        # What an earlier process wrote is looked through, which takes a second for a full file.
        file = await compute(lambda: RecordingFile(path, size_bytes_max=process.record_bytes_max))
    except RecordingFault as fault:
        raise RunFault(f"--record {fault}") from fault
    head = RecordingHead(
        format=FORMAT,
        bigfleet=bigfleet.installed_version(),
        shard_id=process.shard_id,
        epoch=epoch,
        verify_every_cycles=settings.engine_verify_every_cycles,
        started_unix_nanos=clock.unix_nanos(),
    )
    recorder = Recorder(file, head=head, registry=registry, compute=compute)
    writing = asyncio.create_task(recorder.run(), name="recorder")
    try:
        yield recorder
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        recorder.close()
