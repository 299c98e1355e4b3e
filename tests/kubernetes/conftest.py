"""Starts one real control plane for the tests of a worker, and gives each test a cluster with machines of its own."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bigfleet.demo.kubernetes.control_plane import PROGRAM_VARIABLE, ControlPlane, ControlPlaneError, program_from
from tests.kubernetes.cluster import ClosedLoop, ClusterUnderTest, new_plane
from tools.build_controlplane import program_path

#: Turns a skip into a failure; CI sets it.
REQUIRE_VARIABLE = "BIGFLEET_REQUIRE_KUBERNETES"
MISSING = (
    "NO KUBERNETES CONTROL PLANE: what BigFleet does in a real cluster is NOT PROVEN. Install Go 1.26 and run"
    " `make controlplane`; {reason}"
)


#: Takes longer than any other file.
LONGEST = Path(__file__).with_name("kwok") / "test_kwok_certified.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest file: the worker that began it last would be the only one at work for minutes."""
    items.sort(key=lambda item: item.path != LONGEST)


@pytest.fixture(scope="session")
def control_plane_program() -> Path:
    """The program that `make controlplane` builds: the one that is named, else the one that is cached."""
    cached = program_path(os.environ)
    named = os.environ.get(PROGRAM_VARIABLE) or str(cached)
    try:
        return program_from({PROGRAM_VARIABLE: named})
    except ControlPlaneError as error:
        reason = MISSING.format(reason=error)
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def control_plane(control_plane_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane that the tests of a worker share; it belongs to no event loop."""
    plane = new_plane(control_plane_program, tmp_path_factory.mktemp("plane") / "plane")
    asyncio.run(plane.start())
    yield plane
    asyncio.run(plane.stop())


@pytest.fixture(scope="session")
def second_plane(control_plane_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A second one beside `control_plane`, for tests of several clusters; it starts with the first such test."""
    plane = new_plane(control_plane_program, tmp_path_factory.mktemp("second-plane") / "plane")
    asyncio.run(plane.start())
    yield plane
    asyncio.run(plane.stop())


@pytest.fixture
async def second_cluster(second_plane: ControlPlane) -> AsyncIterator[ClusterUnderTest]:
    """The second control plane, with machines that end with the test."""
    async with ClusterUnderTest(second_plane) as opened:
        yield opened


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[ClusterUnderTest]:
    """The shared control plane, with machines that end with the test."""
    async with ClusterUnderTest(control_plane) as opened:
        yield opened


@pytest.fixture
async def namespace(cluster: ClusterUnderTest) -> str:
    """A namespace of the test's own."""
    return await cluster.make_namespace()


@pytest.fixture(scope="session")
def definitions(control_plane: ControlPlane) -> list[str]:
    """The names of our custom resource definitions, installed and served (deploy/crds)."""

    async def install() -> list[str]:
        async with ClusterUnderTest(control_plane) as opened:
            return await opened.install_definitions()

    return asyncio.run(install())


@pytest.fixture
async def closed_loop(control_plane_program: Path, tmp_path: Path) -> AsyncIterator[ClosedLoop]:
    """Starts as many clusters as the test asks for; they end with the test."""
    async with ClosedLoop(control_plane_program, tmp_path) as loop:
        yield loop
