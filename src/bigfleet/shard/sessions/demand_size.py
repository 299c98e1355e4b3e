"""Measures the demand of a roll-up, and detects one that lost so much that it may be a mistake.

docs/spec/shard.md §6, docs/adr/0144-quarantine-by-demand.md. Pure integer arithmetic over the rows as
received; each roll-up is measured once, when it comes into force.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bigfleet.model.need import Need
from bigfleet.model.vector import Vector

#: A baseline of this many rows, or of this many machines' worth, is large enough to be guarded.
GUARDED_ROWS_MIN = 10
GUARDED_MACHINES_MIN = 10
#: Less than one part in this many of the baseline is suspicious.
SHRINK_FACTOR = 10

#: Rows that ask for no quantity are counted, in a dimension of their own.
_ROW_WITHOUT_QUANTITY: Vector = {"": 1}

_Identity = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DemandSize:
    """How much one roll-up asks for. The mappings are by dimension, milli-units where they hold quantities."""

    totals: Mapping[str, int]
    #: Rows that ask for the dimension.
    rows: Mapping[str, int]
    #: Machines of the smallest size that counts: Σ over the rows of ⌊aggregate ÷ min unit⌋, at least 1 per row.
    units: Mapping[str, int]
    #: The rows of at least `GUARDED_MACHINES_MIN` units in some dimension, by (fingerprint, group).
    large_rows: Mapping[_Identity, Need]

    @classmethod
    def of(cls, needs: Sequence[Need]) -> "DemandSize":
        """Measure a roll-up. Cost: one look at each quantity of each row."""
        totals: dict[str, int] = {}
        rows: dict[str, int] = {}
        units: dict[str, int] = {}
        large: dict[_Identity, Need] = {}
        for need in needs:
            min_unit, is_large = need.min_unit, False
            for name, milli in (need.aggregate or _ROW_WITHOUT_QUANTITY).items():
                least = min_unit.get(name, milli)
                row_units = milli // least if least <= milli else 1
                totals[name] = totals.get(name, 0) + milli
                rows[name] = rows.get(name, 0) + 1
                units[name] = units.get(name, 0) + row_units
                is_large = is_large or row_units >= GUARDED_MACHINES_MIN
            if is_large:
                large.setdefault((need.fingerprint, need.group), need)
        return cls(totals, rows, units, large)

    def loss(self, after: "DemandSize", needs: Sequence[Need], largest_supply: Callable[[], Vector]) -> str:
        """Return what is suspicious in the roll-up `needs`, measured as `after`; "" when nothing is.

        `largest_supply` returns, per dimension, the largest supply among the machines bound to the cluster; it is
        called only when a large row is missing.
        """
        for name in sorted(self.totals):
            before, now = self.totals[name], after.totals.get(name, 0)
            is_guarded = self.rows[name] >= GUARDED_ROWS_MIN or self.units[name] >= GUARDED_MACHINES_MIN
            if is_guarded and SHRINK_FACTOR * now < before:
                return f"the total of {name or 'rows'} fell from {before} to {now}{' milli-units' if name else ''}"
        return self._lost_row(after, needs, largest_supply) if self.large_rows else ""

    def _lost_row(self, after: "DemandSize", needs: Sequence[Need], largest_supply: Callable[[], Vector]) -> str:
        present = {(need.fingerprint, need.group) for need in needs}
        supply: Vector | None = None
        for identity, row in self.large_rows.items():
            if identity in present:
                continue
            if supply is None:
                supply = largest_supply()
            for name, milli in sorted(row.aggregate.items()):
                machine = max(supply.get(name, 0), row.min_unit.get(name, milli))
                fell = self.totals[name] - after.totals.get(name, 0)
                # A row that comes back under another profile, such as another priority, leaves the total as it was.
                if milli >= GUARDED_MACHINES_MIN * machine and SHRINK_FACTOR * fell >= (SHRINK_FACTOR - 1) * milli:
                    return f"the row {row.fingerprint!r} {row.group!r} with {milli} milli-units of {name} is missing"
        return ""
