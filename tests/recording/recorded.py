"""What tests of recordings share: a recorder into a file, and the cycles that are read back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from bigfleet.model.compute import compute_inline
from bigfleet.recording.file import RecordingFile
from bigfleet.recording.frames import Torn
from bigfleet.recording.reader import RecordedCycle, read_recording
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import FORMAT, RecordingHead

MIB = 1024 * 1024


def head(shard_id: str = "shard-0", *, written_format: int = FORMAT) -> RecordingHead:
    """Return who writes."""
    return RecordingHead(
        format=written_format,
        bigfleet="0.1.0",
        shard_id=shard_id,
        epoch=7,
        verify_every_cycles=100,
        started_unix_nanos=1_767_225_599_000_000_000,
    )


def new_recorder(path: Path, *, size_bytes_max: int = 64 * MIB, registry: CollectorRegistry | None = None) -> Recorder:
    """Return a recorder that nobody runs; `write_waiting` and `close` write."""
    file = RecordingFile(path, size_bytes_max=size_bytes_max)
    return Recorder(file, head=head(), registry=registry or CollectorRegistry(), compute=compute_inline)


@contextmanager
def recording(path: Path, *, size_bytes_max: int = 64 * MIB) -> Iterator[Recorder]:
    """Yield a recorder and close it."""
    recorder = new_recorder(path, size_bytes_max=size_bytes_max)
    try:
        yield recorder
    finally:
        recorder.close()


def cycles_of(path: Path) -> list[RecordedCycle]:
    """Return the cycles of a file that ends with a whole record."""
    cycles, torn = read_back(path)
    assert torn is None, torn
    return cycles


def read_back(path: Path) -> tuple[list[RecordedCycle], Torn | None]:
    """Return the cycles of a file, and what is left of a record that is not whole."""
    found = list(read_recording(path))
    torn = [one for one in found if isinstance(one, Torn)]
    assert not torn or found[-1] is torn[0]
    return [one for one in found if isinstance(one, RecordedCycle)], torn[0] if torn else None
