"""Runs one operator process: API server, views, leader election, session, HTTP, and a clean stop.

docs/spec/operator.md §1. Rights, template and credentials are checked before anything is written. A process that does
not lead follows the cluster and waits. A process that loses the Lease ends, and its Deployment starts it again. Nothing
here decides anything.
"""

import asyncio
import os
import secrets
import socket
import string
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from bigfleet.cli.operator.process_settings import OperatorProcessSettings
from bigfleet.cli.operator.token_mode import TokenMode
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.failures import RunFault, UsageFault, one_line, root_cause
from bigfleet.cli.runtime.kubernetes import ClusterConnection, connect_cluster, find_endpoint
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.system import SystemClock, process_registry, serve_http, stop_on_signals, system_rng
from bigfleet.model.clock import Clock
from bigfleet.operator.agent import AgentSettings, BootstrapAnswerer, KubernetesAgent
from bigfleet.operator.bootstrap.renderer import SubprocessRenderer, TemplateFault
from bigfleet.operator.bootstrap.service import BootstrapService, StubBootstrapService
from bigfleet.operator.bootstrap.template import BootstrapTemplate
from bigfleet.operator.bootstrap.tokens import NoTokens, SecretTokens, ServiceAccountTokens, TokenMinter
from bigfleet.operator.kubernetes.access import ADVICE, Right, RightsMonitor
from bigfleet.operator.kubernetes.api import KubernetesApi
from bigfleet.operator.kubernetes.events import EventRecorder
from bigfleet.operator.kubernetes.lease import LeadershipLost
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    FIELD_MANAGER,
    UPCOMING_NODES,
)
from bigfleet.operator.kubernetes.rights import operator_rights
from bigfleet.operator.metrics import OperatorMetrics
from bigfleet.operator.session import SessionSettings
from bigfleet.operator.views import OperatorViews
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.security.tls import monitor_files

#: Reading the cluster for the first time takes this long on no API server that works.
SYNC_SECONDS_MAX: Final = 60.0
_TOKEN_CHARACTERS: Final = string.ascii_lowercase + string.digits

_log = structlog.get_logger("bigfleet.cli.operator.command")


