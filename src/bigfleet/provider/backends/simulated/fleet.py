"""Turns the pools of a world into offered machines: ids, shapes, labels, racks (docs/spec/provider.md §19, §21).

Equal worlds give equal fleets, in equal order. Prices and events are the economy's business
(`bigfleet.provider.backends.simulated.economy`); this module must not depend on time.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from bigfleet.model import labels as keys
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.fake import fake_slot
from bigfleet.provider.backends.simulated.catalogue import InstanceType
from bigfleet.provider.backends.simulated.world import CloudWorld, Pool, WorldFault, parse_capacity_type
from bigfleet.provider.records.validate import facts_fault
from bigfleet.provider.storage.codec import intern_map

DEFAULT_ZONES = ("sim-1a", "sim-1b", "sim-1c")
#: Capacity type, instance type, machines per zone of the default world: 28 + 20 + 48 + 24 machines.
_DEFAULT_MIX = (
    (CapacityType.BARE_METAL, "metal.64x256", (8, 8, 8)),
    (CapacityType.BARE_METAL, "gpu-l.96x1024", (4, 0, 0)),
    (CapacityType.RESERVED, "std.16x64", (7, 7, 6)),
    (CapacityType.ON_DEMAND, "std.4x16", (8, 8, 8)),
    (CapacityType.ON_DEMAND, "mem.8x64", (4, 4, 4)),
    (CapacityType.ON_DEMAND, "gpu-s.8x64", (4, 4, 4)),
    (CapacityType.SPOT, "std.8x32", (6, 6, 6)),
    (CapacityType.SPOT, "gpu-m.48x384", (2, 2, 2)),
)
#: Names that a message lists.
_SHOWN_MAX = 20
_IDLE_AT_START = frozenset({CapacityType.BARE_METAL, CapacityType.RESERVED})


#: Instance type, zone, capacity type.
Market = tuple[str, str, CapacityType]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOffer:
    """One machine of the fleet, without what changes over time."""

    #: Price and probability are those of the pool, or 0 where the economy sets them.
    slot: Slot
    #: None: the economy sets it.
    own_price_usd_per_hour: float | None
    own_probability: float | None
    #: From the catalogue; None for a type that is not in it.
    on_demand_usd_per_hour: float | None
    is_idle_at_start: bool

    @property
    def pool(self) -> str:
        """`<capacity type with ->/<instance type>/<zone>`: what hosts are billed by, and waves hit."""
        return pool_name(self.market)

    @property
    def market(self) -> Market:
        """What prices, probabilities and stockouts are shared by."""
        return _market(self.slot)


def _market(slot: Slot) -> Market:
    return slot.instance_type, slot.zone, slot.capacity_type


def pool_name(market: Market) -> str:
    """Return the pool that is this market: the middle of its machines' ids."""
    instance_type, zone, capacity_type = market
    return f"{capacity_word(capacity_type)}/{instance_type}/{zone}"


def capacity_word(capacity_type: CapacityType) -> str:
    """Return a capacity type as ids and labels write it, such as `on-demand`."""
    return capacity_type.name.lower().replace("_", "-")


def default_pools(zones: Sequence[str], catalogue: Mapping[str, InstanceType]) -> tuple[Pool, ...]:
    """Return the sample mix over the first three zones; a type that the catalogue lacks becomes one that it has."""
    names = sorted(catalogue)
    pools = []
    for number, (capacity_type, name, counts) in enumerate(_DEFAULT_MIX):
        chosen = name if name in catalogue else names[number % len(names)]
        for place, count in enumerate(counts):
            zone = zones[place % len(zones)]
            if count:
                pools.append(
                    Pool(instance_type=chosen, zone=zone, count=count, capacity_type=capacity_type.name.lower())
                )
    return tuple(pools)


def build_fleet(world: CloudWorld, catalogue: Mapping[str, InstanceType], provider: str) -> list[SimulatedOffer]:
    """Return every machine of the world. Raises WorldFault with the path of a pool that cannot be offered."""
    pools = world.pools if world.pools is not None else default_pools(world.zones or DEFAULT_ZONES, catalogue)
    racks = _Racks(world.rack_size)
    numbers: Counter[Market] = Counter()
    offers = []
    for number, pool in enumerate(pools):
        place = f"pools[{number}]"
        shape = _PoolShape.of(pool, place, catalogue.get(pool.instance_type), world.region)
        fault = facts_fault(_with_any_price(shape.offer(0, provider, "rack")), price_key="price_per_hour")
        if fault is not None:
            raise WorldFault(f"{place}: {fault.text}")
        market = _market(shape.template)
        for _ in range(pool.count):
            offers.append(shape.offer(numbers[market], provider, racks.next_rack(pool.zone, pool.instance_type)))
            numbers[market] += 1
    _check_planned(world, offers)
    return offers


