"""A server without TLS and its client, for the tests of what goes over the wire."""

from collections.abc import AsyncIterator

import pytest

from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from tests.operator.kubernetes.http_server import ApiServer, client, serving


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """A server without TLS."""
    async with serving() as served:
        yield served


@pytest.fixture
async def api(server: ApiServer) -> AsyncIterator[HttpKubernetesApi]:
    """A client of the server."""
    async with client(server) as made:
        yield made
