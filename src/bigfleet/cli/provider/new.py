"""Defines `bigfleet provider new`: writes a new provider, as a Python project or a program, that can be tested and run.

The files come from `templates/` beside this module. An existing file is never overwritten.
"""

import keyword
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

PYTHON_KIND: Final = "python"
EXEC_KIND: Final = "exec"
#: Programs for `bigfleet provider exec`; each is certified by a test.
EXAMPLES: Final = ("folder.sh", "folder.py", "ipmi.sh", "kwok.sh")
_PROGRAM_MODE: Final = 0o755
NAME_CHARACTERS_MAX: Final = 40
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: Modules that the project itself imports; one of these names would hide them.
_TAKEN: Final = frozenset({"bigfleet", "grpc", "hypothesis", "mypy", "prometheus_client", "pytest", "test", "tests"})
#: Template to the file that it becomes.
_FILES: Final = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "backend.py.tmpl": "$name.py",
    "test_backend.py.tmpl": "tests/test_$name.py",
}


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Module name, such as mycloud; for exec the directory of the program.")
    ],
    directory: Annotated[
        Path | None, typer.Option(metavar="D", help="Directory of the Python project.", show_default="NAME")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="python: a backend class. exec: a program for provider exec.")
    ] = PYTHON_KIND,
    example: Annotated[
        str | None, typer.Option(help=f"Program to begin with, for exec: {', '.join(EXAMPLES)}. [default: folder.sh]")
    ] = None,
) -> None:
    """Create a new provider: a Python project with tests, or a program for provider exec."""
    if kind not in (PYTHON_KIND, EXEC_KIND):
        raise UsageFault(f"--kind: {kind!r} is unknown; choose {PYTHON_KIND} or {EXEC_KIND}")
    if kind == EXEC_KIND:
        if directory is not None:
            raise UsageFault("--directory belongs to --kind python; with --kind exec NAME is the directory")
        program = example or EXAMPLES[0]
        if program not in EXAMPLES:
            raise UsageFault(f"--example: {program!r} is unknown; choose from {', '.join(EXAMPLES)}")
        path = write_example(program, Path(name))
        echo(path)
        echo(f"Next: bigfleet provider exec --program {path} --state {path.stem}.db; replace what it does to machines.")
        return
    if example is not None:
        raise UsageFault("--example belongs to --kind exec; leave it out")
    fault = name_fault(name)
    if fault is not None:
        raise UsageFault(f"NAME: {name!r} {fault}")
    folder = directory or Path(name)
    for path in write_project(name, folder):
        echo(path)
    echo(f"Next: read {folder / 'README.md'}; replace the inside of Substrate in {folder / name}.py.")


def write_example(program: str, folder: Path) -> Path:
    """Write a program that can be run and return its path.

    Raises UsageFault when it exists, and RunFault when it cannot be written.
    """
    source = resources.files("bigfleet.cli.provider").joinpath("templates", EXEC_KIND, f"{program}.tmpl")
    path = folder / program
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text("utf-8"))
        path.chmod(_PROGRAM_MODE)
    except FileExistsError as error:
        raise UsageFault(f"NAME: {error.filename} exists and is not overwritten; name another directory") from error
    except OSError as error:
        raise RunFault(f"NAME: {error.filename}: {error.strerror}; name another directory") from error
    return path


def name_fault(name: str) -> str | None:
    """Return why a name is no module name that a provider can have, and what to do; None when it is one."""
    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        is_near = name.isascii() and _NAME.fullmatch(better) is not None
        hint = f"; write {better}" if is_near else ", such as mycloud"
        return f"is no module name: it takes lower-case letters, digits and single _, a letter first{hint}"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"has {len(name)} characters, at most {NAME_CHARACTERS_MAX} are allowed"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return f"is a word of Python; choose another, such as {name}_provider"
    if name in sys.stdlib_module_names or name in _TAKEN:
        return f"would hide the module of that name; choose another, such as {name}_provider"
    return None


def write_project(name: str, folder: Path) -> list[Path]:
    """Write every file and return the paths in order.

    Raises UsageFault when one of them exists, before anything is written, and RunFault when one cannot be written.
    """
    words = _words(name)
    contents = {folder / _filled(place, words): _template(source, words) for source, place in _FILES.items()}
    for path in contents:
        if path.exists() or path.is_symlink():
            raise UsageFault(f"--directory: {path} exists and is not overwritten; name another directory")
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise RunFault(f"--directory: {error.filename}: {error.strerror}; name another folder") from error
    return list(contents)


def _words(name: str) -> Mapping[str, str]:
    parts = name.split("_")
    return {
        "name": name,
        "provider": "-".join(parts),
        "project": "-".join((*parts, "provider")) if parts[-1] != "provider" else "-".join(parts),
        "title": " ".join(parts),
        "backend": "".join(part.capitalize() for part in parts) + "Backend",
    }


def _template(source: str, words: Mapping[str, str]) -> str:
    text = resources.files("bigfleet.cli.provider").joinpath("templates", source).read_text("utf-8")
    return _filled(text, words)


def _filled(text: str, words: Mapping[str, str]) -> str:
    return Template(text).substitute(words)
