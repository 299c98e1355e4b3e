"""Searches exchanges once a minute, outside the cycle, and keeps the result for each cluster.

docs/spec/exchange.md §6. It reads the last finished cycle, which is never changed, and gives nothing back to a cycle,
unless the mode of a cluster is `on`: then it has the first proposal that is ready carried out. One cluster is searched
at a time, and only while no composition is planned. Then some pairs of clusters are searched for machines that could
move between them.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import structlog

from bigfleet.compositions.targets import FleetPlanner
from bigfleet.engine.decision import CapacityPool
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.exchange.between_clusters import MoveQuestion, Pair, find_move, move_question, with_move
from bigfleet.exchange.course import ExchangeEnd
from bigfleet.exchange.plausibility import PriceBook, PriceHistory, current_prices, proportionate
from bigfleet.exchange.price_paths import PricePaths, all_judged
from bigfleet.exchange.questions import ExchangeContext, questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.sentences import proposal_sentences
from bigfleet.exchange.values import (
    BlockReason,
    ClusterExchanges,
    ExchangeMode,
    ExchangeProposal,
    ExchangeQuestion,
    ExchangeSettings,
    ExclusionReason,
    WaitReason,
    WholeCluster,
)
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.compute import Compute
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.exchange.execution import PromisedMachines
from bigfleet.shard.exchange.forecasts import DrainForecasts, ForecastState
from bigfleet.shard.exchange.moves import Answered, MoveBook
from bigfleet.shard.metrics import EXCHANGE_WAITS
from bigfleet.shard.status.views import DecidedOn

#: Time between two looks.
LOOK_SECONDS: Final = 60.0
#: Clusters of one look, those first that were looked at longest ago.
CLUSTERS_MAX: Final = 100
#: Machines that they hold in all, the first cluster apart: a look at 200,000 takes 4 s of processor time.
MACHINES_MAX: Final = 20_000
#: A search begins when the planner's workers have nothing to do; it is looked for so often.
_WORKERS_SECONDS: Final = 1.0

#: Reasons to wait that are found again at each look.
_ASKED_AGAIN: Final = (WaitReason.NO_STOCK, WaitReason.FORECAST, WaitReason.WOULD_NOT_FIT)

_log = structlog.get_logger("bigfleet.shard.exchange.proposals")


class ExchangeWorkers(Protocol):
    """Searches exchanges outside of the shard's event loop."""

    @property
    def is_idle(self) -> bool:
        """Return whether no work is running or queued."""
        ...

    async def find_exchanges(self, question: ExchangeQuestion) -> ClusterExchanges:
        """Return what can be exchanged; raises what went wrong."""
        ...

    async def find_move(self, question: MoveQuestion) -> ExchangeProposal | None:
        """Return the move of a pair of clusters; raises what went wrong."""
        ...


@dataclass(frozen=True, slots=True)
class FoundExchanges:
    """What was found for one cluster, and when."""

    question: ExchangeQuestion
    exchanges: ClusterExchanges
    at_unix_nanos: int


@dataclass(slots=True)
class _Look:
    """One look at some clusters."""

    decided: DecidedOn
    #: The rows of the clusters, in list order.
    demand: list[Need]
    clusters: frozenset[str]
    blocked: Mapping[str, BlockReason]
    #: Machines of each class that are no longer on offer: given away by the cycle that is looked at, or to be taken by
    #: exchanges under way and those that this look begins.
    taken: Counter[ClassKey]
    #: Idle machines that other clusters gave for these ones.
    promises: Sequence[PromisedMachines]
    exclude: dict[str, ExclusionReason] = field(default_factory=dict)


