"""Shows machines in the cluster and acts on its nodes: matching, node statuses, UpcomingNodes, hints, drains.

`bigfleet.operator.agent` wires the parts together; each reads caches and writes through a `KubernetesApi`. This package
does not decide which machine is drained.
"""
