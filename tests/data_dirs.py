"""Where large data for tests lies, when it is there: facts from public sources that the project does not carry.

A folder is named by an environment variable, else looked for beside the checkout. A test that needs one skips without
it and says how to give it.
"""

import os
from pathlib import Path

TRACE_VARIABLE = "BIGFLEET_TRACE_DIR"
TRACE_NODES = "openb_node_list_all_node.csv"
TRACE_PODS = "openb_pod_list_default.csv"
TRACE_ABSENT = (
    f"the public GPU cluster trace is not here; set {TRACE_VARIABLE} to the folder with {TRACE_NODES} and {TRACE_PODS}"
)


def trace_dir() -> Path | None:
    """Return the folder of the public GPU cluster trace of 2023, or None when it is not there."""
    named = os.environ.get(TRACE_VARIABLE)
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "gpu-cluster-trace-2023"
    folder = Path(named) if named else beside
    return folder if (folder / TRACE_NODES).is_file() and (folder / TRACE_PODS).is_file() else None
