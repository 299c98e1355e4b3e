"""Compiles the engine's kernels once before processes are started: each would do so for itself, for a minute."""

import pytest

from bigfleet.engine.columnar.engine import warm_up


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_kept() -> None:
    warm_up()
