"""Nodes are asked for in the cluster that a kubeconfig file names (docs/spec/libvirt-provider.md §6)."""

import os
from pathlib import Path

from bigfleet.cli.provider.node_readiness import KubeconfigNodes
from bigfleet.cli.runtime.system import SystemClock
from tests.libvirt.nodes import node_server


async def test_a_node_is_ready_when_its_cluster_says_so(tmp_path: Path) -> None:
    nodes, ready = KubeconfigNodes(tmp_path, SystemClock()), {"n-1"}
    with node_server(tmp_path, ["team-a"], ready.__contains__):
        assert await nodes.is_ready("team-a", "n-1")
        assert not await nodes.is_ready("team-a", "n-2")
        assert not await nodes.is_ready("team-b", "n-1")
        ready.clear()
        assert not await nodes.is_ready("team-a", "n-1")
    # Its API server is away now.
    assert not await nodes.is_ready("team-a", "n-1")
    await nodes.aclose()


async def test_a_file_that_changes_is_read_again_and_a_wrong_one_is_no_ready_node(tmp_path: Path) -> None:
    nodes = KubeconfigNodes(tmp_path, SystemClock())
    path = nodes.path("team-a")
    path.write_text("{")
    assert not await nodes.is_ready("team-a", "n-1")
    with node_server(tmp_path, ["team-a"], lambda _name: True):
        assert await nodes.is_ready("team-a", "n-1")
        content = path.read_text()
        path.write_text("nothing")
        os.utime(path, ns=(1, 1))
        assert not await nodes.is_ready("team-a", "n-1")
        path.write_text(content)
        assert await nodes.is_ready("team-a", "n-1")
    await nodes.aclose()


def test_the_name_of_a_cluster_leads_to_no_other_directory(tmp_path: Path) -> None:
    nodes = KubeconfigNodes(tmp_path, SystemClock())
    assert nodes.path("../a/b").parent == tmp_path
    assert nodes.path("team-a") == tmp_path / "team-a.kubeconfig"
