"""Reads the world file: what the simulated cloud consists of and how it behaves, with a default for every key.

docs/spec/provider.md §21. An unknown key or a bad value is refused with its path. Durations are seconds of the world;
`--time-scale` multiplies all of them. This module must not be read and then ignored.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.field_faults import field_fault
from bigfleet.files.json_loading import load_json
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model.states import CapacityType

POOLS_MAX = 100_000
MACHINES_MAX = 1_000_000
#: Of waves, zone outages and planned stockouts, each.
PLANNED_MAX = 1_000


class WorldFault(ValueError):
    """The world file cannot be used; the message names the file and the path in it."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file."""


class Pool(_Section, frozen=True, kw_only=True):
    """Machines of one type, zone and capacity type."""

    instance_type: str
    zone: str
    count: int
    capacity_type: str = "on_demand"
    #: None: as the catalogue says, or equal to `allocatable` when that is given.
    resources: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    labels: dict[str, str] = {}
    #: None: from the catalogue and the price model.
    price_per_hour: float | None = None
    #: None: drawn for spot, 0 for others.
    interruption_probability: float | None = None
    #: None: bare metal is fixed, the others are not.
    fixed: bool | None = None


_CAPACITY_SPELLINGS = {
    "ONDEMAND": "ON_DEMAND",
    "BAREMETAL": "BARE_METAL",
}


def parse_capacity_type(text: str) -> CapacityType | None:
    """Return the capacity type: `-`, `_` or no separator, any case; None when it is none of the four."""
    name = text.strip().upper().replace("-", "_")
    name = _CAPACITY_SPELLINGS.get(name, name)
    known = CapacityType.__members__.get(name)
    return None if known is CapacityType.UNSPECIFIED else known


class Price(_Section, frozen=True, kw_only=True):
    """What an hour costs; factors of the on-demand price."""

    reserved_factor: float = 0.6
    spot_mean: float = 0.30
    spot_min: float = 0.15
    spot_max: float = 0.95
    #: A new spot price is drawn this often.
    step_seconds: float = 300.0


class Wave(_Section, frozen=True, kw_only=True):
    """A loss of many hosts at one time; each is warned like any other that is taken."""

    #: `<capacity type with ->/<instance type>/<zone>`, the middle of its machines' ids.
    pool: str
    #: Seconds since the world began.
    at_seconds: float
    #: Of the pool's hosts at that time; whom it hits is drawn.
    share: float


class ZoneOutage(_Section, frozen=True, kw_only=True):
    """A zone that loses every host at once, without a warning, and gives none until it is over."""

    zone: str
    #: Seconds since the world began.
    from_seconds: float
    to_seconds: float


class Interruption(_Section, frozen=True, kw_only=True):
    """How hosts are taken away: spot machines one by one by their hazard, others by what is planned here."""

    #: One of these is declared per type and zone, per hour: 2.5, 7.5, 12.5, 17.5 and 30 % a month of 720 hours.
    probabilities: tuple[float, ...] = (0.000035, 0.00011, 0.00019, 0.00027, 0.0005)
    #: Real hazard over declared probability; 0 takes nothing away.
    truth_factor: float = 1.0
    notice_seconds: float = 120.0
    without_notice_share: float = 0.02
    hint_seconds: float = 600.0
    hint_share: float = 0.5
    waves: tuple[Wave, ...] = ()
    zone_outages: tuple[ZoneOutage, ...] = ()


class Dwell(_Section, frozen=True, kw_only=True):
    """A log-normal duration."""

    median_seconds: float
    p99_seconds: float


class Dwells(_Section, frozen=True, kw_only=True):
    """How long things take."""

    create_on_demand: Dwell = Dwell(median_seconds=90, p99_seconds=240)
    create_spot: Dwell = Dwell(median_seconds=45, p99_seconds=120)
    create_reserved: Dwell = Dwell(median_seconds=60, p99_seconds=180)
    create_bare_metal: Dwell = Dwell(median_seconds=300, p99_seconds=900)
    join: Dwell = Dwell(median_seconds=40, p99_seconds=120)
    drain: Dwell = Dwell(median_seconds=5, p99_seconds=20)
    delete: Dwell = Dwell(median_seconds=20, p99_seconds=60)
    slow_share: float = 0.005
    slow_factor: float = 10.0

    def create(self, capacity_type: CapacityType) -> Dwell:
        """Return the dwell of a Create."""
        dwell: Dwell = getattr(self, f"create_{capacity_type.name.lower()}")
        return dwell


class StockoutModel(_Section, frozen=True, kw_only=True):
    """Times without capacity, drawn per type, zone and capacity type; not used when `stockouts` is given."""

    available_seconds_mean: float = 12 * 3600.0
    out_seconds_mean: float = 20 * 60.0
    #: A Create that meets one fails after this.
    answer_seconds: float = 2.0


class PlannedStockout(_Section, frozen=True, kw_only=True):
    """One time without capacity, in seconds since the world began; an empty field is any."""

    from_seconds: float
    to_seconds: float
    instance_type: str = ""
    zone: str = ""
    capacity_type: str = ""


class Faults(_Section, frozen=True, kw_only=True):
    """Probabilities per call; of `inventory_…` per pass, of the last four per machine and pass."""

    #: Create fails and made nothing.
    create_error: float = 0.0
    #: The node of a Configure never becomes Ready.
    join_never: float = 0.0
    #: The call did its work and fails all the same.
    error_after_effect: float = 0.0
    #: What the call asked for happens for real, but after the call's deadline.
    effect_after_timeout: float = 0.0
    #: The call fails and may be tried again.
    transient: float = 0.0
    #: The inventory breaks half way.
    inventory_partial: float = 0.0
    #: The inventory is the one of the time before.
    inventory_stale: float = 0.0
    price_nan: float = 0.0
    price_negative: float = 0.0
    price_x100: float = 0.0
    probability_over_1: float = 0.0


