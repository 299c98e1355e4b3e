"""Files without an end, sparse ones and YAML that grows by itself are refused, and pipes are read."""

import os
import threading
from pathlib import Path

import pytest
import yaml

from bigfleet.files.bounded import bounded_lines, read_bounded
from bigfleet.files.yaml_loading import MERGED_KEYS_MAX, load_yaml
from tests.commands import run_here


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/proc/self/mem"])
def test_what_has_no_end_is_refused(device: str) -> None:
    """It would take all memory."""
    with pytest.raises(OSError, match=r"Is a device|Input/output error"):
        read_bounded(Path(device), 1_000)


def test_a_sparse_file_is_refused_unread(tmp_path: Path) -> None:
    """It takes no room on the disk."""
    sparse = tmp_path / "sparse.json"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(OSError, match="Has more than 1,000,000,000 bytes"):
        read_bounded(sparse, 1_000_000_000)


def test_a_pipe_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """A command can be given the output of another one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for content, is_read in ((b"x" * 1_000, True), (b"x" * 1_001, False)):
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        try:
            if is_read:
                assert read_bounded(pipe, 1_000) == content
            else:
                with pytest.raises(OSError, match="Has more than"):
                    read_bounded(pipe, 1_000)
        finally:
            writer.join()


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--inventory", "{}", "--demand", "{}"),
        ("partition", "show", "{}"),
        ("snapshot", "restore", "{}", "--store", "sqlite:///nowhere"),
        ("provider", "simulated", "--world", "{}", "--state", "state.db"),
        ("provider", "simulated", "--intent-key", "{}", "--state", "state.db"),
        ("conformance", "--target", "localhost:1", "--blob", "{}"),
        ("provider", "simulated", "--catalog", "{}", "--state", "state.db"),
        ("engine", "decide", "{}", "--out", "out.jsonl"),
        ("up", "--nodes", "{}", "--pods", "{}"),
        ("operator", "--kubeconfig", "{}", "--cluster-id", "c", "--shard-addr", "localhost:1", "--bootstrap-stub"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.parametrize("kind", ["device", "sparse"])
def test_commands_refuse_files_without_an_end(command: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    """They name the file and end."""
    file = Path("/dev/zero")
    if kind == "sparse":
        file = tmp_path / "sparse.yaml"
        file.touch()
        os.truncate(file, 1 << 40)
    said = run_here(*(each.format(file) for each in command), cwd=tmp_path)
    assert said.returncode == 2
    assert "Traceback" not in said.stderr
    assert str(file.parent) in said.stderr


@pytest.mark.parametrize("name", ["a.yaml", "a.jsonl"])
@pytest.mark.parametrize("kind", ["device", "sparse"])
def test_cases_of_engines_without_an_end_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    """A folder names its files itself."""
    file = tmp_path / name
    if kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    said = run_here("engine", "check", str(tmp_path))
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert str(file) in said.stderr


def test_lines_are_read_one_by_one_up_to_their_limit(tmp_path: Path) -> None:
    """A file of any size can be read by its lines, a line without an end cannot."""
    file = tmp_path / "lines"
    file.write_bytes(b"12345\n\n1234")
    assert list(bounded_lines(file, 6)) == [b"12345\n", b"\n", b"1234"]
    with pytest.raises(OSError, match="Has a line of more than 5 bytes"):
        list(bounded_lines(file, 5))
    with pytest.raises(OSError, match="Is a device"):
        list(bounded_lines(Path("/dev/zero"), 5))


def test_merges_that_grow_by_themselves_are_refused() -> None:
    """Eleven lines would become nine to the eleventh keys."""
    lines = ["y0: &a0 {k: v}"]
    lines += [f"y{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}" for level in range(1, 12)]
    with pytest.raises(yaml.YAMLError, match="keys are merged"):
        load_yaml("\n".join(lines))


def test_merges_of_a_usual_size_are_read() -> None:
    """A mapping may have as many keys of its own as it is written with."""
    own = ", ".join(f"k{number}: 1" for number in range(MERGED_KEYS_MAX + 1))
    assert load_yaml(f"a: &a {{x: 1}}\nb: {{<<: [*a], y: 2}}\nc: {{{own}}}")["b"] == {"x": 1, "y": 2}
