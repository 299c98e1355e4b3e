"""First fit of many clusters in tables places every pod where first fit of each cluster, host by host, places it."""

import random
from collections import defaultdict

import numpy as np
import pytest

from bigfleet.engine.shapes.columns.demand import Access, DemandColumns
from bigfleet.engine.shapes.columns.order import HostColumns, HostKind
from bigfleet.engine.shapes.columns.placing import first_fit
from bigfleet.engine.shapes.columns.rows import NO_LIMIT, firsts
from bigfleet.engine.shapes.state import ClusterState
from tests.engine.proof import in_proportion

TABLES = in_proportion(200, least=40)
#: A machine of the second scale has more memory, in milli-bytes, than a float holds exactly.
SCALES = (1_000, (1 << 53) + 1)


def _hosts(rng: random.Random, clusters: int, hosts_max: int, scale: int) -> HostColumns:
    sizes = [rng.randrange(hosts_max + 1) for _ in range(clusters)]
    count = sum(sizes)
    rooms = [
        (rng.randrange(1, 65) * 1000, rng.randrange(1, 65) * scale, rng.choice((NO_LIMIT, rng.randrange(1, 30) * 1000)))
        for _ in range(count)
    ]
    kinds = [HostKind(0, True, False), HostKind(1, True, True), HostKind(1, False, False)]
    return HostColumns(
        first=firsts(np.array(sizes)),
        row=np.arange(count),
        kind=np.array([rng.randrange(len(kinds)) for _ in range(count)], np.int64),
        kinds=kinds,
        totals=np.array(rooms, np.int64).reshape(count, 3),
    )


def _demand(rng: random.Random, clusters: int, groups_max: int, scale: int) -> DemandColumns:
    sizes = sorted((rng.randrange(groups_max + 1) for _ in range(clusters)), reverse=True)
    count = sum(sizes)
    requests = [(rng.randrange(1, 20) * 500, rng.choice((0, rng.randrange(1, 20) * scale)), 1000) for _ in range(9)]
    accesses = [Access(frozenset({0, 1}), False), Access(frozenset({0, 1}), True), Access(frozenset({1}), False)]

    def numbers(most: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.array([rng.randrange(most) for _ in range(count)], np.int64)

    return DemandColumns(
        clusters=[ClusterState(id=f"c-{number}") for number in range(clusters)],
        has_impossible=np.zeros(clusters, np.bool_),
        positions=np.arange(clusters),
        places=np.arange(clusters),
        needs=(),
        first_row=np.arange(clusters + 1),
        first_group=firsts(np.array(sizes)),
        index=np.arange(count),
        counts=numbers(120) + 1,
        limits=np.array([rng.choice((NO_LIMIT, NO_LIMIT, 1, 3)) for _ in range(count)], np.int64),
        is_waiting=np.array([rng.random() < 0.1 for _ in range(count)], np.bool_),
        access=numbers(len(accesses)),
        accesses=accesses,
        number=numbers(len(requests)),
        requests=np.array(requests, np.int64),
    )


def _host_by_host(hosts: HostColumns, demand: DemandColumns) -> dict[tuple[int, int], int]:
    """Return the pods by host and group."""
    rooms, found = hosts.totals.tolist(), defaultdict[tuple[int, int], int](int)
    for cluster in range(len(demand.clusters)):
        for group in range(*demand.first[cluster : cluster + 2].tolist()):
            left, request = int(demand.counts[group]), demand.requests[demand.number[group]].tolist()
            access = demand.accesses[int(demand.access[group])]
            for host in range(*hosts.first[cluster : cluster + 2].tolist()):
                kind = hosts.kinds[int(hosts.kind[host])]
                if kind.shape not in access.matching or (access.is_pinned and kind.can_be_interrupted):
                    continue
                if demand.is_waiting[group] and kind.is_configured:
                    continue
                fitting = (room // each for room, each in zip(rooms[host], request, strict=True) if each)
                pods = min(left, int(demand.limits[group]), *fitting)
                if pods:
                    found[host, group] += pods
                    left -= pods
                    rooms[host] = [room - pods * each for room, each in zip(rooms[host], request, strict=True)]
    return dict(found)


@pytest.mark.parametrize("scale", SCALES, ids=["floats", "integers"])
def test_tables_place_what_first_fit_places(scale: int) -> None:
    placed = waited = 0
    for seed in range(TABLES):
        rng = random.Random(seed)
        clusters, hosts_max, groups_max = rng.choice(((1, 80, 30), (5, 40, 12), (12, 9, 9), (30, 3, 4)))
        hosts, demand = _hosts(rng, clusters, hosts_max, scale), _demand(rng, clusters, groups_max, scale)
        claims = first_fit(hosts, demand, demand.wanted())
        pairs = list(zip(claims.host.tolist(), claims.group.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs), seed
        assert dict(zip(pairs, claims.pods.tolist(), strict=True)) == _host_by_host(hosts, demand), seed
        placed += int(claims.pods.sum())
        waited += int(demand.counts.sum() - claims.pods.sum())
    assert placed
    assert waited


def test_clusters_of_any_sizes_share_no_table_with_much_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small table for each size, the same pods have the same places."""
    rng = random.Random(7)
    hosts, demand = _hosts(rng, 40, 60, 1_000), _demand(rng, 40, 12, 1_000)
    together = first_fit(hosts, demand, demand.wanted())
    monkeypatch.setattr("bigfleet.engine.shapes.columns.placing._CELLS_MAX", 1)
    apart = first_fit(hosts, demand, demand.wanted())
    assert set(zip(*(column.tolist() for column in together), strict=True)) == set(
        zip(*(column.tolist() for column in apart), strict=True)
    )
