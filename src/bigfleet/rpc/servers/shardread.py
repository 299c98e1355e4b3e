"""Serves `ShardRead`: the decisions of the last cycle, the live inventory, and the newest actions.

docs/spec/wire.md §9, docs/spec/shard.md §12. Readers stream from values that no cycle changes;
`bigfleet.rpc.servers.explain` explains decisions. This module does not change a shard.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Set
from heapq import merge
from itertools import islice
from typing import Any

import grpc
import numpy as np
from grpc import aio

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId, identifier_fault
from bigfleet.model.machine import Machine
from bigfleet.model.vector import format_vector
from bigfleet.rpc.servers.explain import Explainer, ExplanationRefusal
from bigfleet.rpc.servers.reader_turns import ReaderTurns
from bigfleet.rpc.wire.convert_exchange import exchanges_to_wire, runs_to_wire
from bigfleet.rpc.wire.convert_machine import machine_to_wire, stamp_to_wire
from bigfleet.rpc.wire.convert_session import need_to_wire
from bigfleet.rpc.wire.gen import provider_pb2, shardread_pb2, shardread_pb2_grpc
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.exchange.exchange_records import ExchangeRecord
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.inventory.fleet_queries import MachineQuery, find, first_after
from bigfleet.shard.outcomes import ActionRecord
from bigfleet.shard.status.session_views import SessionView
from bigfleet.shard.status.views import NeedView

SERVICE_NAME = shardread_pb2.DESCRIPTOR.services_by_name["ShardRead"].full_name
PAGE_MACHINES_DEFAULT = 10_000
PAGE_MACHINES_MAX = 100_000
ACTIONS_DEFAULT = 1_000
ACTIONS_MAX = 10_000
#: Flags that a machine can carry in this version; `reserved` never holds yet.
_FLAGS = frozenset({"unjoined", "stuck", "reserved", "pending", "held"})

_Context = aio.ServicerContext[Any, Any]


class ShardReadServicer(shardread_pb2_grpc.ShardReadServicer):
    """Reads one shard."""

    def __init__(self, shard: Shard, clock: Clock, exchanges: ExchangeProposals | None = None) -> None:
        """Without `exchanges` none is listed."""
        self._shard = shard
        self._exchanges = exchanges
        self._clock = clock
        self._explainer = Explainer(shard)
        self._turns = ReaderTurns(clock)

    async def InspectNeeds(
        self, request: shardread_pb2.InspectNeedsRequest, context: _Context
    ) -> AsyncIterator[shardread_pb2.InspectNeedsResponse]:
        """Stream a header, then the rows of the last finished cycle."""
        if request.limit < 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"limit {request.limit} must not be negative")
        view = await self._shard.inspect()
        needs = [row for row in view.needs if request.cluster_id in ("", row.need.cluster)]
        yield shardread_pb2.InspectNeedsResponse(
            header=shardread_pb2.InspectNeedsHeader(
                cycle=view.cycle, computed_at_unix_nanos=view.computed_at_unix_nanos, total_needs=len(needs)
            )
        )
        # A limit of 0 is none (docs/spec/wire.md §9).
        async for need in self._turns.converted(needs[: request.limit or None], _need_view):
            yield shardread_pb2.InspectNeedsResponse(need=need)

    async def ListMachines(
        self, request: shardread_pb2.ListMachinesRequest, context: _Context
    ) -> AsyncIterator[shardread_pb2.ListMachinesResponse]:
        """Stream a header, one page of the live inventory by id, and an end that names the next page."""
        fault = _page_fault(request)
        if fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        asked = _Asked(self._shard, request)
        yield shardread_pb2.ListMachinesResponse(
            header=shardread_pb2.ListMachinesHeader(
                cycle=self._shard.cycle,
                computed_at_unix_nanos=self._clock.unix_nanos(),
                total_matched=asked.total,
            )
        )
        async for machine in self._turns.converted(asked.page, self._machine_at):
            if machine is not None:
                yield shardread_pb2.ListMachinesResponse(machine=machine)
        token = asked.page[-1] if asked.has_more else ""
        yield shardread_pb2.ListMachinesResponse(end=shardread_pb2.ListMachinesEnd(next_page_token=token))

    async def ListActions(
        self, request: shardread_pb2.ListActionsRequest, context: _Context
    ) -> AsyncIterator[shardread_pb2.ListActionsResponse]:
        """Stream the newest actions first, running ones included."""
        if not 0 <= request.limit <= ACTIONS_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"limit must be from 0 to {ACTIONS_MAX}")
        records = list(self._shard.ledger.history)
        for record in islice(_asked_actions(records, request), request.limit or ACTIONS_DEFAULT):
            yield shardread_pb2.ListActionsResponse(action=_action_view(record))

    async def ListSessions(
        self, request: shardread_pb2.ListSessionsRequest, context: _Context
    ) -> AsyncIterator[shardread_pb2.ListSessionsResponse]:
        """Stream how each cluster's operator and the shard stand, cluster ids ascending, as of its turn."""
        fault = identifier_fault(request.cluster_id) if request.cluster_id else None
        if fault is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"cluster_id {fault}")
        for view in self._shard.session_views.views(request.cluster_id):
            yield shardread_pb2.ListSessionsResponse(session=_session_view(view))

    async def ListExchanges(
        self, request: shardread_pb2.ListExchangesRequest, context: _Context
    ) -> AsyncIterator[shardread_pb2.ListExchangesResponse]:
        """Stream what could be exchanged in each cluster, as of the last look, and what was; cluster ids ascending."""
        fault = identifier_fault(request.cluster_id) if request.cluster_id else None
        if fault is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"cluster_id {fault}")
        found = [] if self._exchanges is None else self._exchanges.found(request.cluster_id)
        views = {each.exchanges.cluster: exchanges_to_wire(each) for each in found}
        carried_out, runs = self._shard.exchanges, defaultdict[str, list[ExchangeRecord]](list)
        for record in carried_out.records:
            if request.cluster_id in ("", record.cluster):
                runs[record.cluster].append(record)
        for cluster in sorted(views.keys() | runs.keys()):
            view = views.get(cluster) or shardread_pb2.ClusterExchangesView(cluster_id=cluster)
            view.runs.extend(runs_to_wire(runs[cluster], carried_out.course_of(cluster)))
            yield shardread_pb2.ListExchangesResponse(exchanges=view)

    async def ExplainNeed(
        self, request: shardread_pb2.ExplainNeedRequest, context: _Context
    ) -> shardread_pb2.ExplainNeedResponse:
        """Return why a row got what it got in the last finished cycle."""
        try:
            explained = await self._explainer.need(request.cluster_id, request.profile_fingerprint, request.group)
        except ExplanationRefusal as refusal:
            return await context.abort(refusal.code, str(refusal))
        return shardread_pb2.ExplainNeedResponse(
            cycle=explained.cycle,
            computed_at_unix_nanos=explained.computed_at_unix_nanos,
            need=_need_view(explained.subject),
            events=explained.events,
            truncated=explained.truncated,
        )

    async def ExplainMachine(
        self, request: shardread_pb2.ExplainMachineRequest, context: _Context
    ) -> shardread_pb2.ExplainMachineResponse:
        """Return why a machine was decided on as it was in the last finished cycle, and its actions, newest first."""
        try:
            explained = await self._explainer.machine(request.machine_id)
        except ExplanationRefusal as refusal:
            return await context.abort(refusal.code, str(refusal))
        # As ListMachines shows it, if it is still there: what was decided may be under way by now.
        machine = self._shard.inventory.get(explained.subject.id) or explained.subject
        asked = shardread_pb2.ListActionsRequest(machine_id=machine.id)
        actions = islice(_asked_actions(list(self._shard.ledger.history), asked), ACTIONS_DEFAULT)
        return shardread_pb2.ExplainMachineResponse(
            cycle=explained.cycle,
            computed_at_unix_nanos=explained.computed_at_unix_nanos,
            machine=self._machine_view(machine),
            events=explained.events,
            actions=[_action_view(record) for record in actions],
        )

    def _machine_at(self, machine_id: MachineId) -> shardread_pb2.MachineView | None:
        machine = self._shard.inventory.get(machine_id)
        return None if machine is None else self._machine_view(machine)

    def _machine_view(self, machine: Machine) -> shardread_pb2.MachineView:
        pending = self._shard.ledger.pending(machine.id)
        delayed_until_unix_nanos, delay_reason = self._shard.guardrails.delay_of(machine)
        return shardread_pb2.MachineView(
            machine=machine_to_wire(machine, {}),
            **stamp_to_wire(machine),
            state_since_unix_nanos=self._shard.inventory.state_since_unix_nanos(machine.id),
            pending_action=pending.kind_label if pending is not None else "",
            stuck=self._shard.stuck.is_stuck(machine.id),
            joined=self._shard.publisher.joins.is_joined(machine),
            unjoined=self._shard.publisher.joins.is_unjoined(machine.id),
            held=self._shard.machine_backoff.is_held(machine.id),
            reclaim_delayed_until_unix_nanos=delayed_until_unix_nanos,
            reclaim_delayed_reason=delay_reason,
        )


