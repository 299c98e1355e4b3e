"""Maintains one cluster's session with its shard: dial, Hello, roll-ups, answers, back-off (docs/spec/operator.md §4).

If any task ends, the session ends; the next one is dialled with full jitter, so that not all clusters reconnect to a
restarted shard at once. No wait is longer than the shard has been away: a short outage stays short (ADR 0200). The
receive loop sorts frames and never waits; slow work runs in tasks. The cluster is behind
`bigfleet.operator.ports.ClusterAgent`, the transport behind `SessionDialer`. A lost session ends nothing in the
cluster, and this flow must never send a roll-up that the agent did not vouch for.
"""

import asyncio
from dataclasses import dataclass

import structlog

from bigfleet.model import frames
from bigfleet.model.clock import Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, DrainResult, NodeStateUpdate, ReclaimInstruction
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord, DrainTable
from bigfleet.operator.outbox import OperatorOutbox
from bigfleet.operator.ports import ClusterAgent, EndKind, SessionDialer, SessionEnded, SessionStream

log = structlog.get_logger(__name__)

CAPABILITIES = frozenset(
    {
        frames.CAPABILITY_NODE_STATUS,
        frames.CAPABILITY_DRAIN_RESULT,
        frames.CAPABILITY_NEED_STATUS,
        frames.CAPABILITY_DRAIN_FORECAST,
    }
)
HELLO_SECONDS_MAX = 10.0
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 30.0
#: A session this old ends the growth of the waits: what ended it was not a shard that refuses everyone.
HEALTHY_SECONDS = 60.0
BOOTSTRAP_SECONDS_MAX = 25.0
BOOTSTRAPS_AT_ONCE_MAX = 16
BOOTSTRAPS_WAITING_MAX = 256
#: Share of the interval by which each roll-up may come early or late, so that clusters do not report in step.
ROLLUP_JITTER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How often demand is sent."""

    rollup_interval_seconds: float = 10.0
    #: Least time between two roll-ups, however often demand changes.
    rollup_gap_seconds: float = 1.0


def backoff_ceiling_seconds(away_seconds: float) -> float:
    """Return the longest wait before the next dial, by the time without a session: as long, from 500 ms to 30 s.

    Jitter is drawn below it. If waits doubled with each dial, clusters that drew short ones would wait longest.
    """
    return min(BACKOFF_SECONDS_MAX, max(BACKOFF_FIRST_SECONDS, away_seconds))


class SessionClient:
    """One cluster's side of its sessions, one after the other."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        agent: ClusterAgent,
        dialer: SessionDialer,
        clock: Clock,
        rng: Rng,
        settings: SessionSettings | None = None,
    ) -> None:
        self._cluster = cluster
        self._agent = agent
        self._dialer = dialer
        self._clock = clock
        self._rng = rng
        self._settings = settings or SessionSettings()
        self._outbox = OperatorOutbox()
        self._drains = DrainTable()
        self._demand_changed = asyncio.Event()
        #: What the shard can do; None while no session stands.
        self._shard_capabilities: frozenset[str] | None = None
        self._opened_seconds: float | None = None
        #: Seconds without a session since the last one that was healthy.
        self._away_seconds = 0.0
        #: Machines named since the session opened; a resync ack says that these are all.
        self._machines_named: set[str] = set()
        #: Whether it was logged in this session that a roll-up waits at the shard.
        self._has_logged_deferral = False
        self._bootstraps_waiting = 0
        self._bootstrap_slots = asyncio.Semaphore(BOOTSTRAPS_AT_ONCE_MAX)
        self.replaced_total = 0
        #: Bootstrap requests that were not answered because too many waited.
        self.bootstraps_dropped_total = 0

    @property
    def is_connected(self) -> bool:
        """Return whether the shard has answered this session's Hello."""
        return self._shard_capabilities is not None

    @property
    def drains_running(self) -> int:
        """How many machines the cluster was asked to drain and that are not over."""
        return len(self._drains)

    @property
    def frames_dropped_total(self) -> int:
        """How many frames were dropped because their queue was full."""
        return self._outbox.dropped_total

    @property
    def rollups_replaced_total(self) -> int:
        """How many roll-ups a newer one replaced before they were sent."""
        return self._outbox.replaced_total

    def demand_changed(self) -> None:
        """Send a roll-up soon: at once, or when the least gap since the last one has passed."""
        self._demand_changed.set()

    def node_changed(self, status: frames.NodeStatus) -> None:
        """Report a changed node to a connected shard that accepts such reports; the next resync repairs the rest."""
        if frames.CAPABILITY_NODE_STATUS in (self._shard_capabilities or ()):
            self._outbox.put(status)

    def resume_drain(self, drain: DrainRecord) -> bool:
        """Note a drain that an earlier process of this cluster began, so that its result and its end are known.

        Call it before `run`: the frames of the first session may end the drain. False when the machine has one already.
        """
        return self._drains.resume(drain)

    def drain_finished(self, result: DrainResult) -> None:
        """Note how a drain ended, and report it to the shard now or when the next session opens."""
        if self._drains.finish(result) and frames.CAPABILITY_DRAIN_RESULT in (self._shard_capabilities or ()):
            self._outbox.put(result)

    def forecast_made(self, forecast: frames.DrainForecast) -> None:
        """Answer the shard, if it is there and asks for such answers."""
        if frames.CAPABILITY_DRAIN_FORECAST in (self._shard_capabilities or ()):
            self._outbox.put(forecast)

    async def run(self) -> None:
        """Maintain a session until cancelled."""
        while True:
            away_since_seconds = self._clock.monotonic_seconds()
            ended = await self._hold_one_session()
            lasted_seconds = self._lasted_seconds()
            now_seconds = self._clock.monotonic_seconds()
            self._away_seconds += now_seconds - away_since_seconds - (lasted_seconds or 0.0)
            if lasted_seconds is not None and lasted_seconds >= HEALTHY_SECONDS:
                self._away_seconds = 0.0
            self._opened_seconds = None
            delay_seconds = self._rng.uniform(0.0, backoff_ceiling_seconds(self._away_seconds))
            if ended.kind is not EndKind.LOST:
                # Two operators with one cluster id must not chase each other, and a refusal does not pass by itself.
                delay_seconds = BACKOFF_SECONDS_MAX
                self.replaced_total += ended.kind is EndKind.REPLACED
            self._log_end(ended, lasted_seconds, delay_seconds)
            await self._clock.sleep(delay_seconds)
            self._away_seconds += self._clock.monotonic_seconds() - now_seconds

    def _lasted_seconds(self) -> float | None:
        """Return for how long the session has been open, None when the shard has not answered its Hello."""
        return None if self._opened_seconds is None else self._clock.monotonic_seconds() - self._opened_seconds

    def _log_end(self, ended: SessionEnded, lasted_seconds: float | None, delay_seconds: float) -> None:
        report = log.error if ended.kind is EndKind.DENIED else log.info
        lasted = {} if lasted_seconds is None else {"lasted_seconds": round(lasted_seconds, 1)}
        report(
            "session.not_opened" if lasted_seconds is None else "session.ended",
            cluster=self._cluster,
            kind=ended.kind.value,
            reason=str(ended),
            retry_in=round(delay_seconds, 3),
            **lasted,
        )

    async def _hold_one_session(self) -> SessionEnded:
        task = asyncio.current_task()
        cancels_before = task.cancelling() if task is not None else 0
        # In a task of its own: a task group whose task fails counts a cancellation against its parent for good, and one
        # that fails in the moment of its cancellation raises the failure alone. Out here neither can be mistaken.
        try:
            ended = await asyncio.create_task(self._session())
        except asyncio.CancelledError:
            lasted_seconds = self._lasted_seconds()
            if lasted_seconds is not None:
                log.info(
                    "session.ended", cluster=self._cluster, kind="stopped", lasted_seconds=round(lasted_seconds, 1)
                )
            raise
        self._shard_capabilities = None
        # A task that was cancelled before its first step has not counted itself out.
        self._bootstraps_waiting = 0
        self._outbox.session_ended()
        self._agent.session_closed(ended)
        if task is not None and task.cancelling() > cancels_before:
            raise asyncio.CancelledError
        return ended

    async def _session(self) -> SessionEnded:
        try:
            async with self._dialer.dial() as stream:
                await self._greet(stream)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive(stream, tasks))
                    tasks.create_task(self._send(stream))
                    tasks.create_task(self._report())
        except* SessionEnded as group:
            ended = _first(group)
        else:
            ended = SessionEnded(EndKind.LOST, "the session's tasks ended")
        return ended

    async def _greet(self, stream: SessionStream) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                await stream.send(frames.Hello(cluster_id=self._cluster, capabilities=CAPABILITIES))
                while True:
                    frame = await stream.receive()
                    if isinstance(frame, frames.Acknowledgement) and frame.echo == frames.ECHO_HELLO:
                        break
        except TimeoutError:
            raise SessionEnded(EndKind.LOST, f"no answer to Hello within {HELLO_SECONDS_MAX:g} s") from None
        self._shard_capabilities = frame.capabilities
        self._opened_seconds = self._clock.monotonic_seconds()
        self._machines_named = set()
        self._has_logged_deferral = False
        log.info("session.opened", cluster=self._cluster, shard_capabilities=sorted(frame.capabilities))
        self._agent.session_opened(frame.capabilities)
        if frames.CAPABILITY_DRAIN_RESULT in frame.capabilities:
            for result in self._drains.results():
                self._outbox.put(result)

    # ---- sending ------------------------------------------------------------------------------------------------

    async def _send(self, stream: SessionStream) -> None:
        while True:
            await stream.send(await self._outbox.take())

    async def _report(self) -> None:
        interval_seconds = self._settings.rollup_interval_seconds
        while True:
            self._demand_changed.clear()
            roll_up = self._agent.roll_up()
            if roll_up is not None:
                self._outbox.put(roll_up)
            await self._clock.sleep(self._settings.rollup_gap_seconds)
            jitter = self._rng.uniform(-ROLLUP_JITTER, ROLLUP_JITTER)
            await self._wait_for_change(interval_seconds * (1 + jitter) - self._settings.rollup_gap_seconds)

    async def _wait_for_change(self, seconds_max: float) -> None:
        """Return when demand has changed, or after `seconds_max`."""
        timer = asyncio.ensure_future(self._clock.sleep(seconds_max))
        change = asyncio.ensure_future(self._demand_changed.wait())
        try:
            await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            change.cancel()

    # ---- receiving ----------------------------------------------------------------------------------------------

    async def _receive(self, stream: SessionStream, tasks: asyncio.TaskGroup) -> None:
        while True:
            match await stream.receive():
                case frames.Acknowledgement() as ack:
                    self._take_ack(ack)
                case BootstrapRequest() as request:
                    self._take_bootstrap(request, tasks)
                case NodeStateUpdate() as update:
                    self._take_node_state(update)
                case ReclaimInstruction() as instruction:
                    self._take_reclaim(instruction)
                case frames.AvailableCapacity() as hint:
                    self._agent.available(hint)
                case frames.NeedStatusUpdate() as update:
                    self._agent.need_status(update)
                case frames.DrainForecastRequest() as request:
                    self._agent.drain_forecast(request)
                case None:
                    log.debug("operator.frame_skipped", cluster=self._cluster, reason="its kind is unknown")

    def _take_ack(self, ack: frames.Acknowledgement) -> None:
        if ack.echo in (frames.ECHO_ROLLUP, frames.ECHO_ROLLUP_REJECTED):
            self._agent.acknowledged(ack)
        elif ack.echo == frames.ECHO_ROLLUP_DEFERRED and not self._has_logged_deferral:
            self._has_logged_deferral = True
            log.warning(
                "session.rollup_deferred",
                cluster=self._cluster,
                reason=ack.error,
                advice="the cluster's demand is large and changes often; the shard reads the newest roll-up later",
            )
        elif ack.echo == frames.ECHO_RESYNC:
            for drain in self._drains.forget_all_but(self._machines_named):
                self._agent.drain_ended(drain, withdrawn=False)
            self._agent.resynced(frozenset(self._machines_named))
            for status in self._agent.node_statuses():
                self.node_changed(status)

    def _take_bootstrap(self, request: BootstrapRequest, tasks: asyncio.TaskGroup) -> None:
        if self._bootstraps_waiting >= BOOTSTRAPS_WAITING_MAX:
            self.bootstraps_dropped_total += 1
            log.warning(
                "operator.bootstrap_dropped",
                cluster=self._cluster,
                machine=request.machine_id,
                reason=f"{BOOTSTRAPS_WAITING_MAX} requests wait already",
            )
            return
        self._bootstraps_waiting += 1
        tasks.create_task(self._answer_bootstrap(request))

    async def _answer_bootstrap(self, request: BootstrapRequest) -> None:
        try:
            async with asyncio.timeout(BOOTSTRAP_SECONDS_MAX), self._bootstrap_slots:
                answer = await self._agent.bootstrap(request)
        except TimeoutError:
            answer = BootstrapResponse(
                request_id=request.request_id, error=f"bootstrap data took longer than {BOOTSTRAP_SECONDS_MAX:g} s"
            )
        except Exception as error:
            # The shard sends the request again: one that breaks the code must not end the operator each time.
            log.exception("operator.bootstrap_failed", cluster=self._cluster, machine=request.machine_id)
            answer = BootstrapResponse(
                request_id=request.request_id, error=f"the operator failed: {type(error).__name__}; see its log"
            )
        finally:
            self._bootstraps_waiting -= 1
        self._outbox.put(answer)

    def _take_node_state(self, update: NodeStateUpdate) -> None:
        self._machines_named.add(update.machine_id)
        drain = self._drains.observe(update.machine_id, update.state)
        if drain is not None:
            withdrawn = update.state is MachineState.CONFIGURED
            self._agent.drain_ended(drain, withdrawn=withdrawn)
        self._agent.node_state(update)

    def _take_reclaim(self, instruction: ReclaimInstruction) -> None:
        for drain in self._drains.begin(instruction, now_seconds=self._clock.monotonic_seconds()):
            self._agent.drain_started(drain)
        started = self._drains.count_begun(instruction.instruction_id)
        self._outbox.put(frames.ReclaimAck(instruction_id=instruction.instruction_id, nodes_started=started))


def _first(group: BaseExceptionGroup[SessionEnded]) -> SessionEnded:
    """Return the most informative end of a group: a refusal or a replacement before a mere loss."""
    ends = _flatten(group)
    return next((end for end in ends if end.kind is not EndKind.LOST), ends[0])


def _flatten(group: BaseExceptionGroup[SessionEnded]) -> list[SessionEnded]:
    ends: list[SessionEnded] = []
    for inner in group.exceptions:
        ends.extend(_flatten(inner) if isinstance(inner, BaseExceptionGroup) else [inner])
    return ends
