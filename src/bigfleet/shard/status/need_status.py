"""Reports to each operator which of its needs are unmet after a cycle, by how much, and why.

docs/spec/shard.md §10.7 and §12. Rows are those that the cluster reported. Everything is computed off the loop, over
the short rows only; a verdict never changes a decision.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from bigfleet.shard.status.views import ViewContext, in_a_spread_domain, is_unbootable, reason_of, residuals_of

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
    UnmetReason.BOOTSTRAP_FAILED: "machines for it could not be bootstrapped; they are tried again",
    UnmetReason.STOCKOUT: "the provider has no stock of machines for it, or fails to create them; it is tried again",
}
#: States of bound machines and of those that are being created that do not serve yet.
_ON_THEIR_WAY = (MachineState.CREATING, MachineState.CONFIGURING)
_PARKED = "no single domain can hold the whole group; it is tried again from time to time"


class Unmet(NamedTuple):
    """One reported row that the last cycle left short."""

    need: Need
    #: What it asks of each machine; most rows that ask for the same share the object.
    ask: Ask
    residual: Vector
    reason: UnmetReason
    parked: bool
    #: The reported row, and the row as decided on, which is what an operator refuses.
    key: RowKey
    decided_key: RowKey
    #: Demand of the row that no known machine can host, even empty.
    impossible: tuple[Impossibility, ...] = ()


class _Found(NamedTuple):
    """What was found of a result, and what that depends on beside it."""

    result: RowResult
    unmet: Unmet
    has_supply: bool
    is_sold_out: bool
    is_withheld: bool
    #: What the row asks for and the label of its strict spread, if it has one, and whether a machine has both.
    spread_ask: Ask | None
    has_domain: bool


class UnmetRows:
    """Finds the reported rows that are short, and why. Used off the loop, by one caller at a time.

    Tens of thousands of rows may stay short from cycle to cycle. What was found of one that lacks all of its aggregate
    is used again as long as its result is the same object, and machines match it, or are sold out, as they were.
    """

    def __init__(self) -> None:
        #: By the id of the result, of the last cycle; without rows that are refused or whose creations fail.
        self._found: dict[int, _Found] = {}

    def of(self, short: Iterable[RowResult], context: ViewContext, fits: Fits) -> list[Unmet]:
        """Return the rows, in list order; what victims will cover is still short."""
        rows, asks = list[Unmet](), _Asks(fits)
        former, found = self._found, dict[int, _Found]()
        sold_out = SoldOutShapes(context.snapshot, context.options)
        refused, failing = context.refused, context.failing
        for result in short:
            need, known = result.need, former.get(id(result))
            key = need.key if known is None else known.unmet.decided_key
            is_refused, is_failing = key in refused, key in failing
            if (
                known is not None
                and not (is_refused or is_failing)
                and asks.has_supply(known.unmet.ask) is known.has_supply
                and (known.spread_ask is None or asks.has_supply(known.spread_ask) is known.has_domain)
                and sold_out.could_host(need) is known.is_sold_out
                and sold_out.are_withheld_from(need) is known.is_withheld
            ):
                found[id(result)] = known
                rows.append(known.unmet)
                continue
            for member, residual in residuals_of(result, context):
                if not residual:
                    continue
                ask, has_supply = asks.of(member)
                spread = in_a_spread_domain(member)
                spread_ask, has_domain = (None, True) if spread is None else asks.of(spread)
                is_sold_out, is_withheld = sold_out.could_host(member), sold_out.are_withheld_from(member)
                reason = reason_of(
                    result,
                    is_refused=is_refused,
                    is_unbootable=is_unbootable(failing.get(key)) or is_withheld,
                    lacks_stock=is_failing or is_sold_out,
                    has_supply=has_supply,
                    lacks_domain=not has_domain,
                )
                own_key = key if member is need else member.key
                unmet = Unmet(member, ask, residual, reason, need.parked, own_key, key, result.impossible)
                rows.append(unmet)
                if residual is need.aggregate and not (is_refused or is_failing):
                    found[id(result)] = _Found(
                        result, unmet, has_supply, is_sold_out, is_withheld, spread_ask, has_domain
                    )
        self._found = found
        return rows


class _Asks:
    """What rows ask, and whether some machine could serve it."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._known: dict[Ask, tuple[Ask, bool]] = {}
        # An ask takes longer to make and to hash than the rest of a row. The rows hold on to their min units, and to
        # asks that were made before, so that an id is one of them.
        self._by_parts: dict[tuple[str, int], tuple[Ask, bool]] = {}
        self._by_id: dict[int, bool] = {}

    def of(self, need: Need) -> tuple[Ask, bool]:
        """Return what a row asks, and whether a machine of the fleet matches it and holds its min unit."""
        parts = (need.profile.fingerprint, id(need.min_unit))
        found = self._by_parts.get(parts)
        if found is None:
            found = self._by_parts[parts] = self._equal(Ask.of(need))
        return found

    def has_supply(self, ask: Ask) -> bool:
        """Return whether a machine of the fleet matches an ask that was made in an earlier cycle."""
        known = self._by_id.get(id(ask))
        if known is None:
            known = self._by_id[id(ask)] = self._equal(ask)[1]
        return known

    def _equal(self, ask: Ask) -> tuple[Ask, bool]:
        known = self._known.get(ask)
        if known is None:
            known = self._known[ask] = ask, bool(self._fits.fitting(ask).any())
        return known