class _Asked:
    """The machines that a ListMachines asks for, as they are now: those of the last snapshot, and what changed since.

    The snapshot is searched in columns; what changed, or carries a flag that is asked for, is looked at one by one.
    """

    def __init__(self, shard: Shard, request: shardread_pb2.ListMachinesRequest) -> None:
        wanted = MachineQuery(
            cluster=request.cluster_id,
            instance_type=request.instance_type,
            zone=request.zone,
            states=frozenset(request.states),
            capacity_types=frozenset(request.capacity_types),
        )
        size = request.page_size or PAGE_MACHINES_DEFAULT
        if request.flags:
            names = sorted(_holding(shard, wanted, _flagged(shard, set(request.flags))))
            rest = names[bisect_right(names, request.page_token) :]
            self.total, self.page, left = len(names), rest[:size], len(rest)
        else:
            # In this order: should the first snapshot be ready in between, what it holds is merely looked at twice.
            changed = shard.inventory.changed_since_snapshot
            view = shard.inventory.latest_snapshot
            fresh = sorted(_holding(shard, wanted, changed))
            rows = find(view, wanted, but_for=changed)
            self.total = len(rows) + len(fresh)
            rows = rows[np.searchsorted(rows, first_after(view, request.page_token)) :]
            fresh = fresh[bisect_right(fresh, request.page_token) :]
            # Two runs in order: a page can hold only the head of each.
            heads = merge((view.ids[row] for row in rows[:size].tolist()), fresh[:size])
            self.page, left = list(islice(heads, size)), len(rows) + len(fresh)
        #: Whether ids after the page's last one match.
        self.has_more = len(self.page) < left


