"""The alerts fire when they should: Prometheus' own tool evaluates them over series that are written down."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CASES = Path(__file__).with_name("alert_rules.yaml")
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: Debian's package prometheus has it")
def test_alerts_fire_when_a_process_dies_restarts_or_is_open_to_all(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = ROOT / "deploy" / "prometheus" / "bigfleet-alerts.yaml"
    cases = tmp_path / "cases.yaml"
    cases.write_text(CASES.read_text(encoding="utf-8").replace("RULES", str(rules)), encoding="utf-8")
    done = subprocess.run([PROMTOOL, "test", "rules", str(cases)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
