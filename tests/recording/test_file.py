"""A recording on disk: any file of it is read by itself, and whatever ends it costs what is behind, nothing else."""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import structlog
import xxhash
from prometheus_client import CollectorRegistry

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.recording.file import RecordingFault, RecordingFile
from bigfleet.recording.frames import (
    CONTENT_BYTES_MAX,
    MAGIC,
    Damage,
    Frame,
    FrameKind,
    FramePacker,
    Torn,
    Unpacker,
    WrongFile,
    frames,
)
from bigfleet.recording.growing_file import OLD_FILES_MAX, numbered
from bigfleet.recording.hook import CycleInput
from bigfleet.recording.reader import RecordedCycle, read_recording
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import FORMAT
from tests.engine.columnar.test_incremental import Life
from tests.recording.recorded import cycles_of, head, new_recorder, read_back, recording
from tests.recording.test_recording import S, machines_of, small_fleet
from tests.shard.world import machine, need


def live(recorder: Recorder, life: Life, cycles: range) -> list[tuple[int, list[object]]]:
    """Let machines and demand change, and record it; return what the machines were at each cycle."""
    seen = []
    for cycle in cycles:
        life.put(machine(f"m{cycle % 9}", S.IDLE, price_usd_per_hour=float(cycle)), float(cycle))
        if cycle % 5 == 0:
            life.demand = [need("c1", str(cycle % 50 + 1)), need("c2", "4")]
        life.options = replace(life.options, now_seconds=float(cycle))
        view = life.store.snapshot()
        decision = life.engine.decide(view, life.demand, life.options)
        recorder.take(CycleInput(cycle, cycle * NANOS_PER_SECOND, True, view, life.demand, life.options), decision)
        recorder.write_waiting()
        seen.append((cycle, machines_of(view)))
    return seen


def test_every_file_of_a_rotated_recording_is_read_by_itself(tmp_path: Path) -> None:
    """Four old ones are kept; together they are one course without a gap, and each begins with everything."""
    path = tmp_path / "recording"
    life = Life(small_fleet())
    with recording(path, size_bytes_max=4_000) as recorder:
        seen = dict(live(recorder, life, range(1, 200)))
    files = [numbered(path, number) for number in range(OLD_FILES_MAX, -1, -1)]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    read = []
    for file in files:
        assert 4_000 <= file.stat().st_size < 5_000 or file == path
        cycles = cycles_of(file)
        assert [cycle.is_fresh for cycle in cycles] == [True] + [False] * (len(cycles) - 1)
        for cycle in cycles:
            assert machines_of(cycle.view) == seen[cycle.cycle]
            assert cycle.options == replace(life.options, now_seconds=float(cycle.cycle))
        read += [cycle.cycle for cycle in cycles]
    assert read == list(range(read[0], 200))


def test_a_file_is_not_given_up_before_it_was_worth_its_beginning(tmp_path: Path) -> None:
    """Where a whole fleet takes more than the size that was asked for, not every cycle is written whole."""
    path = tmp_path / "recording"
    with recording(path, size_bytes_max=1) as recorder:
        live(recorder, Life(small_fleet()), range(1, 30))
    assert [cycle.is_fresh for cycle in cycles_of(path)].count(True) == 1
    assert len(cycles_of(path)) > 1


def test_the_next_process_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    """What a killed one left of a record is cut off; both are read, the second from nothing."""
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 10))
    with path.open("ab") as file:
        file.write(path.read_bytes()[len(MAGIC) : len(MAGIC) + 9])
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 4))
    cycles = cycles_of(path)
    assert [cycle.cycle for cycle in cycles] == [*range(1, 10), *range(1, 4)]
    assert [place for place, cycle in enumerate(cycles) if cycle.is_fresh] == [0, 9]


def test_a_file_that_ends_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 4))
    whole = path.read_bytes()
    stops = [frame.stop for frame in frames(path.open("rb")) if isinstance(frame, Frame)]
    cut = tmp_path / "cut"
    for size in range(len(MAGIC), len(whole)):
        cut.write_bytes(whole[:size])
        cycles, torn = read_back(cut)
        # The first frame is the head.
        expected = max(0, sum(stop <= size for stop in stops) - 1)
        assert len(cycles) == expected
        is_whole = size == len(MAGIC) or size in stops
        assert torn == (None if is_whole else Torn(start := max([len(MAGIC), *stops_upto(stops, size)]), size - start))


def stops_upto(stops: list[int], size: int) -> list[int]:
    return [stop for stop in stops if stop <= size]


