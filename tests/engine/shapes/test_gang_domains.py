"""A gang that its cluster hosts whole finds its domain without a look at domains of which the cluster holds nothing."""

import pytest

from bigfleet.engine.shapes import gangs
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.state import HostIndex, RowState
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import fleet

FLEETS = in_proportion(300, least=60)


def test_it_finds_what_judging_every_domain_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    best_domain, judged = gangs._best_domain, gangs._judged
    looked_at: list[str] = []
    chosen = passed_over = 0

    def counted(*arguments: object, **_: object) -> object:
        values = list(arguments[1])  # type: ignore[call-overload]
        looked_at.extend(values)
        return judged(arguments[0], values, *arguments[2:])  # type: ignore[arg-type]

    def compared(row: RowState, state: DecisionState, index: HostIndex) -> gangs.GangDomain | None:
        nonlocal chosen, passed_over
        assert row.same_key is not None
        is_stuck = row.need.parked or bool(row.impossible)
        offers = {} if is_stuck else state.usable_in_domains(row, row.same_key)
        free = {value for value, found in offers.items() if any(gangs._unclaimed(offer) > 0 for offer in found)}
        values = sorted(free | gangs._held_values(row, row.same_key, index))
        gang, planned = gangs._gang(row, state, index), gangs._planned_domains(row, state)
        every = list(judged(gang, values, offers, planned, state, index))
        wanted = min(every, key=lambda domain: domain.rank, default=None)
        looked_at.clear()
        found = best_domain(row, state, index)
        assert found == wanted
        assert set(looked_at) <= set(values)
        chosen += found is not None
        passed_over += len(values) - len(set(looked_at))
        return found

    monkeypatch.setattr(gangs, "_judged", counted)
    monkeypatch.setattr(gangs, "_best_domain", compared)
    for seed in range(FLEETS):
        drawn = fleet(seed, machines_max=20 * (1 + seed % 4), rows_max=8)
        decide(drawn.snapshot, drawn.demand, drawn.options)
    assert chosen > FLEETS // 4
    assert passed_over
