"""Which spare machines go to which shard: the rebalancing pass, a pure function of the fleet's last reports.

docs/spec/coordinator.md §7. Three tiers in strict order for each shortfall: idle machines, speculative slots, and, for
what is old and got nothing, a drain in another shard. Integers and fractions alone, every order total, so that equal
input gives equal output. What a pass proposes is enqueued by the leader; nothing here reads a clock or sends anything.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bigfleet.coordinator.flows import Benefit, Cooling, Drains, Flow, Offers, Slots, Wish, machines_needed
from bigfleet.coordinator.moves import FleetView, Knobs, Memory, Move, Plan, ShortfallKey, Skip, Tier
from bigfleet.coordinator.reports import Asking, Base, ShardFigures, Shortfall, accepts
from bigfleet.coordinator.tables import QuotaKey
from bigfleet.model import vector
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.vector import Vector, format_vector

_DEFAULTS = Knobs()
_NOTHING = Memory()


def plan(view: FleetView, memory: Memory = _NOTHING, knobs: Knobs = _DEFAULTS) -> Plan:
    """Return the moves of one pass, in the order in which shortfalls are served (§7.1), and why the rest got none.

    A donor gives from a row at most what its margin leaves over all moves of the pass; a shortfall never gets more
    than its deficit needs, and nothing at all while Same binds it.
    """
    return _Pass(view, memory, knobs).run()


class _Pass:
    """One pass: what it has planned so far."""

    def __init__(self, view: FleetView, memory: Memory, knobs: Knobs) -> None:
        self._view = view
        self._shards = tuple(sorted(view.shards, key=lambda shard: shard.shard_id))
        self._memory = memory
        self._knobs = knobs
        self._moves: list[Move] = []
        self._cooling = Cooling(set(memory.cooling))
        self._draining_donors = set(memory.draining_donors)
        self._drains_left = knobs.drains_max
        donors: defaultdict[str, list[ShardFigures]] = defaultdict(list)
        for shard in self._shards:
            if shard.is_fresh and shard.base is Base.DOMAINS and shard.provider_address:
                donors[shard.provider_address].append(shard)
        self._donors = dict(donors)
        self._idle = {at: Offers.of(shards, knobs, is_speculative=False) for at, shards in donors.items()}
        self._speculative = {at: Offers.of(shards, knobs, is_speculative=True) for at, shards in donors.items()}
        self._drains = {at: Drains(shards) for at, shards in donors.items()}
        self._quotas = {address: self._quota_behind(address) for address in donors}
        self._smallest = _smallest_allocatables(view)
        self._ready = _ready_by_requester(self._donors)
        #: Askings that get nothing any more, by provider address.
        self._spent: dict[str, set[Asking]] = {address: set() for address in donors}

    def run(self) -> Plan:
        """Serve every shortfall in turn."""
        shards = self._shards
        reasons = np.concatenate([_closed_gates(shard, self._knobs) for shard in shards] or [np.zeros(0, np.int8)])
        owners = [shard for shard in shards for _ in shard.shortfalls]
        shortfalls = [shortfall for shard in shards for shortfall in shard.shortfalls]
        askings = [asking for shard in shards for asking in shard.askings]
        for place in _in_order(shards, reasons):
            shard, asking = owners[place], askings[place]
            is_spent = asking in self._spent.get(shard.provider_address, ()) and shard.shard_id not in self._ready
            if is_spent and not self._may_be_drained_for(shortfalls[place]):
                reasons[place] = self._spent_reason(shard, shortfalls[place], asking)
            else:
                before = len(self._moves)
                reason = self._serve(shard, shortfalls[place], asking)
                reasons[place] = 0 if len(self._moves) > before else reason
        return Plan(tuple(self._moves), shards, reasons)

    def _may_be_drained_for(self, shortfall: Shortfall) -> bool:
        return bool(self._drains_left) and shortfall.age_cycles > self._knobs.preempt_age_cycles

    def _spent_reason(self, shard: ShardFigures, shortfall: Shortfall, asking: Asking) -> Skip:
        """Return why a shortfall gets nothing whose asking is spent."""
        key = ShortfallKey(shard.shard_id, shortfall.fingerprint)
        on_its_way = vector.add(self._memory.moving.get(key, vector.ZERO), self._memory.draining.get(key, vector.ZERO))
        if on_its_way and not vector.subtract(shortfall.deficit, on_its_way):
            return Skip.IN_FLIGHT
        tiers = (self._idle, self._speculative)
        return max(tier[shard.provider_address].reached(asking, shard.shard_id) for tier in tiers)

    def _serve(self, shard: ShardFigures, shortfall: Shortfall, asking: Asking) -> Skip:
        address, key = shard.provider_address, ShortfallKey(shard.shard_id, shortfall.fingerprint)
        moving = self._memory.moving.get(key, vector.ZERO)
        draining = self._memory.draining.get(key, vector.ZERO)
        has_donor = any(donor is not shard for donor in self._donors.get(address, ()))
        wish = Wish(
            requester=shard.shard_id,
            asking=asking,
            deficit=vector.subtract(shortfall.deficit, moving),
            reached=Skip.REQUIREMENTS if has_donor else Skip.PROVIDER,
        )
        self._hand_over(shard, shortfall, wish)
        wish.deficit = vector.subtract(wish.deficit, draining)
        if not wish.deficit:
            return Skip.IN_FLIGHT
        if not has_donor:
            return wish.reached
        before = len(self._moves)
        self._move(shard, shortfall, wish, Tier.IDLE)
        self._move(shard, shortfall, wish, Tier.SPECULATIVE)
        is_untouched = len(self._moves) == before and not moving and not draining
        if self._may_be_drained_for(shortfall) and is_untouched and wish.reached is not Skip.COOLDOWN:
            self._drain(shard, shortfall, wish)
        if self._idle[address].is_spent(asking) and self._speculative[address].is_spent(asking):
            self._spent[address].add(asking)
        return wish.reached

    # ---- machines that a drain has freed ------------------------------------------------------------------------

    def _hand_over(self, shard: ShardFigures, shortfall: Shortfall, wish: Wish) -> None:
        """Propose to hand over what is ready for the shard, as much as it still needs, whatever the defences say."""
        if shard.provider_address not in self._donors:
            return
        for (donor, instance_type, zone), waiting in self._ready.get(shard.shard_id, {}).items():
            allocatable = self._smallest.get(instance_type, vector.ZERO)
            needed = self._needed(allocatable, wish) if accepts(wish.asking.gate, instance_type, zone) else 0
            given = waiting[: min(needed, self._knobs.machines_max)]
            if donor.provider_address != shard.provider_address or not wish.deficit or not given:
                continue
            del waiting[: len(given)]
            move = self._proposal(Tier.READY, donor.shard_id, shard, shortfall, (instance_type, zone), len(given))
            self._moves.append(replace(move, machine_ids=tuple(given)))
            wish.deficit = vector.subtract(wish.deficit, move.capacity)

    def _needed(self, allocatable: Vector, wish: Wish) -> int:
        """Return how many machines of a type are needed, by the smallest that is known; 1 where none is known."""
        if not allocatable:
            return 1
        return machines_needed(allocatable, wish.deficit) if vector.covers(allocatable, wish.asking.min_unit) else 0

    # ---- tiers 1 and 2 ------------------------------------------------------------------------------------------

    def _move(self, shard: ShardFigures, shortfall: Shortfall, wish: Wish, tier: Tier) -> None:
        """Propose the best flow again and again, until the deficit is gone or no flow is left."""
        address = shard.provider_address
        offers = (self._idle if tier is Tier.IDLE else self._speculative)[address]
        quota, slots = self._quotas[address] if tier is Tier.SPECULATIVE else (None, None)
        while wish.deficit:
            flow = offers.best(wish, self._cooling, slots)
            if flow is None:
                return
            row = flow.giveable.row
            kind = (row.instance_type, row.zone)
            move = self._proposal(tier, flow.giveable.donor, shard, shortfall, kind, flow.give)
            capacity = vector.scale(row.allocatable, flow.give)
            move = replace(move, quota=quota, capacity=capacity, why=f"{move.why}; {_told(flow)}")
            self._moves.append(move)
            self._cooling.flows.add(move.flow)
            wish.deficit = vector.subtract(wish.deficit, move.capacity)
            offers.take(flow)
            if slots is not None:
                slots.take(flow.giveable.donor, flow.give)

    def _quota_behind(self, address: str) -> tuple[QuotaKey | None, Slots | None]:
        """Return the quota row of the provider at an address, None without one."""
        for name, provider in sorted(self._view.providers.items()):
            key = QuotaKey(name, provider.region)
            if provider.address == address and key in self._view.quotas:
                return key, Slots(dict(self._view.quotas[key].slots_of))
        return None, None

    # ---- tier 3 -------------------------------------------------------------------------------------------------

    def _drain(self, shard: ShardFigures, shortfall: Shortfall, wish: Wish) -> None:
        """Propose to drain cheaper work of the donor that has most of an accepted type (§7.4)."""
        drains = self._drains[shard.provider_address]
        best: tuple[int, ShardId, str, int] | None = None
        for instance_type in drains.types(wish.asking):
            if drains.is_wanted_by_others(instance_type, shard.shard_id):
                wish.note(Skip.DONOR_IN_NEED)
            allocatable = self._smallest.get(instance_type, vector.ZERO)
            needed = self._needed(allocatable, wish)
            for bound, donor in drains.of_type(instance_type) if needed else ():
                if donor == shard.shard_id or not self._may_drain(donor, shortfall):
                    continue
                give = min(bound, needed)
                if allocatable and not Benefit.of(give, allocatable, wish.deficit, self._knobs).is_worth_it:
                    wish.note(Skip.WORTH)
                    break
                if self._cooling.bars_drain(instance_type, donor, shard.shard_id):
                    wish.note(Skip.COOLDOWN)
                    continue
                found = (-bound, donor, instance_type, give)
                best = found if best is None else min(best, found)
                break
        if best is None:
            return
        bound, donor, instance_type, give = best
        count = min(give, self._drains_left, self._knobs.machines_max)
        move = self._proposal(Tier.PREEMPT, donor, shard, shortfall, (instance_type, ""), count)
        self._moves.append(replace(move, why=f"{move.why}; it has {-bound} of them bound, the most"))
        self._cooling.flows.add(move.flow)
        self._draining_donors.add(donor)
        self._drains_left -= count

    def _may_drain(self, donor: ShardId, shortfall: Shortfall) -> bool:
        return donor not in self._draining_donors and (donor, shortfall.fingerprint) not in self._memory.refused_drains

    def _proposal(
        self,
        tier: Tier,
        donor: ShardId,
        shard: ShardFigures,
        shortfall: Shortfall,
        kind: tuple[str, str],
        count: int,
    ) -> Move:
        """Return a move of machines as large as the smallest that is known of their type."""
        return Move(
            tier=tier,
            donor=donor,
            requester=shard.shard_id,
            fingerprint=shortfall.fingerprint,
            instance_type=kind[0],
            zone=kind[1],
            count=count,
            machine_ids=(),
            requirements=shortfall.requirements,
            min_unit=shortfall.min_unit,
            capacity=vector.scale(self._smallest.get(kind[0], vector.ZERO), count),
            priority=shortfall.priority,
            interruption_bucket=shortfall.interruption_bucket,
            quota=None,
            why=_why(tier, donor, shard.shard_id, shortfall, kind, count),
        )


def _closed_gates(shard: ShardFigures, knobs: Knobs) -> NDArray[np.int8]:
    """Return for each shortfall of a shard why it may not ask at all (§7.1), a Skip, or 0."""
    if not shard.is_fresh:
        return np.full(len(shard.shortfalls), Skip.STALE, np.int8)
    if shard.base is not Base.DOMAINS:
        return np.full(len(shard.shortfalls), Skip.BASE, np.int8)
    is_young = shard.ages <= knobs.age_cycles
    return np.select([is_young, shard.is_bound], [np.int8(Skip.AGE), np.int8(Skip.TOPOLOGY)], np.int8(0))


def _in_order(shards: tuple[ShardFigures, ...], reasons: NDArray[np.int8]) -> list[int]:
    """Return the places of those that may ask: priority and age descending, shard and fingerprint ascending."""
    if not shards:
        return []
    priorities = np.concatenate([shard.priorities for shard in shards])
    ages = np.concatenate([shard.ages for shard in shards])
    # The sort is stable, shards stand by id, and each one's shortfalls of equal priority and age by fingerprint.
    order = np.lexsort((-ages, -priorities))
    return [int(place) for place in order[reasons[order] == 0]]


Waiting = dict[tuple[ShardFigures, str, str], list[MachineId]]


def _ready_by_requester(donors: dict[str, list[ShardFigures]]) -> dict[ShardId, Waiting]:
    """Return the drained machines that wait for each shard, by donor, type and zone, ids ascending."""
    ready: defaultdict[ShardId, defaultdict[tuple[ShardFigures, str, str], list[MachineId]]]
    ready = defaultdict(lambda: defaultdict(list))
    for shards in donors.values():
        for donor in shards:
            for kept in sorted(donor.ready, key=lambda kept: (kept.instance_type, kept.zone, kept.machine_id)):
                if kept.to_shard_id != donor.shard_id:
                    ready[kept.to_shard_id][(donor, kept.instance_type, kept.zone)].append(kept.machine_id)
    return {requester: dict(waiting) for requester, waiting in ready.items()}


def _smallest_allocatables(view: FleetView) -> dict[str, Vector]:
    """Return the smallest allocatable known of each type anywhere, per dimension (§7.4)."""
    smallest: dict[str, Vector] = {}
    for shard in view.shards:
        if not shard.is_fresh:
            continue
        for row in (*shard.idle, *shard.speculative):
            if not row.allocatable:
                continue
            known = smallest.get(row.instance_type)
            if known is None:
                smallest[row.instance_type] = row.allocatable
            elif known != row.allocatable:
                smallest[row.instance_type] = {
                    name: min(milli, row.allocatable[name]) for name, milli in known.items() if name in row.allocatable
                }
    return smallest


_WHAT = {
    Tier.READY: "drained machines",
    Tier.IDLE: "idle machines",
    Tier.SPECULATIVE: "speculative slots",
    Tier.PREEMPT: "machines of cheaper work, to be drained,",
}


def _why(
    tier: Tier, donor: ShardId, requester: ShardId, shortfall: Shortfall, kind: tuple[str, str], count: int
) -> str:
    lacked = " ".join(f"{name} {text}" for name, text in format_vector(shortfall.deficit).items())
    where = f" in {kind[1]}" if kind[1] else ""
    return (
        f"{requester} lacks {lacked} at priority {shortfall.priority} for {shortfall.age_cycles} cycles:"
        f" {count} {_WHAT[tier]} of {kind[0]}{where} come from {donor}"
    )


def _told(flow: Flow) -> str:
    """Say what a flow does for the shortfall and what it leaves the donor."""
    kept = flow.giveable.row.count - flow.give
    if flow.benefit.is_all_closed:
        return f"they close all of it, {kept} stay there"
    part, whole = flow.benefit.least_closed
    return f"they close {part / whole:.0%} of what it lacks most, {kept} stay there"
