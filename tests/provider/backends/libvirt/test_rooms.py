"""The room of hosts agrees with a count from scratch, after any sequence of Creates and Deletes (§2)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.provider.backends.libvirt.fleet import ForeignUse, HostRooms, fleet_of, host_of
from bigfleet.provider.backends.libvirt.hosts_file import KvmHosts, parse_kvm_hosts
from bigfleet.provider.backends.partitioned.ports import CarveSize, HostPlacement
from tests.provider.backends.libvirt.memory_host import document

SIZES = {"small": (1, 2048, 40 * 1024), "large": (2, 4096, 40 * 1024), "huge": (4, 3000, 150 * 1024)}


def hosts() -> KvmHosts:
    body: dict[str, Any] = document(a={}, b={"cpus": 7, "memory": "20Gi", "disk": "300Gi"})
    body["types"]["huge"] = {"vcpus": 4, "memory": "3000Mi", "disk": "150Gi"}
    return parse_kvm_hosts(body)


def counted(free: list[int], size: tuple[int, int, int]) -> int:
    """Return how often a size fits, by trying."""
    count, left = 0, list(free)
    while all(have >= take for have, take in zip(left, size, strict=True)):
        left = [have - take for have, take in zip(left, size, strict=True)]
        count += 1
    return count


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(list(SIZES)), st.booleans()), max_size=30),
    st.integers(0, 4),
)
def test_vectors_are_what_fits(steps: list[tuple[str, str, bool]], foreign_vcpus: int) -> None:
    foreign = ForeignUse(vcpus=foreign_vcpus, memory_mib=foreign_vcpus * 1000)
    rooms = HostRooms(hosts(), {"a": foreign})
    free = {
        "a": [4 - foreign.vcpus, 8 * 1024 - foreign.memory_mib, 400 * 1024],
        "b": [7, 20 * 1024, 300 * 1024],
    }
    standing: list[tuple[str, str, str]] = []
    for number, (host, kind, is_delete) in enumerate(steps):
        if is_delete and standing:
            at, what, name = standing.pop(0)
            rooms.release(name)
            free[at] = [have + take for have, take in zip(free[at], SIZES[what], strict=True)]
        else:
            vcpus, memory_mib, disk_mib = SIZES[kind]
            size = CarveSize(memory_mib=memory_mib, vcpus=vcpus, disk_mib=disk_mib, disks=1, spindles=0)
            answer = rooms.place(host, f"bf-{number}", size, [host])
            assert isinstance(answer, HostPlacement) == (counted(free[host], SIZES[kind]) > 0)
            if isinstance(answer, HostPlacement):
                standing.append((host, kind, f"bf-{number}"))
                free[host] = [have - take for have, take in zip(free[host], SIZES[kind], strict=True)]
        for each in ("a", "b"):
            assert rooms.vector(each) == tuple(counted(free[each], size) for size in SIZES.values())


def test_a_type_that_fits_on_no_host_is_warned_of() -> None:
    body = document()
    body["types"]["giant"] = {"vcpus": 5, "memory": "1Gi", "disk": "1Gi"}
    assert fleet_of(parse_kvm_hosts(body), "p", {}).warnings == ("machines of type giant fit on no host",)


@pytest.mark.parametrize(
    ("machine_id", "host"), [("p/z/h/t/000", "h"), ("p/q/z/h/t/000", "h"), ("h/t/000", ""), ("x", "")]
)
def test_the_id_of_a_machine_names_its_host(machine_id: str, host: str) -> None:
    assert host_of(machine_id) == host
