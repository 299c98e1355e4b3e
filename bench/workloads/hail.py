"""W15: one question to a whole process, `hail-dedicated` and Ganeti's own `hail` in turn, with equal answers.

docs/spec/benchmarks.md. Clusters are made by arithmetic on indices: hosts of four quarters, filled in eight ways that
come round; mirrored instances stand on two hosts of their group. The wanted ratio is of elapsed time; processor time is
shown besides, because what else the machine does is in the one and not in the other. Where Ganeti's package is not
installed there is nothing to compare with, and the figures say so. Nothing here may report a figure when the two
answers differ.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from bench.harness import Measured, Measurement, Reading

#: Where Debian's ganeti-htools puts it; not on PATH.
HAIL: Final = Path("/usr/lib/ganeti/iallocators/hail")
#: As the installed console script does it, with this interpreter.
OURS: Final = (sys.executable, "-c", "from bigfleet.cli.hail.program import main; main()")
MEMORY_MIB: Final = 32_000
DISK_MIB: Final = 200_000
#: Quarters of the instances on a host, by its index: 11 instances on 8 hosts.
FILLINGS: Final = ((), (1,), (2,), (1, 1), (2, 1), (1, 1, 1), (4,), (3,))
#: Runs of each, in turn.
RUNS: Final = 5
#: docs/spec/benchmarks.md wants these of clusters of so many hosts.
PLAIN_MAX: Final = 1.5
PAIR_MIN: Final = 5.0
WANTED_HOSTS: Final = 5_000


def _bounds(quarters: int, below: int) -> dict[str, int]:
    return {
        "memory-size": quarters * MEMORY_MIB // 4 - below,
        "cpu-count": quarters,
        "disk-size": quarters * DISK_MIB // 4 - below,
        "disk-count": 1,
        "nic-count": 1,
        "spindle-use": quarters,
    }


def _policy() -> dict[str, Any]:
    return {
        "minmax": [{"min": _bounds(quarters, 60), "max": _bounds(quarters, 0)} for quarters in (1, 2, 3, 4)],
        "std": _bounds(1, 0),
        "disk-templates": ["plain", "drbd"],
        "vcpu-ratio": 4.0,
        "spindle-ratio": 32.0,
    }


def _instance(quarters: int, template: str) -> dict[str, Any]:
    disk = quarters * DISK_MIB // 4 - 40
    return {
        "memory": quarters * MEMORY_MIB // 4 - 40,
        "vcpus": quarters,
        "disks": [{"mode": "rw", "size": disk, "spindles": quarters}],
        "disk_space_total": disk,
        "disk_template": template,
        "spindle_use": quarters,
        "tags": [],
        "nics": [{"mac": "aa:00:00:00:00:01", "ip": None, "mode": "bridged", "link": "br0", "network": None}],
        "admin_state": "up",
        "os": "debian",
        "hypervisor": "xen-pvm",
    }


def cluster(hosts: int, groups: int, template: str) -> dict[str, Any]:
    """Return the message of a cluster, without a request; of drbd each instance has its mirror on another host."""
    disks = 2 if template == "drbd" else 1
    taken: Counter[int] = Counter()
    instances = {}
    for at in range(hosts):
        for number, quarters in enumerate(FILLINGS[at // groups % 8]):
            body = _instance(quarters, template)
            # Within the group, and never the host itself.
            places = [at, (at + groups * (1 + at % 7 + number)) % hosts][:disks]
            instances[f"instance-{at}-{number}.example.com"] = {
                **body,
                "nodes": [f"host-{p}.example.com" for p in places],
            }
            taken.update(dict.fromkeys(places, quarters))
    nodes = {}
    for at in range(hosts):
        used = sum(FILLINGS[at // groups % 8])
        nodes[f"host-{at}.example.com"] = {
            "tags": [],
            "primary_ip": f"192.0.2.{at % 250}",
            "secondary_ip": f"198.51.100.{at % 250}",
            "offline": False,
            "drained": False,
            "master_candidate": False,
            "group": f"uuid-{at % groups}",
            "master_capable": True,
            "vm_capable": True,
            "ndparams": {"exclusive_storage": True, "spindle_count": 4, "oob_program": "", "ssh_port": 22},
            "total_memory": MEMORY_MIB + 100,
            "reserved_memory": 0,
            "free_memory": MEMORY_MIB + 100 - used * (MEMORY_MIB // 4 - 40) - at % 3,
            "total_disk": disks * DISK_MIB,
            "free_disk": disks * DISK_MIB - taken[at] * (DISK_MIB // 4 - 40) - at % 5,
            "total_cpus": 8,
            "reserved_cpus": 1,
            "total_spindles": 4 * disks,
            "free_spindles": max(0, 4 * disks - taken[at]),
            "i_pri_memory": used * MEMORY_MIB // 4,
            "i_pri_up_memory": used * MEMORY_MIB // 4,
        }
    body = {"alloc_policy": "preferred", "networks": [], "tags": [], "ipolicy": _policy()}
    return {
        "version": 2,
        "cluster_name": "bench.example.com",
        "cluster_tags": [],
        "enabled_hypervisors": ["xen-pvm"],
        "ipolicy": _policy(),
        "nodegroups": {f"uuid-{g}": {"name": f"group-{g}", **body} for g in range(groups)},
        "nodes": nodes,
        "instances": instances,
    }


def message(hosts: int, groups: int, template: str) -> bytes:
    """Return a request for a quarter on such a cluster."""
    request = {
        "type": "allocate",
        "name": "new.example.com",
        "required_nodes": 2 if template == "drbd" else 1,
        **_instance(1, template),
    }
    return json.dumps({**cluster(hosts, groups, template), "request": request}).encode()


class Times(NamedTuple):
    """What one run took, seconds."""

    elapsed: float
    processor: float


def _asked(command: Sequence[str], path: Path) -> tuple[bytes, Times]:
    """Run a program on a message and return what it says, and what it took; user and system time."""
    started = time.perf_counter()
    process = subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}"
    return said, Times(elapsed, usage.ru_utime + usage.ru_stime)


def _median(several: Sequence[Times]) -> Times:
    return Times(*(statistics.median(column) for column in zip(*several, strict=True)))


def measure_question(hosts: int, groups: int, template: str, runs: int) -> Measured:
    """Ask both in turn and compare the medians. Raises AssertionError when they answer differently."""
    ours_took: list[Times] = []
    hail_took: list[Times] = []
    answers: set[bytes] = set()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "message.json"
        path.write_bytes(message(hosts, groups, template))
        for _ in range(runs):
            for command, took in ((OURS, ours_took), ((str(HAIL),), hail_took)):
                if command is OURS or HAIL.exists():
                    said, times = _asked(command, path)
                    answers.add(said)
                    took.append(times)
    assert len(answers) == 1, f"different answers: {answers}"
    (said,) = answers
    assert said.startswith(b'{"success":true'), said
    ours = _median(ours_took)
    compared = _compared(ours, _median(hail_took), template, hosts) if hail_took else ()
    note = "" if hail_took else " (no ganeti-htools here: nothing to compare with)"
    return Measured(
        readings=(
            *compared,
            Reading(f"hail-dedicated, elapsed{note}", ours.elapsed * 1000, "ms"),
            Reading(f"hail-dedicated, processor time{note}", ours.processor * 1000, "ms"),
        ),
        checksum=hashlib.sha256(said).hexdigest()[:12],
    )


def _compared(ours: Times, hail: Times, template: str, hosts: int) -> tuple[Reading, ...]:
    is_wanted = hosts >= WANTED_HOSTS
    of_hail = (
        Reading("hail, elapsed", hail.elapsed * 1000, "ms"),
        Reading("hail, processor time", hail.processor * 1000, "ms"),
    )
    if template == "drbd":
        return (
            Reading("hail's time ÷ ours", hail.elapsed / ours.elapsed, "", least=PAIR_MIN if is_wanted else None),
            Reading("the same of processor time", hail.processor / ours.processor, ""),
            *of_hail,
        )
    return (
        Reading("our time ÷ hail's", ours.elapsed / hail.elapsed, "", most=PLAIN_MAX if is_wanted else None),
        Reading("the same of processor time", ours.processor / hail.processor, ""),
        *of_hail,
    )


def question(hosts: int, groups: int, template: str, runs: int = RUNS) -> Measurement:
    """W15: one instance more. Medians of so many runs of each, in turn."""
    return Measurement(
        name="W15 hail",
        size=f"{template}, {hosts:,} hosts, {groups} group{'s' if groups > 1 else ''}; median of {runs}",
        run=lambda: measure_question(hosts, groups, template, runs),
        is_slow=hosts >= WANTED_HOSTS or template == "drbd",
    )


HAIL_QUESTIONS = (
    question(1_000, 4, "plain"),
    question(5_000, 20, "plain"),
    question(5_000, 1, "plain"),
    question(1_000, 1, "drbd", runs=3),
    question(5_000, 20, "drbd", runs=3),
    question(5_000, 1, "drbd", runs=1),
)
