"""From a pod that fits nowhere to a virtual machine that boots, makes its Node and runs the pod, and back to nothing.

Nothing is simulated but the kubelet, which a script in the guest stands for. The domain, its boot, the join with the
token of its bootstrap data, the scheduler and the API server are real.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.machine import Machine
from bigfleet.model.node_identity import provider_id
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, MACHINE_ID, NODES, PODS, UPCOMING_NODES
from bigfleet.operator.nodes.names import upcoming_node_name
from bigfleet.provider.backends.libvirt.names import domain_name, seed_name
from tests.kubernetes.cluster import ClusterUnderTest, eventually, is_ready
from tests.kubernetes.kinds import pod, pod_template
from tests.kubernetes.libvirt.libvirt_fleet import LibvirtFleet
from tests.libvirt.daemon import LibvirtDaemon, libvirt_daemon, require_libvirt
from tests.libvirt.guest_image import build_image
from tests.libvirt.providers import assert_nowhere, last_boot

CLUSTER = "one"
#: An idle machine that is on demand is released after so long (docs/spec/engine.md §7.3).
HOLD_SECONDS = 600.0
#: Its bootstrap data begin with it.
MARK = f"# join {CLUSTER}\n".encode()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LibvirtDaemon]:
    """A host whose image boots, with a network."""
    require_libvirt()
    with libvirt_daemon() as daemon:
        image = tmp_path / "guest.raw"
        build_image(image, has_network=True)
        daemon.put_image(image)
        yield daemon
        for path in daemon.console_directory.iterdir():
            print(path.name, path.read_text(errors="replace").replace("\r", ""), sep="\n")


class Stopwatch:
    """Prints how long after the pod each thing happened."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._began_seconds = self._clock.monotonic_seconds()

    def note(self, text: str) -> None:
        print(f"{self._clock.monotonic_seconds() - self._began_seconds:7.1f} s  {text}", flush=True)


async def _machine(fleet: LibvirtFleet, state: MachineState) -> Machine:
    """Return the one machine that is no slot, once it is in a state."""

    async def read() -> Machine | None:
        used = [each for each in await fleet.machines() if each.state is not MachineState.SPECULATIVE]
        assert len(used) <= 1, used
        return used[0] if used and used[0].state is state else None

    try:
        return await eventually(read, f"no machine is {state.name}")
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *fleet.complaints()])) from None


@pytest.mark.kubernetes
@pytest.mark.slow
# Ten minutes of it an idle machine is held, and a guest that is emulated boots.
@pytest.mark.timeout(3600)
async def test_a_pending_pod_boots_a_virtual_machine_that_joins_serves_it_and_goes(
    cluster: ClusterUnderTest, host: LibvirtDaemon, tmp_path: Path
) -> None:
    async with LibvirtFleet(tmp_path / "fleet", CLUSTER, cluster, host) as fleet:
        namespace = await cluster.make_namespace()
        wanted = pod("web", pod_template(requests={"cpu": "500m", "memory": "48Mi"}))
        watch = Stopwatch()
        await cluster.api.create(PODS, wanted, namespace=namespace)
        (waiting,) = await cluster.unschedulable_pods(namespace, 1)
        watch.note("the scheduler finds no room")
        await cluster.found(CAPACITY_REQUESTS, f"cr-{waiting.metadata.uid}", namespace)
        watch.note("CapacityRequest")
        await _machine(fleet, MachineState.CREATING)
        watch.note("Creating")
        await _machine(fleet, MachineState.CONFIGURING)
        watch.note("Configuring")
        machine = await _machine(fleet, MachineState.CONFIGURED)
        watch.note("Configured: its Node is Ready")
        domain = domain_name(machine.id)
        assert_nowhere(MARK, host.directory)
        (running,) = await fleet.running(CLUSTER, namespace, 1)
        watch.note("the pod runs")
        await _assert_is_node_of(cluster, machine, running)
        await cluster.found(UPCOMING_NODES, upcoming_node_name(machine.id))

        await cluster.plane.kubectl("delete", "pod", "web", "--namespace", namespace)
        watch.note("the pod is gone")
        await _machine(fleet, MachineState.DRAINING)
        watch.note("Draining")
        await _machine(fleet, MachineState.IDLE)
        watch.note("Idle: drained")
        assert host.volumes() == [seed_name(domain)]
        await cluster.gone(NODES, machine.node_name)
        await cluster.gone(UPCOMING_NODES, upcoming_node_name(machine.id))
        # What is answered late is asked again, and said again.
        expected = _course(namespace)
        assert list(dict.fromkeys(line for line in _said(host, domain) if line in expected)) == expected
        await _released(fleet)
        watch.note("released: the host has no domain")
        assert (host.domains(), host.volumes()) == ([], [])
        assert fleet.unexplained() == []


def _said(host: LibvirtDaemon, domain: str) -> list[str]:
    """Return what a guest said on its console since its last boot."""
    return last_boot(host, domain).splitlines()


def _course(namespace: str) -> list[str]:
    """Return what a guest says from its boot until it is off."""
    return [
        "BF-DISK clean",
        f"BF-JOIN by=seed cluster={CLUSTER}",
        "BF-NODE created",
        f"BF-POD runs {namespace}/web 200",
        f"BF-POD ends {namespace}/web 200",
        "BF-NODE deleted 200",
        "BF-OFF",
    ]


async def _assert_is_node_of(cluster: ClusterUnderTest, machine: Machine, running: PodObject) -> None:
    """Assert that a pod runs on the Node that a machine made of itself."""
    node = await cluster.api.get(NODES, machine.node_name)
    assert is_ready(running)
    assert running.spec.node_name == node.metadata.name
    assert node.spec.provider_id == provider_id(machine)
    assert (node.metadata.annotations or {})[MACHINE_ID] == machine.id


async def _released(fleet: LibvirtFleet) -> None:
    """Return once no machine is used."""

    async def is_empty() -> bool:
        return all(each.state is MachineState.SPECULATIVE for each in await fleet.machines())

    await eventually(is_empty, "the machine is not released", held_seconds=HOLD_SECONDS)
