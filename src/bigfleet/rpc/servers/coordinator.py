"""Serves `Coordinator`: reports of shards, changes of administrators, lists for readers.

docs/spec/wire.md §4 and §10, docs/spec/coordinator.md §4. Order of checks: identity, leadership, arguments, then the
action. A replica that does not lead names the leader in the trailing metadata. This module does not decide which
instruction a shard gets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from bigfleet.coordinator.commands import (
    BindCluster,
    Command,
    CommandRefused,
    ReleaseDomain,
    Rule,
    SetQuota,
    UpsertProvider,
)
from bigfleet.coordinator.leader import BadReport
from bigfleet.coordinator.leader_term import ShardAlive, Term
from bigfleet.coordinator.replica import NotTheLeader, Replica
from bigfleet.coordinator.stores.protocol import NotLeader, OutcomeUnknown, StoreUnavailable
from bigfleet.coordinator.tables import QuotaKey
from bigfleet.model.clock import Clock
from bigfleet.model.frames import MalformedMessage
from bigfleet.model.ids import IDENTIFIER_BYTES_MAX, ClusterId, ShardId, control_character_in, text_bytes
from bigfleet.model.ownership import Domain
from bigfleet.rpc.clients.coordinator import LEADER_HINT
from bigfleet.rpc.security.identity import REPORT, Denied, Gate
from bigfleet.rpc.servers import coordinator_views as views
from bigfleet.rpc.wire.convert_coordinator import answer_to_wire, report_from_wire
from bigfleet.rpc.wire.gen import coordinator_pb2, coordinator_pb2_grpc
from bigfleet.rpc.wire.message_limits import SCANNED_BYTES_MIN, report_elements_fault
from bigfleet.rpc.wire.report_checks import check_identifier

_SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
SERVICE_NAME = _SERVICE.full_name
_REPORT_METHOD = _SERVICE.methods_by_name["ReportShard"].name
#: A larger report is checked and converted off the loop: each record of a machine takes some ten microseconds.
REPORT_BYTES_ON_LOOP_MAX: Final = 256 * 1024
JOIN_TEXT = "coordinator state lives in etcd; replicas join by pointing at the same endpoints"

_CODES = {
    Rule.EMPTY_KEY: grpc.StatusCode.INVALID_ARGUMENT,
    Rule.BAD_KEY: grpc.StatusCode.INVALID_ARGUMENT,
    Rule.SECOND_KEY: grpc.StatusCode.INVALID_ARGUMENT,
    Rule.NEGATIVE_SLOTS: grpc.StatusCode.INVALID_ARGUMENT,
    Rule.BAD_ADDRESS: grpc.StatusCode.INVALID_ARGUMENT,
    Rule.SHARD_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Rule.DOMAIN_ALREADY_ASSIGNED: grpc.StatusCode.ALREADY_EXISTS,
    Rule.CLUSTER_ALREADY_BOUND: grpc.StatusCode.ALREADY_EXISTS,
}

_log = structlog.get_logger("bigfleet.rpc.servers.coordinator")

_Context = aio.ServicerContext[Any, Any]
T = TypeVar("T")
_parse_report: Final = coordinator_pb2.ShardReport.FromString


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers for one replica."""

    def __init__(
        self,
        replica: Replica,
        clock: Clock,
        gate: Gate | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_refused` is called for each report that was refused before the leader saw it."""
        self._replica = replica
        self._clock = clock
        self._gate = gate or Gate()
        self._on_refused = on_refused
        self._gate.on_role_refused.append(self._count_role_refused)
        #: Large reports are counted one at a time: a scan shares the interpreter with the loop.
        self._scans = asyncio.Lock()

    async def ReportShard(self, content: Any, context: _Context) -> coordinator_pb2.ReportAck:
        """Take a report, which comes as bytes, and answer it."""
        request = await self._read_report(content, context)
        try:
            self._gate.check_report(context, request.shard_id)
        except Denied as denied:
            self._on_refused()
            self._gate.log_refusal(context, REPORT, denied)
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(denied))
        await self._must_lead(context)
        try:
            if len(content) <= REPORT_BYTES_ON_LOOP_MAX:
                report = report_from_wire(request)
            else:
                report = await asyncio.to_thread(report_from_wire, request)
        except MalformedMessage as fault:
            self._on_refused()
            named = request.shard_id[:IDENTIFIER_BYTES_MAX]
            _log.warning("coordinator.report_rejected", shard=named, error=str(fault), peer=context.peer())
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))
        return answer_to_wire(await self._do(context, lambda term: term.report(report)))

    async def _read_report(self, content: bytes, context: _Context) -> coordinator_pb2.ShardReport:
        """Return a report's message; ends the call of one that has too many elements, before it is parsed."""
        if len(content) >= SCANNED_BYTES_MIN:
            async with self._scans:
                fault = await asyncio.to_thread(report_elements_fault, content)
            if fault is not None:
                self._on_refused()
                _log.warning("coordinator.report_rejected", error=str(fault), peer=context.peer())
                await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))
        try:
            return _parse_report(content)
        except DecodeError:
            pass
        # Not within the handler of the error, whose traceback would keep the bytes.
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the request could not be read")
        raise AssertionError("abort always raises")

    # ---- changes -------------------------------------------------------------------------------------------------

    async def AssignDomain(
        self, request: coordinator_pb2.AssignDomainRequest, context: _Context
    ) -> coordinator_pb2.AssignDomainResponse:
        """Give a domain to a shard."""
        by = await self._admit(context, "AssignDomain")
        await _must_hold(context, lambda: _check_domain(request), lambda: _check_shard(request))
        domain = Domain(request.topology_key, request.topology_value)
        await self._do(context, lambda term: term.assign(domain, ShardId(request.shard_id)))
        self._log_command("AssignDomain", by, domain="=".join(domain), shard=request.shard_id)
        return coordinator_pb2.AssignDomainResponse()

    async def UnassignDomain(
        self, request: coordinator_pb2.UnassignDomainRequest, context: _Context
    ) -> coordinator_pb2.UnassignDomainResponse:
        """Begin to take a domain away."""
        by = await self._admit(context, "UnassignDomain")
        await _must_hold(context, lambda: _check_domain(request))
        domain = Domain(request.topology_key, request.topology_value)
        await self._commit(context, ReleaseDomain(domain))
        self._log_command("UnassignDomain", by, domain="=".join(domain))
        return coordinator_pb2.UnassignDomainResponse()

    async def RemoveShard(
        self, request: coordinator_pb2.RemoveShardRequest, context: _Context
    ) -> coordinator_pb2.RemoveShardResponse:
        """Remove a shard that is gone."""
        by = await self._admit(context, "RemoveShard")
        await _must_hold(context, lambda: _check_shard(request))
        shard_id = ShardId(request.shard_id)
        await self._do(context, lambda term: term.remove_shard(shard_id, is_forced=request.force))
        self._log_command("RemoveShard", by, shard=shard_id, force=request.force)
        return coordinator_pb2.RemoveShardResponse()

    async def BindCluster(
        self, request: coordinator_pb2.BindClusterRequest, context: _Context
    ) -> coordinator_pb2.BindClusterResponse:
        """Bind a cluster to a shard."""
        by = await self._admit(context, "BindCluster")
        await _must_hold(
            context, lambda: check_identifier("cluster_id", request.cluster_id), lambda: _check_shard(request)
        )
        cluster, shard_id = ClusterId(request.cluster_id), ShardId(request.shard_id)
        await self._commit(context, BindCluster(cluster, shard_id, self._clock.unix_nanos()))
        self._log_command("BindCluster", by, cluster=cluster, shard=shard_id)
        return coordinator_pb2.BindClusterResponse()

    async def SetQuota(
        self, request: coordinator_pb2.SetQuotaRequest, context: _Context
    ) -> coordinator_pb2.SetQuotaResponse:
        """Replace the slots of one provider and region."""
        by = await self._admit(context, "SetQuota")
        allocation = request.allocation
        await _must_hold(
            context,
            lambda: _check_name("allocation.provider", allocation.provider),
            lambda: _check_name("allocation.region", allocation.region),
            *(_checking_slots(shard_id) for shard_id in sorted(allocation.per_shard)),
        )
        slots_of = {ShardId(shard_id): slots for shard_id, slots in allocation.per_shard.items()}
        await self._commit(context, SetQuota(QuotaKey(allocation.provider, allocation.region), slots_of))
        self._log_command("SetQuota", by, provider=allocation.provider, region=allocation.region, slots=slots_of)
        return coordinator_pb2.SetQuotaResponse()

    async def UpsertProvider(
        self, request: coordinator_pb2.UpsertProviderRequest, context: _Context
    ) -> coordinator_pb2.UpsertProviderResponse:
        """Replace a provider."""
        by = await self._admit(context, "UpsertProvider")
        provider = request.provider
        await _must_hold(
            context,
            lambda: _check_name("provider.name", provider.name),
            lambda: _check_text("provider.address", provider.address),
            lambda: _check_text("provider.region", provider.region),
        )
        await self._commit(context, UpsertProvider(provider.name, provider.address, provider.region))
        self._log_command(
            "UpsertProvider", by, provider=provider.name, address=provider.address, region=provider.region
        )
        return coordinator_pb2.UpsertProviderResponse()

    async def JoinRaftCluster(
        self, request: coordinator_pb2.JoinRaftClusterRequest, context: _Context
    ) -> coordinator_pb2.JoinRaftClusterResponse:
        """Refuse: there is no Raft of ours. Whoever asks learns it from any replica."""
        await self._identify(context, "JoinRaftCluster")
        await _abort(context, grpc.StatusCode.UNIMPLEMENTED, JOIN_TEXT)

    async def SnapshotSave(
        self, request: coordinator_pb2.SnapshotSaveRequest, context: _Context
    ) -> AsyncIterator[coordinator_pb2.SnapshotSaveChunk]:
        """Stream a snapshot: its meta, then the document in pieces."""
        by = await self._admit(context, "SnapshotSave")
        snapshot = await self._guarded(context, self._replica.snapshot)
        self._log_command("SnapshotSave", by, index=snapshot.meta.index, size=snapshot.meta.size)
        yield coordinator_pb2.SnapshotSaveChunk(meta_json=snapshot.meta_json)
        for piece in snapshot.pieces():
            yield coordinator_pb2.SnapshotSaveChunk(data=piece)

    # ---- lists ---------------------------------------------------------------------------------------------------

    async def ListShards(
        self, request: coordinator_pb2.ListShardsRequest, context: _Context
    ) -> coordinator_pb2.ListShardsResponse:
        """List shards by id."""
        return views.shards(await self._reading(context, "ListShards"))

    async def ListDomainAssignments(
        self, request: coordinator_pb2.ListDomainAssignmentsRequest, context: _Context
    ) -> coordinator_pb2.ListDomainAssignmentsResponse:
        """List domains by shard, key and value."""
        return views.domains(await self._reading(context, "ListDomainAssignments"))

    async def ListShardReports(
        self, request: coordinator_pb2.ListShardReportsRequest, context: _Context
    ) -> coordinator_pb2.ListShardReportsResponse:
        """List the last reports by shard."""
        term = await self._reading(context, "ListShardReports")
        await _must_hold(context, lambda: _check_optional_shard(request))
        return views.reports(term, request.shard_id)

    async def ListQuotas(
        self, request: coordinator_pb2.ListQuotasRequest, context: _Context
    ) -> coordinator_pb2.ListQuotasResponse:
        """List quotas by provider and region."""
        return views.quotas(await self._reading(context, "ListQuotas"))

    async def ListProviders(
        self, request: coordinator_pb2.ListProvidersRequest, context: _Context
    ) -> coordinator_pb2.ListProvidersResponse:
        """List providers by name."""
        return views.providers(await self._reading(context, "ListProviders"))

    async def ListClusters(
        self, request: coordinator_pb2.ListClustersRequest, context: _Context
    ) -> coordinator_pb2.ListClustersResponse:
        """List clusters by id."""
        return views.clusters(await self._reading(context, "ListClusters"))

    async def ListInstructions(
        self, request: coordinator_pb2.ListInstructionsRequest, context: _Context
    ) -> coordinator_pb2.ListInstructionsResponse:
        """List instructions by term and sequence."""
        term = await self._reading(context, "ListInstructions")
        await _must_hold(context, lambda: _check_optional_shard(request))
        return views.instructions(term, self._clock, shard_id=request.shard_id, with_finished=request.include_finished)

    # ---- checks --------------------------------------------------------------------------------------------------

    def _count_role_refused(self, rpc: str) -> None:
        if rpc == REPORT:
            self._on_refused()

    async def _must_lead(self, context: _Context) -> Term:
        async def leading() -> Term:
            return self._replica.leading()

        return await self._guarded(context, leading)

    async def _identify(self, context: _Context, method: str) -> str:
        """Return who calls, as logs name it; ends the call of anybody who may not."""
        rpc = f"/{SERVICE_NAME}/{method}"
        try:
            identity = self._gate.check(context, rpc)
        except Denied as denied:
            self._gate.log_refusal(context, rpc, denied)
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(denied))
        return context.peer() if identity is None else identity.uri

    async def _admit(self, context: _Context, method: str) -> str:
        by = await self._identify(context, method)
        await self._must_lead(context)
        return by

    async def _reading(self, context: _Context, method: str) -> Term:
        await self._identify(context, method)
        return await self._must_lead(context)

    # ---- actions -------------------------------------------------------------------------------------------------

    async def _commit(self, context: _Context, command: Command) -> None:
        await self._do(context, lambda term: term.commit(command))

    async def _do(self, context: _Context, work: Callable[[Term], Coroutine[Any, Any, T]]) -> T:
        return await self._guarded(context, lambda: self._replica.change(work))

    async def _guarded(self, context: _Context, work: Callable[[], Awaitable[T]]) -> T:
        """Return what the work returns, or end the call with the status of what it raises."""
        try:
            return await work()
        except NotTheLeader as elsewhere:
            leader = elsewhere.leader
            hint = leader.address if leader is not None else ""
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(elsewhere), hint)
        except NotLeader as elsewhere:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(elsewhere))
        except StoreUnavailable as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"store unreachable: {error}")
        except OutcomeUnknown as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"outcome unknown: {error}")
        except CommandRefused as refused:
            await _abort(context, _CODES.get(refused.rule, grpc.StatusCode.ABORTED), str(refused))
        except ShardAlive as alive:
            await _abort(context, grpc.StatusCode.ABORTED, str(alive))
        except BadReport as fault:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))

    def _log_command(self, method: str, by: str, **what: object) -> None:
        _log.info("admin.command_executed", rpc=method, by=by, **what)


async def _abort(context: _Context, code: grpc.StatusCode, text: str, hint: str = "") -> NoReturn:
    await context.abort(code, text, trailing_metadata=((LEADER_HINT, hint),) if hint else ())
    raise AssertionError("abort raises")


async def _must_hold(context: _Context, *checks: Callable[[], None]) -> None:
    """End the call at the first check that finds a fault."""
    try:
        for check in checks:
            check()
    except MalformedMessage as fault:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))


def _check_domain(
    request: coordinator_pb2.AssignDomainRequest | coordinator_pb2.UnassignDomainRequest,
) -> None:
    _check_name("topology_key", request.topology_key)
    _check_name("topology_value", request.topology_value)


def _check_shard(
    request: coordinator_pb2.AssignDomainRequest
    | coordinator_pb2.RemoveShardRequest
    | coordinator_pb2.BindClusterRequest,
) -> None:
    check_identifier("shard_id", request.shard_id)


def _check_optional_shard(
    request: coordinator_pb2.ListShardReportsRequest | coordinator_pb2.ListInstructionsRequest,
) -> None:
    if request.shard_id:
        check_identifier("shard_id", request.shard_id)


def _checking_slots(shard_id: str) -> Callable[[], None]:
    return lambda: check_identifier("allocation.per_shard", shard_id)


def _check_name(place: str, text: str) -> None:
    if not text:
        raise MalformedMessage(place, "is empty")
    _check_text(place, text)


def _check_text(place: str, text: str) -> None:
    size_bytes = text_bytes(text)
    if size_bytes > IDENTIFIER_BYTES_MAX:
        raise MalformedMessage(place, f"has {size_bytes} bytes, at most {IDENTIFIER_BYTES_MAX} are allowed")
    character = control_character_in(text)
    if character:
        raise MalformedMessage(place, f"has the control character {character!r}, which no name may have")


class _Handlers:
    """Takes the handlers that the generated registration makes, in place of a server."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Take nothing: these are made of the others."""

    def add_registered_method_handlers(self, _service: str, handlers: dict[str, Any]) -> None:
        """Take the handlers by the names of their methods."""
        self.by_name = dict(handlers)


def add_to_server(servicer: CoordinatorServicer, server: aio.Server) -> None:
    """Register the servicer. It gets reports as bytes, which the generated registration would have parsed."""
    handlers: Any = _Handlers()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, handlers)
    report: Any = grpc.unary_unary_rpc_method_handler(
        servicer.ReportShard, response_serializer=coordinator_pb2.ReportAck.SerializeToString
    )
    methods = {**handlers.by_name, _REPORT_METHOD: report}
    # The stubs know nothing of the second of these, which the generated code calls too.
    registry: Any = server
    registry.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
    registry.add_registered_method_handlers(SERVICE_NAME, methods)
