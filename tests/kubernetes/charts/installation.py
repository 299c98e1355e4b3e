"""Installs the charts with helm on a control plane, and runs what their pods run as processes of this machine."""

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from tests.deploy.charts import CHARTS, NAMESPACE
from tests.kubernetes.pod_commands import pod_command
from tests.kubernetes.program import Program
from tests.patience import PATIENCE_SECONDS
from tests.processes import run_bigfleet
from tools.fetch_helm import program_path

#: What the API server checks of each pod, and warns of.
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


class Installation:
    """The namespace bigfleet-system of a control plane, and the processes that stand for its pods."""

    def __init__(self, plane: ControlPlane, program: Path, folder: Path) -> None:
        self.plane = plane
        self.folder = folder
        self.certs = folder / "certs"
        self.processes: dict[str, Program] = {}
        self._program = program
        self._environment = {
            "HOME": str(folder),
            "KUBECONFIG": str(plane.admin_kubeconfig),
            "PATH": os.environ["PATH"],
        }

    # ---- commands

    async def run(self, *words: str, standard_input: str = "") -> subprocess.CompletedProcess[str]:
        """Run helm or kubectl to its end."""
        name, *arguments = words
        helm = program_path(os.environ)
        command = [str(helm)] if name == "helm" else [str(self._program), "kubectl"]
        return await asyncio.to_thread(
            subprocess.run,
            [*command, *arguments],
            input=standard_input,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    async def kubectl(self, *words: str, standard_input: str = "") -> str:
        """Return what kubectl prints; it must end with 0, and the API server must warn of nothing."""
        return checked(await self.run("kubectl", *words, standard_input=standard_input))

    async def helm(self, *words: str) -> str:
        """Return what helm prints; it must end with 0, and the API server must warn of nothing."""
        return checked(await self.run("helm", *words, "--namespace", NAMESPACE))

    async def install(self, release: str, chart: str, *values: str) -> str:
        """Install a chart."""
        return await self.helm("install", release, str(CHARTS / chart), *values)

    async def upgrade(self, release: str, chart: str, *values: str) -> str:
        """Change values of a release; the others stay."""
        return await self.helm("upgrade", release, str(CHARTS / chart), "--reuse-values", *values)

    async def uninstall_all(self) -> None:
        """Uninstall every release."""
        for release in (await self.helm("list", "--short")).split():
            await self.helm("uninstall", release)

    async def revision(self, release: str) -> str:
        """Return the newest line of a release's history."""
        return (await self.helm("history", release)).strip().splitlines()[-1]

    # ---- what the charts expect

    async def make_namespace(self) -> None:
        """Create the namespace unless it is there, in which only restricted pods are admitted."""
        found = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}}
        await self.kubectl("apply", "--filename=-", standard_input=yaml.safe_dump(found))

    def make_certificates(self, cluster: str) -> None:
        """Write certificates of an authority for all processes, as servers under 127.0.0.1."""
        done = run_bigfleet("certs", "dev", str(self.certs), f"--cluster={cluster}", "--host=127.0.0.1")
        assert done.returncode == 0, done.stderr

    async def make_secret(self, name: str, certificate: str) -> None:
        """Store a certificate as the Secret of a process."""
        files = {"tls.crt": f"{certificate}.crt", "tls.key": f"{certificate}.key", "ca.crt": "ca.crt"}
        sources = [f"--from-file={key}={self.certs / file}" for key, file in files.items()]
        await self.kubectl("-n", NAMESPACE, "create", "secret", "generic", name, *sources)

    # ---- processes

    async def start(self, workload: str, flags: Mapping[str, str], *more: str) -> Program:
        """Run what the pods of a workload run, with other values for some flags, in place of its pods."""
        await self.kubectl("-n", NAMESPACE, "scale", workload, "--replicas=0")
        command = await pod_command(self.kubectl, NAMESPACE, workload, self.folder / workload)
        # A program is a command of `bigfleet`, which the image has on its path.
        first, *words = command.with_flags(flags)
        assert first == "bigfleet"
        name = workload.rpartition("/")[2]
        environment = {"KUBECONFIG": str(self.plane.admin_kubeconfig)}
        if command.service_account != "default":
            access = await self.plane.service_account_kubeconfig(NAMESPACE, command.service_account)
            environment = {"KUBECONFIG": str(access)}
        process = Program(name, [*words, *more], self.folder / f"{name}.log", environment)
        process.start()
        self.processes[name] = process
        return process

    async def stop(self) -> None:
        """Stop all processes in order, those last that others call."""
        for process in reversed(self.processes.values()):
            await process.stop()

    def check_running(self) -> None:
        """Raise AssertionError with its log when a process has ended by itself."""
        for process in self.processes.values():
            assert not process.has_ended, f"{process.name} has ended:\n{process.log.read_text()[-3000:]}"

    def reader(self) -> list[str]:
        """Return the flags of somebody who only reads."""
        files = {"cert": "readonly.crt", "key": "readonly.key", "ca": "ca.crt"}
        return [f"--tls-{flag}={self.certs / file}" for flag, file in files.items()]


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed. Raises AssertionError when it failed or had a warning."""
    assert done.returncode == 0, f"{' '.join(done.args[1:])}\n{done.stdout}{done.stderr}"
    warnings = [line for line in done.stderr.splitlines() if "arning" in line]
    assert not warnings, f"{' '.join(done.args[1:])}\n{done.stderr}"
    return done.stdout
