"""Draws workloads with random requests and scheduling rules, each of which BigFleet says that it expresses.

What docs/limits.md excludes is left out: all pods of such a workload run once a fleet of `RANDOM_POOLS` is at rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from bigfleet.model import labels
from bigfleet.operator.kubernetes.api import Json, JsonObject
from tests.kubernetes.fleet import ZONES, pool

#: Types of machines with the cpu that a pod of them may ask for at most, daemons set aside.
TYPES: Final = {"std.4x16": 3.0, "std.8x32": 6.5, "std.16x64": 14.0, "mem.16x128": 14.0}
#: The type that is offered as spot, and as nothing else.
SPOT_TYPE: Final = "std.8x32"
RANDOM_POOLS: Final = [
    pool(each, zone, 20, capacity_type="spot" if each == SPOT_TYPE else "on_demand") for each in TYPES for zone in ZONES
]
CPUS: Final = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0)
#: What every type has room for.
MIB_PER_CPU: Final = (128, 512, 1024, 2300)
#: What only machines with much memory have room for.
MUCH_MIB_PER_CPU: Final = 5000
#: Fewer where a rule wants many machines.
PODS_MAX, RULED_PODS_MAX = 24, 8
_HOSTNAME: Final = "kubernetes.io/hostname"

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """A Deployment that a test creates."""

    name: str
    pods: int
    template: JsonObject
    #: The rules that were drawn, for messages.
    rules: tuple[str, ...]


def random_workloads(rng: Random, count: int, priority_classes: Sequence[str]) -> list[RandomWorkload]:
    """Return so many workloads with names of their own; some have one of the priority classes."""
    return [_workload(rng, number, priority_classes) for number in range(count)]


def _workload(rng: Random, number: int, priority_classes: Sequence[str]) -> RandomWorkload:
    name = f"random-{number}"
    nodes = _draw_nodes(rng)
    rules = list(nodes.rules)
    cpu = min(rng.choice(CPUS), nodes.cpu_max)
    memory_mib = int(cpu * rng.choice(MIB_PER_CPU if nodes.rules else (*MIB_PER_CPU, MUCH_MIB_PER_CPU)))
    main = _container("main", cpu, memory_mib)
    spec = nodes.spec()
    spec["containers"] = [main]
    pods = rng.randint(1, max(2, int(PODS_MAX / (1 + cpu))))
    if rng.random() < 0.5:
        pods = min(pods, RULED_PODS_MAX)
        add: Callable[[Spec, str, int], None] = rng.choice(_PEER_RULES)
        add(spec, name, rng.randint(1, 2))
        rules.append(add.__name__.strip("_"))
    if rng.random() < 0.3:
        rules.append(_add_container(rng, spec, cpu, memory_mib, nodes.cpu_max))
    if rng.random() < 0.3:
        spec["priorityClassName"] = rng.choice(priority_classes)
        rules.append(spec["priorityClassName"])
    return RandomWorkload(name=name, pods=pods, template={"metadata": {"labels": {}}, "spec": spec}, rules=tuple(rules))


# ---- which nodes


@dataclass(slots=True)
class _Nodes:
    """The rules of a pod about nodes."""

    cpu_max: float = max(TYPES.values())
    selector: dict[str, str] = field(default_factory=dict)
    expressions: list[JsonObject] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def spec(self) -> Spec:
        spec: Spec = {"nodeSelector": self.selector} if self.selector else {}
        if self.expressions:
            terms = [{"matchExpressions": self.expressions}]
            affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            spec["affinity"] = {"nodeAffinity": affinity}
        return spec


def _draw_nodes(rng: Random) -> _Nodes:
    """Return a rule about zones, or none, and one about machines, or none."""
    nodes = _Nodes()
    zones = rng.choice((None, None, "one", "some", "all but one"))
    if zones == "one":
        nodes.selector[labels.ZONE] = rng.choice(ZONES)
    elif zones == "some":
        nodes.expressions.append({"key": labels.ZONE, "operator": "In", "values": rng.sample(ZONES, 2)})
    elif zones == "all but one":
        nodes.expressions.append({"key": labels.ZONE, "operator": "NotIn", "values": [rng.choice(ZONES)]})
    machines = rng.choice((None, None, "type", "no spot", "spot", "rack"))
    if machines == "type":
        nodes.selector[labels.INSTANCE_TYPE] = rng.choice(list(TYPES))
        nodes.cpu_max = TYPES[nodes.selector[labels.INSTANCE_TYPE]]
    elif machines == "no spot":
        nodes.expressions.append({"key": labels.CAPACITY_TYPE, "operator": "NotIn", "values": ["spot"]})
    elif machines == "spot":
        nodes.selector[labels.CAPACITY_TYPE] = "spot"
        nodes.cpu_max = TYPES[SPOT_TYPE]
    elif machines == "rack":
        nodes.expressions.append({"key": labels.RACK, "operator": "Exists"})
        nodes.expressions.append({"key": "example.com/absent", "operator": "DoesNotExist"})
    nodes.rules += [f"zones: {zones}"] * bool(zones) + [f"machines: {machines}"] * bool(machines)
    return nodes


# ---- which other pods


def _selector(name: str) -> JsonObject:
    return {"matchLabels": {"app": name}}


def _one_per_node(spec: Spec, name: str, _skew: int) -> None:
    _add_affinity(spec, "podAntiAffinity", _HOSTNAME, name)


def _same_zone(spec: Spec, name: str, _skew: int) -> None:
    _add_affinity(spec, "podAffinity", labels.ZONE, name)


def _add_affinity(spec: Spec, kind: str, key: str, name: str) -> None:
    term = {"topologyKey": key, "labelSelector": _selector(name)}
    spec.setdefault("affinity", {})[kind] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _spread_over_nodes(spec: Spec, name: str, skew: int) -> None:
    _add_spread(spec, _HOSTNAME, name, skew)


def _spread_over_zones(spec: Spec, name: str, skew: int) -> None:
    _add_spread(spec, labels.ZONE, name, skew)


def _add_spread(spec: Spec, key: str, name: str, skew: int) -> None:
    spread = {
        "topologyKey": key,
        "maxSkew": skew,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": _selector(name),
    }
    spec["topologySpreadConstraints"] = [spread]


def _host_port(spec: Spec, name: str, _skew: int) -> None:
    # A port of its own: two workloads with one port are not distinguished (docs/limits.md).
    port = 10_000 + int(name.rpartition("-")[2])
    spec["containers"][0]["ports"] = [{"containerPort": port, "hostPort": port}]


_PEER_RULES: Final = (_one_per_node, _same_zone, _spread_over_nodes, _spread_over_zones, _host_port)


# ---- what a pod asks for


def _container(name: str, cpu: float, memory_mib: int) -> dict[str, Json]:
    requests: JsonObject = {"cpu": f"{int(cpu * 1000)}m", "memory": f"{memory_mib}Mi"}
    return {"name": name, "image": "fake", "resources": {"requests": requests}}


def _add_container(rng: Random, spec: Spec, cpu: float, memory_mib: int, cpu_max: float) -> str:
    """Add a second container, one that runs before it, or one that runs all the time from before it."""
    kind = rng.choice(("second", "init", "sidecar"))
    more = min(cpu * rng.choice((0.5, 1.0, 2.0)), cpu_max if kind == "init" else cpu_max - cpu)
    container = _container(kind, more, memory_mib // 4)
    if kind == "second":
        spec["containers"].append(container)
    else:
        spec["initContainers"] = [{**container, "restartPolicy": "Always"} if kind == "sidecar" else container]
    return f"{kind} container"
