"""Plans which spare machines move to which shard: a pure function of the last reports of the fleet.

docs/spec/coordinator.md §7. Three tiers in strict order for each shortfall: idle machines, speculative slots, and, for
an old shortfall that got nothing, a drain in another shard. Only integers and fractions are used and every order is
total, so equal input gives equal output. The leader enqueues what a pass proposes; this module reads no clock and sends
nothing.
"""

from collections import defaultdict
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bigfleet.coordinator.donors import Benefit, Cooling, DonorOffers, DonorSlots, Drains, Flow, Wish, machines_needed
from bigfleet.coordinator.pending_shortfalls import SETTLED, Pending
from bigfleet.coordinator.reports import ShardFigures, ShortfallClass, accepts
from bigfleet.coordinator.tables import QuotaKey
from bigfleet.coordinator.transfers import (
    FleetView,
    Knobs,
    Memory,
    RebalancePlan,
    ShortfallKey,
    Skip,
    Tier,
    Transfer,
    quota_behind,
)
from bigfleet.model import vector
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Base
from bigfleet.model.shard_report import Shortfall
from bigfleet.model.vector import Vector, format_vector

_DEFAULTS = Knobs()
_NOTHING = Memory()


def plan(view: FleetView, memory: Memory = _NOTHING, knobs: Knobs = _DEFAULTS) -> RebalancePlan:
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
        self._moves: list[Transfer] = []
        self._cooling = Cooling(set(memory.cooling))
        self._draining_donors = set(memory.draining_donors)
        self._drains_left = knobs.drains_max
        donors: defaultdict[str, list[ShardFigures]] = defaultdict(list)
        for shard in self._shards:
            if shard.is_fresh and shard.base is Base.DOMAINS and shard.provider_address:
                donors[shard.provider_address].append(shard)
        self._donors = dict(donors)
        self._idle = {at: DonorOffers.of(shards, knobs, is_speculative=False) for at, shards in donors.items()}
        self._speculative = {at: DonorOffers.of(shards, knobs, is_speculative=True) for at, shards in donors.items()}
        self._drains = {at: Drains(shards) for at, shards in donors.items()}
        self._quotas = {address: self._quota_behind(address) for address in donors}
        self._smallest = _smallest_allocatables(view)
        self._ready = _ready_by_requester(self._donors)
        self._places = {shard.shard_id: n for n, shard in enumerate(self._shards)}

    def run(self) -> RebalancePlan:
        """Serve every shortfall in turn."""
        shards = self._shards
        shortfalls = list(chain.from_iterable(shard.shortfalls for shard in shards))
        if not shortfalls:
            return RebalancePlan((), shards, np.zeros(0, np.int8))
        askings = list(chain.from_iterable(shard.askings for shard in shards))
        owners = np.repeat(np.arange(len(shards)), [len(shard.shortfalls) for shard in shards])
        reasons = _closed_gates(shards, owners, self._knobs)
        pending = Pending(shards, owners, reasons, self._knobs, self._apart())
        for group, example in enumerate(pending.examples):
            self._settle(pending, group, shards[owners[example]].provider_address, askings[example])
        for place in _in_order(shards, reasons):
            if pending.states[place] == SETTLED:
                continue
            shard, asking = shards[owners[place]], askings[place]
            before = len(self._moves)
            pending.states[place] = SETTLED
            reason = self._serve(shard, shortfalls[place], asking)
            if len(self._moves) == before:
                reasons[place] = reason
                self._settle(pending, pending.group_of[place], shard.provider_address, asking)
        return RebalancePlan(tuple(self._moves), shards, reasons)

    def _apart(self) -> list[int]:
        """Return the places of the shortfalls for which something is under way or ready."""
        known = {*self._memory.moving, *self._memory.draining, *self._memory.drained_for}
        shard_ids = {key.shard_id for key in known} | self._ready.keys()
        apart, start = [], 0
        for shard in self._shards:
            if shard.shard_id in shard_ids:
                is_ready = shard.shard_id in self._ready
                apart += [
                    start + n
                    for n, shortfall in enumerate(shard.shortfalls)
                    if is_ready or ShortfallKey(shard.shard_id, shortfall.fingerprint) in known
                ]
            start += len(shard.shortfalls)
        return apart

    def _settle(self, pending: Pending, group: int, address: str, asking: ShortfallClass) -> None:
        """Settle all shortfalls of a group that are evidently hopeless, without looking at each."""
        if len(self._donors.get(address, ())) < 2:
            pending.settle(group, Skip.PROVIDER, with_old=True)
            return
        with_old = not self._drains_left or not self._drains[address].is_open(asking, self._draining_donors)
        _, slots = self._quotas[address]
        idle, speculative = self._idle[address].most(asking, None), self._speculative[address].most(asking, slots)
        if idle.has_rows or speculative.has_rows:
            enough, of_enough = self._knobs.benefit_min.numerator, self._knobs.benefit_min.denominator
            if enough:
                # What is short of more than the best rows could close of it by enough is not worth any move.
                names = sorted(asking.names)
                most = [max(idle.milli.get(name, 0), speculative.milli.get(name, 0)) for name in names]
                from_milli = [milli * of_enough // enough + 1 for milli in most]
                pending.settle(group, Skip.WORTH, from_milli=from_milli, with_old=with_old)
            return
        wanted_by = idle.wanted_by | speculative.wanted_by
        reached = max(idle.reached, speculative.reached)
        if reached is Skip.REQUIREMENTS and wanted_by:
            own = self._places[next(iter(wanted_by))] if len(wanted_by) == 1 else None
            pending.settle(group, Skip.DONOR_IN_NEED, with_old=with_old, but_of=own)
        pending.settle(group, reached, with_old=with_old)

    def _may_be_drained_for(self, shortfall: Shortfall) -> bool:
        return bool(self._drains_left) and shortfall.age_cycles > self._knobs.preempt_age_cycles

    def _serve(self, shard: ShardFigures, shortfall: Shortfall, asking: ShortfallClass) -> Skip:
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
        is_untouched = (
            len(self._moves) == before and not moving and not draining and key not in self._memory.drained_for
        )
        if self._may_be_drained_for(shortfall) and is_untouched and wish.reached is not Skip.COOLDOWN:
            self._drain(shard, shortfall, wish)
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
            kind = (instance_type, zone)
            move = self._proposal(
                Tier.READY, donor.shard_id, shard, shortfall, kind, len(given), machine_ids=tuple(given)
            )
            self._moves.append(move)
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
            move = self._proposal(
                tier,
                flow.giveable.donor,
                shard,
                shortfall,
                kind,
                flow.give,
                allocatable=row.allocatable,
                quota=quota,
                detail=_flow_detail(flow),
            )
            self._moves.append(move)
            self._cooling.flows.add(move.flow)
            wish.deficit = vector.subtract(wish.deficit, move.capacity)
            offers.take(flow)
            if slots is not None:
                slots.take(flow.giveable.donor, flow.give)

    def _quota_behind(self, address: str) -> tuple[QuotaKey | None, DonorSlots | None]:
        """Return the quota row of the provider at an address, None without one."""
        key = quota_behind(address, self._view.providers, self._view.quotas)
        return (None, None) if key is None else (key, DonorSlots(dict(self._view.quotas[key].slots_of)))

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
        detail = f"it has {-bound} of them bound, the most"
        move = self._proposal(Tier.PREEMPT, donor, shard, shortfall, (instance_type, ""), count, detail=detail)
        self._moves.append(move)
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
        *,
        allocatable: Vector | None = None,
        quota: QuotaKey | None = None,
        machine_ids: tuple[MachineId, ...] = (),
        detail: str = "",
    ) -> Transfer:
        """Return a move; without `allocatable` of machines as large as the smallest that is known of their type."""
        if allocatable is None:
            allocatable = self._smallest.get(kind[0], vector.ZERO)
        why = _why(tier, donor, shard.shard_id, shortfall, kind, count)
        return Transfer(
            tier=tier,
            donor=donor,
            requester=shard.shard_id,
            fingerprint=shortfall.fingerprint,
            instance_type=kind[0],
            zone=kind[1],
            count=count,
            machine_ids=machine_ids,
            requirements=shortfall.requirements,
            min_unit=shortfall.min_unit,
            capacity=vector.scale(allocatable, count),
            priority=shortfall.priority,
            interruption_bucket=shortfall.interruption_bucket,
            quota=quota,
            why=f"{why}; {detail}" if detail else why,
        )