class ExchangeProposals:
    """The exchanges that a shard proposes. All of it is touched by the shard's loop alone."""

    def __init__(
        self, *, shard: Shard, mode: ExchangeMode, clock: Clock, compute: Compute, workers: ExchangeWorkers | None
    ) -> None:
        """`mode` is that of clusters of which the cluster policy says nothing.

        Without `workers` exchanges are searched by `compute`.
        """
        self._shard = shard
        self._mode = mode
        self._clock = clock
        self._compute = compute
        self._workers = workers
        self._settings = ExchangeSettings(excess_seconds=shard.settings.reclaim_after_seconds)
        self._planner = FleetPlanner()
        self._history = PriceHistory()
        self._paths = PricePaths()
        #: By cluster; without moves.
        self._found: dict[str, FoundExchanges] = {}
        self._moves = MoveBook()
        self._forecasts = DrainForecasts(
            sessions=shard.sessions, clock=clock, metrics=shard.metrics, on_answer=self._answered
        )
        #: By cluster of which a question is open: the demand that its proposals were made for.
        self._asked: dict[str, list[Need]] = {}
        #: The same for moves, by each of their clusters, with the giver and the demand of both.
        self._asked_moves: dict[str, tuple[str, list[Need]]] = {}
        #: Of the last look, with what answers have begun since.
        self._taken: Counter[ClassKey] = Counter()
        #: At the last look.
        self._promises: Sequence[PromisedMachines] = ()
        #: When each cluster was last looked at, as a number of looks.
        self._seen: dict[str, int] = {}
        self._looks = 0

    async def run(self) -> None:
        """Look until cancelled. A failed look is logged and counted; the next one starts over."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:  # a search that fails must not end the shard
                self._shard.metrics.exchange_searches.labels("failed").inc()
                _log.exception("exchange.look_failed")

    def found(self, cluster: str = "") -> list[FoundExchanges]:
        """Return what was found last, of all clusters or of one, cluster ids ascending."""
        moves = self._moves.moves
        return [
            replace(each, exchanges=with_move(each.exchanges, moves.get(name)))
            for name, each in sorted(self._found.items())
            if cluster in ("", name)
        ]

    async def look(self) -> None:
        """Look at the clusters of the last finished cycle whose mode says so."""
        look = self._begin()
        if look is None:
            self._export()
            return
        _, _, questions = await self._questions_of(look)
        for gone in look.clusters - {question.cluster for question in questions}:
            self._found.pop(gone, None)
        for question in questions:
            await self._answer(question)
            rows = [need for need in look.demand if need.cluster == question.cluster]
            self._carry_out(question, rows, look.taken)
        await self._look_for_moves(look)
        self._export()

    async def _questions_of(self, look: _Look) -> tuple[DecisionState, ExchangeContext, list[ExchangeQuestion]]:
        """Return what is asked about the clusters of a look, and what it was made of."""
        planner = self._planner
        state = await self._compute(lambda: planner.state(look.decided.snapshot, look.demand, look.decided.options))
        await self._exclude_cooling(look, state)
        now_seconds, history, paths = self._clock.monotonic_seconds(), self._history, self._paths
        settings = {cluster: self._shard.policies.plan_settings(cluster) for cluster in look.clusters}

        def ask() -> tuple[ExchangeContext, list[ExchangeQuestion]]:
            machines = list(_priced(state))
            prices = current_prices(machines)
            history.observe(now_seconds, prices)
            paths.observe(now_seconds, prices)
            context = ExchangeContext(
                rows=look.decided.rows,
                prices=_with_promised(_reliable(history, machines), look.promises),
                settings=self._settings,
                plan_settings=settings,
                exclude=look.exclude,
                blocked=look.blocked,
            )
            return context, questions_of(state, context)

        context, questions = await self._compute(ask)
        return state, context, questions

    # ---- what is asked -----------------------------------------------------------------------------------------------

    def _begin(self) -> _Look | None:
        """Return what is looked at; None while there is nothing to look at."""
        shard, decided = self._shard, self._shard.view.decided_on
        if decided is None or not says_pods(decided.demand):
            self._found.clear()
            return None
        policies, self._looks = shard.policies, self._looks + 1
        known = dict.fromkeys(str(need.cluster) for need in decided.demand)
        modes = {name: policies.exchange_mode(name, self._mode) for name in known}
        for name in shard.exchanges.clusters:
            course = shard.exchanges.course_of(name)
            taker = "" if course is None else course.taker
            if any(modes.get(each) is not ExchangeMode.ON for each in (name, taker) if each):
                shard.exchanges.abandon(name, ExchangeEnd.SWITCHED_OFF)
        wanted = [name for name in known if modes[name] is not ExchangeMode.OFF]
        self._seen = {name: self._seen.get(name, 0) for name in wanted}
        for gone in self._found.keys() - self._seen.keys():
            del self._found[gone]
            self._asked.pop(gone, None)
            self._forecasts.forget(gone)
        self._promises = promises = shard.exchanges.promises()
        chosen = self._chosen(wanted, {promise.taker for promise in promises})
        if not chosen:
            return None
        self._seen |= dict.fromkeys(chosen, self._looks)
        taken = sum((promise.classes for promise in promises), shard.exchanges.missing + self._acquired(decided))
        look = self._look_at(decided, chosen, taken, promises)
        self._taken = look.taken
        return look

    def _look_at(
        self,
        decided: DecidedOn,
        clusters: frozenset[str],
        taken: Counter[ClassKey],
        promises: Sequence[PromisedMachines],
    ) -> _Look:
        shard = self._shard
        look = _Look(
            decided=decided,
            demand=[need for need in decided.demand if need.cluster in clusters],
            clusters=clusters,
            blocked={name: reason for name in clusters if (reason := self._block_reason(name)) is not None},
            taken=taken,
            promises=promises,
        )
        unavailable = (*decided.options.unjoined, *decided.options.reserved, *shard.ledger.in_flight())
        look.exclude |= dict.fromkeys(unavailable, ExclusionReason.UNAVAILABLE)
        look.exclude |= dict.fromkeys(self._forecasts.refused(), ExclusionReason.FORECAST)
        look.exclude |= dict.fromkeys(shard.fit_holds.held(), ExclusionReason.WOULD_NOT_FIT)
        cooling = shard.exchanges.cooling(self._settings.cooling_seconds)
        look.exclude |= dict.fromkeys(cooling - look.exclude.keys(), ExclusionReason.COOLING)
        return look

    def _acquired(self, decided: DecidedOn) -> Counter[ClassKey]:
        """Return what the cycle gave away of the machines that it saw on offer."""
        ids = [each for row in decided.rows if row.acquired for each in (*row.bootstraps, *row.provisions)]
        return Counter(class_key(machine) for each in ids if (machine := self._shard.inventory.get(each)) is not None)

    def _chosen(self, wanted: Sequence[str], first: Set[str]) -> frozenset[str]:
        """Return the clusters of this look: `first`, then those that were looked at longest ago, within its limits."""
        chosen: list[str] = []
        machines = 0
        for name in sorted(wanted, key=lambda name: (name not in first, self._seen[name], name))[:CLUSTERS_MAX]:
            machines += self._shard.inventory.count_bound_to(name)
            if chosen and machines > MACHINES_MAX:
                break
            chosen.append(name)
        return frozenset(chosen)

    def _block_reason(self, cluster: str) -> BlockReason | None:
        if self._shard.exchanges.is_busy(cluster):
            return BlockReason.EXCHANGE_UNDER_WAY
        if self._shard.intake.is_quarantined(cluster):
            return BlockReason.QUARANTINED
        return None if cluster in self._shard.sessions.clusters else BlockReason.OPERATOR_AWAY

    async def _exclude_cooling(self, look: _Look, state: DecisionState) -> None:
        """Keep the machines that have served for too short a time; those that served at the start have not."""
        now_unix_nanos, nanos = self._clock.unix_nanos(), int(self._settings.cooling_seconds * NANOS_PER_SECOND)
        changed_at = self._shard.inventory.changed_at_unix_nanos
        for cluster in state.clusters.values():
            for host in cluster.hosts:
                since = changed_at(MachineId(host.machine.id))
                # A stamp that is far ahead is that of a wall clock that was, and says nothing.
                if since is not None and abs(now_unix_nanos - since) < nanos:
                    look.exclude.setdefault(host.machine.id, ExclusionReason.COOLING)
            # Each takes a moment that grows with its cluster.
            await self._clock.sleep(0)

    # ---- what is answered -----------------------------------------------------------------------------------------

    async def _answer(self, question: ExchangeQuestion) -> None:
        known = self._found.get(question.cluster)
        is_known = known is not None and known.exchanges.blocked is not BlockReason.SEARCH_FAILED
        if known is not None and is_known and known.question == question:
            self._shard.metrics.exchange_searches.labels("unchanged").inc()
            self._show(replace(known, exchanges=all_judged(known.exchanges, self._paths)))
            return
        try:
            exchanges = await self._search(question)
        except asyncio.CancelledError:
            raise
        except Exception as fault:  # one cluster's failure must not hide the others
            self._shard.metrics.exchange_searches.labels("failed").inc()
            _log.warning("exchange.search_failed", cluster=question.cluster, error=f"{type(fault).__name__}: {fault}")
            exchanges = ClusterExchanges(
                cluster=question.cluster,
                machines=question.machines,
                cost_usd_per_hour=question.cost_usd_per_hour,
                blocked=BlockReason.SEARCH_FAILED,
            )
        else:
            self._shard.metrics.exchange_searches.labels("searched").inc()
        exchanges = all_judged(exchanges, self._paths)
        self._show(FoundExchanges(question, exchanges, self._clock.unix_nanos()))

    def _show(self, found: FoundExchanges) -> None:
        cluster = found.question.cluster
        known = self._found.get(cluster)
        self._found[cluster] = found
        self._audit(found.exchanges, () if known is None else known.exchanges.proposals, self._clock.unix_nanos())

    def _carry_out(self, question: ExchangeQuestion, rows: list[Need], taken: Counter[ClassKey]) -> None:
        """Begin the first proposal that is ready and can be begun, where the mode says so."""
        shard, cluster = self._shard, question.cluster
        found = self._found.get(cluster)
        self._asked.pop(cluster, None)
        if found is None or shard.policies.exchange_mode(cluster, self._mode) is not ExchangeMode.ON:
            return
        # What another cluster gave for this one is not taken by others.
        given = (each.classes for each in self._promises if each.taker == cluster)
        exchanges = _with_stock(found.exchanges, question.whole, taken - sum(given, Counter[ClassKey]()))
        self._found[cluster] = replace(found, exchanges=exchanges)
        for proposal in exchanges.proposals:
            if proposal.waits_for is not None:
                continue
            if not self._is_foreseen(question, proposal, rows):
                return
            if shard.exchanges.begin(
                proposal, cluster=cluster, machines=question.machines, rows=rows, settings=self._settings
            ):
                taken.update(proposal.comes_by_class)
                self._forecasts.forget(cluster)
                shard.wake()
                return
            if not proposal.is_gang:
                return  # the next one assumes that this one is carried out

    def _is_foreseen(self, question: ExchangeQuestion, proposal: ExchangeProposal, rows: list[Need]) -> bool:
        """Return whether no operator stands against a proposal; one that waits for its operator shows it."""
        cluster = question.cluster
        if self._shard.exchanges.is_busy(cluster):
            return False
        waits_for = self._forecast(cluster, proposal, question.whole)
        if waits_for is None:
            return True
        if waits_for is WaitReason.FORECAST:
            self._asked[cluster] = rows
        found = self._found[cluster]
        proposals = (
            replace(each, waits_for=waits_for) if each is proposal else each for each in found.exchanges.proposals
        )
        self._found[cluster] = replace(found, exchanges=replace(found.exchanges, proposals=tuple(proposals)))
        return False

    def _forecast(self, cluster: str, proposal: ExchangeProposal, whole: WholeCluster | None) -> WaitReason | None:
        """Return what a proposal waits for of the cluster's operator, who is asked where that is not known."""
        scheduler = self._shard.policies.plan_settings(cluster).order.value
        match self._forecasts.state(cluster, proposal, whole=whole, scheduler=scheduler):
            case ForecastState.FITS | ForecastState.NOT_KNOWN:
                return None
            case ForecastState.ASKED:
                return WaitReason.FORECAST
            case ForecastState.WOULD_NOT_FIT:
                return WaitReason.WOULD_NOT_FIT

    def _answered(self, cluster: str) -> None:
        """Go on with a cluster whose operator has answered."""
        found, rows = self._found.get(cluster), self._asked.pop(cluster, None)
        if found is not None and rows is not None:
            self._carry_out(found.question, rows, self._taken)
            self._export()
        giver, rows_of_giver = self._asked_moves.pop(cluster, ("", []))
        if giver:
            self._carry_out_move(giver, rows_of_giver, self._taken)
            self._export()

    async def _search(self, question: ExchangeQuestion) -> ClusterExchanges:
        if self._workers is None:
            return await self._compute(lambda: find_exchanges(question))
        await self._workers_idle(self._workers)
        return await self._workers.find_exchanges(question)

    async def _workers_idle(self, workers: ExchangeWorkers) -> None:
        while not workers.is_idle:
            # A plan that waits delays machines for pods; a proposal delays nothing.
            await self._clock.sleep(_WORKERS_SECONDS)

    # ---- between clusters ----------------------------------------------------------------------------------------

    async def _look_for_moves(self, look: _Look) -> None:
        """Ask about some pairs of clusters, choose the moves to show, and begin those that may begin."""
        found, exchanges = self._sides(), self._shard.exchanges
        barred = exchanges.unfinished_takers(self._settings.cooling_seconds)
        pairs = self._affordable(await self._compute(lambda: self._moves.due(found, barred)))
        if pairs:
            clusters = frozenset(name for pair in pairs for name in (pair.giver, pair.taker))
            await self._ask_pairs(self._look_at(look.decided, clusters, look.taken, look.promises), pairs, found)
        found = self._sides()
        for giver in self._moves.choose(found, self._paths):
            only = replace(found[giver].exchanges, proposals=(self._moves.moves[giver],))
            self._audit(only, (), self._clock.unix_nanos())
        for giver in self._moves.moves:
            rows = [need for need in look.decided.demand if need.cluster == giver]
            self._carry_out_move(giver, rows, look.taken)

    def _affordable(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the first pairs, as far as their clusters are within the machines of a look; at least one."""
        found: list[Pair] = []
        clusters: set[str] = set()
        for pair in pairs:
            wanted = clusters | {pair.giver, pair.taker}
            if found and sum(map(self._shard.inventory.count_bound_to, wanted)) > MACHINES_MAX:
                break
            found, clusters = [*found, pair], wanted
        return found

    def _sides(self) -> dict[str, Answered]:
        """Return the clusters that may give and take machines, as far as the shard knows."""
        return {
            name: Answered(found.question, found.exchanges)
            for name, found in self._found.items()
            if self._block_reason(name) is None
        }

    async def _ask_pairs(self, look: _Look, pairs: Sequence[Pair], found: Mapping[str, Answered]) -> None:
        """Search the moves of some pairs; `look` is at their clusters."""
        state, context, questions = await self._questions_of(look)
        givers = {question.cluster: question for question in questions}
        for pair in pairs:
            if pair.giver not in givers:
                continue
            try:
                asked = await self._compute(partial(move_question, state, context, givers[pair.giver], pair))
                move = None if asked is None else await self._search_move(asked)
            except asyncio.CancelledError:
                raise
            except Exception as fault:  # one pair's failure must not hide the others
                self._shard.metrics.exchange_searches.labels("failed").inc()
                error = f"{type(fault).__name__}: {fault}"
                _log.warning("exchange.search_failed", cluster=pair.giver, taker=pair.taker, error=error)
                continue
            self._moves.answered(pair, found, look=self._looks, asked=asked, move=move)

    async def _search_move(self, asked: MoveQuestion) -> ExchangeProposal | None:
        if self._workers is None:
            return await self._compute(lambda: find_move(asked))
        await self._workers_idle(self._workers)
        return await self._workers.find_move(asked)

    def _carry_out_move(self, giver: str, rows: list[Need], taken: Counter[ClassKey]) -> None:
        """Begin a giver's part of a move that is ready, where the modes of both clusters say so."""
        shard, found, chosen = self._shard, self._found.get(giver), self._moves.of(giver)
        if found is None or chosen is None or chosen.move.taker_part is None:
            return
        move, clusters = chosen.move, (giver, chosen.move.taker)
        if any(shard.policies.exchange_mode(each, self._mode) is not ExchangeMode.ON for each in clusters):
            return
        if move.waits_for not in (None, *_ASKED_AGAIN) or any(self._block_reason(each) for each in clusters):
            return
        waits_for = _stock_reason(move, found.question.whole, taken)
        if waits_for is None:
            # Both are asked at once: a move of which the taker could make nothing is not begun.
            of_both = (
                self._forecast(giver, move, found.question.whole),
                self._forecast(move.taker, chosen.move.taker_part, chosen.taker),
            )
            waits_for = next(
                (each for each in (WaitReason.WOULD_NOT_FIT, WaitReason.FORECAST) if each in of_both), None
            )
        self._moves.set_waits(giver, waits_for)
        if waits_for is WaitReason.FORECAST:
            self._asked_moves |= dict.fromkeys(clusters, (giver, rows))
        move, machines = replace(move, waits_for=waits_for), found.question.machines
        if waits_for is None and shard.exchanges.begin(
            move, cluster=giver, machines=machines, rows=rows, settings=self._settings
        ):
            taken.update(move.comes_by_class)
            for each in clusters:
                self._forecasts.forget(each)
            self._moves.forget(clusters)
            shard.wake()

    def _audit(self, exchanges: ClusterExchanges, before: Sequence[ExchangeProposal], at_unix_nanos: int) -> None:
        """Write a record of each proposal that is ready and was not before."""
        known = {(each.machine_ids, each.comes) for each in before if each.waits_for is None}
        for proposal in exchanges.proposals:
            if proposal.waits_for is None and (proposal.machine_ids, proposal.comes) not in known:
                self._shard.audit.note_exchange(
                    kind="ProposeExchange",
                    cluster=exchanges.cluster,
                    machines=len(proposal.machine_ids),
                    saving_usd_per_hour=proposal.gate.saving_usd_per_hour,
                    outcome="proposed",
                    message=" ".join(proposal_sentences(proposal)),
                    at_unix_nanos=at_unix_nanos,
                )

    def _export(self) -> None:
        self._shard.exchanges.measure(self._paths)
        self._shard.exchanges.export()
        metrics = self._shard.metrics
        proposals = [each for found in self.found() for each in found.exchanges.proposals]
        ready = [each.gate.saving_usd_per_hour for each in proposals if each.waits_for is None]
        waiting = [each.gate.saving_usd_per_hour for each in proposals if each.waits_for is not None]
        metrics.exchange_saving.labels("promised").set(sum(ready))
        metrics.exchange_saving.labels("waiting").set(sum(waiting))
        waits = Counter("nothing" if each.waits_for is None else each.waits_for.value for each in proposals)
        for reason in EXCHANGE_WAITS:
            metrics.exchange_proposals.labels(reason).set(waits[reason])
        blocked = Counter(found.exchanges.blocked for found in self._found.values())
        for block in BlockReason:
            metrics.exchange_blocked.labels(block.value).set(blocked[block])


def _with_stock(exchanges: ClusterExchanges, whole: WholeCluster | None, taken: Counter[ClassKey]) -> ClusterExchanges:
    """Return the exchanges; those that are ready wait while others take what would come.

    Each cluster is asked about everything on offer, and only one can have the last machine.
    """

    def waits_for(proposal: ExchangeProposal) -> WaitReason | None:
        is_asked = proposal.waits_for in (None, *_ASKED_AGAIN)
        return _stock_reason(proposal, whole, taken) if is_asked else proposal.waits_for

    return replace(exchanges, proposals=tuple(replace(each, waits_for=waits_for(each)) for each in exchanges.proposals))


def _stock_reason(
    proposal: ExchangeProposal, whole: WholeCluster | None, taken: Counter[ClassKey]
) -> WaitReason | None:
    """Return whether what would come is no longer on offer."""
    wanted = Counter({key: count + taken[key] for key, count in proposal.comes_by_class.items()})
    return None if whole is not None and whole.offers(wanted) else WaitReason.NO_STOCK


def _with_promised(prices: PriceBook, promises: Sequence[PromisedMachines]) -> PriceBook:
    """Return the prices with those of machines that have become Idle for another cluster: they are paid for anyway."""
    offered = {CapacityPool.of(each): each.price_usd_per_hour for promise in promises for each in promise.machines}
    return prices._replace(offered={**offered, **prices.offered})


def _priced(state: DecisionState) -> Iterator[Machine]:
    """Yield a machine of each offer and those that the clusters hold."""
    for offer in state.offers:
        yield offer.example
    for cluster in state.clusters.values():
        for host in cluster.hosts:
            yield host.machine


def _reliable(history: PriceHistory, machines: Sequence[Machine]) -> PriceBook:
    return proportionate(history.settled, machines)
