"""docs/kubernetes.md: every command of the page, in its order, on a new control plane."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.machine_nodes import nodes_of
from bigfleet.model.ids import ClusterId
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from bigfleet.shard.ports import ProviderRefusal
from tests.kubernetes.cluster import ROOT, ClusterUnderTest, eventually, new_plane
from tests.kubernetes.guide import ShellBlock, background_commands, settings_of, shell_blocks
from tests.kubernetes.pod_commands import pod_command
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port

PAGE = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "bigfleet-system"
PROGRAMS = ("bigfleet-operator", "bigfleet-pod-controller")
CLUSTER = "blue"
MARKS = {"", "settings", "background", "eventually", "processes", "stops the processes"}


def test_the_page_marks_only_what_its_test_knows() -> None:
    blocks = shell_blocks(PAGE)

    assert {block.mark for block in blocks} == MARKS
    assert PAGE.read_text(encoding="utf-8").count("```sh\n") == len(blocks)
    assert set(settings_of(blocks[0])) == {
        "CERTS", "STATE", "CLUSTER", "SHARD", "PROVIDER", "REGISTRY", "TAG", "API_SERVER", "CA_CERT_HASH",
    }  # fmt: skip


class Reader:
    """Somebody who follows the page in a checkout of their own."""

    def __init__(self, cluster: ClusterUnderTest, program: Path, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder / "checkout"
        self.folder.mkdir()
        shutil.copytree(ROOT / "deploy", self.folder / "deploy")
        commands = folder / "bin"
        commands.mkdir()
        _write_command(commands / "kubectl", f'HOME="{folder}" exec "{program}" kubectl "$@"')
        _write_command(commands / "bigfleet", f'exec "{sys.executable}" -m bigfleet.cli.main "$@"')
        self.environment: dict[str, str] = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.plane.admin_kubeconfig),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def run(self, script: str) -> tuple[int, str]:
        """Run commands in a shell that stops at the first failure; return its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", script,
            cwd=self.folder, env=self.environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE_SECONDS):
            printed, _nothing = await process.communicate()
        return process.returncode or 0, printed.decode()

    async def follow(self, block: ShellBlock) -> None:
        """Do what a block says, as its mark says. Raises AssertionError with what was printed."""
        if block.mark == "settings":
            self.environment.update(own_settings(settings_of(block), self.folder.parent))
        elif block.mark == "background":
            for number, command in enumerate(background_commands(block)):
                self.start(f"background-{number}", ["bash", "-c", f"exec {command}"])
        elif block.mark == "processes":
            for name in PROGRAMS:
                await self.start_program(name)
        elif block.mark == "eventually":
            await self._succeeds(block.script)
        else:
            code, printed = await self.run(block.script)
            assert code == 0, f"{block.script}\nexit {code}: {printed}"
            if block.mark == "stops the processes":
                for name in PROGRAMS:
                    self.stop(name)

    async def _succeeds(self, script: str) -> None:
        said = ""

        async def succeeds() -> bool:
            nonlocal said
            code, said = await self.run(script)
            self.check_running()
            return code == 0

        try:
            await eventually(succeeds, script)
        except AssertionError:
            raise AssertionError(f"{script}\nnever succeeded: {said}\n{self.logs()}") from None

    # ---- processes

    def start(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process that goes on in the background."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command, cwd=self.folder, env=environment or self.environment, stdout=log, stderr=log
            )

    async def start_program(self, name: str) -> None:
        """Start what a Deployment runs: its arguments, its files, the credentials of its service account."""
        kubectl = self.cluster.plane.kubectl
        command = await pod_command(kubectl, NAMESPACE, f"deployment/{name}", self.folder / "pods" / name)
        await kubectl("-n", NAMESPACE, "scale", "deployment", name, "--replicas=0")
        access = await self.cluster.plane.service_account_kubeconfig(NAMESPACE, command.service_account)
        words = command.with_flags({"--metrics-addr": f"127.0.0.1:{free_port()}"})
        self.start(name, [*words, f"--namespace={NAMESPACE}"], {**self.environment, "KUBECONFIG": str(access)})

    def check_running(self) -> None:
        """Raise AssertionError with all logs when a process has ended by itself."""
        for name, process in self._running.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.logs()}"

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def stop(self, name: str) -> None:
        """End a process in order; it must end with 0."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, self.logs()

    def kill(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            process.kill()
            process.wait(PATIENCE_SECONDS)

    # ---- machines

    @asynccontextmanager
    async def machines(self) -> AsyncIterator[None]:
        """Boot what the provider of the page calls Configured, while the context lasts."""
        certs = Path(self.environment["CERTS"])
        paths = TlsPaths(certificate=certs / "readonly.crt", key=certs / "readonly.key", authority=certs / "ca.crt")
        provider = GrpcProvider(self.environment["PROVIDER"], clock=SystemClock(), tls=TlsFiles(paths))
        nodes: dict[str, FakeNode] = {}

        async def read() -> dict[str, FakeNode]:
            try:
                listing = await provider.list(b"")
            except ProviderRefusal:
                return nodes
            nodes.clear()
            nodes.update(nodes_of([record.machine for record in listing.records], ClusterId(CLUSTER)))
            return nodes

        following = asyncio.create_task(self.cluster.follow_machines(read))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await provider.close()


def _write_command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def own_settings(page: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the settings of the page with addresses of this machine, and a folder as home directory."""
    return {
        **{name: value.replace("$HOME", str(folder)) for name, value in page.items()},
        "CLUSTER": CLUSTER,
        "SHARD": f"127.0.0.1:{free_port()}",
        "PROVIDER": f"127.0.0.1:{free_port()}",
    }


@pytest.fixture
async def reader(control_plane_program: Path, tmp_path: Path) -> AsyncIterator[Reader]:
    """A reader with a plane of their own: the page installs cluster-scoped objects, and removes them."""
    plane = new_plane(control_plane_program, tmp_path / "plane")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(plane.stop)
        await plane.start()
        cluster = await stack.enter_async_context(ClusterUnderTest(plane))
        made = Reader(cluster, control_plane_program, tmp_path)
        stack.callback(made.kill)
        yield made


@pytest.mark.kubernetes
async def test_each_command_of_the_page_does_what_the_page_says(reader: Reader) -> None:
    async with AsyncExitStack() as stack:
        for block in shell_blocks(PAGE):
            await reader.follow(block)
            if block.mark == "background":
                await stack.enter_async_context(reader.machines())
        code, printed = await reader.run("kubectl get namespaces,customresourcedefinitions -o name")

    assert code == 0
    assert "bigfleet" not in printed
    assert "Traceback" not in reader.logs()
