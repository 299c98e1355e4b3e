"""docs/helm-guide.md is true: its commands run in order on three control planes and print what the page shows."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from bigfleet.demo.kubernetes.fake_node import FakeNode
from tests.deploy.charts import CHARTS, needs_helm
from tests.guides import Terminal, differs, executable, turns
from tests.kubernetes.charts.pods_as_processes import PodsAsProcesses
from tests.kubernetes.cluster import ROOT, ClusterUnderTest, eventually, new_plane
from tools.fetch_helm import program_path

PAGE = ROOT / "docs" / "helm-guide.md"
CLUSTERS = ("blue", "green", "red")
SHARD = "shard-0.example.com:7780"
CERTS = "$HOME/bigfleet-certs"
#: Those of the page have room for the pods of BigFleet, and for none of the pods that it creates.
OWN_CPUS = {"blue": "2", "green": "500m", "red": "500m"}
_FENCE = re.compile(r"(?:<!-- test: (?P<mark>[a-z]+) -->\n)?```(?P<language>\w+)\n(?P<content>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """Commands of the page; one with the mark `eventually` is repeated until it prints what the page shows."""

    mark: str
    language: str
    content: str


def page_blocks() -> list[Block]:
    """Return the blocks of the page in order."""
    found = _FENCE.finditer(PAGE.read_text(encoding="utf-8"))
    return [Block(each["mark"] or "", each["language"], each["content"]) for each in found]


class Reader:
    """A reader who follows the page in one terminal, with a context of kubectl for each cluster."""

    def __init__(self, clusters: dict[str, ClusterUnderTest], kubectl: Path, folder: Path) -> None:
        own = {
            name: FakeNode(name=f"{name}-0", resources={"cpu": OWN_CPUS[name], "memory": "8Gi"}) for name in clusters
        }
        for name, cluster in clusters.items():
            cluster.machine_booted(own[name])
        executable(folder / "bin" / "kubectl", f'#!/bin/sh\nHOME="{folder}" exec "{kubectl}" kubectl "$@"\n')
        executable(folder / "bin" / "helm", f'#!/bin/sh\nHOME="{folder}" exec "{program_path(os.environ)}" "$@"\n')
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(_merged({name: each.plane.admin_kubeconfig for name, each in clusters.items()}))
        )
        self.certs = folder / "bigfleet-certs"
        self._terminal = Terminal(
            folder,
            {"KUBECONFIG": str(kubeconfig)},
            here=lambda text: text.replace(SHARD, "127.0.0.1:7780").replace(CERTS, str(self.certs)),
        )
        self.pods = PodsAsProcesses(clusters, own, folder / "pods", shard=self._terminal.here(SHARD))
        #: Commands that charts have printed and that were not run yet.
        self._advice: list[str] = []
        self._exported = folder / "exported"
        self._exported.touch()
        shutil.copytree(CHARTS, self._terminal.folder / "deploy" / "charts")
        shutil.copytree(ROOT / "deploy" / "crds", self._terminal.folder / "deploy" / "crds")

    async def run(self, command: str) -> str:
        """Run commands with what earlier ones exported; return what they print, with the page's name of the shard."""
        session = f'. "{self._exported}"\n{command}\nexport -p > "{self._exported}"\n'
        return (await asyncio.to_thread(self._terminal.run, session)).replace(self.pods.shard, SHARD)

    async def follow(self, block: Block) -> None:
        """Run the commands of a block. Raises AssertionError when one prints something else than the page shows."""
        if block.language == "sh":
            await self.run(block.content)
            return
        for command, shown in turns(block.content):
            if block.mark != "eventually":
                printed = await self.run(command)
                print(f"$ {command}\n{printed}", flush=True)
                assert not differs(printed, shown), differs(printed, shown)
                self._advice += advice_in(command, printed)
                continue
            await self._prints(command, shown)

    async def take_advice(self) -> None:
        """Run the commands that charts printed since the last time, where their certificates are."""
        while self._advice:
            await self._prints(f'(cd "$CERTS" && {self._advice.pop(0)})', "…")

    async def _prints(self, command: str, shown: str) -> None:
        said = ""

        async def does() -> bool:
            nonlocal said
            self.pods.check_running()
            try:
                said = await self.run(command)
            except AssertionError as error:
                said = str(error)
                return False
            return not differs(said, shown)

        try:
            await eventually(does, command)
        except AssertionError:
            raise AssertionError(f"{command}\n{differs(said, shown)}\n{self.pods.logs()}") from None
        print(f"$ {command}\n{said}", flush=True)


def advice_in(command: str, printed: str) -> list[str]:
    """Return the commands that the notes of a chart print for now, in the context of its installation."""
    context = re.search(r"--kube-context (\w+)", command)
    if context is None:
        return []
    indented = re.findall(r"^  (\S.*)$", printed.partition("NOTES:")[2], re.MULTILINE)
    # A pod is deleted after an upgrade only.
    return [line.replace("kubectl", f"kubectl --context {context[1]}", 1) for line in indented if "delete" not in line]


def _merged(kubeconfigs: dict[str, Path]) -> dict[str, object]:
    """Return one kubeconfig with a context for each of several."""
    merged: dict[str, list[object]] = {"contexts": [], "clusters": [], "users": []}
    for name, path in kubeconfigs.items():
        found = json.loads(path.read_text(encoding="utf-8"))
        merged["contexts"].append({"name": name, "context": {"cluster": name, "user": name}})
        merged["clusters"].append({"name": name, "cluster": found["clusters"][0]["cluster"]})
        merged["users"].append({"name": name, "user": found["users"][0]["user"]})
    return {"apiVersion": "v1", "kind": "Config", **merged}


def volume(number: int) -> dict[str, object]:
    """Return a volume that one claim of a chart takes; no provisioner makes one in a control plane by itself."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": f"/nonexistent/{number}"},
        },
    }


@pytest.fixture
async def reader(control_plane_program: Path, tmp_path: Path) -> AsyncIterator[Reader]:
    """A reader with three planes of their own: the page installs cluster-scoped objects, and removes them."""
    planes = {name: new_plane(control_plane_program, tmp_path / "planes" / name) for name in CLUSTERS}
    async with AsyncExitStack() as stack:
        for plane in planes.values():
            stack.push_async_callback(plane.stop)
        await asyncio.gather(*(plane.start() for plane in planes.values()))
        clusters = {name: await stack.enter_async_context(ClusterUnderTest(each)) for name, each in planes.items()}
        volumes = yaml.safe_dump_all([volume(number) for number in range(2)])
        await planes["blue"].kubectl("apply", "--filename=-", standard_input=volumes)
        made = Reader(clusters, control_plane_program, tmp_path)
        stack.push_async_callback(made.pods.stop)
        yield made


@pytest.mark.kubernetes
@needs_helm
async def test_each_command_of_the_page_prints_what_the_page_shows(reader: Reader) -> None:
    async with AsyncExitStack() as stack:
        for block in page_blocks():
            await reader.follow(block)
            had_processes = bool(reader.pods.processes)
            await reader.pods.follow()
            if reader.pods.processes and not had_processes:
                await stack.enter_async_context(reader.pods.machines(reader.certs))
            await reader.take_advice()

    assert reader.pods.processes == {}
    assert "Traceback" not in reader.pods.logs()
