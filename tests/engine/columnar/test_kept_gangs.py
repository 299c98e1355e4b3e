"""Gangs whose domain free machines have a say in, when what is free changes and their clusters do not (docs/adr/0111).

Few racks, machines without stamps and equal gangs make ties; a machine that becomes free or goes then turns choices of
gangs in clusters that nothing touched. Every decision is held against one that was made from nothing.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar import credit_pass
from bigfleet.engine.columnar.arrays import SETTLED, UNSETTLED, Replay, Work
from bigfleet.engine.columnar.credit_pass import Pass
from bigfleet.engine.columnar.earmarks import Earmarks, start_replay
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Options
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from tests.engine.proof import examples

CLUSTERS = ("a", "b", "c", "d")
RACKS = ("r0", "r1", "r2", "r3")
RACK = "topology.bigfleet/rack"
OPTIONS = Options(now_seconds=0.0, reported=frozenset(CLUSTERS))

#: (rack, cluster or "" for a free machine) of each machine, and (cluster, machines wanted, gang or not) of each row.
Places = list[tuple[str, str]]
Wants = list[tuple[str, int, bool]]


def machine_at(number: int, rack: str, cluster: str) -> Machine:
    return Machine(
        id=MachineId(f"m{number:02}"),
        state=MachineState.CONFIGURED if cluster else MachineState.IDLE,
        host=HostRef("test", f"h{number}"),
        cluster=ClusterId(cluster),
        instance_type="gpu",
        resources={"gpu": "8"},
        labels={RACK: rack},
    )


def needs_of(wants: Wants) -> list[Need]:
    same = Profile(requirements=(Requirement(RACK, Operator.SAME),), priority=100)
    plain = Profile(requirements=(Requirement(RACK, Operator.EXISTS),), priority=50)
    return [
        Need(
            cluster=ClusterId(cluster),
            profile=same if is_gang else plain,
            aggregate=parse_vector({"gpu": str(8 * machines)}),
            min_unit=parse_vector({"gpu": "8"}),
            arrival_unix_nanos=1,
            group=f"g{place}" if is_gang else "",
        )
        for place, (cluster, machines, is_gang) in enumerate(wants)
    ]


@pytest.fixture
def disputes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the passes in which a kept choice no longer held."""
    counted: Counter[str] = Counter()
    run_round = Pass._round

    def starting(last: Earmarks | None, *rest: object) -> Replay:
        replay = start_replay(last, *rest)  # type: ignore[arg-type]
        counted["compared"] += int(replay.state[2])
        counted["differing"] += bool(replay.differs.any())
        counted["incomparable"] += last is not None and replay.state[2] == 0
        return replay

    def counting(self: Pass) -> tuple[Work, object, object]:
        counted["kept"] += self.previous is not None
        result = run_round(self)
        counted["settled"] += bool((result[0].disputed == SETTLED).any())
        counted["unsettled"] += bool((result[0].disputed == UNSETTLED).any())
        return result

    monkeypatch.setattr(Pass, "_round", counting)
    monkeypatch.setattr(credit_pass, "start_replay", starting)
    return counted


places = st.lists(st.tuples(st.sampled_from(RACKS), st.sampled_from(("", *CLUSTERS))), min_size=12, max_size=40)
wants = st.lists(
    st.tuples(st.sampled_from(CLUSTERS), st.integers(2, 4), st.sampled_from((True, True, True, False))),
    min_size=4,
    max_size=14,
)
#: Which machine moves, and to which rack; it is free before and after.
moves = st.lists(st.tuples(st.integers(0, 39), st.sampled_from((*RACKS, ""))), min_size=2, max_size=12)


def test_what_becomes_free_turns_kept_gangs_as_it_turns_all(disputes: Counter[str]) -> None:
    @examples(400)
    @given(places, wants, moves)
    def check(places: Places, wants: Wants, moves: list[tuple[int, str]]) -> None:
        machines = {m.id: m for m in (machine_at(n, rack, cluster) for n, (rack, cluster) in enumerate(places))}
        free = [machine.id for machine in machines.values() if not machine.cluster]
        needs, engine = needs_of(wants), ColumnarEngine()
        store = ColumnStore.from_snapshot(Snapshot.of(machines.values()))
        engine.decide(store.snapshot(), needs, OPTIONS)
        for which, rack in moves:
            if free:
                moved = machines[free[which % len(free)]]
                state = MachineState.IDLE if rack else MachineState.DELETING
                machines[moved.id] = Machine(
                    id=moved.id,
                    state=state,
                    host=moved.host,
                    instance_type="gpu",
                    resources={"gpu": "8"},
                    labels={RACK: rack or RACKS[0]},
                )
                store.update(machines[moved.id])

            decision = engine.decide(store.snapshot(), needs, OPTIONS)

            assert decision == decide(Snapshot.of(machines.values()), needs, OPTIONS)

    check()

    # A proof that never meets what it is about proves nothing.
    assert disputes["kept"] > 0
    assert disputes["settled"] > 0


#: What one of two fleets' free machines becomes: which, its rack, and the gpus that it offers.
swaps = st.lists(st.tuples(st.integers(0, 39), st.sampled_from(RACKS), st.sampled_from(("4", "8"))), max_size=3)
#: Rows that change places, or want another number of machines.
edits = st.lists(st.tuples(st.integers(0, 13), st.sampled_from((0, 0, 2, 3, 4))), max_size=2)
Steps = list[tuple[list[tuple[int, str, str]], list[tuple[int, int]]]]


def test_what_is_earmarked_otherwise_turns_kept_gangs_as_it_turns_all(disputes: Counter[str]) -> None:
    """Free machines of two sizes swap places, so that a rack has as many as it had and yet others; one cluster's gangs
    want more or fewer, which the gangs of all clusters behind them feel; and equal gangs change places."""

    @examples(800)
    @given(places, wants, st.lists(st.tuples(swaps, edits), min_size=2, max_size=8))
    def check(
        places: Places, wants: Wants, steps: list[tuple[list[tuple[int, str, str]], list[tuple[int, int]]]]
    ) -> None:
        machines = {m.id: m for m in (machine_at(n, rack, cluster) for n, (rack, cluster) in enumerate(places))}
        free = [machine.id for machine in machines.values() if not machine.cluster]
        needs, engine = needs_of(wants), ColumnarEngine()
        store = ColumnStore.from_snapshot(Snapshot.of(machines.values()))
        engine.decide(store.snapshot(), needs, OPTIONS)
        for swapped, edited in steps:
            for which, rack, gpus in swapped if free else ():
                known = machines[free[which % len(free)]]
                machines[known.id] = replace(known, resources={"gpu": gpus}, labels={RACK: rack})
                store.update(machines[known.id])
            for which, count in edited:
                place = which % len(needs)
                if count:
                    needs[place] = replace(needs[place], aggregate=parse_vector({"gpu": str(8 * count)}))
                else:
                    needs[place - 1], needs[place] = needs[place], needs[place - 1]
                    needs.sort(key=lambda need: -need.profile.priority)

            decision = engine.decide(store.snapshot(), needs, OPTIONS)

            assert decision == decide(Snapshot.of(machines.values()), needs, OPTIONS)

    check()

    assert {"compared", "differing", "incomparable"} <= {name for name, count in disputes.items() if count > 0}
