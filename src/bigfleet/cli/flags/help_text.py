"""Formats help as plain text: whole flag names, options under headings, and one full sentence per subcommand.

This module does not parse arguments.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

from typer.core import TyperCommand, TyperGroup

_SENTENCE_CHARACTERS_MAX: Final = 400


class _Sections:
    """Writes options under headings."""

    #: Heading, and the options under it; the others stand under "Options", which comes last.
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})

    def _write_options(self, ctx: Any, parameters: Sequence[Any], formatter: Any) -> None:
        """Write arguments and options. Typer keeps the types of its parameters to itself."""
        titles = {option: title for title, options in self.sections.items() for option in options}
        grouped: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in self.sections}}
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is not None:
                rest = "Arguments" if parameter.param_type_name == "argument" else "Options"
                grouped.setdefault(titles.get(max(parameter.opts, key=len), rest), []).append(record)
        for title, records in grouped.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class HelpCommand(_Sections, TyperCommand):
    """A command whose options stand under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        self._write_options(ctx, self.get_params(ctx), formatter)


class HelpGroup(_Sections, TyperGroup):
    """A group whose help has the whole first sentence of each subcommand, and its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options and subcommands."""
        self._write_options(ctx, self.get_params(ctx), formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [
            (name, command.get_short_help_str(_SENTENCE_CHARACTERS_MAX))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if shown:
            with formatter.section("Commands"):
                formatter.write_dl(shown)
