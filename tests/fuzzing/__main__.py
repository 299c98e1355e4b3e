"""Fuzzes the readers of input from outside, guided by coverage: `python -m tests.fuzzing --for 10m`.

Each target runs in a process of its own for an equal share of the time, with Atheris. What it finds is written to a
folder and named with the line that repeats it; inputs that reach new code join the corpus if `--keep` is given.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("build") / "fuzzing"
#: An input that takes longer is a finding.
INPUT_SECONDS_MAX = 10
INPUT_BYTES_MAX = 65_536
MEMORY_MIB_MAX = 2_048
#: Corpora hold small inputs alone, because all are read in every run of the tests.
KEPT_BYTES_MAX = 2_000
KEPT_PER_TARGET_MAX = 40
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def main() -> int:
    """Fuzz each target; return 1 when one has a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description="Fuzz readers of input from outside.")
    parser.add_argument("--for", dest="duration", default="10m", metavar="TIME", help="such as 10m, for all targets")
    parser.add_argument("--only", default="", metavar="NAME,...", help="targets; the default is all")
    parser.add_argument("--keep", action="store_true", help="add what reaches new code to the corpus")
    parser.add_argument("--repeat", metavar="FILE", help="feed one file to the target that --only names, and end")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    given, engine_arguments = parser.parse_known_args()
    if given.in_process:
        return _fuzz(given.only, engine_arguments)
    # Only now: the process that fuzzes must import everything with instruments in it.
    from tests.fuzzing.targets import BY_NAME

    names = [name for name in given.only.split(",") if name] or list(BY_NAME)
    unknown = [name for name in names if name not in BY_NAME]
    found = re.fullmatch(r"([0-9]+)([smh])", given.duration)
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is no target; choose from {', '.join(BY_NAME)}")
    if found is None:
        parser.error(f"--for: {given.duration!r} is no time; write 90s, 10m or 2h")
    if given.repeat:
        print(repr(BY_NAME[names[0]].feed(Path(given.repeat).read_bytes()))[:2000])
        return 0
    seconds = max(1, int(found[1]) * _SECONDS[found[2]] // len(names))
    return max(_run(name, seconds, keep=given.keep) for name in names)


def _run(name: str, seconds: int, *, keep: bool) -> int:
    """Fuzz one target in a process; print a line, and return 1 for a finding."""
    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as fresh:
        command = [sys.executable, "-m", "tests.fuzzing", "--in-process", "--only", name]
        ended = subprocess.run(
            [
                *command,
                f"-max_total_time={seconds}",
                f"-timeout={INPUT_SECONDS_MAX}",
                f"-max_len={INPUT_BYTES_MAX}",
                f"-rss_limit_mb={MEMORY_MIB_MAX}",
                f"-artifact_prefix={FOUND}/{name}-",
                "-print_final_stats=1",
                fresh,
                str(CORPUS / name),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONHASHSEED": "0"},
            check=False,
        )
        runs = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
        new = sorted(Path(fresh).iterdir(), key=lambda path: path.stat().st_size)
        line = f"{name:24} {int(runs[1]) if runs else 0:9} inputs in {seconds} s, {len(new)} reach new code"
        if ended.returncode == 0:
            print(line, flush=True)
            if keep:
                _keep(name, new)
            return 0
    artifact = re.search(r"Test unit written to (\S+)", ended.stderr)
    print(f"{line}; FOUND exit {ended.returncode}", flush=True)
    print("\n".join(_shown(ended.stdout) if artifact is not None else ended.stderr.splitlines()[-30:]))
    if artifact is not None:
        print(f"repeat with: python -m tests.fuzzing --only {name} --repeat {artifact[1]}")
    return 1


def _shown(text: str) -> list[str]:
    """Return the traceback of a finding."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if "Uncaught Python exception" in line), 0)
    return lines[start : start + 40]


def _keep(name: str, new: list[Path]) -> None:
    known = len(list((CORPUS / name).iterdir()))
    small = [path for path in new if path.stat().st_size <= KEPT_BYTES_MAX]
    for number, path in enumerate(small[: max(0, KEPT_PER_TARGET_MAX - known)], start=known):
        (CORPUS / name / f"{number:02}").write_bytes(path.read_bytes())


def _fuzz(name: str, engine_arguments: list[str]) -> int:
    """Fuzz one target in this process until the engine ends it."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed; run `make fuzz`, which installs it", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["bigfleet"]):
        from tests.fuzzing.targets import BY_NAME
    target = BY_NAME[name]
    atheris.Setup([sys.argv[0], *engine_arguments], lambda content: target.feed(content) and None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
