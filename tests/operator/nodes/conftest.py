"""The cluster of each test of the operator's node side."""

from collections.abc import AsyncIterator

import pytest

from tests.operator.nodes.node_world import NodeWorld


@pytest.fixture
async def world() -> AsyncIterator[NodeWorld]:
    world = NodeWorld()
    yield world
    await world.stop()
