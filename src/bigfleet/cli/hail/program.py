"""Runs `hail-dedicated`: reads one IAllocator message, prints one line of JSON, and ends.

docs/spec/partition.md §1. Ganeti starts it for each question, so it imports no other command and no library that it
does not need (docs/adr/0120-the-allocator-starts-anew.md). Exit codes are those of `hail`: 0 with any answer; 1 with
one line on standard error and nothing on standard output; 2 for an unknown option. It writes to its two outputs only.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, TextIO

from bigfleet.cli.visible_text import error_line
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.partition.answer import AllocationOptions, HailAnswer, answer, refusal_line
from bigfleet.partition.cluster import STATIC_KVM_MIB
from bigfleet.partition.document import WrongInput

#: Set for the ordinary allocator, which may turn out to be ourselves: it then refuses instead of asking again.
DELEGATED = "BIGFLEET_HAIL_DELEGATED"
#: From here on `-v` says which metric decides.
_VERBOSE = 2


class _Failed(Exception):
    """The program ends with exit code 1 and this line."""


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong with a call in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{error_line(f'{self.prog}: {message}')}; see {self.prog} --help\n")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        description="Answer a Ganeti IAllocator message for hosts with exclusive storage: the host, or the pair of"
        " hosts, on which the fewest possible placements are lost.",
    )
    add = parser.add_argument
    add("file", nargs="*", metavar="FILE", help="the message in JSON; - reads standard input")
    add("--sequential", action="store_true", help="multi-allocate: each instance sees those before it, any group")
    add(
        "--ordinary-allocator",
        metavar="PATH",
        help="program that gets the requests that are not dedicated, such as Ganeti's own hail",
    )
    add("--ignore-soft-errors", action="store_true", help="leave out the soft checks of primary hosts")
    add("--restrict-allocation-to", metavar="HOST,...", help="the only hosts to use, even if the request names others")
    add(
        "--static-kvm-node-memory",
        default=str(STATIC_KVM_MIB),
        metavar="MIB",
        help="what each host keeps for itself under KVM; 0: what it reports (default: %(default)s)",
    )
    add("--no-capacity-checks", action="store_true", help="for the ordinary allocator; the dedicated metric has none")
    add("--ignore-dynu", action="store_true", help="for the ordinary allocator; the dedicated metric knows no load")
    add("-v", "--verbose", action="count", default=0, help="twice: say on standard error that the request is dedicated")
    add("-V", "--version", action="store_true", help="print the version and exit")
    return parser


def main() -> None:
    """Run as a program and exit."""
    # What is read lives until the end: looking for cycles in it would take a fifth of the time.
    gc.disable()
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        sys.exit(1)  # started with one of them closed: there is nowhere to write to
    try:
        code = run("hail-dedicated", sys.argv[1:], stdin=sys.stdin.buffer, stdout=sys.stdout.buffer, stderr=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        # A full disk, or a closed pipe; the interpreter would try again to write it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"Error: the answer could not be written: {error.strerror}\n")
        code = 1
    sys.exit(code)


def run(program: str, arguments: Sequence[str], *, stdin: BinaryIO, stdout: BinaryIO, stderr: TextIO) -> int:
    """Answer once and return the exit code. Help and a wrong call leave as SystemExit, as argparse has it."""
    given = _parser(program).parse_intermixed_args(arguments)
    try:
        if given.version:
            stdout.write(f"{program} {_version()}\n".encode())
            return 0
        return _answer(given, stdin, stdout, stderr)
    except (_Failed, WrongInput) as error:
        stderr.write(f"Error: {error_line(error)}\n".encode("ascii", "backslashreplace").decode("ascii"))
        return 1
    finally:
        stdout.flush()


def _version() -> str:
    from bigfleet import installed_version

    return f"(bigfleet) version {installed_version()}"


def _answer(given: argparse.Namespace, stdin: BinaryIO, stdout: BinaryIO, stderr: TextIO) -> int:
    content = _read(given.file, stdin)
    among = given.restrict_allocation_to
    options = AllocationOptions(
        force=given.ignore_soft_errors,
        among=None if among is None else frozenset(among.split(",")),
        static_kvm_mib=_whole(given.static_kvm_node_memory, "--static-kvm-node-memory"),
        is_sequential=given.sequential,
    )
    answered = answer(content, options)
    if answered.line is None and given.ordinary_allocator is not None and DELEGATED not in os.environ:
        return _delegate(given, content, stdout, stderr)
    if answered.warnings:
        lines = "".join(f"  - {error_line(line)}\n" for line in answered.warnings)
        stderr.write(f"Warning: cluster has inconsistent data:\n{lines}\n")
    if answered.line is not None and given.verbose >= _VERBOSE:
        stderr.write("Allocation on a dedicated cluster; using lost-allocations metrics.\n")
    line = _refusal(answered) if answered.line is None else answered.line
    # A name may hold half of a surrogate pair; its escape is JSON, too.
    stdout.write(line.encode("utf-8", "backslashreplace") + b"\n")
    return 0


def _refusal(answered: HailAnswer) -> str:
    """Return the reply to a request that the dedicated metric has no say in."""
    return refusal_line(
        f"this {answered.kind} request is for the ordinary metric: hail-dedicated places instances where every host in"
        " question has exclusive storage; say with --ordinary-allocator PATH who answers the others"
    )


def _whole(text: str, option: str) -> int:
    """Return a number of the command line. Not argparse's `int`: a wrong one is exit code 1 here, as it is in hail."""
    try:
        return int(text)
    except ValueError as error:
        raise _Failed(f"{option}: {text!r} is no whole number of MiB") from error


def _read(files: Sequence[str], stdin: BinaryIO) -> bytes:
    if len(files) != 1:
        raise _Failed(
            "Only one argument is accepted (the input file)" if files else "This program needs an input file."
        )
    if files[0] == "-":
        content = stdin.read(CONFIGURATION_BYTES_MAX + 1)
        if len(content) > CONFIGURATION_BYTES_MAX:
            raise _Failed(f"standard input: Has more than {CONFIGURATION_BYTES_MAX:,} bytes")
        return content
    if not files[0]:
        raise _Failed("The name of the input file is empty.")
    try:
        return read_bounded(Path(files[0]), CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise _Failed(f"{files[0]}: {error.strerror}") from error


def _delegate(given: argparse.Namespace, content: bytes, stdout: BinaryIO, stderr: TextIO) -> int:
    """Hand the message to the ordinary allocator, with the options that it knows, and pass on what it says."""
    import subprocess

    options = [
        *(["--ignore-soft-errors"] if given.ignore_soft_errors else []),
        *(["--no-capacity-checks"] if given.no_capacity_checks else []),
        *(["--ignore-dynu"] if given.ignore_dynu else []),
        *(
            [f"--restrict-allocation-to={given.restrict_allocation_to}"]
            if given.restrict_allocation_to is not None
            else []
        ),
        f"--static-kvm-node-memory={given.static_kvm_node_memory}",
        *(["-v"] * given.verbose),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - the administrator named it; nothing of the message is on its command line
            [given.ordinary_allocator, "-", *options],
            input=content,
            capture_output=True,
            check=False,
            env={**os.environ, DELEGATED: "1"},
        )
    except OSError as error:
        raise _Failed(f"--ordinary-allocator {given.ordinary_allocator}: {error.strerror}") from error
    stderr.write(done.stderr.decode("utf-8", "replace"))
    stdout.write(done.stdout)
    return done.returncode if done.returncode >= 0 else 1
