"""An etcd for the tests that need one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.stores.etcd_process import MISSING, Cluster, cluster_of, etcd_program


@pytest.fixture(scope="session")
def etcd() -> str:
    program = etcd_program()
    if program is None:
        pytest.skip(MISSING)
    return program


@pytest.fixture
async def member(etcd: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """One member."""
    async with cluster_of(etcd, tmp_path, 1) as cluster:
        yield cluster


@pytest.fixture
async def three(etcd: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster of three."""
    async with cluster_of(etcd, tmp_path, 3) as cluster:
        yield cluster