def _flagged(shard: Shard, flags: Set[str]) -> Iterable[str]:
    """Return the machines that carry all of the flags."""
    carriers: dict[str, Set[str]] = {
        "pending": shard.ledger.in_flight(),
        "held": shard.machine_backoff.held(),
        "stuck": shard.stuck.stuck(),
        "unjoined": shard.publisher.joins.unjoined,
    }
    first, *others = (carriers.get(flag, frozenset()) for flag in sorted(flags))
    return frozenset(first).intersection(*others)


def _holding(shard: Shard, wanted: MachineQuery, machine_ids: Iterable[str]) -> Iterator[MachineId]:
    """Yield those of the machines that are known and asked for."""
    for machine_id in machine_ids:
        known = MachineId(machine_id)
        record = shard.inventory.record_of(known)
        if record is not None and wanted.holds(record):
            yield known


def _page_fault(request: shardread_pb2.ListMachinesRequest) -> str:
    if not 0 <= request.page_size <= PAGE_MACHINES_MAX:
        return f"page_size {request.page_size} must be from 0 to {PAGE_MACHINES_MAX}"
    unknown = sorted(set(request.flags) - _FLAGS)
    if unknown:
        return f"flags: {unknown[0]!r} is unknown; choose from {', '.join(sorted(_FLAGS))}"
    known_states = provider_pb2.MachineState.values()
    wrong_state = next((state for state in request.states if state not in known_states), None)
    if wrong_state is not None:
        return f"states: {wrong_state} is no machine state"
    known_types = provider_pb2.CapacityType.values()
    wrong_type = next((kind for kind in request.capacity_types if kind not in known_types), None)
    if wrong_type is not None:
        return f"capacity_types: {wrong_type} is no capacity type"
    fault = identifier_fault(request.page_token) if request.page_token else None
    if fault is not None:
        return f"page_token {fault}; send the next_page_token of the page before"
    return ""