def test_zeros_at_the_end_are_what_lost_power_leaves(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 6))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5_000))
    cycles, torn = read_back(path)
    assert (len(cycles), torn) == (5, Torn(size, 5_000))


def whole_cycles(path: Path) -> Iterator[tuple[int, list[object]]]:
    """Yield number and machines of each cycle; a file that is damaged is not taken for one that is cut off."""
    for one in read_recording(path):
        assert isinstance(one, RecordedCycle)
        yield one.cycle, machines_of(one.view)


def test_no_byte_can_change_without_being_found(tmp_path: Path) -> None:
    """Whatever byte is another one, what is read is what was written, and then it is said where it is not."""
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 3))
    whole = path.read_bytes()
    good = [(cycle.cycle, machines_of(cycle.view)) for cycle in cycles_of(path)]
    wrong = tmp_path / "wrong"
    for place in range(len(MAGIC), len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        wrong.write_bytes(damaged)
        read: list[tuple[int, list[object]]] = []
        with pytest.raises(Damage, match="damaged at byte"):
            read.extend(whole_cycles(wrong))
        assert read == good[: len(read)]


FOREIGN: list[tuple[bytes, str]] = [
    (b"", "the file is empty"),
    (b"apiVersion: v1\nkind: List\n", "no recording of a shard: name a file that"),
    (b"\0" * 100, "no recording of a shard"),
    (b"bigfleet recording 9\nxxxx", "a recording of format 9, this version reads 1: replay it with the version"),
]


@pytest.mark.parametrize(("content", "told"), FOREIGN)
def test_what_is_no_recording_is_said_to_be_none(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(WrongFile, match=told):
        list(read_recording(path))


def test_records_of_another_format_name_the_version_that_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_bytes(MAGIC + FramePacker().head(msgspec.msgpack.encode(head(written_format=FORMAT - 1))))
    with pytest.raises(WrongFile, match=r"records of format 1 .* written by bigfleet 0\.1\.0; .* reads format 2"):
        list(read_recording(path))


def test_a_recording_of_another_format_is_put_aside_and_a_new_one_is_begun(tmp_path: Path) -> None:
    """An upgraded shard goes on recording; the old file stays for the version that wrote it."""
    path = tmp_path / "recording"
    old = MAGIC + FramePacker().head(msgspec.msgpack.encode(head(written_format=FORMAT - 1)))
    path.write_bytes(old)
    with structlog.testing.capture_logs() as logs, recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 4))

    assert numbered(path, 1).read_bytes() == old
    assert [cycle.cycle for cycle in cycles_of(path)] == [1, 2, 3]
    assert [(line["event"], line["error"]) for line in logs] == [("recording.file_put_aside", "records of format 1")]


def test_a_sound_frame_that_makes_no_sense_is_damage(tmp_path: Path) -> None:
    """A record without a head, and one that refers to what was never said."""
    path = tmp_path / "recording"
    packer = FramePacker()
    path.write_bytes(MAGIC + packer.cycle(b"\x90"))
    with pytest.raises(Damage, match="a cycle without a head"):
        list(read_recording(path))
    packer = FramePacker()
    path.write_bytes(MAGIC + packer.head(msgspec.msgpack.encode(head())) + packer.cycle(b"\x90"))
    with pytest.raises(Damage, match="makes no sense"):
        list(read_recording(path))


