"""Creates the hosts of `--seed-count`: equal hosts for four machines each, so that slots never overlap.

docs/spec/provider.md §22. This module must not depend on anything but the count.
"""

from typing import Any, Final

INSTANCES_PER_HOST: Final = 4
_ZONES: Final = ("zone-a", "zone-b", "zone-c")
_GROUP: Final = "seed"
_MEMORY_MIB: Final = 131_072
_DISK_MIB: Final = 1_048_576
_CPUS: Final = 32
#: Memory and disk must stay above zero.
_SLACK_MIB: Final = 16
_PRICE_USD_PER_HOUR: Final = 0.10


def seed_document(count: int) -> dict[str, Any]:
    """Return the document of enough hosts for so many slots, rounded up to whole hosts."""
    hosts = {f"host-{number:04d}": _ZONES[number % len(_ZONES)] for number in range(-(-count // INSTANCES_PER_HOST))}
    quarter = {
        "memory-size": _MEMORY_MIB // INSTANCES_PER_HOST - _SLACK_MIB,
        "cpu-count": _CPUS // INSTANCES_PER_HOST,
        "disk-size": _DISK_MIB // INSTANCES_PER_HOST - _SLACK_MIB,
        "disk-count": 1,
        "nic-count": 1,
        "spindle-use": 1,
    }
    return {
        "cluster_tags": [],
        "enabled_hypervisors": ["fake"],
        "nodegroups": {_GROUP: _group(quarter)},
        "nodes": dict.fromkeys(hosts, _node()),
        "instances": {},
        "bigfleet": {
            "groups": {_GROUP: {"intervals": [{"name": "quarter", "price_usd_per_hour": _PRICE_USD_PER_HOUR}]}},
            "nodes": {name: {"zone": zone} for name, zone in hosts.items()},
        },
    }


def _group(quarter: dict[str, int]) -> dict[str, Any]:
    return {
        "name": _GROUP,
        "alloc_policy": "preferred",
        "networks": [],
        "tags": [],
        "ipolicy": {
            "minmax": [{"min": quarter, "max": quarter}],
            "std": quarter,
            "disk-templates": ["plain"],
            "vcpu-ratio": 1.0,
            "spindle-ratio": 32.0,
        },
    }


def _node() -> dict[str, Any]:
    return {
        "group": _GROUP,
        "offline": False,
        "drained": False,
        "ndparams": {"exclusive_storage": True},
        "total_memory": _MEMORY_MIB,
        "reserved_memory": 0,
        "free_memory": _MEMORY_MIB,
        "total_disk": _DISK_MIB,
        "free_disk": _DISK_MIB,
        "total_cpus": _CPUS,
        "reserved_cpus": 0,
        "total_spindles": INSTANCES_PER_HOST,
        "free_spindles": INSTANCES_PER_HOST,
    }
