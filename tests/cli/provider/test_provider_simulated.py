"""Flags of `bigfleet provider simulated` that contradict each other are refused."""

from pathlib import Path

import pytest

from tests.commands import run_here


@pytest.mark.parametrize("flag", [("--world", "w.yaml"), ("--catalog", "c.csv"), ("--calm",)], ids=lambda flag: flag[0])
def test_the_fake_backend_has_no_simulated_cloud(flag: tuple[str, ...], tmp_path: Path) -> None:
    """The flag would be ignored without a word."""
    said = run_here("provider", "simulated", "--use-fake-backend", *flag, cwd=tmp_path)

    assert said.returncode == 2
    assert said.stderr.startswith(f"bigfleet: --use-fake-backend and {flag[0]} contradict each other: ")


def test_a_provider_name_that_no_machine_id_may_have_is_refused_by_its_flag(tmp_path: Path) -> None:
    """No world is at fault, and none was named."""
    said = run_here("provider", "simulated", "--provider", "ü/x", "--state", "p.db", cwd=tmp_path)

    assert said.returncode == 2
    assert said.stderr.startswith("bigfleet: --provider: 'ü/x' ")
    assert "--world" not in said.stderr
