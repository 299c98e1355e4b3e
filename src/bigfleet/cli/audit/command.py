"""Defines `bigfleet audit verify FILE...`: reports whether an audit log is complete, and lists its faults.

docs/spec/shard.md §13. Exit 0 for a complete log, 1 for a damaged one, 2 for a wrong call or a file that cannot be
read. It never writes to a log.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo
from bigfleet.cli.visible_text import error_line

if TYPE_CHECKING:
    from bigfleet.shard.audit.log import AuditHead
    from bigfleet.shard.audit.verification import Checked

#: A longer line is none of ours; a device without line feeds must not fill the memory.
_LINE_BYTES_MAX = 1024 * 1024

app = typer.Typer(cls=HelpGroup, help="Check the audit log of a shard.", no_args_is_help=True)

_Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of one audit log, in any order.")]
_Anchor = Annotated[
    str | None,
    typer.Option(
        metavar="SEQUENCE:CHAIN", help="Head that an earlier verification printed; the log must still contain it."
    ),
]


@app.callback()
def audit() -> None:
    """Check the audit log of a shard."""


@app.command(cls=SwitchCommand)
def verify(files: _Files, anchor: _Anchor = None) -> None:
    """Verify that no line was changed, moved, added or removed."""
    from bigfleet.shard.audit.verification import FINDINGS_MAX, check

    noted = _read_anchor(anchor) if anchor is not None else None
    with ExitStack() as stack:
        opened = [(path, stack.enter_context(_open(path))) for path in files]
        opened.sort(key=lambda each: _first_sequence(*each))
        checked = check(((str(path), _lines(path, content)) for path, content in opened), noted)
    if not checked.findings:
        echo(_sound(checked, files))
        return
    for finding in checked.findings:
        place = f"{finding.file}:{finding.line}" if finding.line else finding.file
        echo(error_line(f"{place}: {finding.fault.value}: {finding.text}"))
    more = ", or more; the rest was not looked at" if len(checked.findings) >= FINDINGS_MAX else ""
    count = len(checked.findings)
    raise RunFault(f"the audit log is damaged: {count} {'finding' if count == 1 else 'findings'}{more}")


def _sound(checked: "Checked", files: Sequence[Path]) -> str:
    what = f"{checked.records:,} records in {len(files)} {'file' if len(files) == 1 else 'files'}"
    if checked.head is None:
        # A shard makes the file when it starts, before its first action.
        are = "the file is empty" if len(files) == 1 else "the files are empty"
        return f"OK: {what}: {are}; --anchor shows whether it had records before"
    span = f"{checked.first_sequence:,} to {checked.head.sequence:,}"
    older = "" if checked.first_sequence == 1 else "; the records before are in none of these files"
    return f"OK: {what}, number {span}{older}\nhead: {checked.head}"


def _read_anchor(text: str) -> "AuditHead":
    from bigfleet.shard.audit.log import AuditHead

    number, colon, chain = text.partition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= 19
    is_chain = len(chain) == 64 and set(chain) <= set("0123456789abcdef")
    if not colon or not is_number or not is_chain:
        raise UsageFault(
            f"--anchor: {text!r} is not a head; use the SEQUENCE:CHAIN that an earlier verification printed"
        )
    return AuditHead(int(number), chain)


def _open(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():
            raise UsageFault(
                f"{path}: {'is not a file' if path.exists() else 'does not exist'}; name a file of the log"
            )
        return path.open("rb")
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; name a file that can be read") from error


def _first_sequence(path: Path, content: IO[bytes]) -> int:
    """Return the number of the first record, so that files are read in the order in which they were written."""
    from bigfleet.shard.audit.log import read_line

    line = read_line(next(_lines(path, content), b"").removesuffix(b"\n"))
    content.seek(0)
    return line.sequence if line is not None else 0


def _lines(path: Path, content: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from iter(lambda: content.readline(_LINE_BYTES_MAX), b"")
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; name a file that can be read") from error
