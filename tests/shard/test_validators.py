"""What validators of a shard's states find: each invariant, broken on purpose."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from bigfleet.model.frames import CAPABILITY_NODE_STATUS, Acknowledgement
from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.model.validation import InvariantBroken, validate, validating
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ports import JoinGate, ShardSettings
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState
M0, IDLE0, UNKNOWN = MachineId("m0"), MachineId("idle0"), MachineId("unknown")


async def living_world() -> World:
    """Return a shard with a bound machine whose node is missing, an Idle one, a demand, and an operator."""
    world = World(ScriptedProvider(), settings=ShardSettings(join_gate=JoinGate.OBSERVE))
    row = need("c1", "8")
    stamp = {"assigned_need_fingerprint": row.fingerprint, "assigned_priority": 100}
    world.provider.add(machine("m0", S.CONFIGURED, cluster="c1", **stamp), machine("idle0", S.IDLE))
    world.connect("c1", CAPABILITY_NODE_STATUS).report(row)
    await world.cycle()
    return world


def _other_price(shard: Shard) -> None:
    inventory = shard.inventory
    inventory.snapshot()
    record = inventory._machines[M0]
    dearer = replace(record.machine(M0), price_usd_per_hour=7.0)
    inventory._machines[M0], _ = inventory._keeper.keep(dearer, record.binding, math.nan, inventory._store.vocabulary)


def _swapped_rows(shard: Shard) -> None:
    shard.inventory._store._ids.reverse()


def _other_record(shard: Shard) -> None:
    shard.ledger._pending[UNKNOWN] = next(iter(shard.ledger.history))
    shard.ledger._touched.add(UNKNOWN)


def _two_frames_of_a_key(shard: Shard) -> None:
    outbox = next(iter(shard.sessions)).outbox
    outbox._by_key["machine/m0"] = 99
    outbox.put(Acknowledgement(echo="1"))


#: What is broken, how, and what is said of it.
PLANTED: dict[str, tuple[Callable[[Shard], object], str]] = {
    "an idle stamp of a bound machine": (
        lambda shard: shard.inventory._idle_since_seconds.update({M0: 1.0}), "idle-since stamps"
    ),
    "a state stamp of no machine": (
        lambda shard: shard.inventory._state_since_unix_nanos.update({UNKNOWN: 1}), "state-since stamp"
    ),
    "a cluster that is counted twice": (lambda shard: shard.inventory._count("c1", 1), "clusters carry"),
    "a machine that the columns lost": (lambda shard: shard.inventory._store.remove(IDLE0), "other machines"),
    "another price than in the columns": (_other_price, "other values"),
    "rows out of order": (_swapped_rows, "not in order"),
    "a machine with a row that waits for one": (
        lambda shard: shard.inventory._store._waiting.update({M0: (5, 0, 0, 0, 0, 0.0)}), "waits for one"
    ),
    "an action of another machine": (_other_record, "another's record"),
    "a slot without an action": (lambda shard: shard.actuator._slots._held.add(UNKNOWN), "without an action"),
    "a key without a frame": (_two_frames_of_a_key, "a key without a frame"),
    "an overdue machine that is not missing": (
        lambda shard: shard.publisher.joins._overdue.update({"c1": {UNKNOWN: None}}), "is not missing"
    ),
    "deadlines out of order": (
        lambda shard: shard.publisher.joins._due.append((-1.0, [M0])), "not ascending"
    ),
    "a row whose latency is forgotten": (
        lambda shard: shard.publisher._latency._first_seen_seconds["c1"].clear(), "not those of the rows"
    ),
}  # fmt: skip


@pytest.mark.virtual_time
@pytest.mark.parametrize("defect", PLANTED)
async def test_a_broken_invariant_is_found(defect: str) -> None:
    """At the end of the cycle at the latest; before it was broken nothing is found."""
    world = await living_world()
    shard = world.shard
    validate(shard.inventory, shard.actuator, shard.publisher)
    plant, said = PLANTED[defect]

    def break_and_validate() -> None:
        plant(shard)
        validate(shard.inventory, shard.actuator, shard.publisher)

    with pytest.raises(InvariantBroken, match=said):
        break_and_validate()


def test_validation_is_for_a_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is off, nothing is looked at."""
    monkeypatch.setattr("bigfleet.model.validation._is_on", False)

    class Broken:
        def validate(self) -> None:
            raise InvariantBroken("broken")

    validate(Broken())
    with validating(), pytest.raises(InvariantBroken):
        validate(Broken())
    validate(Broken())