def test_a_frame_that_unpacks_to_too_much_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may not take all memory: neither by what it unpacks to nor by a size that it names."""
    unpacked_bytes_max = 8 * 1024**2
    monkeypatch.setattr("bigfleet.recording.frames.CONTENT_BYTES_MAX", unpacked_bytes_max)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(1024**2)) for _ in range(unpacked_bytes_max // 1024**2 + 1))
    packed += packer.flush(zlib.Z_SYNC_FLUSH)
    frame = Frame(FrameKind.CYCLE, packed, 0, len(packed))
    with pytest.raises(Damage, match="unpacks to more than"):
        Unpacker().cycle(frame)
    monkeypatch.undo()

    path = tmp_path / "recording"
    fields = struct.pack("<BIQ", FrameKind.HEAD, CONTENT_BYTES_MAX + 1, 0)
    path.write_bytes(MAGIC + fields + struct.pack("<I", xxhash.xxh32_intdigest(fields)) + b"short")
    with pytest.raises(Damage, match="a frame of 536,870,913 bytes"):
        list(read_recording(path))


def test_a_file_that_is_no_recording_is_never_written_into(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(RecordingFault, match=r"no recording of a shard.*it is left alone, choose another file"):
        RecordingFile(path, size_bytes_max=1000)
    assert path.read_text() == "my notes\n"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordingFault, match="No such file or directory; choose a file that can be written"):
        RecordingFile(tmp_path / "none" / "recording", size_bytes_max=1000)
    with pytest.raises(RecordingFault, match="is not a file"):
        RecordingFile(Path("/dev/null"), size_bytes_max=1000)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    first = RecordingFile(path, size_bytes_max=1000)
    with pytest.raises(RecordingFault, match="another process writes it"):
        RecordingFile(path, size_bytes_max=1000)
    first.close()


def test_a_damaged_file_is_put_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 4))
    damaged = bytearray(path.read_bytes())
    damaged[len(MAGIC) + 40] ^= 1
    path.write_bytes(damaged)
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 3))
    assert numbered(path, 1).read_bytes() == damaged
    assert len(cycles_of(path)) == 2


def full_disk(after_bytes: int) -> Callable[[int, bytes], int]:
    """Return a write that takes so many bytes in all and then has no room."""
    left = [after_bytes]

    def write(file: int, content: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        taken = REAL_WRITE(file, content[: left[0]])
        left[0] -= taken
        return taken

    return write


REAL_WRITE = os.write


def test_a_full_disk_pauses_the_recording_with_one_line_and_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file ends with a whole record; what comes while there is no room is counted and thrown away."""
    path = tmp_path / "recording"
    registry = CollectorRegistry()
    recorder = new_recorder(path, registry=registry)
    life = Life(small_fleet())
    live(recorder, life, range(1, 5))
    assert registry.get_sample_value("bigfleet_shard_recording_on") == 1
    size = path.stat().st_size
    assert registry.get_sample_value("bigfleet_shard_recording_bytes_total") == size - len(MAGIC)
    monkeypatch.setattr(os, "write", full_disk(after_bytes=30))
    with structlog.testing.capture_logs() as logs:
        live(recorder, life, range(5, 30))
    monkeypatch.undo()
    recorder.close()

    assert [line["event"] for line in logs] == ["recording.paused"]
    assert (logs[0]["log_level"], logs[0]["error"]) == ("error", "No space left on device")
    assert registry.get_sample_value("bigfleet_shard_recording_on") == 0
    assert registry.get_sample_value("bigfleet_shard_recorded_cycles_total") == 4
    assert registry.get_sample_value("bigfleet_shard_recording_missed_cycles_total") == 25
    assert path.stat().st_size == size
    assert len(cycles_of(path)) == 4


def test_a_recording_resumes_in_a_new_file_that_tells_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is tried in vain, one older file is given up for it at most."""
    path = tmp_path / "recording"
    registry = CollectorRegistry()
    recorder = new_recorder(path, registry=registry)
    life = Life(small_fleet())
    before = live(recorder, life, range(1, 5))
    monkeypatch.setattr(os, "write", full_disk(after_bytes=30))
    with structlog.testing.capture_logs() as logs:
        live(recorder, life, range(5, 100))
        monkeypatch.undo()
        after = live(recorder, life, range(100, 150))
    recorder.close()

    assert [line["event"] for line in logs] == ["recording.paused", "recording.resumed"]
    assert registry.get_sample_value("bigfleet_shard_recording_on") == 1
    older, newer = cycles_of(numbered(path, 1)), cycles_of(path)
    assert [cycle.cycle for cycle in older] == [cycle for cycle, _ in before]
    assert newer[0].missed == newer[0].cycle - 5 == logs[1]["missed"] > 0
    assert [cycle.cycle for cycle in newer] == [cycle for cycle, _ in after if cycle >= newer[0].cycle]
    assert [cycle.missed for cycle in newer[1:]] == [0] * (len(newer) - 1)
    assert not numbered(path, 2).exists()


def test_a_defect_of_the_recorder_costs_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(tmp_path / "recording")
    monkeypatch.setattr(recorder, "_digester", None)
    with structlog.testing.capture_logs() as logs:
        live(recorder, Life(small_fleet()), range(1, 4))
    assert [line["event"] for line in logs] == ["recording.failed", "recording.ended"]
    recorder.close()


def test_options_before_anything_was_said_are_damage(tmp_path: Path) -> None:
    """Reading cannot begin in the middle of a segment."""
    path = tmp_path / "recording"
    with recording(path) as recorder:
        live(recorder, Life(small_fleet()), range(1, 3))
    first, second = [frame for frame in frames(path.open("rb")) if isinstance(frame, Frame)][:2]
    whole = path.read_bytes()
    path.write_bytes(whole[: first.stop] + whole[second.stop :])
    with pytest.raises(Damage):
        list(read_recording(path))
