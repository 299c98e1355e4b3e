"""Defines `bigfleet provider backup`: copies a provider's state, also while the provider runs.

docs/spec/provider.md §11. Exit 0 for a complete backup, 1 for none, 2 for a wrong call. The state file is copied first,
so that the other files are never older than it.
"""

from pathlib import Path
from typing import Annotated

import typer

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.terminal import echo

#: Suffixes of the files that belong to a state file: the rooms of partitioned hosts, and a simulated cloud.
_COMPANIONS = (".rooms", ".cloud")


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create; must not exist.")],
    state: Annotated[Path, typer.Option("--state", metavar="FILE", help="State file of the provider.")],
) -> None:
    """Copy a provider's state to new files, also while the provider runs."""
    from bigfleet.files.backup import BackupFault, back_up
    from bigfleet.provider.storage.sqlite import back_up_provider

    made: list[Path] = []
    try:
        sizes = {file: back_up_provider(state, file)}
        made.append(file)
        for suffix in _COMPANIONS:
            source, target = state.with_name(state.name + suffix), file.with_name(file.name + suffix)
            if source.exists():
                sizes[target] = back_up(source, target, lambda _copy: None)
                made.append(target)
    except BackupFault as fault:
        for path in made:
            path.unlink()
        raise RunFault(str(fault)) from fault
    for path, size_bytes in sizes.items():
        echo(f"{path}: {size_bytes:,} bytes")
