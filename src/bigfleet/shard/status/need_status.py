"""Reports to each operator which of its needs are unmet after a cycle, by how much, and why.

docs/spec/shard.md §10.7 and §12. Rows are those that the cluster reported. Everything here is worked out off the loop
over the rows that are short, and over no others; a verdict changes nothing about a decision.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Impossibility, RowResult
from bigfleet.engine.shapes.fleet import has_pods
from bigfleet.engine.shortfalls import priority_class
from bigfleet.model import vector
from bigfleet.model.frames import NeedStatus, NeedStatusUpdate, UnmetReason
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.fleet_queries import SoldOutShapes
from bigfleet.shard.inventory.machine_shapes import Ask, Fits, Prices
from bigfleet.shard.status.views import ViewContext, reason_of, residuals_of

#: Shapes that are too large and that one sentence names.
TOO_LARGE_MAX = 3
#: Rows of one verdict.
ROWS_MAX = 1000
#: Least time between two verdicts for one operator.
GAP_SECONDS = 5.0

_SENTENCES: Mapping[UnmetReason, str] = {
    UnmetReason.PRIORITY_STARVED: "matching machines are held by equal or higher priority",
    UnmetReason.NO_MATCHING_SUPPLY: "no machine of the fleet matches the requirements and holds the largest request",
    UnmetReason.TOPOLOGY_UNSATISFIABLE: "no single domain can hold the whole group",
    UnmetReason.PREEMPTION_EXHAUSTED: "machines are being drained for it",
    UnmetReason.REQUEST_TOO_LARGE: "no machine of the fleet is large enough for one of its pods",
    UnmetReason.CLUSTER_LIMIT: "the cluster policy does not let the cluster have more",
    UnmetReason.STOCKOUT: "the provider has no stock of machines for it, or fails to create them; it is tried again",
}
#: States of bound machines and of those that are being created that do not serve yet.
_ON_THEIR_WAY = (MachineState.CREATING, MachineState.CONFIGURING)
_PARKED = "no single domain can hold the whole group; it is tried again from time to time"


@dataclass(frozen=True, slots=True)
class Unmet:
    """One reported row that the last cycle left short."""

    need: Need
    #: What it asks of each machine; rows of one profile and min unit share the object.
    ask: Ask
    residual: Vector
    reason: UnmetReason
    parked: bool
    #: Timer cycles as a shortfall; 0 while victims cover it.
    age_cycles: int
    #: The row as decided on, which is what an operator refuses.
    decided_key: RowKey
    #: Demand of the row that no known machine can host, even empty.
    impossible: tuple[Impossibility, ...] = ()


def unmet_rows(short: Iterable[RowResult], context: ViewContext, fits: Fits) -> list[Unmet]:
    """Return the reported rows that are short, in list order; what victims will cover is still short."""
    found = []
    # An ask takes longer to hash than everything else here. The rows hold on to their min units, so an id is one unit.
    asks: dict[tuple[str, int], tuple[Ask, bool]] = {}
    sold_out = SoldOutShapes(context.snapshot, context.options)
    for result in short:
        key = result.need.key
        for member, residual in residuals_of(result, context):
            if not residual:
                continue
            parts = (member.profile.fingerprint, id(member.min_unit))
            known = asks.get(parts)
            if known is None:
                ask = Ask.of(member)
                known = asks[parts] = ask, bool(fits.fitting(ask).any())
            reason = reason_of(
                result,
                is_refused=key in context.refused,
                lacks_stock=key in context.failing or sold_out.could_host(member),
                has_supply=known[1],
            )
            age_cycles = context.row_ages.get(member.key, 0)
            parked, impossible = result.need.parked, result.impossible
            found.append(Unmet(member, known[0], residual, reason, parked, age_cycles, key, impossible))
    return found


# ---- gauges ------------------------------------------------------------------------------------------------------


def shortfall_counts(unmet: Iterable[Unmet]) -> Counter[tuple[UnmetReason, str]]:
    """Return the entries of the row ledger by reason and priority class."""
    return Counter((row.reason, priority_class(row.need.profile.priority)) for row in unmet if row.age_cycles)


def missing_machines(unmet: Sequence[Unmet], prices_usd_per_hour: Prices, fits: Fits) -> Counter[int]:
    """Return, by interruption bucket, how many machines the short rows lack.

    `prices_usd_per_hour` are those of the classes. Of each row it is the number of the cheapest matching class that
    covers what the row lacks; without such a class as many as its min unit fits into that, at least 1.
    """
    counts: Counter[int] = Counter()
    units: dict[tuple[int, tuple[str, ...]], Vector | None] = {}
    for row in unmet:
        key = (id(row.ask), tuple(sorted(row.residual)))
        if key not in units:
            units[key] = _cheapest_unit(row.ask, key[1], prices_usd_per_hour, fits)
        unit = units[key] or row.need.min_unit
        lacking = [ceil(milli / unit[name]) for name, milli in row.residual.items() if name in unit]
        counts[row.need.profile.interruption_bucket] += max(lacking, default=1)
    return counts


def _cheapest_unit(ask: Ask, names: tuple[str, ...], prices_usd_per_hour: Prices, fits: Fits) -> Vector | None:
    places = np.flatnonzero(fits.fitting(ask) & fits.offering(names))
    if not len(places):
        return None
    return fits.supply(int(places[prices_usd_per_hour[places].argmin()]))


# ---- frames ------------------------------------------------------------------------------------------------------


def statuses(unmet: Iterable[Unmet], clusters: Set[str], texts: Mapping[RowKey, str]) -> dict[str, list[NeedStatus]]:
    """Return the statuses of the clusters' unmet rows, list order, one row more than may be sent."""
    found: defaultdict[str, list[NeedStatus]] = defaultdict(list)
    for row in unmet:
        cluster = row.need.cluster
        if cluster in clusters and len(found[cluster]) <= ROWS_MAX:
            found[cluster].append(
                NeedStatus(
                    fingerprint=row.need.fingerprint,
                    group=row.need.group,
                    residual=vector.format_vector(row.residual, row.need.families),
                    reason=row.reason,
                    age_cycles=row.age_cycles,
                    parked=row.parked,
                    message=_sentence(row, texts),
                )
            )
    return found


