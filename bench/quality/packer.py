"""Runs the packer of `bigfleet.sim.packing` on an instance."""

from collections.abc import Sequence

from bench.quality.values import Instance, PackingCluster
from bigfleet.sim.packing import packer
from bigfleet.sim.packing.values import Purchase


def pack(instance: Instance, clusters: Sequence[PackingCluster] | None = None) -> list[Purchase]:
    """Return the packer's fleet for each cluster, in their order, from one stock."""
    return packer.pack(instance.offers, instance.clusters if clusters is None else clusters)
