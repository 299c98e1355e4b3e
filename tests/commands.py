"""Runs commands in the process of the test: what they say and return is that of a process, half a second sooner."""

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

from bigfleet.cli.main import main
from bigfleet.cli.runtime import system as runtime

#: Where a command is that prints to no terminal.
_ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run_here(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, as `tests.processes.run_bigfleet` does in one of its own.

    It logs nothing: how a process logs would stay with the tests that follow.
    """
    # Some commands write bytes.
    out, err = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    silent = patch.object(runtime, "configure_logging", lambda *_arguments: None)
    with (
        chdir(cwd or Path.cwd()),
        patch.dict(os.environ, _ENVIRONMENT),
        silent,
        patch.object(sys, "argv", ["bigfleet", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return subprocess.CompletedProcess(arguments, code, _content(out), _content(err))


def _content(written: TextIOWrapper) -> str:
    written.seek(0)
    return written.read()
