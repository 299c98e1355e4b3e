"""Compiles the engine's kernels once before processes are started: each would do so for itself, for a minute."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_kept() -> None:
    # Not with this file, which may be read before the directory of kept kernels is known.
    from bigfleet.engine.columnar.engine import warm_up

    warm_up()
