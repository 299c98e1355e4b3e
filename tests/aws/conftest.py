"""Starts the strict shim once for the tests of this folder, and gives each test one that knows nothing yet."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.client import CREDENTIALS, ShimClient
from tests.patience import wait_until


@pytest.fixture(scope="session")
def shim_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server that ends with the session."""
    folder = tmp_path_factory.mktemp("shim")
    port, log = folder / "port", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.aws.serve_shim", str(port)],
            env={**os.environ, **CREDENTIALS},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: port.exists() or process.poll() is not None, log.read_text)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def shim(shim_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShimClient:
    """Return a shim without faults and instances; botocore finds credentials that moto takes, and no others."""
    for name, value in {**CREDENTIALS, "AWS_CONFIG_FILE": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    client = ShimClient(shim_url)
    client.reset()
    return client