def _need_view(row: NeedView) -> shardread_pb2.NeedView:
    need = row.need
    view = shardread_pb2.NeedView(
        need=need_to_wire(need),
        cluster_id=need.cluster,
        arrival_unix_nanos=need.arrival_unix_nanos,
        profile_fingerprint=need.fingerprint,
        satisfied=row.satisfied,
        claimed_machine_count=row.claimed_machines,
        bootstrap_count=row.bootstraps,
        provision_count=row.provisions,
        same_domain=row.domain,
        same_satisfiable=row.satisfiable and need.profile.same_key is not None,
        acquisition_parked=row.parked,
        parked_age_cycles=row.parked_age_cycles,
        age_cycles_unmet=row.unmet_age_cycles,
        unmet_reason=row.reason.value,  # type: ignore[arg-type]  # the numbers are those of the wire
    )
    if row.residual:
        view.residual_deficit.resources.update(format_vector(row.residual, need.families))
    if row.matching is not None:
        view.matching_supply.idle = row.matching.idle
        view.matching_supply.configured = row.matching.configured
        view.matching_supply.speculative = row.matching.speculative
        view.matching_supply.capped = row.matching.is_capped
    if row.victims:
        view.preemption.victims_found = row.victims
        view.preemption.capacity_freed.resources.update(format_vector(row.freed, need.families))
    return view


def _asked_actions(records: list[ActionRecord], request: shardread_pb2.ListActionsRequest) -> Iterator[ActionRecord]:
    for record in reversed(records):
        action = record.action
        if (
            request.cluster_id in ("", action.cluster)
            and request.machine_id in ("", action.machine_id)
            and (not request.kinds or record.kind_label in request.kinds)
            and (not request.outcomes or record.outcome_label in request.outcomes)
            and record.decided_unix_nanos >= request.since_unix_nanos
        ):
            yield record


def _action_view(record: ActionRecord) -> shardread_pb2.ActionRecord:
    action = record.action
    return shardread_pb2.ActionRecord(
        action_id=record.action_id,
        kind=record.kind_label,
        machine_id=action.machine_id,
        cluster_id=action.cluster,
        reason=action.reason,
        decided_cycle=record.decided_cycle,
        executed_cycle=record.executed_cycle,
        decided_unix_nanos=record.decided_unix_nanos,
        finished_unix_nanos=record.finished_unix_nanos,
        grace_seconds=action.grace_seconds,
        preemptor_priority=action.preemptor_priority,
        outcome=record.outcome_label,
        message=record.message,
    )


def _session_view(view: SessionView) -> shardread_pb2.SessionView:
    return shardread_pb2.SessionView(
        cluster_id=view.cluster,
        state=view.state.value,
        since_unix_nanos=view.since_unix_nanos,
        last_rollup_unix_nanos=view.last_rollup_unix_nanos,
        rows=view.rows,
        rollup_held=view.rollup_held,
        outbox_frames=view.outbox_frames,
        outbox_dropped=view.outbox_dropped,
        capabilities=view.capabilities,
    )


def add_to_server(servicer: ShardReadServicer, server: aio.Server) -> None:
    """Register the service on a server."""
    shardread_pb2_grpc.add_ShardReadServicer_to_server(servicer, server)