class _RandomCharacters:
    """Draws characters of join tokens from the operating system."""

    def draw(self, count: int) -> str:
        """Return `count` lower-case letters and digits."""
        return "".join(secrets.choice(_TOKEN_CHARACTERS) for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts that a process builds before it may lead."""

    process: OperatorProcessSettings
    namespace: str
    connection: ClusterConnection
    views: OperatorViews
    bootstrap: BootstrapAnswerer
    metrics: OperatorMetrics
    clock: Clock
    instance: str


async def serve_operator(process: OperatorProcessSettings, environment: Mapping[str, str] = os.environ) -> int:
    """Run the operator until a signal stops it; return the exit code.

    Raises UsageFault for wrong credentials or templates, RunFault when it cannot start or go on.
    """
    clock = SystemClock()
    notifier = ServiceNotifier.from_environment(os.environ, os.getpid())
    interpreter.settle()
    stop = stop_on_signals()
    registry = process_registry()
    endpoint = find_endpoint(process.kubeconfig, clock, environment)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(
            connect_cluster(endpoint, clock=clock, user_agent=FIELD_MANAGER, qps=process.qps, burst=process.burst)
        )
        api = connection.api
        metrics = OperatorMetrics(registry)
        if process.tls is not None:
            monitor_files(process.tls, registry, "bigfleet_operator")
        namespace = process.namespace or endpoint.namespace
        views = OperatorViews(api, clock=clock, rng=system_rng())
        parts = _Parts(
            process=process,
            namespace=namespace,
            connection=connection,
            views=views,
            bootstrap=await _bootstrap(process, connection.token_api, metrics, clock, stack),
            metrics=metrics,
            clock=clock,
            instance=socket.gethostname(),
        )
        readiness = partial(_why_unready, views)
        await stack.enter_async_context(serve_http(process.metrics_address, registry, readiness))
        await stack.enter_async_context(notifier.reporting(readiness, stop))
        await _run_until(stop, parts)
    return 0


async def _bootstrap(
    process: OperatorProcessSettings, api: KubernetesApi, metrics: OperatorMetrics, clock: Clock, stack: AsyncExitStack
) -> BootstrapAnswerer:
    """Return what answers bootstrap requests, with a template that renders."""
    if process.bootstrap_template is None:
        return StubBootstrapService()
    renderer = SubprocessRenderer()
    stack.push_async_callback(renderer.close)
    template = BootstrapTemplate(
        process.bootstrap_template,
        renderer=renderer,
        cluster_id=process.cluster,
        with_token=process.token_mode is not TokenMode.NONE,
    )
    try:
        await template.load()
    except TemplateFault as fault:
        raise UsageFault(f"--bootstrap-template {fault}") from fault
    return BootstrapService(
        cluster_id=process.cluster,
        template=template,
        tokens=_tokens(process, api, clock),
        ttl_seconds=process.bootstrap_ttl_seconds,
        clock=clock,
        listener=metrics,
    )


def _tokens(process: OperatorProcessSettings, api: KubernetesApi, clock: Clock) -> TokenMinter:
    if process.service_account is not None:
        namespace, name = process.service_account
        try:
            return ServiceAccountTokens(api, namespace=namespace, name=name, ttl_seconds=process.bootstrap_ttl_seconds)
        except ValueError as fault:
            raise UsageFault(f"--bootstrap-ttl: {fault}") from fault
    if process.token_mode is TokenMode.BOOTSTRAP:
        return SecretTokens(api, clock=clock, characters=_RandomCharacters(), ttl_seconds=process.bootstrap_ttl_seconds)
    return NoTokens()


def _why_unready(views: OperatorViews) -> str:
    unsynced = views.unsynced()
    return f"reading {', '.join(unsynced)}" if unsynced else ""


async def _run_until(stop: asyncio.Event, parts: _Parts) -> None:
    """Run until a signal; raises RunFault when the process cannot go on."""
    running = asyncio.create_task(_run(parts), name="operator")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (running, stopping):
        task.cancel()
    result, _stop = await asyncio.gather(running, stopping, return_exceptions=True)
    if isinstance(result, RunFault):
        raise result
    if isinstance(result, Exception):
        _log.error("operator.failed", exc_info=result)
        raise RunFault(f"the operator stopped by itself: {one_line(repr(root_cause(result)))}") from result


async def _run(parts: _Parts) -> None:
    await parts.connection.check(_rights(parts), (CAPACITY_REQUESTS, UPCOMING_NODES, AVAILABLE_CAPACITIES))
    following = asyncio.create_task(parts.views.run(), name="views")
    monitor = RightsMonitor(
        parts.connection.election_api,
        _rights(parts),
        forbidden=parts.connection.forbidden,
        clock=parts.clock,
        on_review=parts.metrics.rights_missing.set,
    )
    watching = asyncio.create_task(monitor.run(), name="rights")
    leading = asyncio.create_task(_lead_when_elected(parts), name="election")
    try:
        done, _pending = await asyncio.wait((following, watching, leading), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        # The leader's work and the Lease end before the views that they read.
        for task in (leading, following, watching):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _rights(parts: _Parts) -> tuple[Right, ...]:
    process = parts.process
    return operator_rights(
        parts.namespace,
        drain_force=process.drain_force,
        token_secret=process.token_mode is TokenMode.BOOTSTRAP,
        token_service_account=process.service_account,
    )


async def _lead_when_elected(parts: _Parts) -> None:
    server = parts.connection.endpoint.server
    try:
        async with asyncio.timeout(SYNC_SECONDS_MAX):
            await parts.views.wait_synced()
    except TimeoutError:
        raise RunFault(
            f"the API server {server} was not read completely within {SYNC_SECONDS_MAX:g} s:"
            f" {', '.join(parts.views.unsynced())}"
        ) from None
    elector = parts.connection.elector(namespace=parts.namespace, lease_name=parts.process.lease_name)
    _log.info("operator.ready", cluster=parts.process.cluster, shard=parts.process.shard_address, server=server)
    try:
        await elector.run(lambda: _lead(parts))
    except LeadershipLost as lost:
        if lost.is_forbidden:
            raise RunFault(f"RBAC: leadership was lost for want of a right: {lost}; {ADVICE}") from lost
        raise RunFault(f"leadership was lost, another operator of this cluster may lead now: {lost}") from lost
    finally:
        parts.metrics.leader.set(0)


async def _lead(parts: _Parts) -> None:
    process = parts.process
    parts.metrics.leader.set(1)
    agent = KubernetesAgent(
        cluster=process.cluster,
        api=parts.connection.api,
        views=parts.views,
        bootstrap=parts.bootstrap,
        events=EventRecorder(parts.connection.api, component=FIELD_MANAGER, instance=parts.instance, clock=parts.clock),
        dialer=GrpcSessionDialer(process.shard_address, process.tls),
        metrics=parts.metrics,
        clock=parts.clock,
        rng=system_rng(),
        settings=AgentSettings(
            session=SessionSettings(rollup_interval_seconds=process.rollup_interval_seconds),
            status_workers=process.status_workers,
            handler_workers=process.handler_workers,
            drain_force=process.drain_force,
        ),
    )
    await agent.run()