class CloudWorld(_Section, frozen=True, kw_only=True):
    """The whole file."""

    region: str = "sim-1"
    #: None: sim-1a, sim-1b, sim-1c, or the zones of the pools when there are pools.
    zones: tuple[str, ...] | None = None
    rack_size: int = 48
    #: None: 120 machines of the sample mix.
    pools: tuple[Pool, ...] | None = None
    price: Price = Price()
    interruption: Interruption = Interruption()
    dwell: Dwells = Dwells()
    stockout: StockoutModel = StockoutModel()
    #: None: drawn as `stockout` says.
    stockouts: tuple[PlannedStockout, ...] | None = None
    faults: Faults = Faults()


def load_world(path: Path | None) -> CloudWorld:
    """Return the world of a YAML or JSON file, the default world for None. Raises WorldFault."""
    if path is None:
        return CloudWorld()
    try:
        content = read_bounded(path, CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise WorldFault(f"{path}: {error.strerror}; name a file that can be read") from error
    return parse_world(content, str(path), is_json=path.suffix == ".json")


def parse_world(content: bytes, file: str, *, is_json: bool = False) -> CloudWorld:
    """Return the world of a file's content. Raises WorldFault naming file and path."""
    try:
        text = content.decode("utf-8")
        tree = load_json(text) if is_json else load_yaml(text)
        world = msgspec.convert({} if tree is None else tree, CloudWorld)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise WorldFault(f"{file}: {field_fault(error, CloudWorld)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "YAML"
        raise WorldFault(f"{file}: not {kind}: {' '.join(str(error).split())}") from error
    fault = next(_faults(world), None)
    if fault is not None:
        raise WorldFault(f"{file}: {fault}")
    return world


def _faults(world: CloudWorld) -> Iterator[str]:
    """Yield each bad value with its path."""
    if world.rack_size < 1:
        yield f"rack_size: {world.rack_size} must be at least 1"
    if world.zones is not None and (not world.zones or len(set(world.zones)) != len(world.zones)):
        yield "zones: must name at least one zone, each once"
    yield from _pool_faults(world)
    yield from _number_faults(world)
    if not world.price.spot_min <= world.price.spot_mean <= world.price.spot_max:
        yield "price.spot_mean: must lie between spot_min and spot_max"
    yield from _planned_faults(world)


def _planned_faults(world: CloudWorld) -> Iterator[str]:
    """Check what is planned for a time; whether its zone and pool exist is checked against the fleet."""
    rules = world.interruption
    timed = {
        "interruption.waves": rules.waves,
        "interruption.zone_outages": rules.zone_outages,
        "stockouts": world.stockouts or (),
    }
    for path, entries in timed.items():
        if len(entries) > PLANNED_MAX:
            yield f"{path}: {len(entries)} entries, at most {PLANNED_MAX} are allowed"
        for number, entry in enumerate(entries):
            yield from _section_number_faults(f"{path}[{number}]", entry)
            if isinstance(entry, ZoneOutage | PlannedStockout) and entry.to_seconds <= entry.from_seconds:
                yield f"{path}[{number}].to_seconds: must be after from_seconds"
    for number, planned in enumerate(world.stockouts or ()):
        if planned.capacity_type and parse_capacity_type(planned.capacity_type) is None:
            yield f"stockouts[{number}].capacity_type: {planned.capacity_type!r} is unknown"


def _pool_faults(world: CloudWorld) -> Iterator[str]:
    pools = world.pools or ()
    if len(pools) > POOLS_MAX:
        yield f"pools: {len(pools)} entries, at most {POOLS_MAX} are allowed"
    if sum(max(pool.count, 0) for pool in pools) > MACHINES_MAX:
        yield f"pools: more than {MACHINES_MAX} machines"
    for number, pool in enumerate(pools):
        place = f"pools[{number}]"
        if pool.count < 0:
            yield f"{place}.count: {pool.count} must not be negative"
        if parse_capacity_type(pool.capacity_type) is None:
            yield f"{place}.capacity_type: {pool.capacity_type!r} is none of on_demand, spot, reserved, bare_metal"
        if world.zones is not None and pool.zone not in world.zones:
            yield f"{place}.zone: {pool.zone!r} is not among the zones"


def _number_faults(world: CloudWorld) -> Iterator[str]:
    """Check each number by what its name says it is."""
    for section in ("price", "interruption", "dwell", "stockout", "faults"):
        yield from _section_number_faults(section, getattr(world, section))


def _section_number_faults(path: str, section: _Section) -> Iterator[str]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        place = f"{path}.{name}"
        if isinstance(value, _Section):
            yield from _section_number_faults(place, value)
        elif isinstance(value, str) or name in ("waves", "zone_outages"):
            continue
        elif isinstance(value, tuple):
            if not value or not all(0 < probability <= 1 for probability in value):
                yield f"{place}: must hold numbers above 0 and at most 1"
        elif not math.isfinite(value) or value < 0:
            yield f"{place}: {value} must be finite and not negative"
        elif (path == "faults" or name.endswith("share")) and value > 1:
            yield f"{place}: {value} is a probability, at most 1"
        elif value == 0 and name in ("median_seconds", "p99_seconds", "step_seconds", "available_seconds_mean"):
            yield f"{place}: must be above 0"
    if isinstance(section, Dwell) and section.p99_seconds < section.median_seconds:
        yield f"{path}.p99_seconds: must be at least median_seconds"
