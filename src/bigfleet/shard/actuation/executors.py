"""Executes one action: provisions, bootstraps, drains or deletes a machine, step by step, each step retried.

docs/spec/shard.md §9; comments name its steps. An executor makes one attempt; the next cycle retries. The worker's part
ends when the provider acknowledges a transitional state; reconcile observes the end of the transition. A transition
never ends without a report of the provider.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import structlog

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model import labels
from bigfleet.model.clock import Clock
from bigfleet.model.frames import (
    CAPABILITY_DRAIN_RESULT,
    BootstrapResponse,
    DrainOutcome,
    DrainResult,
    ReclaimInstruction,
)
from bigfleet.model.ids import IdSource, MachineId
from bigfleet.model.machine import Machine, PreemptedFor
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.need import RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_slots import ActionSlots
from bigfleet.shard.actuation.action_states import GOAL_STATE, REDRIVEN_STATE, REQUIRED_STATE
from bigfleet.shard.actuation.backoff import DemandBackoff, MachineBackoff
from bigfleet.shard.actuation.operator_requests import bootstrap_request, reclaim_instruction
from bigfleet.shard.actuation.provider_backoff import ProviderBackoff
from bigfleet.shard.actuation.stockouts import Stockouts
from bigfleet.shard.cycle.reclaim_delay import FitHolds, is_delayable
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import REFUSAL_OUTCOMES, ActionOutcome, ActionRecord
from bigfleet.shard.ports import (
    FenceToken,
    ListedMachine,
    Provider,
    ProviderRefusal,
    RefusalKind,
    ShardSettings,
    TokenSource,
    TransitionAck,
)
from bigfleet.shard.sessions.registry import Session, SessionLost, Sessions

_log = structlog.get_logger("bigfleet.shard.actuation.executors")

FENCED_CAUSE = "fenced: another process of this shard is newer"
DISAGREEMENT_CAUSE = "capacity type and Delete support disagree"
_INVALID_RECORD = "the provider's answer holds a record that breaks the invariant"


@dataclass(slots=True, eq=False)
class _DrainWait:
    record: ActionRecord
    deadline_seconds: float
    #: Set when the provider shows something other than Configured.
    ended: asyncio.Event


class Executors:
    """The four flows, over one provider and the connected operators."""

    def __init__(
        self,
        *,
        settings: ShardSettings,
        inventory: Inventory,
        ingest: Ingest,
        sessions: Sessions,
        provider: Provider,
        tokens: TokenSource,
        metrics: ShardMetrics,
        clock: Clock,
        ids: IdSource,
        ledger: ActionLedger,
        machine_backoff: MachineBackoff,
        demand_backoff: DemandBackoff,
        stockouts: Stockouts,
        fit_holds: FitHolds,
        revisit: Callable[[MachineId], None],
        profile_of: Callable[[RowKey], Profile | None],
        note_drain: Callable[[MachineId, int], None],
        is_reserved: Callable[[MachineId], bool],
    ) -> None:
        """`profile_of` finds a row that is still in demand; `note_drain` takes each drain's grace in seconds."""
        self._settings = settings
        self._inventory = inventory
        self._ingest = ingest
        self._sessions = sessions
        self._provider = provider
        self._tokens = tokens
        self._metrics = metrics
        self._clock = clock
        self._ids = ids
        self._ledger = ledger
        self._machine_backoff = machine_backoff
        self._demand_backoff = demand_backoff
        self._stockouts = stockouts
        self._fit_holds = fit_holds
        self._revisit = revisit
        self._profile_of = profile_of
        self._note_drain = note_drain
        self._is_reserved = is_reserved
        self.provider_backoff = ProviderBackoff(clock, provider)
        self.slots = ActionSlots(settings=settings, metrics=metrics)
        #: Drains that wait for their operator, by machine; setting the event ends the wait (§9.3).
        self._drain_waits: dict[str, _DrainWait] = {}

    async def execute(self, record: ActionRecord) -> ActionOutcome:
        """Carry out one action and return how it ended."""
        try:
            return await self._execute(record)
        except Exception:
            # Whatever went wrong here, the provider's view of the machine is the one to go on from.
            self._revisit(record.action.machine_id)
            raise

    async def _execute(self, record: ActionRecord) -> ActionOutcome:
        machine = self._inventory.get(record.action.machine_id)
        if machine is None:
            return ActionOutcome.STALE
        if self.provider_backoff.is_active:
            # It was queued before the provider was found not to be ready. No call is made.
            record.is_counted_only = True
            return ActionOutcome.REFUSED
        kind = record.action.kind
        if record.is_redrive:
            return await self._redrive(record, machine)
        if self._demand_backoff.refuse_oversized(record):
            return ActionOutcome.BLOB_ERROR
        if kind is ActionKind.BOOTSTRAP:
            return await self._bootstrap(record, machine)
        if machine.state is not REQUIRED_STATE[kind]:
            return ActionOutcome.NOOP if machine.state is GOAL_STATE.get(kind) else ActionOutcome.STALE
        if kind is ActionKind.PROVISION:
            return await self._provision(record, machine)
        if kind is ActionKind.DELETE:
            return await self._delete(record, machine)
        return await self._drain(record, machine)

    def is_draining_with_operator(self, machine_id: str) -> bool:
        """Return whether the machine's drain waits for its operator: Draining here, Configured at the provider."""
        return machine_id in self._drain_waits

    def draining(self) -> Set[str]:
        """Return the machines whose drain waits for its operator; a live view."""
        return self._drain_waits.keys()

    def end_drain_wait(self, machine_id: str) -> None:
        """End the wait: the provider shows that the drain is over or the machine is gone."""
        wait = self._drain_waits.get(machine_id)
        if wait is not None:
            wait.ended.set()

    def drain_waits_of(self, cluster: str) -> list[str]:
        """Return the machines whose drain waits for this cluster's operator, in the order in which they began."""
        return [machine_id for machine_id, wait in self._drain_waits.items() if wait.record.action.cluster == cluster]

    def instruction_again(self, machine_id: str) -> ReclaimInstruction | None:
        """Return the instruction of a drain that waits, with what is left of its grace; None when it is over."""
        wait, machine = self._drain_waits.get(machine_id), self._inventory.get(machine_id)
        if wait is None or machine is None:
            return None
        return self._instruction(wait.record, machine, self._seconds_left(wait.deadline_seconds))

    def _seconds_left(self, deadline_seconds: float) -> int:
        return int(max(0.0, deadline_seconds - self._clock.monotonic_seconds()))

    # ---- provision ----------------------------------------------------------------------------------------------

    async def _provision(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        action = record.action
        profile = _action_profile(action)
        if not self._stockouts.may_create(machine):  # P0
            record.message = "its capacity pool is out of stock: nothing was asked of the provider"
            return ActionOutcome.EXHAUSTED
        creating = replace(  # P1
            machine,
            state=MachineState.CREATING,
            assigned_need_fingerprint=profile.fingerprint,
            assigned_group=action.group,
            intended_cluster=action.cluster,
        )
        self._ingest.drive(creating)
        ack = await self._create(record, creating)  # P2
        if isinstance(ack, ActionOutcome):
            return ack
        if not self._take(machine.id, ack.record):  # P3
            return self._hold_invalid(machine.id, record)
        state = ack.record.machine.state
        if state is MachineState.IDLE:  # P4, a synchronous provider
            idle = self._inventory.get(machine.id)
            if idle is None:
                return ActionOutcome.NOT_FOUND
            following = self._ledger.follow_up(record, replace(action, kind=ActionKind.BOOTSTRAP))
            return await self._bootstrap(following, idle)
        return _beyond(state, MachineState.SPECULATIVE)

    async def _create(self, record: ActionRecord, machine: Machine) -> TransitionAck | ActionOutcome:
        ack = await self._call(record, "create", lambda token: self._provider.create(machine.id, token))
        if ack is ActionOutcome.EXHAUSTED:
            self._stockouts.exhausted(machine)
            await self._settle(machine.id)
        return ack

    # ---- bootstrap ----------------------------------------------------------------------------------------------

    async def _bootstrap(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        action = record.action
        profile = _action_profile(action)
        if machine.state is MachineState.CONFIGURED:  # B1
            same = machine.cluster == action.cluster and machine.assigned_need_fingerprint == profile.fingerprint
            return ActionOutcome.NOOP if same else ActionOutcome.TRANSITION_ERROR
        if machine.state is not MachineState.IDLE:
            return ActionOutcome.STALE
        session = self._sessions.of(action.cluster)
        if session is None:  # B2
            return self._demand_backoff.no_session(record)
        if not self._demand_backoff.may_ask(action.cluster):  # B3
            return ActionOutcome.OPERATOR_UNRESPONSIVE
        configuring = replace(  # B4
            machine,
            state=MachineState.CONFIGURING,
            cluster=action.cluster,
            assigned_need_fingerprint=profile.fingerprint,
            assigned_group=action.group,
        )
        self._ingest.drive(configuring)
        answer = await self._blob(record, session, configuring, profile)  # B5, B6
        if isinstance(answer, ActionOutcome):
            self._roll_back(machine.id)
            return answer
        return await self._configure(record, configuring, profile, answer)

    async def _blob(
        self, record: ActionRecord, session: Session, machine: Machine, profile: Profile
    ) -> BootstrapResponse | ActionOutcome:
        """Ask the operator for the blob, once more when it expired while the slot was awaited."""
        cluster = record.action.cluster
        for _attempt in range(2):
            asked_at = self._clock.monotonic_seconds()
            self._demand_backoff.asked(cluster)
            try:
                async with self.slots.waiting(machine.id, "blob", cluster):
                    answer = await self._ask(session, machine, profile)
                    received_at = self._clock.monotonic_seconds()
            except (TimeoutError, SessionLost):
                self._demand_backoff.unanswered(cluster)
                record.message = f"the operator of {cluster} sent no bootstrap data in time"
                return ActionOutcome.BLOB_TIMEOUT
            self._demand_backoff.answered(cluster)
            self._metrics.request_bootstrap.observe(received_at - asked_at)
            if answer.error:
                record.message = answer.error
                self._demand_backoff.refuse(cluster, profile.fingerprint, record.action.group, answer.error)
                return ActionOutcome.BLOB_ERROR
            age_seconds = self._clock.monotonic_seconds() - received_at
            if answer.ttl_seconds <= 0 or age_seconds < answer.ttl_seconds:
                return answer
        record.message = f"the bootstrap data expired twice before it could be used ({answer.ttl_seconds} s)"
        return ActionOutcome.BLOB_EXPIRED

    async def _ask(self, session: Session, machine: Machine, profile: Profile) -> BootstrapResponse:
        if not self._sessions.is_current(session):
            raise SessionLost(session.cluster)
        request = bootstrap_request(self._ids.new_id(), session.cluster, machine, profile)
        session.outbox.put(request)
        return await self._sessions.await_blob(session, request.request_id, self._settings.bootstrap_timeout_seconds)

    async def _configure(
        self, record: ActionRecord, configuring: Machine, profile: Profile, answer: BootstrapResponse
    ) -> ActionOutcome:
        stamped = configuring.assigned(profile)
        ack = await self._configure_call(record, stamped, self._metadata_of(stamped), answer)  # B7
        current = self._inventory.get(stamped.id)
        # B8, also without an answer: the call may have been applied, and reconcile keeps what is stamped here.
        if current is not None and current.state is MachineState.CONFIGURING:
            self._ingest.drive(stamped)
        return self._configured(record, stamped, profile, ack)

    def _metadata_of(self, stamped: Machine) -> Mapping[str, str]:
        return encode_metadata(stamped) | {labels.ASSIGNED_SHARD: self._tokens.shard_id}

    async def _configure_call(
        self, record: ActionRecord, machine: Machine, metadata: Mapping[str, str], answer: BootstrapResponse
    ) -> TransitionAck | ActionOutcome:
        return await self._call(
            record,
            "configure",
            lambda token: self._provider.configure(machine.id, machine.cluster, answer.user_data, metadata, token),
        )

    def _configured(
        self, record: ActionRecord, stamped: Machine, profile: Profile, ack: TransitionAck | ActionOutcome
    ) -> ActionOutcome:
        self._stockouts.configure_answered(stamped, ack if isinstance(ack, ActionOutcome) else None, record.message)
        if isinstance(ack, ActionOutcome):
            return ActionOutcome.CONFIGURE_ERROR if ack is ActionOutcome.PROVIDER_ERROR else ack
        if not self._take(stamped.id, ack.record):
            return self._hold_invalid(stamped.id, record)
        shown = ack.record.machine
        match shown.state:
            case MachineState.CONFIGURED | MachineState.CONFIGURING if shown.cluster in ("", stamped.cluster):  # B9
                self._demand_backoff.succeeded(stamped.cluster, profile.fingerprint, stamped.assigned_group)
                return ActionOutcome.SUCCESS
            case MachineState.IDLE:
                return ActionOutcome.TRANSITION_RACED_TO_IDLE
            case _:
                return ActionOutcome.TRANSITION_ERROR

    def _roll_back(self, machine_id: MachineId) -> None:
        current = self._inventory.get(machine_id)
        if current is not None and current.state is MachineState.CONFIGURING:
            self._ingest.drive(replace(current.without_binding(), state=MachineState.IDLE))

    # ---- drain --------------------------------------------------------------------------------------------------

    async def _drain(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        action = record.action
        if machine.cluster != action.cluster:  # D1
            return ActionOutcome.STALE
        deadline_seconds = self._clock.monotonic_seconds() + action.grace_seconds
        session = self._sessions.of(machine.cluster)
        if session is None and is_delayable(action) and machine.cluster in self._fit_holds.awaited_sessions():
            record.message = "the session of its cluster has ended; the reclaim waits for the next one"
            return ActionOutcome.STALE
        awaits_result = session is not None and session.can(CAPABILITY_DRAIN_RESULT)
        if awaits_result and is_delayable(action) and not self.slots.may_wait("drain", machine.cluster):  # D2+
            record.message, record.is_counted_only = "too many drains wait for operators; it begins later", True
            return ActionOutcome.STALE
        if session is not None:  # D2: the instruction leaves before the state frame that drive() sends
            session.outbox.put(self._instruction(record, machine, action.grace_seconds))
        preemptor = action.preemptor
        self._ingest.drive(
            replace(
                machine,
                state=MachineState.DRAINING,
                preempted_for=PreemptedFor(*preemptor) if preemptor is not None else None,
            )
        )
        self._note_drain(machine.id, action.grace_seconds)
        grace_seconds = action.grace_seconds
        if session is None:  # D2'
            record.is_without_session = True
            self._metrics.drains_without_session.inc()
            _log.warning(
                "drain.started_without_session",
                machine=machine.id,
                cluster=machine.cluster,
                advice="PodDisruptionBudgets are not honoured; start the cluster's operator",
            )
        elif awaits_result:  # D3
            result = await self._await_drained(record, machine, deadline_seconds)
            if result is None:
                record.message = "the provider showed that the drain was over"
                return ActionOutcome.NOOP
            record.message = result.outcome.name
            if result.outcome is DrainOutcome.WOULD_NOT_FIT and is_delayable(action):
                return self._keep(record, machine, result.message)
            is_over = result.outcome is DrainOutcome.GRACE_EXPIRED
            grace_seconds = 0 if is_over else self._seconds_left(deadline_seconds)
        return await self._drain_call(record, machine.id, grace_seconds)

    def _keep(self, record: ActionRecord, machine: Machine, text: str) -> ActionOutcome:
        """Leave the machine in service: the pods on it fit nowhere else."""
        record.message = f"the operator answered WOULD_NOT_FIT: {text}"
        seconds = self._fit_holds.hold(machine.id, text)
        _log.info("drain.rejected", machine=machine.id, cluster=machine.cluster, reason=text, hold_seconds=seconds)
        current = self._inventory.get(machine.id)
        if current is None or current.state is not MachineState.DRAINING:
            return ActionOutcome.NOOP
        self._ingest.keep_bound(current)
        return ActionOutcome.WOULD_NOT_FIT

    async def _drain_call(self, record: ActionRecord, machine_id: MachineId, grace_seconds: int) -> ActionOutcome:
        ack = await self._call(  # D4
            record, "drain", lambda token: self._provider.drain(machine_id, grace_seconds, token)
        )
        if isinstance(ack, ActionOutcome):
            return ack
        if not self._take(machine_id, ack.record):  # D5: the binding ends with an observed Idle, here or in reconcile
            return self._hold_invalid(machine_id, record)
        is_taken = ack.record.machine.state in (MachineState.IDLE, MachineState.DRAINING)
        return ActionOutcome.SUCCESS if is_taken else ActionOutcome.TRANSITION_ERROR

    def _instruction(self, record: ActionRecord, machine: Machine, grace_seconds: int) -> ReclaimInstruction:
        node_name = self._ingest.node_name(machine) or machine.id
        return reclaim_instruction(record, machine, node_name=node_name, grace_seconds=grace_seconds)

    async def _await_drained(
        self, record: ActionRecord, machine: Machine, deadline_seconds: float
    ) -> DrainResult | None:
        """Wait for the operator's result, at most the grace.

        Returns GRACE_EXPIRED when the grace ended without one, None when the provider ended the drain meanwhile.
        """
        result = self._sessions.drain_future(machine.cluster, record.action_id, machine.id)
        wait = _DrainWait(record, deadline_seconds, asyncio.Event())
        self._drain_waits[machine.id] = wait
        ended = asyncio.ensure_future(wait.ended.wait())
        try:
            async with self.slots.waiting(machine.id, "drain", machine.cluster):
                waiters: list[asyncio.Future[Any]] = [result, ended]
                timeout = record.action.grace_seconds
                await asyncio.wait(waiters, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            del self._drain_waits[machine.id]
            self._sessions.forget_drain(record.action_id, machine.id)
        if wait.ended.is_set():
            return None
        expired = DrainResult(
            instruction_id=record.action_id, machine_id=machine.id, outcome=DrainOutcome.GRACE_EXPIRED
        )
        answer = result.result() if result.done() else expired
        self._metrics.drain_results.labels(answer.outcome.name.lower()).inc()
        return answer

    # ---- delete -------------------------------------------------------------------------------------------------

    async def _delete(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        is_deletable = machine.capacity_type in (CapacityType.ON_DEMAND, CapacityType.SPOT)
        if machine.cluster or not is_deletable or self._is_reserved(machine.id):  # L1
            return ActionOutcome.STALE
        self._ingest.drive(replace(machine, state=MachineState.DELETING))  # L2
        return await self._delete_call(record, machine)

    async def _delete_call(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        ack = await self._call(record, "delete", lambda token: self._provider.delete(machine.id, token))
        if isinstance(ack, ActionOutcome):
            shown = self._inventory.get(machine.id)
            is_still_idle = shown is not None and shown.state is MachineState.IDLE
            if ack is ActionOutcome.NOT_SUPPORTED or (ack is ActionOutcome.PROVIDER_ERROR and is_still_idle):  # L4
                self._hold(machine.id, DISAGREEMENT_CAUSE, until_restart=True)
            return ack
        if not self._take(machine.id, ack.record):  # L3
            return self._hold_invalid(machine.id, record)
        state = ack.record.machine.state
        expected = (MachineState.SPECULATIVE, MachineState.DELETING)
        return ActionOutcome.SUCCESS if state in expected else ActionOutcome.TRANSITION_ERROR

    async def _redrive(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        """Make the call of a transition that does not end once more (§9.5); only the provider ends it."""
        if machine.state is not REDRIVEN_STATE[record.action.kind]:
            return ActionOutcome.STALE
        match machine.state:
            case MachineState.CONFIGURING:
                return await self._configure_again(record, machine)
            case MachineState.DRAINING:
                # The bound counts the grace in, so it has passed.
                return await self._drain_call(record, machine.id, 0)
            case MachineState.DELETING:
                return await self._delete_call(record, machine)
        ack = await self._create(record, machine)
        if isinstance(ack, ActionOutcome):
            return ack
        if not self._take(machine.id, ack.record):
            return self._hold_invalid(machine.id, record)
        return _beyond(ack.record.machine.state, MachineState.SPECULATIVE)

    async def _configure_again(self, record: ActionRecord, machine: Machine) -> ActionOutcome:
        """Configure with a fresh blob, and with the cluster and the metadata that the provider shows."""
        session = self._sessions.of(machine.cluster)
        if session is None:
            return ActionOutcome.NO_SESSION
        if not self._demand_backoff.may_ask(machine.cluster):
            return ActionOutcome.OPERATOR_UNRESPONSIVE
        profile = self._profile_of((machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group))
        if profile is None:
            record.message = "its row has left the demand: the operator cannot be asked for its bootstrap data"
            return ActionOutcome.STALE
        shown = await self._shown(machine.id)
        if shown is None:
            record.message = "the provider does not show what was asked of it"
            return ActionOutcome.CONFIGURE_ERROR
        if shown.machine.state is not MachineState.CONFIGURING:
            return ActionOutcome.NOOP if self._take(machine.id, shown) else self._hold_invalid(machine.id, record)
        answer = await self._blob(record, session, machine, profile)
        if isinstance(answer, ActionOutcome):
            return answer
        again = replace(machine, cluster=shown.machine.cluster or machine.cluster)
        # A provider that shows no metadata yet has what this shard sent.
        metadata = shown.metadata or self._metadata_of(machine)
        return self._configured(record, again, profile, await self._configure_call(record, again, metadata, answer))

    # ---- what the provider answers ------------------------------------------------------------------------------

    async def _call(
        self, record: ActionRecord, method: str, call: Callable[[FenceToken], Awaitable[TransitionAck]]
    ) -> TransitionAck | ActionOutcome:
        """Make one provider call; return its ack, or the outcome of a refusal after settling it (§9.6)."""
        machine_id = record.action.machine_id
        token = self._tokens.next()
        record.token_sequence = token.sequence
        try:
            async with asyncio.timeout(self._settings.execute_timeout_seconds):
                ack = await call(token)
        except TimeoutError:
            record.message = f"{method}: no answer within {self._settings.execute_timeout_seconds:g} s"
            self._revisit(machine_id)
            return ActionOutcome.UNKNOWN_OUTCOME
        except ProviderRefusal as refusal:
            record.message = f"{method}: {refusal}"
            if method == "create" and refusal.kind is RefusalKind.EXHAUSTED:
                # The machine is healthy and its pool is not: no refusal is counted, the pool backs off (§9.8).
                return ActionOutcome.EXHAUSTED
            return await self._refused(machine_id, refusal)
        record.operation_id = ack.operation_id
        if ack.record.machine.id != machine_id:
            return self._hold_invalid(machine_id, record, f"{method}: the answer speaks of {ack.record.machine.id!r}")
        self._machine_backoff.accepted(machine_id)
        self.provider_backoff.accepted()
        return ack

    async def _refused(self, machine_id: MachineId, refusal: ProviderRefusal) -> ActionOutcome:
        match refusal.kind:
            case RefusalKind.FENCED:
                self._metrics.fenced.inc()
                _log.error(
                    "shard.fenced", machine=machine_id, advice="stop one of the two processes with this shard id"
                )
                self._hold(machine_id, FENCED_CAUSE, until_restart=True)
            case RefusalKind.NOT_FOUND:
                if machine_id in self._inventory:
                    self._ingest.remove(machine_id)
                self._machine_backoff.forget(machine_id)
                # A machine that is there after all would be in no later delta.
                self._revisit(machine_id)
            case RefusalKind.NOT_SUPPORTED:
                self._hold(machine_id, f"not supported by the provider: {refusal}", until_restart=True)
            case RefusalKind.UNKNOWN_OUTCOME:
                self._revisit(machine_id)
            case RefusalKind.NOT_READY:
                self.provider_backoff.refused()
                await self._settle(machine_id)
            case RefusalKind.EXHAUSTED | RefusalKind.REFUSED:
                await self._settle(machine_id)
                if self._machine_backoff.refused(machine_id):
                    self._hold(machine_id, f"refused three times in a row: {refusal}", until_restart=False)
                exhausted = refusal.kind is RefusalKind.EXHAUSTED
                return ActionOutcome.EXHAUSTED if exhausted else ActionOutcome.PROVIDER_ERROR
        return REFUSAL_OUTCOMES[refusal.kind]

    async def _settle(self, machine_id: MachineId) -> None:
        """Read the machine at once: nothing was applied, so normally it is back where it came from."""
        shown = await self._shown(machine_id)
        if shown is not None and not self._take(machine_id, shown):
            self._revisit(machine_id)

    async def _shown(self, machine_id: MachineId) -> ListedMachine | None:
        """Return what Get says of the machine; without a usable answer None, and the next reconcile reads it."""
        try:
            async with asyncio.timeout(self._settings.execute_timeout_seconds):
                shown = await self._provider.get(machine_id)
        except (TimeoutError, ProviderRefusal):
            shown = None
        if shown is None or shown.machine.id != machine_id:
            self._revisit(machine_id)
            return None
        return shown

    def _take(self, machine_id: MachineId, shown: ListedMachine) -> bool:
        """Take a record that answers for this machine; False when it is refused or names another machine."""
        return shown.machine.id == machine_id and self._ingest.observe(shown)

    def _hold(self, machine_id: MachineId, cause: str, *, until_restart: bool) -> None:
        machine = self._inventory.get(machine_id)
        if machine is None:
            return
        self._ingest.fail(machine, cause)
        self._machine_backoff.hold(machine_id, self._ingest.applied_state(machine_id), until_restart=until_restart)

    def _hold_invalid(self, machine_id: MachineId, record: ActionRecord, fault: str = _INVALID_RECORD) -> ActionOutcome:
        record.message = fault
        if (machine := self._inventory.get(machine_id)) is not None and machine.state is MachineState.CREATING:
            self._stockouts.exhausted(machine)  # The next one of the pool may be as unusable (§9.8).
        self._hold(machine_id, fault, until_restart=False)
        return ActionOutcome.INVALID_RECORD


def _beyond(state: MachineState, source: MachineState) -> ActionOutcome:
    """Return how a call ended whose answer shows this state: it must have left where it came from."""
    return ActionOutcome.TRANSITION_ERROR if state in (source, MachineState.FAILED) else ActionOutcome.SUCCESS


def _action_profile(action: Action) -> Profile:
    assert action.profile is not None, f"{action.kind.label} without a profile"
    return action.profile
