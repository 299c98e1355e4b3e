"""A gang that its cluster hosts whole finds its domain and its places without a verdict on any domain."""

from collections.abc import Set

import pytest

from bigfleet.engine.shapes import gangs
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.held_gangs import held_domains, own_first, own_machines, place_whole
from bigfleet.engine.shapes.hosting import clear_row, place_first_fit
from bigfleet.engine.shapes.state import HostIndex, HostState, PodGroup, RowState
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import fleet

FLEETS = in_proportion(300, least=60)

#: Where the pods of a row are: its claims and shares by machine, and what has no place.
Places = tuple[dict[str, tuple[dict[PodGroup, int], dict[int, int]]], list[int], dict[int, int]]


def places(row: RowState) -> Places:
    """Return where the pods of a row are."""
    taken: dict[str, tuple[dict[PodGroup, int], dict[int, int]]] = {}
    for host in row.cluster.hosts:
        claims = {group: count for group, count in host.claims.items() if group.row is row}
        shares = host.shares.get(row, {})
        if claims or shares:
            taken[host.machine.id] = claims, dict(shares)
    return taken, [group.left for group in row.groups], dict(row.divisible or {})


def rooms(hosts: list[HostState]) -> list[tuple[int, ...]]:
    """Return what each host has left."""
    return [tuple(host.room) for host in hosts]


def judged(row: RowState, state: DecisionState, index: HostIndex, planned: Set[str | None]) -> gangs.GangDomain | None:
    """Return the domain of least rank, of all domains."""
    assert row.same_key is not None
    is_stuck = row.need.parked or bool(row.impossible)
    offers = {} if is_stuck else state.usable_in_domains(row, row.same_key)
    free = {value for value, found in offers.items() if any(gangs._unclaimed(offer) > 0 for offer in found)}
    values = sorted(free | held_domains(row, index).keys())
    found = gangs._judged(gangs._gang(row, state, index), values, offers, planned, state, index)
    return min(found, key=lambda domain: domain.rank, default=None)


def placed_in(value: str, row: RowState, state: DecisionState, index: HostIndex) -> Places:
    """Return where the pods of a row are after first fit in a domain, own machines first; nothing is changed."""
    everywhere, row.matching = row.matching, gangs._in_domain(row, state, value)
    hosts = own_first(row, index, frozenset(own_machines(row, index)))
    place_first_fit(row, hosts)
    found = places(row)
    clear_row(row, hosts)
    row.matching = everywhere
    return found


def test_it_finds_what_judging_every_domain_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[DecisionState] = []
    credit_gang, whole, moved, with_own = gangs.credit_gang, 0, 0, 0

    def compared(row: RowState, index: HostIndex, planned: Set[str | None]) -> str | None:
        nonlocal whole, moved, with_own
        hosts, had = row.cluster.hosts, row.has_left
        best = judged(row, states[-1], index, planned)
        before = rooms(hosts), places(row)
        is_whole = best is not None and had and best.rank.held == -1
        wanted = placed_in(best.value, row, states[-1], index) if best is not None and is_whole else None
        found = place_whole(row, index, planned)
        if best is None or wanted is None:
            assert found is None
            assert (rooms(hosts), places(row)) == before
            return None
        assert found == best.value
        assert places(row) == wanted
        assert not row.has_left
        whole += 1
        moved += best.rank.own > -1
        with_own += best.rank.own < 0
        return found

    def remembered(row: RowState, state: DecisionState) -> None:
        states.append(state)
        credit_gang(row, state)

    monkeypatch.setattr(gangs, "place_whole", compared)
    monkeypatch.setattr("bigfleet.engine.shapes.credit.credit_gang", remembered)
    for seed in range(FLEETS):
        drawn = fleet(seed, machines_max=20 * (1 + seed % 4), rows_max=8, gangs=(0.15, 0.6)[seed % 2])
        decide(drawn.snapshot, drawn.demand, drawn.options)
    assert len(states) > FLEETS
    assert whole > FLEETS // 4, "clusters host gangs whole"
    assert moved, "on others' machines"
    assert with_own, "on their own machines"
    assert whole < len(states), "and some not"
