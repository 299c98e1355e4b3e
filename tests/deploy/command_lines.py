"""Parses the command lines that files of deploy/ hold, with the parser of the command itself."""

from collections.abc import Sequence
from typing import Any

import typer

from bigfleet.cli.coordinator.command import CoordinatorFlags
from bigfleet.cli.main import app
from bigfleet.cli.operator.command import OperatorFlags
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.shard.command import ShardFlags

#: What a command checks beside its parser, before it reads files.
CHECKED: dict[tuple[str, ...], Any] = {
    ("shard",): ShardFlags,
    ("coordinator",): CoordinatorFlags,
    ("operator",): OperatorFlags,
}


class UnknownFlag(Exception):
    """A command line that its command refuses; the message is the command's."""


def parsed_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command line that begins with a subcommand of `bigfleet`, by the names of parameters.

    Raises UnknownFlag when the command would end with 2 before it reads a file.
    """
    command: Any = typer.main.get_command(app)
    rest, path = list(words), []
    while rest and rest[0] in getattr(command, "commands", {}):
        path.append(rest.pop(0))
        command = command.commands[path[-1]]
    try:
        context = command.make_context(" ".join(["bigfleet", *path]), rest)
        flags: dict[str, Any] = context.params
        # What a group takes for a subcommand.
        left = [*context.args, *getattr(context, "_protected_args", ())]
        group = CHECKED.get(tuple(path))
        if group is not None:
            fields = group.__dataclass_fields__
            group(**{name: value for name, value in flags.items() if name in fields}).check()
    except (typer.TyperException, UsageFault) as fault:
        raise UnknownFlag(f"{' '.join(words)}: {fault}") from fault
    if left or not path:
        raise UnknownFlag(f"{' '.join(words)}: {' '.join(left)!r} is no flag")
    return flags
