"""The example program `kwok.sh` with kubectl in its PATH, on a control plane."""

import asyncio
import base64
import json
import os
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from tests.cli.provider.exec_examples import example
from tests.guides import executable
from tests.patience import PATIENCE_SECONDS

BLOB = b"join with the token 9f8e7d6c5b4a"


class KwokProgram:
    """The example with kubectl in its PATH and the provider's name of one test."""

    def __init__(self, plane: ControlPlane, plane_program: Path, folder: Path) -> None:
        self.path = example("kwok.sh", folder)
        executable(folder / "bin" / "kubectl", f'#!/bin/sh\nexec {shlex.quote(str(plane_program))} kubectl "$@"\n')
        self.name = f"kwok-{folder.name.replace('_', '-').lower()[:20].rstrip('-')}"
        self.variables = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(plane.admin_kubeconfig),
            "KWOK_HEARTBEAT_SECONDS": "0.2",
        }
        self.environment = {**os.environ, **self.variables, "KWOK_PROVIDER": self.name, "KWOK_SLOTS": "2"}

    def question(self, operation_id: str, cluster: str = "team-a") -> dict[str, Any]:
        """Return the question about the second machine."""
        machine = {
            "id": f"{self.name}-0001",
            "instance_type": "kwok.16x64",
            "zone": "zone-b",
            "labels": {"rack": "b-17"},
            "host_ref": "op-MADE",
            "cluster": cluster,
        }
        blob = base64.b64encode(BLOB).decode()
        return {"machine": machine, "operation": {"id": operation_id}, "blob": blob, "grace_seconds": 30}

    def run(self, verb: str, question: dict[str, Any] | None = None) -> str:
        """Return what it prints."""
        done = subprocess.run(
            [self.path, verb],
            input=json.dumps(question or {}),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def hosts(self) -> list[dict[str, Any]]:
        """Return the hosts of the inventory."""
        lines = [json.loads(line) for line in self.run("inventory").splitlines()]
        assert lines[-1] == {"end": True, "unread_prefixes": []}
        return [line["host"] for line in lines if "host" in line]

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Run the feed, again whenever it failed; when its standard input closes it must end."""
        inputs: list[asyncio.StreamWriter] = []
        is_over = asyncio.Event()

        async def run() -> None:
            while not is_over.is_set():
                feed = await asyncio.create_subprocess_exec(
                    self.path, "feed", stdin=subprocess.PIPE, env=self.environment
                )
                assert feed.stdin is not None
                inputs.append(feed.stdin)
                if is_over.is_set():
                    feed.stdin.close()
                await feed.wait()

        running = asyncio.create_task(run())
        try:
            yield
        finally:
            is_over.set()
            for each in inputs:
                each.close()
            await asyncio.wait_for(running, PATIENCE_SECONDS)