def coming_needs(
    rows: Sequence[RowResult], snapshot: ColumnSnapshot, clusters: Set[str]
) -> dict[str, list[tuple[str, str]]]:
    """Return (fingerprint, group) of the satisfied rows whose machines do not all serve yet, by cluster.

    Only of decisions over pods: an operator that says no pods has no pod to wait for. One more than may be sent.
    """
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    numbers = [int(state) for state in _ON_THEIR_WAY]
    transitional = np.flatnonzero(np.isin(snapshot.columns.state, numbers)).tolist()
    on_their_way = {snapshot.ids[row] for row in transitional}
    # A machine is bound for one row and may host pods of others.
    on_their_way.update(machine_id for result in rows for machine_id in (*result.bootstraps, *result.provisions))
    for result in rows:
        if not has_pods(result.need) or result.need.cluster not in clusters or not result.satisfied:
            continue
        needs = found[result.need.cluster]
        if len(needs) <= ROWS_MAX and not on_their_way.isdisjoint(result.claimed):
            needs.append((result.need.fingerprint, result.need.group))
    return found


def _sentence(row: Unmet, texts: Mapping[RowKey, str]) -> str:
    if row.reason is UnmetReason.BOOTSTRAP_REFUSED:
        text = texts.get(row.decided_key, "")
        return f"the operator cannot bootstrap it: {text}" if text else "the operator cannot bootstrap it"
    sentence = _PARKED if row.parked else _SENTENCES[row.reason]
    largest = [each for each in row.impossible if each.dimension]
    if not largest:
        return sentence
    too_large = "; ".join(_too_large(each, row.need) for each in largest[:TOO_LARGE_MAX])
    return too_large if row.reason is UnmetReason.REQUEST_TOO_LARGE else f"{sentence}; {too_large}"


def _too_large(found: Impossibility, need: Need) -> str:
    """Return what one shape wants and the largest machine has, such as `1 pod wants cpu 1000, ...`."""
    wanted, has = (
        vector.format_vector({found.dimension: milli}, need.families) for milli in (found.wanted, found.largest)
    )
    shapes = (*need.shapes, *need.waiting)
    count = 0 if found.shape is None else shapes[found.shape].count
    pods = "its largest request wants" if not count else "1 pod wants" if count == 1 else f"{count:,} pods want"
    available = has.get(found.dimension, "none")
    return f"{pods} {found.dimension} {wanted[found.dimension]}, the largest machine for it has {available}"


class _SentStatus(NamedTuple):
    rows: tuple[NeedStatus, ...]
    coming: tuple[tuple[str, str], ...]
    rollup_timestamp_unix_nanos: int
    truncated: bool
    at_seconds: float


class NeedStatusPublisher:
    """Sends each operator the statuses of its rows when they change, and not too often."""

    def __init__(self) -> None:
        self._last_sent: dict[str, _SentStatus] = {}

    def forget(self, cluster: str) -> None:
        """Send the cluster everything again after the next cycle: its session is new, or lost frames."""
        self._last_sent.pop(cluster, None)

    def due(
        self,
        statuses_by_cluster: Mapping[str, Sequence[NeedStatus]],
        judged: Mapping[str, int],
        *,
        coming_by_cluster: Mapping[str, Sequence[tuple[str, str]]],
        context: ViewContext,
        now_seconds: float,
    ) -> Iterator[tuple[str, NeedStatusUpdate]]:
        """Yield the verdicts to send: rows or judged roll-up differ from what was sent, and the gap has passed.

        `judged` names the clusters that may be sent one, with the roll-up that was in force. Call `sent` for each.
        """
        for cluster, timestamp_unix_nanos in judged.items():
            last = self._last_sent.get(cluster)
            if last is not None and now_seconds - last.at_seconds < GAP_SECONDS:
                continue
            found = statuses_by_cluster.get(cluster, ())
            coming = coming_by_cluster.get(cluster, ())
            truncated = max(len(found), len(coming)) > ROWS_MAX
            rows, coming = tuple(found[:ROWS_MAX]), tuple(coming[:ROWS_MAX])
            if last is not None and last[:4] == (rows, coming, timestamp_unix_nanos, truncated):
                continue
            yield (
                cluster,
                NeedStatusUpdate(
                    cycle=context.cycle,
                    computed_at_unix_nanos=context.computed_at_unix_nanos,
                    rows=rows,
                    rollup_timestamp_unix_nanos=timestamp_unix_nanos,
                    truncated=truncated,
                    coming=coming,
                ),
            )

    def sent(self, cluster: str, update: NeedStatusUpdate, now_seconds: float) -> None:
        """Remember what a cluster was sent."""
        self._last_sent[cluster] = _SentStatus(
            update.rows, update.coming, update.rollup_timestamp_unix_nanos, update.truncated, now_seconds
        )
