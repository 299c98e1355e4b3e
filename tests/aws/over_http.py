"""Builds the provider's backend with boto3 before the strict shim, under the kit."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bigfleet.provider.backends.aws.backend import AgentReady, AwsBackend, AwsSettings
from bigfleet.provider.backends.aws.boto import AwsSession, BotoEc2, BotoObjects, BotoPrices, BotoQueue
from bigfleet.provider.backends.aws.channel import Channel
from bigfleet.provider.backends.aws.interruptions import Interruptions
from bigfleet.provider.backends.aws.offerings import read_aws_offerings
from bigfleet.provider.backends.aws.prices import AwsPrices
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.aws.client import BUCKET, REGION, ShimClient
from tests.provider.harness import make_core, started

MACHINE = "aws/on-demand/m6i.large/us-east-1a/000"
PREFIX = "machines"
#: Between two looks; the product's is 5 s.
POLL_SECONDS = 0.05


def make_backend(
    shim: ShimClient,
    session: AwsSession,
    folder: Path,
    offerings: list[Mapping[str, object]],
    *,
    queue_url: str = "",
    **settings: Any,
) -> AwsBackend:
    """Return a backend that speaks HTTP with the shim."""
    path = folder / "offerings.json"
    path.write_text(json.dumps(offerings))
    clock, ec2 = LoopClock(), BotoEc2(session)
    backend = AwsBackend(
        ec2,
        Channel(ec2, BotoObjects(session, BUCKET), clock, prefix=PREFIX, interval_seconds=POLL_SECONDS),
        AwsPrices(ec2, BotoPrices(session), clock, region=REGION, path=None),
        Interruptions(clock, None),
        settings=AwsSettings(
            provider="aws",
            node_role="",
            user_data="#!/bin/sh\n",
            poll_seconds=POLL_SECONDS,
            **{"launches_per_second": 1000.0, "launches_burst": 1000, **settings},
        ),
        clock=clock,
        queue=BotoQueue(session, queue_url) if queue_url else None,
    )
    backend.set_offerings(read_aws_offerings(path, "aws"))
    return backend


@asynccontextmanager
async def served(
    shim: ShimClient,
    folder: Path,
    *offerings: Mapping[str, object],
    reconcile_seconds: float = 3600.0,
    endpoint_url: str = "",
    **more: Any,
) -> AsyncIterator[CapacityCore]:
    """Yield a started core over the backend, and stop it."""
    session = AwsSession(region=REGION, endpoint_url=endpoint_url or shim.url)
    backend = make_backend(shim, session, folder, list(offerings) or [shim.offering()], **more)
    options = CoreOptions(reconcile_interval_seconds=reconcile_seconds, failed_hold_seconds=0.0)
    core = await started(make_core(backend, readiness=AgentReady(backend), options=options))
    try:
        yield core
    finally:
        await core.stop()
        session.close()