# ---- gauges ------------------------------------------------------------------------------------------------------


def shortfall_counts(unmet: Iterable[Unmet], ages: Mapping[RowKey, int]) -> Counter[tuple[UnmetReason, str]]:
    """Return the entries of the row ledger by reason and priority class; `ages` are those of the row ledger."""
    counts: Counter[tuple[UnmetReason, str]] = Counter()
    # Rows share their priorities, so that few of them have to be put into a class.
    by_priority = Counter((row.need.profile.priority, row.reason) for row in unmet if row.key in ages)
    for (priority, reason), rows in by_priority.items():
        counts[reason, priority_class(priority)] += rows
    return counts


def missing_machines(unmet: Sequence[Unmet], prices_usd_per_hour: Prices, fits: Fits) -> Counter[int]:
    """Return, by interruption bucket, how many machines the short rows lack.

    `prices_usd_per_hour` are those of the classes. Of each row it is the number of the cheapest matching class that
    covers what the row lacks; without such a class as many as its min unit fits into that, at least 1.
    """
    counts: Counter[int] = Counter()
    units: dict[tuple[int, tuple[str, ...]], Vector | None] = {}
    # Amounts that were written alike are one object, so that most rows lack what another one does. The rows hold on to
    # both, so that an id is one object.
    known: dict[tuple[int, int], int] = {}
    for row in unmet:
        parts = (id(row.ask), id(row.residual))
        machines = known.get(parts)
        if machines is None:
            key = (parts[0], tuple(sorted(row.residual)))
            if key not in units:
                units[key] = _cheapest_unit(row.ask, key[1], prices_usd_per_hour, fits)
            unit = units[key] or row.need.min_unit
            lacking = [ceil(milli / unit[name]) for name, milli in row.residual.items() if name in unit]
            machines = known[parts] = max(lacking, default=1)
        counts[row.need.profile.interruption_bucket] += machines
    return counts


def _cheapest_unit(ask: Ask, names: tuple[str, ...], prices_usd_per_hour: Prices, fits: Fits) -> Vector | None:
    places = np.flatnonzero(fits.fitting(ask) & fits.offering(names))
    if not len(places):
        return None
    return fits.supply(int(places[prices_usd_per_hour[places].argmin()]))


# ---- frames ------------------------------------------------------------------------------------------------------


def statuses(
    unmet: Iterable[Unmet], clusters: Set[str], texts: Mapping[RowKey, str], ages: Mapping[RowKey, int]
) -> dict[str, list[NeedStatus]]:
    """Return the statuses of the clusters' unmet rows, list order, one row more than may be sent.

    `ages` are timer cycles as a shortfall, by reported row; a row that victims cover has none.
    """
    found: defaultdict[str, list[NeedStatus]] = defaultdict(list)
    has_room = set(clusters)
    for row in unmet:
        cluster = row.need.cluster
        if cluster in has_room:
            if len(found[cluster]) == ROWS_MAX:
                has_room.discard(cluster)
            found[cluster].append(
                NeedStatus(
                    fingerprint=row.need.fingerprint,
                    group=row.need.group,
                    residual=vector.format_vector(row.residual, row.need.families),
                    reason=row.reason,
                    age_cycles=ages.get(row.key, 0),
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
    if row.reason is UnmetReason.BOOTSTRAP_FAILED:
        sentence = texts.get(row.decided_key, sentence)
    spread = row.need.profile.strict_spread
    if row.reason is UnmetReason.TOPOLOGY_UNSATISFIABLE and spread is not None:
        sentence = f"no machine that could host it has the label {spread.topology_key} of its topology spread"
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
