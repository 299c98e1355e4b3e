"""The checked-in code of the wire is what the generator writes today."""

import pickle
from pathlib import Path

from bigfleet.rpc.wire.gen import coordinator_pb2
from tools.generate_proto import GEN_DIR, generate


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in {".py", ".pyi"}}


def test_checked_in_code_is_up_to_date(tmp_path: Path) -> None:
    """Generating again gives the checked-in files, byte for byte, no more and no fewer (`make proto` mends it)."""
    generate(tmp_path)
    fresh, kept = contents(tmp_path), contents(GEN_DIR)

    assert sorted(kept) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != kept[name]] == []


def test_generating_removes_files_without_a_source(tmp_path: Path) -> None:
    """What an earlier .proto file left behind goes away; files of other kinds stay."""
    (tmp_path / "gone_pb2.py").write_text("")
    (tmp_path / "notes.txt").write_text("")

    written = generate(tmp_path)

    assert sorted([*(path.name for path in written), "notes.txt"]) == sorted(path.name for path in tmp_path.iterdir())


def test_generated_messages_can_be_pickled() -> None:
    """Message classes know the module that they are imported from."""
    report = coordinator_pb2.ShardReport(shard_id="shard-0", cycle=7)

    assert report == pickle.loads(pickle.dumps(report))
