"""Parses switches: `--name`, `--name=true` and `--name=false` (docs/spec/provider.md §19), and refuses empty paths.

Click supports `--name/--no-name` only. A switch never consumes the next token. An empty path, as of a variable of a
shell that is not set, would be the current directory.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperOption

from bigfleet.cli.flags.help_text import HelpCommand, HelpGroup
from bigfleet.cli.runtime.failures import UsageFault

_VALUES: Final = {"true": True, "false": False}


class SwitchCommand(HelpCommand):
    """A command whose switches may be given a value with `=`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name=true|false` as click reads it, then parse. Typer keeps the type of `ctx` to itself."""
        tokens = _plain_tokens(self.params, args)
        _refuse_empty_paths(self, ctx, tokens)
        return super().parse_args(ctx, tokens)


class SwitchGroup(HelpGroup):
    """A group whose own switches may be given a value with `=`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name=true|false` as click reads it, then parse. Typer keeps the type of `ctx` to itself."""
        tokens = _plain_tokens(self.params, args)
        _refuse_empty_paths(self, ctx, tokens)
        return super().parse_args(ctx, tokens)


def _refuse_empty_paths(command: Any, ctx: Any, tokens: list[str]) -> None:
    """Raise UsageFault for a file or directory that is given and empty."""
    values, _rest, _order = command.make_parser(ctx).parse_args(args=list(tokens))
    for parameter in command.params:
        given = values.get(parameter.name)
        texts = given if isinstance(given, (list, tuple)) else (given,)
        if "" in texts and parameter.type_descriptor.annotation in (Path, list[Path]):
            is_option = parameter.param_type_name == "option"
            label = parameter.opts[0] if is_option else (parameter.metavar or parameter.name.upper()).rstrip(".")
            may_be_absent = is_option and not parameter.required
            raise UsageFault(
                f"{label} is empty; name a file or directory{', or leave the option out' if may_be_absent else ''}"
            )


def _plain_tokens(parameters: Iterable[Any], tokens: Iterable[str]) -> list[str]:
    switches = {
        option: (option, parameter.secondary_opts[0] if parameter.secondary_opts else None)
        for parameter in parameters
        if isinstance(parameter, TyperOption) and parameter.is_flag
        for option in parameter.opts
    }
    return [_plain(token, switches) for token in tokens]


def _plain(token: str, switches: dict[str, tuple[str, str | None]]) -> str:
    name, equals, text = token.partition("=")
    if not equals or name not in switches:
        return token
    if text not in _VALUES:
        raise typer.BadParameter(f"{name}: {text!r} is neither true nor false")
    on, off = switches[name]
    if _VALUES[text]:
        return on
    if off is None:
        raise typer.BadParameter(f"{name} cannot be switched off")
    return off
