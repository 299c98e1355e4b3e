"""`bigfleet audit verify`: what it says of a whole log, of one that is not, and of a wrong call."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bigfleet.cli.audit.command import app
from bigfleet.cli.flags.values import parse_size_bytes
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.shard.audit.log import GENESIS, chained
from bigfleet.shard.audit.verification import FINDINGS_MAX
from tests.commands import run_here
from tests.processes import run_bigfleet


def run(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def lines_of(count: int, *, first: int = 1, previous: str = GENESIS) -> tuple[list[bytes], str]:
    """Return the lines of a file and the chain of its last record."""
    lines: list[bytes] = []
    for number in range(first, first + count):
        line, previous = chained({"time": "2026"}, number, previous, has_previous=not lines)
        lines.append(line)
    return lines, previous


@pytest.fixture
def log(tmp_path: Path) -> list[Path]:
    """A log in two files of 2,000 and 3 records, the older first."""
    older, chain = lines_of(2000)
    newer, _chain = lines_of(3, first=2001, previous=chain)
    paths = [tmp_path / "audit.log.1", tmp_path / "audit.log"]
    for path, lines in zip(paths, (older, newer), strict=True):
        path.write_bytes(b"".join(lines))
    return paths


def test_a_whole_log_is_told_with_its_counts_and_its_head(log: list[Path]) -> None:
    """Whatever the order in which a shell names the files."""
    older, newer = log
    result = run(newer, older)

    head = lines_of(3, first=2001, previous=lines_of(2000)[1])[1]
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "OK: 2,003 records in 2 files, number 1 to 2,003",
        f"head: 2003:{head}",
    ]


def test_a_log_whose_beginning_was_rotated_away_says_so(log: list[Path]) -> None:
    """It is whole as far as it goes."""
    result = run(log[1])

    assert result.exit_code == 0
    assert result.output.splitlines()[0] == (
        "OK: 3 records in 1 file, number 2,001 to 2,003; the records before are in none of these files"
    )


def test_an_empty_log_is_whole(tmp_path: Path) -> None:
    """As a shard leaves it that has done nothing."""
    (tmp_path / "audit.log").touch()

    assert run(tmp_path / "audit.log").output == (
        "OK: 0 records in 1 file: the file is empty; --anchor shows whether it had records before\n"
    )


@pytest.mark.rule("shard 13/10")
def test_what_is_wrong_is_named_by_file_line_and_kind(log: list[Path]) -> None:
    """One line each; the exit tells."""
    older, newer = log
    lines = older.read_bytes().splitlines(keepends=True)
    older.write_bytes(b"".join([*lines[:9], lines[9].replace(b"2026", b"2027"), *lines[10:99], *lines[100:]]))
    newer.write_bytes(newer.read_bytes()[:-1])
    said = run_bigfleet("audit", "verify", str(older), str(newer))

    assert said.returncode == 1
    assert said.stdout.splitlines() == [
        f"{older}:10: edited: record 10 is not as it was written after record 9",
        f"{older}:100: gap: record 100 is missing before this line",
        f"{newer}:3: truncated: the last line has no end: its record was cut off",
    ]
    assert said.stderr == "bigfleet: the audit log is damaged: 3 findings\n"


def test_a_log_that_is_none_stops_after_some_findings(tmp_path: Path) -> None:
    """A large file of something else is not told line by line."""
    (tmp_path / "noise").write_text("noise\n" * 1000)
    result = run(tmp_path / "noise")

    assert isinstance(result.exception, RunFault)
    assert len(result.output.splitlines()) == FINDINGS_MAX
    assert "or more; the rest was not looked at" in str(result.exception)


@pytest.mark.rule("shard 13/10")
def test_a_head_that_was_noted_finds_what_is_gone_from_the_end(log: list[Path]) -> None:
    """The lines that are left know nothing of it."""
    head = run(*log).output.splitlines()[1].removeprefix("head: ")
    assert run(*log, "--anchor", head).exit_code == 0
    newer = log[1]
    newer.write_bytes(b"".join(newer.read_bytes().splitlines(keepends=True)[:1]))

    assert run(*log).exit_code == 0
    result = run(*log, "--anchor", head)
    assert isinstance(result.exception, RunFault)
    assert result.output == f"{newer}: truncated: record 2003 is missing: a log with it was verified before\n"


@pytest.mark.parametrize("anchor", ["7", "7:abc", "x:" + "0" * 64, "7:" + "g" * 64, "²:" + "0" * 64])
def test_an_anchor_that_is_none_is_refused(log: list[Path], anchor: str) -> None:
    """The line says where one comes from."""
    result = run(*log, "--anchor", anchor)

    assert isinstance(result.exception, UsageFault)
    assert str(result.exception) == (
        f"--anchor: {anchor!r} is not a head; use the SEQUENCE:CHAIN that an earlier verification printed"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, or no file at all."""
    for path, finding in [(tmp_path / "missing", "does not exist"), (tmp_path, "is not a file")]:
        said = run_here("audit", "verify", str(path))
        assert (said.returncode, said.stderr) == (2, f"bigfleet: {path}: {finding}; name a file of the log\n")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("256MiB", 268_435_456), ("1GiB", 2**30), ("64KiB", 65_536), ("10B", 10), ("7", 7)]
)
def test_sizes_are_read_with_their_units(text: str, size_bytes: int) -> None:
    """Binary units, as the flags of a shard name them."""
    assert parse_size_bytes(text, "--x") == size_bytes


@pytest.mark.parametrize("text", ["", "0", "0MiB", "-1", "1MB", "1.5GiB", "1 MiB", "9" * 40])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    """Naming the flag."""
    with pytest.raises(UsageFault, match=r"--x: .* is not a size"):
        parse_size_bytes(text, "--x")
