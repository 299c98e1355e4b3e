"""Compiles every kernel into a set on disk, in as many processes as there are cores.

Each module is compiled in a process of its own, after the modules that it calls, so that the memory of the compiler is
given back and no module is compiled twice. A second build of the same set waits for the first.
"""

import ast
import fcntl
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from bigfleet.cli.runtime.early_end import end_with_parent
from bigfleet.cli.runtime.kernel_cache import use_set
from bigfleet.cli.runtime.kernel_set import (
    INCOMPLETE,
    MANIFEST,
    KernelTarget,
    Manifest,
    current_target,
    examine,
    read_manifest,
    write_manifest,
)

_COLUMNAR: Final = "bigfleet.engine.columnar.kernels"
#: Every module that holds kernels, those that take longest first.
KERNEL_MODULES: Final = (
    *(f"{_COLUMNAR}.{name}" for name in ("base", "gang_domains", "credit", "acquisition", "preemption")),
    "bigfleet.planner.compiled",
    *(f"{_COLUMNAR}.{name}" for name in ("earmark_replay", "sweeps", "pod_credit")),
    "bigfleet.recording.kernel",
)
#: Lets the engine that decides on the same cores go first.
BACKGROUND_NICENESS: Final = 10
#: For a build to end the processes that it started, before it is killed.
_END_SECONDS_MAX: Final = 5.0


class KernelBuildFault(Exception):
    """A set cannot be built; the message names the place and the cause."""


#: Called when a module is done: its name, the number of its kernels, the seconds that it took.
OnCompiled = Callable[[str, int, float], None]


def build_kernels(
    directory: Path, *, cpu: str | None = None, jobs: int | None = None, on_compiled: OnCompiled | None = None
) -> Manifest:
    """Make a directory a complete set for this process, or for one of `kernel_set.LEVELS`; return its manifest.

    A set that is complete and fits is left as it is. Raises KernelBuildFault when the directory cannot be written,
    holds anything else, or a module cannot be compiled.
    """
    target = current_target(cpu)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            return _build(directory, target, jobs or os.cpu_count() or 1, on_compiled or (lambda *_: None))
    except OSError as error:
        raise KernelBuildFault(
            f"{error.filename or directory}: {error.strerror}; choose a directory that can be written"
        ) from error


def _build(directory: Path, target: KernelTarget, jobs: int, on_compiled: OnCompiled) -> Manifest:
    found = read_manifest(directory)
    if isinstance(found, Manifest) and found.target == target and not isinstance(examine(directory, target), str):
        return found
    _check_own(directory)
    if found != INCOMPLETE:
        _clear(directory)
    was_begun = any(directory.glob("*/*.nbi"))
    try:
        _compile_all(directory, target, jobs, on_compiled)
    except KernelBuildFault:
        # Nobody vouches for files that a build has left which did not end.
        if not was_begun:
            raise
        _clear(directory)
        _compile_all(directory, target, jobs, on_compiled)
    return write_manifest(directory, target)


def _compile_all(directory: Path, target: KernelTarget, jobs: int, on_compiled: OnCompiled) -> None:
    waiting = dict(_calls())
    running: dict[Future[float], str] = {}
    context = multiprocessing.get_context("spawn")
    # One process for each module, so that its memory is given back.
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1, initializer=end_with_parent) as pool:
        while waiting or running:
            under_way = {*waiting, *running.values()}
            for module in [each for each, called in waiting.items() if not called & under_way]:
                del waiting[module]
                running[pool.submit(_compile, module, directory, target)] = module
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                module = running.pop(done)
                seconds = _seconds_of(done, module)
                on_compiled(module, len(list((directory / module).glob("*.nbi"))), seconds)


def _seconds_of(done: "Future[float]", module: str) -> float:
    try:
        return done.result()
    except BrokenProcessPool as error:
        raise KernelBuildFault(f"{module}: the process that compiled it died; it needs 600 MiB of memory") from error
    except Exception as error:
        raise KernelBuildFault(f"{module}: {type(error).__name__}: {error}") from error


def _compile(module: str, directory: Path, target: KernelTarget) -> float:
    """Compile one module in this process; return the seconds that it took."""
    began = time.monotonic()
    use_set(directory, target)
    _print_without_addresses()
    import_module(module)
    return time.monotonic() - began


def _print_without_addresses() -> None:
    """Let equal sources make equal files: Numba writes into each how it prints the functions that the kernel calls."""
    dispatcher: Any = import_module("numba.core.dispatcher")

    def named(self: Any) -> str:
        return f"{type(self).__name__}({self.py_func.__module__}.{self.py_func.__qualname__})"

    dispatcher._DispatcherBase.__repr__ = named


def _calls() -> Iterator[tuple[str, set[str]]]:
    """Yield each module that holds kernels with those whose kernels it calls, as its imports say."""
    root = files("bigfleet")
    for module in KERNEL_MODULES:
        source = root.joinpath(*module.split(".")[1:-1], f"{module.rsplit('.', 1)[1]}.py").read_text(encoding="utf-8")
        imported = {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        # What calls nothing still waits for the first: a planner that starts now compiles its own loops meanwhile.
        yield module, (imported & set(KERNEL_MODULES) or {KERNEL_MODULES[0]}) - {module}


def _check_own(directory: Path) -> None:
    """Raise KernelBuildFault when the directory holds what no build has written."""
    own = (_LOCK, MANIFEST, f"{MANIFEST}.new", *KERNEL_MODULES)
    foreign = [path.name for path in directory.iterdir() if path.name not in own]
    if foreign:
        raise KernelBuildFault(f"{directory} holds {foreign[0]}, which is not a kernel; choose an empty directory")


def _clear(directory: Path) -> None:
    # The manifest first: without it the rest does not count as a set.
    (directory / MANIFEST).unlink(missing_ok=True)
    for module in KERNEL_MODULES:
        shutil.rmtree(directory / module, ignore_errors=True)


_LOCK: Final = ".lock"


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory while it is built; its holder's end releases it."""
    with (directory / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BackgroundBuild:
    """Builds a set in a child process, so that this process never holds the compiler's memory."""

    def __init__(self, directory: Path) -> None:
        """Start nothing yet."""
        self.directory = directory
        self._process = multiprocessing.get_context("spawn").Process(
            target=_build_in_background, args=(directory,), name="kernels"
        )

    def start(self) -> None:
        """Start the process."""
        self._process.start()

    @property
    def is_over(self) -> bool:
        """Return whether the process has ended, whether or not it built the set."""
        return self._process.exitcode is not None

    @property
    def compiled(self) -> int:
        """How many kernels are on disk now."""
        return sum(1 for _ in self.directory.glob("*/*.nbi"))

    def wait(self) -> bool:
        """Wait for the end, in any thread; return whether the set is complete."""
        self._process.join()
        return self._process.exitcode == 0

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_END_SECONDS_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _build_in_background(directory: Path) -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, _end)
    os.nice(BACKGROUND_NICENESS)
    try:
        build_kernels(directory)
    except KernelBuildFault as fault:
        raise SystemExit(f"kernels cannot be built: {fault}") from fault


def _end(_signal: int, _frame: object) -> None:
    """End at once. A build that is killed leaves semaphores, which Python reports on the shard's standard error."""
    for process in multiprocessing.active_children():
        process.kill()
    raise SystemExit(1)
