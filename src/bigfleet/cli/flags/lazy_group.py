"""Loads the module of a subcommand when the subcommand is called.

A command line runs one command. Importing the modules of all commands and building their parsers took longer than most
commands run. This module must never import a command.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.lean_imports import import_without


@dataclass(frozen=True, slots=True)
class CommandSource:
    """The place where a subcommand is defined, and what the help of its group says about it."""

    module: str
    #: First sentence of the help of the subcommand.
    summary: str
    #: Name of a typer.Typer or of a function.
    attribute: str = "app"
    #: Name of the class in the module that parses the function's arguments; SwitchCommand when empty.
    command_class: str = ""

    def load(self, name: str) -> Any:
        """Import the module and return the parser of the subcommand. Typer keeps the type of parsers to itself."""
        # structlog would import rich to draw tracebacks, which no log of ours shows: a tenth of a provider's start.
        import_without("rich", "structlog")
        module = import_module(self.module)
        found = getattr(module, self.attribute)
        # Only a parent with a callback keeps its one command apart from itself.
        parent = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        parent.callback()(_no_options)
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=name)
        else:
            command_class = getattr(module, self.command_class) if self.command_class else SwitchCommand
            parent.command(name, cls=command_class)(found)
        parser: Any = typer.main.get_command(parent)
        return parser.commands[name]


def _no_options() -> None:
    """Stand in for the options of a parent."""


class _LazyCommands(Mapping[str, Any]):
    """Subcommands by name; each is loaded when it is first read."""

    def __init__(self, sources: Mapping[str, CommandSource]) -> None:
        self._sources = sources
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._sources[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class LazyGroup(HelpGroup):
    """A group that loads a subcommand when it is called; the group's own help loads none."""

    sources: ClassVar[Mapping[str, CommandSource]] = MappingProxyType({})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _LazyCommands(self.sources)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the subcommands, in the order of the help."""
        return list(self.sources)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, source.summary) for name, source in self.sources.items()])
