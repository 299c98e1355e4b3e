"""Defines `bigfleet partition show` and `bigfleet partition compare` (docs/partitioned-hosts.md).

Exit 2 for a wrong call or a wrong file, else 0. This module does not place an instance anywhere but in memory.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

app = typer.Typer(cls=HelpGroup, help="Inspect partitioned hosts and compare placement orders.", no_args_is_help=True)

#: Width of pictures and tables where there is no terminal.
WIDTH: Final = 120

_File = Annotated[Path, typer.Argument(metavar="FILE", help="IAllocator message; a request in it is ignored.")]
_Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as SVG instead of printing it.")]
_Group = Annotated[str | None, typer.Option(metavar="NAME", help="Show only this group, by name or UUID.")]
_Static = Annotated[
    int,
    typer.Option(
        "--static-kvm-node-memory",
        metavar="MIB",
        help="Memory that each host reserves under KVM; 0 uses what it reports.",
    ),
]
_Hosts = Annotated[int, typer.Option(min=1, max=1_000, help="Number of hosts.")]
_Sequences = Annotated[int, typer.Option(min=1, max=10_000, help="Number of random sequences per start and load.")]
_Seed = Annotated[int, typer.Option(help="Seed of the sequences.")]


@app.command(cls=SwitchCommand)
def show(file: _File, svg: _Svg = None, group: _Group = None, static_kvm_node_memory: _Static = 4096) -> None:
    """Draw the hosts of a message, their instances and free capacity."""

    from bigfleet.cli.partition.picture import picture_of, print_picture, svg_of
    from bigfleet.cli.runtime.console import output_console
    from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
    from bigfleet.partition.cluster import read_cluster
    from bigfleet.partition.document import WrongInput, decode

    try:
        message = decode(read_bounded(file, CONFIGURATION_BYTES_MAX))
        cluster = read_cluster(message, static_kvm_mib=static_kvm_node_memory)
    except OSError as error:
        raise UsageFault(f"{file}: {error.strerror}; name a file that can be read") from error
    except WrongInput as error:
        raise UsageFault(f"{file}: {' '.join(str(error).split())}") from error
    groups = [each for each in cluster.groups if group is None or group in (each.name, each.uuid)]
    if group is not None and not groups:
        raise UsageFault(f"--group: {file} has no group {group!r}; name one of its groups, or leave --group out")
    picture = picture_of(cluster, groups)
    if svg is None:
        print_picture(output_console(WIDTH), picture)
        return
    try:
        svg.write_text(svg_of(picture), encoding="utf-8")
    except OSError as error:
        raise RunFault(f"--svg: {svg}: {error.strerror}; name a file that can be written") from error
    echo(f"{svg}: {sum(len(each.hosts) for each in picture)} hosts")


@app.command(cls=SwitchCommand)
def compare(hosts: _Hosts = 20, sequences: _Sequences = 100, seed: _Seed = 1) -> None:
    """Compare four placement orders with random instances."""
    import random

    from bigfleet.cli.partition.orders import compare_orders, table_of
    from bigfleet.cli.runtime.console import output_console

    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose; nothing here is a secret
    output_console(WIDTH).print(table_of(compare_orders(hosts, sequences, rng), hosts=hosts, sequences=sequences))
