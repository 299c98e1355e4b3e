"""Equal input gives equal output, byte for byte, in any process (docs/spec/engine.md, introduction)."""

import os
import subprocess
import sys
from pathlib import Path

import bigfleet

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import hashlib
from bigfleet.engine.explain.records import RecordLog
from bigfleet.engine.reference.decide import decide
from tests.engine_cases import fleet_need_of, fleet_options_of, fleet_snapshot_of, load_fleets

digest = hashlib.sha256()
for fleet in load_fleets():
    log = RecordLog()
    needs = [fleet_need_of(record) for record in fleet["demand"]]
    decision = decide(fleet_snapshot_of(fleet), needs, fleet_options_of(fleet), log)
    digest.update(repr((decision, log.records)).encode())
print(digest.hexdigest())
"""


def digest_with(hash_seed: str) -> str:
    """Decide every generated fleet in a process of its own and return the digest of decisions and records."""
    path = os.pathsep.join([str(ROOT), str(Path(bigfleet.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return finished.stdout


def test_decisions_and_records_do_not_depend_on_the_hash_seed() -> None:
    assert digest_with("1") == digest_with("2")
