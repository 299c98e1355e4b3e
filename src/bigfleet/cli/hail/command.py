"""Passes the arguments of `bigfleet hail` to the program that Ganeti starts (docs/spec/partition.md §1).

One parser knows the options, so both names of the program accept the same. Nothing is decided here.
"""

import sys
from typing import Any

import typer
from typer.core import TyperCommand

_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


class HailCommand(TyperCommand):
    """A command all of whose words, `--help` too, are the program's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "context_settings": _WORDS, "add_help_option": False})


def hail(context: typer.Context) -> int:
    """Answer a Ganeti IAllocator message for hosts with exclusive storage; also installed as hail-dedicated."""
    from bigfleet.cli.hail.program import run

    return run("bigfleet hail", context.args, stdin=sys.stdin.buffer, stdout=sys.stdout.buffer, stderr=sys.stderr)
