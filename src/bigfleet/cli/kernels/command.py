"""Defines `bigfleet kernels build` and `bigfleet kernels check`.

Exit 2 for a wrong call, 1 if a set cannot be built or this process cannot use it, else 0.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

app = typer.Typer(cls=HelpGroup, help="Compile the engine's kernels ahead of the first start.", no_args_is_help=True)

_To = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the set. Default: the user's cache directory.")
]
_Cpu = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="x86-64-v2, -v3 or -v4. Default: the processor of this host.")
]
_Jobs = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of processes. Default: one for each core.")]
_From = Annotated[
    Path | None, typer.Option("--from", metavar="DIR", help="Directory of the set. Default: where a shard looks.")
]
_ADVICE: Final = "run: bigfleet kernels build"


@app.command(cls=SwitchCommand)
def build(to: _To = None, cpu: _Cpu = None, jobs: _Jobs = None) -> None:
    """Compile every kernel and write them, with a manifest, to a directory.

    Set BIGFLEET_KERNELS to that directory to use the set from any path, as any user; it is only read.
    """
    from bigfleet.cli.runtime.kernel_build import KernelBuildFault, build_kernels
    from bigfleet.cli.runtime.kernel_cache import user_directory
    from bigfleet.cli.runtime.kernel_set import LEVELS, current_target

    if cpu is not None and cpu not in LEVELS:
        raise UsageFault(f"--cpu: {cpu!r} is unknown; choose one of {', '.join(LEVELS)}")
    directory = to or user_directory(current_target(cpu))

    def compiled(module: str, count: int, seconds: float) -> None:
        echo(f"{count:3} kernels of {module} in {seconds:.1f} s")

    try:
        manifest = build_kernels(directory, cpu=cpu, jobs=jobs, on_compiled=compiled)
    except KernelBuildFault as fault:
        raise RunFault(str(fault)) from fault
    echo(f"{manifest.count} kernels for {manifest.target.cpu} in {directory}")


@app.command(cls=SwitchCommand)
def check(source: _From = None) -> None:
    """Load the kernels and print for each whether it came from disk; exit 1 when any would have to be compiled."""
    from bigfleet.cli.kernels.loading import loaded_kernels
    from bigfleet.cli.runtime.kernel_cache import shipped_directories, use_set, user_directory
    from bigfleet.cli.runtime.kernel_set import KERNELS, current_target, examine

    wanted = current_target()
    places = [source] if source else [*shipped_directories(), user_directory(wanted)]
    for directory in places:
        found = examine(directory, wanted)
        if isinstance(found, str):
            echo(f"miss: {directory}: {found}")
            continue
        use_set(directory, found.target)
        kernels = loaded_kernels()
        for name, is_hit in kernels.items():
            echo(f"{'hit ' if is_hit else 'miss'}  {name}")
        misses = sum(not is_hit for is_hit in kernels.values())
        echo(f"{len(kernels) - misses} of {len(kernels)} kernels for {found.target.cpu} from {directory}")
        raise typer.Exit(1 if misses else 0)
    raise RunFault(f"none of {KERNELS} kernels is on disk for this process; {_ADVICE}")
