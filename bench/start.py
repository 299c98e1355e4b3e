"""`python -m bench.start`: how long a shard takes to start, by where its kernels are.

docs/spec/benchmarks.md. Each start is the real `bigfleet shard` command with 100 fake machines, in a process of its
own: without kernels, with those that it has just compiled, and with sets that came with the installation, for this
processor and for one of the portable levels. Processor seconds are those of the shard and of all that it started.
"""

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console
from rich.table import Table

from bench.workloads.streams import free_port
from bigfleet.cli.runtime.kernel_set import LEVELS, missing_features

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_POLL_SECONDS = 0.1
_MACHINES = 100
_COMPILED = "bigfleet_shard_kernels_compiled_ratio"


class Start(msgspec.Struct, frozen=True):
    """What one start took."""

    #: Until `/readyz` answers 200: from here on the shard decides.
    ready_seconds: float
    #: Until every kernel is loaded.
    compiled_seconds: float
    #: Of the shard and of every process that it started, until every kernel was loaded.
    cpu_seconds: float
    #: Of the shard alone, when every kernel is loaded.
    resident_mib: float
    #: Of the shard and of what it started, together, at most; sampled.
    peak_mib: float


@contextmanager
def _shard(environment: dict[str, str], place: Path, metrics_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a shard while the context lasts."""
    arguments = [
        "--fake-provider", str(_MACHINES), "--data-dir", str(place), "--log-level", "error",
        "--listen", f"127.0.0.1:{free_port()}", "--metrics-addr", f"127.0.0.1:{metrics_port}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "bigfleet", "shard", *arguments]
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _page(port: int, path: str) -> str:
    """Return a page, or "" while it is not there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return ""


def _ratio(port: int) -> float:
    lines = _page(port, "/metrics").splitlines()
    return max((float(line.split()[1]) for line in lines if line.startswith(_COMPILED)), default=0.0)


def _stat(pid: int) -> list[str]:
    """Return the fields of a process behind its name, or nothing when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return []


def _tree(pid: int) -> set[int]:
    """Return a process and all that it started."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {child for child, fields in parents.items() if fields and int(fields[1]) in found}
    return found


def _cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and of what it waited for: user, system, and both of the children."""
    return sum(map(int, _stat(pid)[11:15])) / _TICKS_PER_SECOND


def _resident_mib(pid: int) -> float:
    fields = _stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if fields else 0.0


def measure(environment: dict[str, str]) -> Start:
    """Start a shard with these variables and watch it until every kernel is loaded."""
    metrics_port = free_port()
    with TemporaryDirectory() as place:
        began = time.perf_counter()
        with _shard(environment, Path(place), metrics_port) as process:
            ready_seconds = peak_mib = 0.0
            while _ratio(metrics_port) < 1:
                if process.poll() is not None:
                    raise SystemExit(f"the shard ended with {process.returncode}")
                if not ready_seconds and _page(metrics_port, "/readyz"):
                    ready_seconds = time.perf_counter() - began
                peak_mib = max(peak_mib, sum(map(_resident_mib, _tree(process.pid))))
                time.sleep(_POLL_SECONDS)
            compiled_seconds = time.perf_counter() - began
            while not ready_seconds:
                if _page(metrics_port, "/readyz"):
                    ready_seconds = time.perf_counter() - began
                time.sleep(_POLL_SECONDS)
            resident_mib = _resident_mib(process.pid)
            peak_mib = max(peak_mib, resident_mib)
            return Start(ready_seconds, compiled_seconds, _cpu_seconds(process.pid), resident_mib, peak_mib)


def starts(level: str) -> Iterator[tuple[str, Start]]:
    """Yield each kind of start with what it took."""
    with TemporaryDirectory() as place:
        cache, own, portable = (str(Path(place) / name) for name in ("cache", "own", "portable"))
        yield "no kernels", measure({"NUMBA_CACHE_DIR": cache})
        yield "kernels of the first start", measure({"NUMBA_CACHE_DIR": cache})
        build = [sys.executable, "-m", "bigfleet", "kernels", "build", "--to"]
        subprocess.run([*build, own], check=True, stdout=subprocess.DEVNULL)
        yield "a set for this processor", measure({"BIGFLEET_KERNELS": own})
        subprocess.run([*build, portable, "--cpu", level], check=True, stdout=subprocess.DEVNULL)
        yield f"a set for {level}", measure({"BIGFLEET_KERNELS": portable})


def main() -> None:
    """Read the command line, start shards one after the other and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    best = [level for level in LEVELS if not missing_features(level)]
    parser.add_argument("--cpu", choices=list(LEVELS), default=best[-1] if best else next(iter(LEVELS)))
    level = parser.parse_args().cpu
    table = Table(title="start of a shard")
    table.add_column("kernels")
    for name in ("ready s", "compiled s", "CPU s", "resident MiB", "peak MiB"):
        table.add_column(name, justify="right")
    for kind, start in starts(level):
        table.add_row(kind, *(f"{figure:.1f}" for figure in msgspec.structs.astuple(start)))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
