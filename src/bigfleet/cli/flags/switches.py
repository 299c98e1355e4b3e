"""Parses switches: `--name`, `--name=true` and `--name=false` (docs/spec/provider.md §19).

Click supports `--name/--no-name` only. A switch never consumes the next token.
"""

from collections.abc import Iterable
from typing import Any, Final

import typer
from typer.core import TyperOption

from bigfleet.cli.flags.help_text import HelpCommand, HelpGroup

_VALUES: Final = {"true": True, "false": False}


class SwitchCommand(HelpCommand):
    """A command whose switches may be given a value with `=`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name=true|false` as click reads it, then parse. Typer keeps the type of `ctx` to itself."""
        return super().parse_args(ctx, _plain_tokens(self.params, args))


class SwitchGroup(HelpGroup):
    """A group whose own switches may be given a value with `=`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name=true|false` as click reads it, then parse. Typer keeps the type of `ctx` to itself."""
        return super().parse_args(ctx, _plain_tokens(self.params, args))


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
