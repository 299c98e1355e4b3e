"""Defines how a command fails: one line with place and remedy, and an exit code.

Exit 2 is a wrong call or a wrong file given with it, exit 1 a run that failed (docs/spec/shard.md §1). A user's
mistake never shows a traceback.
"""

from enum import Enum
from typing import TypeVar

Choice = TypeVar("Choice", bound=Enum)


class CommandFault(Exception):
    """A failure with a message for a person: one line, or several arguments with one line each."""

    exit_code = 1

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the message."""
        return tuple(map(str, self.args))


class UsageFault(CommandFault):
    """The command line, or a file named on it, is wrong."""

    exit_code = 2


class RunFault(CommandFault):
    """The command was right and could not do its work."""

    exit_code = 1


def choice_of(choices: type[Choice], flag: str, text: str) -> Choice:
    """Return the member of an enum whose value is a flag's text. Raises UsageFault naming the choices."""
    try:
        return choices(text)
    except ValueError:
        known = ", ".join(each.value for each in choices)
        raise UsageFault(f"{flag}: {text!r} is unknown; choose one of {known}") from None


def root_cause(error: BaseException) -> BaseException:
    """Return the first error inside a group of errors, which says nothing by itself; another error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_line(error: object) -> str:
    """Return the text of another library's error, white space folded, so that it fits into a message of one line."""
    return " ".join(str(error).split())
