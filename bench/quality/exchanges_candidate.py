"""Runs the decision over demand shapes as a candidate that exchanges machines at rest, as a shard with `--exchange on`.

Each exchange is carried out on paper, at once: what comes is bound to the cluster, what goes drains, and what the
cluster then needs no longer leaves by the next decisions. Machines do not cool, because at rest only time would pass.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bench.quality.shapes_candidate import PaperFleet, demand_of
from bench.quality.values import Instance, PackingCluster, Scheduler, Settled, Start
from bigfleet.cli.plan.exchanging import carried_out
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import build
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.exchange.plausibility import current_prices, proportionate
from bigfleet.exchange.questions import ExchangeContext, questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import ClusterExchanges, ExchangeQuestion
from bigfleet.planner.problem import PlanSettings, SchedulerOrder

#: Rounds of at most one exchange for each cluster.
ROUNDS_MAX: Final = 400


class ExchangesCandidate:
    """Decides as the candidate over shapes does, and then exchanges machines until no proposal is ready."""

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Return what the clusters hold when nothing is exchanged any more."""
        demands = instance.demands(start)
        fleet = ExchangingFleet(instance, demands, SchedulerOrder(scheduler.value))
        for clusters in demands[:-1]:
            fleet.live(clusters)
        return fleet.exchange(demands[-1], fleet.live(demands[-1]))


class ExchangingFleet(PaperFleet):
    """Machines of an instance that are exchanged for cheaper ones."""

    def exchange(self, clusters: Sequence[PackingCluster], settled: Settled) -> Settled:
        """Exchange and decide until no proposal is ready; return what is held then, with the actions of both."""
        started = time.process_time()
        answers: dict[str, ClusterExchanges] = {}
        questions: dict[str, ExchangeQuestion] = {}
        actions, is_at_rest = settled.actions, settled.is_at_rest
        for _ in range(ROUNDS_MAX):
            for question in self._questions(clusters):
                if questions.get(question.cluster) != question:
                    questions[question.cluster], answers[question.cluster] = question, find_exchanges(question)
            carried = [found.cluster for found in answers.values() if self._carry_out_first(found)]
            if not carried:
                break
            # The composition of such a cluster is what it holds now, without what its pods do not need.
            held = self.snapshot(machine for machine in self.machines if machine.cluster in carried)
            planned = self.planned(clusters, held)
            self.targets = {**self.targets, **{name: planned[name] for name in carried if name in planned}}
            after = self.rest(clusters)
            actions, is_at_rest = actions + after.actions, is_at_rest and after.is_at_rest
            settled = after
        else:
            is_at_rest = False
        seconds = settled.engine_seconds + time.process_time() - started
        return replace(settled, actions=actions, is_at_rest=is_at_rest, engine_seconds=seconds)

    def _questions(self, clusters: Sequence[PackingCluster]) -> list[ExchangeQuestion]:
        demand, options, snapshot = demand_of(clusters), self.options(clusters), self.snapshot()
        context = ExchangeContext(
            rows=decide(snapshot, demand, options).rows,
            prices=proportionate(current_prices(self.machines), self.machines),
            plan_settings={cluster.id: PlanSettings(order=self.order) for cluster in clusters},
        )
        return questions_of(build(SnapshotMachines(snapshot, options), demand, options), context)

    def _carry_out_first(self, found: ClusterExchanges) -> bool:
        """Carry out the first proposal that is ready if everything that comes is on offer; return whether it was."""
        ready = next((each for each in found.proposals if each.waits_for is None), None)
        if ready is None:
            return False
        changed = carried_out({machine.id: machine for machine in self.machines}, found.cluster, ready)
        for machine in (changed or {}).values():
            self.put(machine)
        return changed is not None
