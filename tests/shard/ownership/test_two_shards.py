"""Two running shards behind one provider, whatever is wanted, given, lost and repeated: no machine is both's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigfleet.model import labels
from bigfleet.model.ids import MachineId
from bigfleet.model.instructions import Instruction, TransferOwnership
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Base, Domain, RowKind
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.handover import DoesNotApply, MayYetSucceed
from bigfleet.shard.ownership.ownership import Ownership
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.shard.ownership.handover_shard import ME, OTHER, HandoverShard, drain, instruction, release
from tests.shard.reconcile.test_unchanged_records import digest_of
from tests.shard.world import RevisionedProvider, machine, need

ZONES = {ME: "za", OTHER: "zb"}
NAMES = {zone: [f"{zone}{number}" for number in range(4)] for zone in ZONES.values()}


#: How a provider tells what it has: all of it, all of it with digests, or what has changed.
MODES = ("records", "digests", "deltas")


class WatchedProvider(RevisionedProvider):
    """Tells of every mutating call before it is judged, and lists in one of the ways."""

    on_call: Callable[[str, FenceToken], None] = lambda _machine, _token: None
    mode = "records"

    def view(self, since_revision: bytes) -> Listing:
        if self.mode == "deltas":
            return super().view(since_revision)
        records = [ListedMachine(each, dict(self.metadata.get(each.id, {}))) for each in self.records.values()]
        digests = b"".join(map(digest_of, records)) if self.mode == "digests" else b""
        return Listing(records=records, digests=digests)

    def _transition(self, method: str, machine_id: MachineId, token: FenceToken, *more: Any) -> Any:
        self.on_call(machine_id, token)
        return super()._transition(method, machine_id, token, *more)


class Pair:
    """Two shards, and whoever tells them to give and to take."""

    def __init__(self, base: Path, mode: str) -> None:
        self.provider = WatchedProvider()
        self.provider.mode = mode
        for zone, names in NAMES.items():
            self.provider.add(*(machine(name, MachineState.IDLE, zone=zone) for name in names))
        quick = ShardSettings(report_interval_seconds=1.0, incremental_reconcile=mode == "deltas")
        self.shards = [
            HandoverShard(base / name, name=name, provider=self.provider, settings=quick, new_file_owns=Base.DOMAINS)
            for name in ZONES
        ]
        for shard in self.shards:
            domain = Domain(labels.ZONE, ZONES[shard.name])
            shard.file.commit(replace(shard.owned, domains=frozenset({domain})))
        self.provider.on_call = self.check_call
        self.sequence = 0
        #: What was told, to whom, and the adoptions that nobody has told yet.
        self.told: list[tuple[int, Instruction]] = []
        self.untold: list[tuple[int, Instruction]] = []
        #: The instructions to give of which the answer has come, whenever that was.
        self.answered: set[str] = set()
        self.moved = 0

    def check_call(self, machine_id: str, token: FenceToken) -> None:
        """No shard calls for a machine that it has given up."""
        (caller,) = [shard for shard in self.shards if shard.name == token.shard_id]
        row = caller.owned.rows.get(MachineId(machine_id))
        assert row is None or row.kind is RowKind.ADOPTED, f"{caller.name} called for {machine_id}, which it gave up"

    def check(self) -> None:
        """No machine is in two inventories, nor in an inventory of a shard that gave it up."""
        first, second = (set(shard.holds()) for shard in self.shards)
        assert not first & second
        for shard in self.shards:
            gone = {m for m, row in shard.owned.rows.items() if row.kind is not RowKind.ADOPTED}
            assert not gone.intersection(shard.holds())

    async def tell(self, number: int, told: Instruction) -> None:
        self.told.append((number, told))
        ownership: Ownership | None = self.shards[number].world.shard.ownership
        assert ownership is not None
        try:
            done = await ownership.handover.carry_out(told)
        except (DoesNotApply, MayYetSucceed):
            return
        gave = told.payload
        if isinstance(gave, TransferOwnership) and gave.selector and done.machines:
            self._pass_on(told, gave, done.machines)

    def _pass_on(self, told: Instruction, gave: TransferOwnership, machines: tuple[Machine, ...]) -> None:
        """Have an adoption told of what was given, once, as a coordinator does with the answer."""
        if told.instruction_id in self.answered:
            return
        self.answered.add(told.instruction_id)
        taking = TransferOwnership(from_shard=gave.from_shard, to_shard=gave.to_shard, machines=machines)
        (taker,) = [number for number, shard in enumerate(self.shards) if shard.name == gave.to_shard]
        self.untold.append((taker, instruction(taking, told.version.sequence, suffix="/adopt")))
        self.moved += len(machines)

    async def happens(self, event: tuple[Any, ...]) -> None:
        number = event[1] if len(event) > 1 else 0
        shard, other = self.shards[number], self.shards[1 - number]
        match event:
            case ("cycles", _, is_timer):
                await shard.world.cycle(is_timer=is_timer)
            case ("wants", _, cpu):
                cluster = f"of-{shard.name}"
                session = shard.world.connect(cluster)
                session.report(*([need(cluster, str(cpu))] if cpu else []))
            case ("gives", _, count):
                self.sequence += 1
                giving = replace(release(count=count), from_shard=shard.name, to_shard=other.name)
                await self.tell(number, instruction(giving, self.sequence))
            case ("drains", _):
                self.sequence += 1
                await self.tell(number, instruction(replace(drain(1), to_shard=other.name), self.sequence))
            case ("is told",) if self.untold:
                await self.tell(*self.untold.pop(0))
            case ("again", _, place) if self.told:
                await self.tell(*self.told[place % len(self.told)])
            case ("dies", _):
                shard.start()
            case ("settles",):
                self.provider.settle()
            case ("waits", _, seconds):
                await LoopClock().sleep(seconds)

    async def heal(self) -> None:
        """Tell what nobody was told yet, and let both look."""
        while self.untold:
            await self.tell(*self.untold.pop(0))
        for _ in range(3):
            for shard in self.shards:
                await shard.world.cycle()
            self.provider.settle()

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


_SHARD = st.integers(0, 1)
_EVENTS = st.one_of(
    st.tuples(st.just("cycles"), _SHARD, st.booleans()),
    st.tuples(st.just("wants"), _SHARD, st.sampled_from([0, 4, 12, 20])),
    st.tuples(st.just("gives"), _SHARD, st.integers(1, 3)),
    st.tuples(st.just("drains"), _SHARD),
    st.tuples(st.just("is told")),
    st.tuples(st.just("again"), _SHARD, st.integers(0, 50)),
    st.tuples(st.just("dies"), _SHARD),
    st.tuples(st.just("settles")),
    st.tuples(st.just("waits"), _SHARD, st.sampled_from([1, 9, 700])),
)


#: Told to give before it has read its provider, a shard gives when it is told again, and the adoption follows then.
_GIVES_WHEN_TOLD_AGAIN = [("dies", 0), ("gives", 0, 1), ("cycles", 0, False), ("again", 0, 0)]


@pytest.mark.rule("shard 5.3/16", "shard 16/6")
@pytest.mark.slow
@settings(max_examples=in_proportion(240), deadline=None)
@given(course=st.lists(_EVENTS, min_size=10, max_size=40), mode=st.sampled_from(MODES))
@example(course=_GIVES_WHEN_TOLD_AGAIN, mode="records")
def test_no_machine_is_ever_of_two_shards_and_none_is_lost(
    course: Any, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def run() -> None:
        pair = Pair(tmp_path_factory.mktemp("pair"), mode)
        for shard in pair.shards:
            await shard.world.cycle()
        for event in course:
            await pair.happens(event)
            pair.check()
        await pair.heal()
        pair.check()
        held = [set(shard.holds()) for shard in pair.shards]
        assert held[0] | held[1] == set(pair.provider.records)
        pair.close()

    run_virtual(run)


async def _busy(base: Path, mode: str) -> int:
    pair = Pair(base, mode)
    for turn in range(6):
        number = turn % 2
        for event in (("cycles", number, True), ("gives", number, 2), ("dies", 1 - number), ("is told",)):
            await pair.happens(event)
            pair.check()
        await pair.happens(("waits", 0, 9))
    await pair.heal()
    pair.close()
    return pair.moved


@pytest.mark.rule("shard 5.3/16")
@pytest.mark.parametrize("mode", MODES)
def test_machines_go_to_and_fro_over_restarts(tmp_path: Path, mode: str) -> None:
    assert run_virtual(lambda: _busy(tmp_path, mode)) > 3