def _check_planned(world: CloudWorld, offers: Sequence[SimulatedOffer]) -> None:
    """Refuse a wave or an outage that could never hit anything. Raises WorldFault with its path."""
    rules = world.interruption
    pools, zones = {offer.pool for offer in offers}, {offer.slot.zone for offer in offers}
    for number, wave in enumerate(rules.waves):
        if wave.pool not in pools:
            known = ", ".join(sorted(pools)[:_SHOWN_MAX])
            raise WorldFault(f"interruption.waves[{number}].pool: there is no pool {wave.pool!r}; there are {known}")
    for number, outage in enumerate(rules.zone_outages):
        if outage.zone not in zones:
            known = ", ".join(sorted(zones)[:_SHOWN_MAX])
            raise WorldFault(
                f"interruption.zone_outages[{number}].zone: no machine is in {outage.zone!r}, but in {known}"
            )


def build_seed_fleet(count: int, provider: str) -> list[SimulatedOffer]:
    """Return `count` slots in the mix and at the prices of the fake backend."""
    offers = []
    numbers: defaultdict[tuple[str, CapacityType], int] = defaultdict(int)
    for number in range(count):
        slot = fake_slot(number, id="seed")
        place = numbers[slot.zone, slot.capacity_type]
        numbers[slot.zone, slot.capacity_type] += 1
        kind = capacity_word(slot.capacity_type)
        slot = fake_slot(number, id=f"{provider}/{kind}/{slot.instance_type}/{slot.zone}/{place:03d}")
        offers.append(
            SimulatedOffer(
                slot=slot,
                own_price_usd_per_hour=slot.price_usd_per_hour,
                own_probability=slot.interruption_probability,
                on_demand_usd_per_hour=None,
                is_idle_at_start=False,
            )
        )
    return offers


def _with_any_price(offer: SimulatedOffer) -> Slot:
    """Return the slot with a good price and probability where the economy sets them, to check the rest."""
    price, probability = offer.own_price_usd_per_hour, offer.own_probability
    return replace(
        offer.slot,
        price_usd_per_hour=1.0 if price is None else price,
        interruption_probability=1.0 if probability is None else probability,
    )


class _Racks:
    """Slots of one (zone, type family) fill racks in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._filled: Counter[tuple[str, str]] = Counter()

    def next_rack(self, zone: str, instance_type: str) -> str:
        """Return the rack of the next slot."""
        family = instance_type.split(".", 1)[0]
        number = self._filled[zone, family] // self._size
        self._filled[zone, family] += 1
        return f"{zone}-{family}-rack-{number}"


@dataclass(frozen=True, slots=True)
class _PoolShape:
    pool: Pool
    #: A slot without id and rack.
    template: Slot
    on_demand_usd_per_hour: float | None

    @classmethod
    def of(cls, pool: Pool, place: str, known: InstanceType | None, region: str) -> "_PoolShape":
        """Check a pool and complete it from the catalogue."""
        capacity_type = parse_capacity_type(pool.capacity_type)
        assert capacity_type is not None, "the world file was checked"
        allocatable = pool.allocatable or pool.resources or (known.allocatable if known else None)
        if allocatable is None:
            raise WorldFault(f"{place}.instance_type: {pool.instance_type!r} is not in the catalogue; give allocatable")
        is_priced = pool.price_per_hour is not None or capacity_type is CapacityType.BARE_METAL or known is not None
        if not is_priced:
            raise WorldFault(
                f"{place}.instance_type: {pool.instance_type!r} is not in the catalogue; give price_per_hour"
            )
        labels = {
            keys.REGION: region,
            keys.CAPACITY_TYPE: capacity_word(capacity_type),
            **(known.labels if known else {}),
            **pool.labels,
        }
        template = Slot(
            id="",
            instance_type=pool.instance_type,
            zone=pool.zone,
            capacity_type=capacity_type,
            resources=intern_map(pool.resources or allocatable),
            allocatable=intern_map(allocatable),
            labels=MappingProxyType(labels),
            price_usd_per_hour=pool.price_per_hour or 0.0,
            interruption_probability=pool.interruption_probability or 0.0,
            fixed=capacity_type is CapacityType.BARE_METAL if pool.fixed is None else pool.fixed,
        )
        return cls(pool, template, known.on_demand_usd_per_hour if known else None)

    def offer(self, number: int, provider: str, rack: str) -> SimulatedOffer:
        """Return one machine of the pool."""
        pool, template = self.pool, self.template
        return SimulatedOffer(
            slot=replace(
                template,
                id=f"{provider}/{pool_name(_market(template))}/{number:03d}",
                labels=intern_map({keys.RACK: rack, **template.labels}),
            ),
            own_price_usd_per_hour=pool.price_per_hour,
            own_probability=pool.interruption_probability,
            on_demand_usd_per_hour=self.on_demand_usd_per_hour,
            is_idle_at_start=template.capacity_type in _IDLE_AT_START,
        )
