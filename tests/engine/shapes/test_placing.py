"""First fit of many clusters in tables places every pod where first fit of each cluster, host by host, places it."""

import random
from collections import defaultdict

import numpy as np
import pytest

from bigfleet.engine.columnar.arrays import PodGroups, PodHosts, PodPlaces
from bigfleet.engine.columnar.kernels import pod_credit
from bigfleet.engine.shapes.columns.demand import Access, DemandColumns
from bigfleet.engine.shapes.columns.order import HostColumns, HostKind
from bigfleet.engine.shapes.columns.placing import Claims, access_of, first_fit
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


def _in_loops(hosts: HostColumns, demand: DemandColumns) -> tuple[Claims, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]:
    """Return the claims that the compiled loops find, and which hosts are claimed."""
    count, groups = len(hosts.row), len(demand.counts)
    access, is_allowed = access_of(hosts.kinds, demand)
    is_claimed, left, first_claim = (
        np.zeros(count, np.uint8),
        np.zeros(groups, np.int64),
        np.zeros(groups + 1, np.int64),
    )
    kinds = np.arange(count)
    host, pods = pod_credit.place_pods(
        PodHosts(hosts.first, hosts.row, kinds.astype(np.int32), kinds, hosts.kind, hosts.totals),
        PodGroups(
            *(demand.first, demand.number, demand.requests, demand.counts, demand.limits, access),
            is_allowed.view(np.uint8),
        ),
        PodPlaces(is_claimed, left, first_claim),
    )
    group = np.repeat(np.arange(groups), np.diff(first_claim))
    assert left.tolist() == (demand.counts - np.bincount(group, pods, groups).astype(np.int64)).tolist()
    return Claims(host, group, pods), is_claimed


@pytest.mark.parametrize("scale", SCALES, ids=["small", "large"])
def test_loops_place_what_first_fit_places(scale: int) -> None:
    placed = grown = 0
    for seed in range(TABLES):
        rng = random.Random(seed)
        clusters, hosts_max, groups_max = rng.choice(((1, 80, 30), (5, 40, 12), (12, 9, 9), (30, 3, 4)))
        hosts, demand = _hosts(rng, clusters, hosts_max, scale), _demand(rng, clusters, groups_max, scale)
        claims, is_claimed = _in_loops(hosts, demand)
        pairs = list(zip(claims.host.tolist(), claims.group.tolist(), strict=True))
        assert dict(zip(pairs, claims.pods.tolist(), strict=True)) == _host_by_host(hosts, demand), seed
        assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0])), seed
        assert np.flatnonzero(is_claimed).tolist() == sorted(set(claims.host.tolist())), seed
        placed += int(claims.pods.sum())
        grown += len(pairs) > len(hosts.row) + pod_credit.CLAIMS_PER_GROUP * len(demand.counts)
    assert placed
    assert grown, "no claims had to get more room"


def test_kinds_are_numbered_by_first_sight_however_many_there_are() -> None:
    for seed, values in enumerate((2, 3, 40)):
        rng = np.random.default_rng(seed)
        count = 3_000
        rows = rng.permutation(count)[: count - 100]
        owners, stamp = rng.integers(0, 4, count, np.int32), rng.integers(0, values, count, np.int32)
        shape, offer = rng.integers(0, values, (2, count), np.int32)
        state, cluster_of = rng.integers(1, 4, count).astype(np.uint8), np.array([-1, 0, -1, 1], np.int32)
        places, keep = np.array([0, 0, 1, 2] + [0] * 252), np.arange(values)[::-1].copy()
        kind = np.empty(len(rows), np.int32)
        first = pod_credit.number_kinds(
            *(rows, owners, cluster_of, state, shape, offer, stamp, places, keep),
            *(np.array([values, values, values]), kind),
        )
        numbers: dict[tuple[object, ...], int] = {}
        expected, firsts_seen = [], []
        for place, row in enumerate(rows.tolist()):
            cluster = int(cluster_of[owners[row]])
            if cluster < 0:
                expected.append(-1)
                continue
            key = (cluster, int(state[row]), int(shape[row]), int(offer[row]), int(stamp[row]))
            if key not in numbers:
                numbers[key] = len(numbers)
                firsts_seen.append(place)
            expected.append(numbers[key])
        assert kind.tolist() == expected
        assert first.tolist() == firsts_seen
        _assert_ordered(rng, rows, kind, len(numbers))


def _assert_ordered(
    rng: np.random.Generator,
    rows: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    kind: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    kinds: int,
) -> None:
    rank, is_wanted = rng.integers(0, kinds, kinds), rng.integers(0, 2, kinds).astype(np.uint8)
    is_claimed, first = rng.integers(0, 2, len(rows) + 100).astype(np.uint8), np.zeros(kinds + 1, np.int64)
    ordered, of_kind = pod_credit.in_rank_order(rows, kind, is_wanted, rank, is_claimed, first)
    found = [
        (int(rank[k]), place, row, k)
        for place, (row, k) in enumerate(zip(rows.tolist(), kind.tolist(), strict=True))
        if k >= 0 and is_wanted[k] and not is_claimed[row]
    ]
    assert list(zip(ordered.tolist(), of_kind.tolist(), strict=True)) == [each[2:] for each in sorted(found)]
    assert np.diff(first).tolist() == np.bincount([each[0] for each in found], minlength=kinds).tolist()


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