def _closed_gates(shards: tuple[ShardFigures, ...], owners: NDArray[np.int64], knobs: Knobs) -> NDArray[np.int8]:
    """Return for each shortfall why it may not ask at all (§7.1), a Skip, or 0."""
    is_fresh = np.array([shard.is_fresh for shard in shards])[owners]
    has_domains = np.array([shard.base is Base.DOMAINS for shard in shards])[owners]
    is_young = np.concatenate([shard.ages for shard in shards]) <= knobs.age_cycles
    is_bound = np.concatenate([shard.is_bound for shard in shards])
    gates = {Skip.STALE: ~is_fresh, Skip.BASE: ~has_domains, Skip.AGE: is_young, Skip.TOPOLOGY: is_bound}
    return np.select(list(gates.values()), [np.int8(skip) for skip in gates], np.int8(0))


def _in_order(shards: tuple[ShardFigures, ...], reasons: NDArray[np.int8]) -> list[int]:
    """Return the places without a reason: priority and age descending, shard and fingerprint ascending."""
    left = np.flatnonzero(reasons == 0)
    priorities = np.concatenate([shard.priorities for shard in shards])[left]
    ages = np.concatenate([shard.ages for shard in shards])[left]
    # The sort is stable, shards stand by id, and each one's shortfalls of equal priority and age by fingerprint.
    places: list[int] = left[np.lexsort((-ages, -priorities))].tolist()
    return places


