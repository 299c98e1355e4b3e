"""Where compiled kernels are kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from bigfleet.cli.runtime import kernel_cache

config: Any = numba.config


@pytest.fixture(autouse=True)
def _setting_restored() -> Iterator[None]:
    before = config.CACHE_DIR
    yield
    config.CACHE_DIR = before


def test_the_directory_is_named_by_what_the_kernels_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source is another directory, so that no kernel outlives a change of one that it takes in."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first = kernel_cache.keep_kernels()
    monkeypatch.setattr(kernel_cache, "source_digest", lambda: "another")
    second = kernel_cache.keep_kernels()

    assert first is not None
    assert second is not None
    assert first != second
    assert str(second) == config.CACHE_DIR


def test_without_a_writable_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only place is no failure: each process compiles for itself."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))

    assert kernel_cache.keep_kernels() is None
    assert config.CACHE_DIR == ""
