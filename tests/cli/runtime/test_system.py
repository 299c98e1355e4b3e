"""The logs of every process are JSON lines with the same first facts (docs/spec/provider.md §18)."""

import json
import subprocess
import sys
from datetime import datetime

PROGRAM = """
import logging, structlog
from bigfleet.cli.runtime.system import configure_logging
configure_logging("part")
structlog.get_logger("bigfleet.x").info("it.happened", machine="m-1")
logging.getLogger("library").warning("they say")
"""


def test_a_line_names_time_level_and_event_whoever_wrote_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    ours, theirs = (json.loads(line) for line in done.stderr.splitlines())

    assert ours.keys() == {"time", "level", "event", "component", "machine"}
    assert (ours["level"], ours["event"], ours["component"]) == ("info", "it.happened", "part")
    assert (theirs["level"], theirs["event"], theirs["component"]) == ("warning", "they say", "part")
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in (ours, theirs))
