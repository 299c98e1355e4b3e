"""Moves against a search of its own over all single moves, and chains of moves and exchanges that end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from random import Random

import pytest

from bigfleet.compositions.targets import targets_of
from bigfleet.engine.decision import ActionKind, Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import class_key
from bigfleet.exchange.between_clusters import moves_of
from bigfleet.exchange.questions import questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import ExchangeProposal, ExchangeSettings
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from tests.exchange.building import machine, need, pods
from tests.exchange.fleets import moves, options_of, own, rented, state_of, wants

#: Everything that saves is ready, so that what is compared is the saving.
ALL_READY = ExchangeSettings(hold_seconds=1e9, saving_fraction_min=0.01)
#: Pods of a few sizes pack as well in first-fit order as they can.
SIZES = (1000, 1900, 3800)
ROUNDS_MAX = 40


def types(*names: str) -> Requirement:
    """Return that a pod runs on these instance types only."""
    return Requirement("node.kubernetes.io/instance-type", Operator.IN, names)


# ---- all single moves ------------------------------------------------------------------------------------------------


def fits(sizes: Sequence[int], rooms: Sequence[int]) -> bool:
    """Return whether the pods have a place on machines with so much room, by trying every one."""
    if not sizes:
        return True
    first, *rest = sorted(sizes, reverse=True)
    tried = set()
    for place, room in enumerate(rooms):
        if room >= first and room not in tried:
            tried.add(room)
            if fits(rest, [*rooms[:place], room - first, *rooms[place + 1 :]]):
                return True
    return False


def best_saving(
    giver: tuple[Sequence[int], int],
    taker: tuple[Sequence[int], Sequence[tuple[int, float]]],
    offered: Sequence[tuple[int, float]],
) -> float:
    """Return the most that one machine of 4 cpu saves by the hour when it moves; below 0 if none can.

    `giver` has its pods and so many machines, `taker` its pods and its rented machines (room and price).
    """
    wanted, count = giver
    costs = [
        sum(price for _, price in more)
        for number in range(3)
        for more in combinations_with_replacement(offered, number)
        if fits(wanted, [*(4000,) * (count - 1), *(room for room, _ in more)])
    ]
    rooms, held = taker
    saved = [
        sum(held[n][1] for n in going)
        for number in range(len(held) + 1)
        for going in combinations(range(len(held)), number)
        if fits(rooms, [4000, *(held[n][0] for n in range(len(held)) if n not in going)])
    ]
    return max(saved) - min(costs) if costs and saved else -1.0


def drawn(random: Random, room: int) -> list[int]:
    """Return the pods of a machine."""
    found: list[int] = []
    while room - sum(found) >= min(SIZES):
        found.append(random.choice([size for size in SIZES if size <= room - sum(found)]))
    return found[: random.randint(1, len(found))]


def rows_of(cluster: str, sizes: Sequence[int], *where: Requirement) -> list[Need]:
    """Return one row for all pods of a cluster."""
    shapes = [pods(size, 0.5, sizes.count(size)) for size in sorted(set(sizes))]
    return wants(cluster, need(*shapes, requirements=where))


def test_no_move_saves_more_than_the_best_single_one_and_most_save_as_much() -> None:
    """Small fleets at rest of which every single move is tried."""
    compared = equal = 0
    for seed in range(40):
        random = Random(seed)
        count, large = random.randint(1, 3), random.randint(0, 1)
        offered = [(4000, random.choice((0.2, 0.4, 0.9))), (8000, random.choice((0.5, 0.7)))]
        held = [(4000, random.choice((1.0, 2.0))), *[(8000, 3.0)] * large]
        a = [size for _ in range(count) for size in drawn(random, 4000)]
        b = [size for room, _ in held for size in drawn(random, room)]
        machines = own("a", count)
        machines += [m for room, price in held for m in rented("b", 1, price, room // 1000)]
        machines += [
            machine(f"new{room}-{n}", room // 1000, price, instance_type=f"new{room}")
            for room, price in offered
            for n in range(3)
        ]
        rows = [*rows_of("a", a), *rows_of("b", b, types("own4", "rented4", "rented8"))]
        fleet, context = state_of(machines, rows, settings=ALL_READY)
        if any(question.blocked for question in questions_of(fleet, context)):
            continue
        most = best_saving((a, count), (b, held), offered)
        found = moves(machines, rows, settings=ALL_READY).get("a")
        compared += most > 0.01
        if found is not None:
            assert found.gate.saving_usd_per_hour <= most + 1e-6, seed
            equal += found.gate.saving_usd_per_hour == pytest.approx(most)
    assert compared >= 10
    assert equal >= 0.9 * compared


# ---- chains ----------------------------------------------------------------------------------------------------------


def with_targets(machines: Sequence[Machine], rows: Sequence[Need]) -> Options:
    """Return the options with target compositions for the machines, as a shard has them."""
    options = options_of(rows)
    return replace(options, targets=targets_of(Snapshot.of(machines), rows, options))


def serving(one: Machine, cluster: str) -> Machine:
    """Return the machine Configured in a cluster."""
    return replace(one, state=MachineState.CONFIGURED, host=HostRef("p", one.id), cluster=ClusterId(cluster))


def on_offer(one: Machine) -> Machine:
    """Return the machine without a cluster: Idle if it is paid for anyway."""
    if one.instance_type.startswith("own"):
        return replace(one, state=MachineState.IDLE, cluster=ClusterId(""))
    return replace(one, state=MachineState.SPECULATIVE, host=HostRef(), cluster=ClusterId(""))


def at_rest(machines: Sequence[Machine], rows: Sequence[Need]) -> list[Machine]:
    """Return the machines after the actions of decisions until there are none."""
    found = {each.id: each for each in machines}
    for _ in range(12):
        current = list(found.values())
        decision = decide(Snapshot.of(current), rows, with_targets(current, rows))
        actions = [each for each in decision.actions if each.kind is not ActionKind.DELETE]
        if not actions:
            assert all(row.satisfied for row in decision.rows)
            return current
        for action in actions:
            is_acquired = action.kind in (ActionKind.PROVISION, ActionKind.BOOTSTRAP)
            known = found[action.machine_id]
            found[action.machine_id] = serving(known, action.cluster) if is_acquired else on_offer(known)
    raise AssertionError("the fleet never rests")


def carried_out(machines: Sequence[Machine], cluster: str, proposal: ExchangeProposal) -> list[Machine]:
    """Return the machines after an exchange of a cluster; of one between clusters after both parts."""
    wanted = proposal.comes_by_class
    after = []
    for each in machines:
        kind = next((kind for kind, _ in proposal.comes if kind.key == class_key(each)), None)
        if each.id in proposal.machine_ids:
            after.append(on_offer(each))
        elif not each.cluster and kind is not None and wanted[kind.key] > 0:
            wanted[kind.key] -= 1
            after.append(serving(each, cluster))
        else:
            after.append(each)
    assert not +wanted
    return after if proposal.taker_part is None else carried_out(after, proposal.taker, proposal.taker_part)


def cost(machines: Sequence[Machine]) -> float:
    """Return what all clusters rent, dollars an hour."""
    return sum(
        each.price_usd_per_hour for each in machines if each.cluster and not each.instance_type.startswith("own")
    )


def next_step(machines: Sequence[Machine], rows: Sequence[Need]) -> tuple[str, ExchangeProposal] | None:
    """Return the first exchange of a cluster that is ready, else the first move."""
    fleet, context = state_of(machines, rows, options=with_targets(machines, rows))
    questions = questions_of(fleet, context)
    answers = [find_exchanges(question) for question in questions]
    for answer in answers:
        for proposal in answer.proposals:
            if proposal.waits_for is None:
                return answer.cluster, proposal
    found = moves_of(fleet, context, questions, answers)
    return next(((giver, move) for giver, move in found.items() if move.waits_for is None), None)


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5)),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 12)),
    ],
)
def test_chains_of_moves_and_exchanges_end(seed: int) -> None:
    """Each makes the fleet cheaper by what it says, every pod keeps a place, and what left is on offer again."""
    random = Random(seed)
    rows, machines, moved = [], [], 0
    for cluster, count in (("a", 6), ("b", 5), ("d", 4)):
        sizes = [size for _ in range(count) for size in drawn(random, 4000)]
        # The first cluster may rent what is cheap, the others pay more for what they may rent.
        allowed = {"a": "new8000", "b": "new4000", "d": "dear"}[cluster]
        rows += rows_of(cluster, sizes, types("own4", "rented4", allowed))
        machines += own(cluster, count if cluster == "a" else 1) + rented(cluster, 0 if cluster == "a" else count)
    for name, cpu, price in (("new8000", 8, 0.5), ("new4000", 4, 1.2), ("dear", 4, 2.6)):
        machines += [machine(f"{name}-{n}", cpu, price, instance_type=name) for n in range(8)]
    machines = at_rest(machines, rows)
    for _ in range(ROUNDS_MAX):
        step = next_step(machines, rows)
        if step is None:
            break
        cluster, proposal = step
        before, machines = cost(machines), carried_out(machines, cluster, proposal)
        gate = proposal.gate
        assert cost(machines) - before == pytest.approx(gate.comes_usd_per_hour - gate.goes_usd_per_hour)
        machines = at_rest(machines, rows)
        assert cost(machines) < before
        moved += proposal.taker_part is not None
    else:
        pytest.fail(f"the chain does not end within {ROUNDS_MAX} exchanges")
    assert moved
