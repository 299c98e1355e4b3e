"""A fleet of real programs on real control planes: from nothing to all running, then what happens to fleets."""

import pytest
from pathlib import Path

from tests.kubernetes.cluster import ClusterUnderTest
from tests.kubernetes.fleet import ZONES, FleetUnderTest, pool
from tests.kubernetes.kinds import DEPLOYMENTS, deployment, pod_template

pytestmark = pytest.mark.kubernetes


async def test_x(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    pools = [pool("std.16x64", zone, 6) for zone in ZONES]
    import time
    t=time.monotonic()
    async with FleetUnderTest(Path("/tmp/c1-fleet"), {"one": cluster}, pools=pools) as fleet:
        namespace = await cluster.make_namespace()
        print("up", time.monotonic()-t)
        await cluster.api.create(DEPLOYMENTS, deployment("web", 20, pod_template()), namespace=namespace)
        await fleet.running("one", namespace, 20)
        print("running", time.monotonic()-t)
        await fleet.objects_are_exact("one")
        print("exact", time.monotonic()-t)
        await cluster.api.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 4}}, namespace=namespace)
        await fleet.running("one", namespace, 4)
        await fleet.objects_are_exact("one")
        print("down", time.monotonic()-t)
        print(fleet.complaints())
    print("end", time.monotonic()-t)
