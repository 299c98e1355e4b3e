"""Writes lines to a terminal without the control characters that foreign names and messages may contain.

Every command prints through this module or through `bigfleet.cli.runtime.console`.
"""

import typer

from bigfleet.cli.visible_text import error_line, visible


def echo(message: object = "") -> None:
    """Write one message and a newline to standard output."""
    typer.echo(visible(str(message)))


def echo_error(message: object) -> None:
    """Write an error to standard error, as one line of bounded length."""
    typer.echo(error_line(message), err=True)