Waiting = dict[tuple[ShardFigures, str, str], list[MachineId]]


def _ready_by_requester(donors: dict[str, list[ShardFigures]]) -> dict[ShardId, Waiting]:
    """Return the drained machines that wait for each shard, by donor, type and zone, ids ascending."""
    ready: defaultdict[ShardId, defaultdict[tuple[ShardFigures, str, str], list[MachineId]]]
    ready = defaultdict(lambda: defaultdict(list))
    for shards in donors.values():
        for donor in shards:
            for each in sorted(donor.ready, key=lambda each: (each.instance_type, each.zone, each.machine_id)):
                if each.to_shard != donor.shard_id:
                    ready[each.to_shard][(donor, each.instance_type, each.zone)].append(each.machine_id)
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


#: What comes, one and several.
_WHAT = {
    Tier.READY: ("drained machine", "drained machines"),
    Tier.IDLE: ("idle machine", "idle machines"),
    Tier.SPECULATIVE: ("speculative slot", "speculative slots"),
    Tier.PREEMPT: ("machine of cheaper work, to be drained,", "machines of cheaper work, to be drained,"),
}


def _why(
    tier: Tier, donor: ShardId, requester: ShardId, shortfall: Shortfall, kind: tuple[str, str], count: int
) -> str:
    lacked = " ".join(f"{name} {text}" for name, text in format_vector(shortfall.deficit).items())
    where = f" in {kind[1]}" if kind[1] else ""
    return (
        f"{requester} lacks {lacked} at priority {shortfall.priority} for {shortfall.age_cycles} cycles:"
        f" {count} {_WHAT[tier][count > 1]} of {kind[0]}{where} {'come' if count > 1 else 'comes'} from {donor}"
    )


def _flow_detail(flow: Flow) -> str:
    """Return a text: what a flow brings the shortfall and what it leaves the donor."""
    remaining = flow.giveable.row.count - flow.give
    closing = "they close" if flow.give > 1 else "it closes"
    left = f"{remaining} {'stays' if remaining == 1 else 'stay'} there"
    if flow.benefit.is_all_closed:
        return f"{closing} all of it, {left}"
    part, whole = flow.benefit.least_closed
    return f"{closing} {part / whole:.0%} of what it lacks most, {left}"
