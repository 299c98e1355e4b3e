"""Implements a fake backend that fails on request: by the slot that is created, by the cluster that is bound.

docs/spec/provider.md §20. Everything that is not selected succeeds at once, as in `bigfleet.provider.backends.fake`.
This module must not fail by chance.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import Found, FoundKind, Host, MachineView, Op
from bigfleet.provider.backends.fake import FakeBackend, fake_slot

#: A slot with this label and value cannot be created.
CREATE_LABEL = "conformance.fault/create"
CREATE_ERROR = "error"
CREATE_SLOTS = 8

#: Clusters: a Configure into one of these ends as the name says.
CONFIGURE_ERROR = "fault-error"
CONFIGURE_TIMEOUT = "fault-timeout"
CONFIGURE_SLOW_OK = "fault-slow-ok"
READINESS_BLOCK = "fault-readiness-block"
#: A machine of this cluster cannot be drained.
DRAIN_ERROR = "fault-drain-error"

#: Clusters that no node ever joins, also if the provider restarts while their Configure runs.
_NEVER_READY = frozenset({READINESS_BLOCK, CONFIGURE_TIMEOUT, CONFIGURE_SLOW_OK})

_LABELS: Mapping[str, str] = MappingProxyType({CREATE_LABEL: CREATE_ERROR})
#: How long after its time-out a Configure into `fault-slow-ok` succeeds.
_LATE_SECONDS = 1.0


class AskedToFail(Exception):
    """The failure that a selector asked for."""


class FaultBackend(FakeBackend):
    """The fake's slots, and eight that cannot be created. Not resumable; `adopt` returns what this object holds."""

    def __init__(self, count: int, *, clock: Clock) -> None:
        super().__init__(count)
        self.provider = "fault"
        self.slots += [replace(fake_slot(n, id=f"faultcreate-{n}"), labels=_LABELS) for n in range(CREATE_SLOTS)]
        self._clock = clock

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Make a host, but not of a slot that is labelled to err."""
        if machine.labels.get(CREATE_LABEL) == CREATE_ERROR:
            raise AskedToFail(f"the slot is labelled {CREATE_LABEL}={CREATE_ERROR}")
        return await super().create(machine, op)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Bind the host, or err, hang, or succeed too late, as the cluster's name says."""
        if cluster == CONFIGURE_ERROR:
            raise AskedToFail(f"the cluster is {cluster}")
        if cluster == CONFIGURE_TIMEOUT:
            await asyncio.Event().wait()
        if cluster == CONFIGURE_SLOW_OK:
            await self._outlast(op)
        return await super().configure(machine, cluster, blob, op)

    async def _outlast(self, op: Op) -> None:
        """Return a second after the call's time-out, even if it is cancelled."""
        ends_seconds = op.deadline_monotonic_seconds + _LATE_SECONDS
        while (left_seconds := ends_seconds - self._clock.monotonic_seconds()) > 0:
            try:
                await self._clock.sleep(left_seconds)
            except asyncio.CancelledError:
                continue

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Unbind the host, but not from the cluster that releases no host."""
        if machine.cluster == DRAIN_ERROR:
            raise AskedToFail(f"the cluster is {machine.cluster}")
        await super().drain(machine, grace_seconds, op)

    async def adopt(self, machine: MachineView) -> Found:
        """Say what this object holds; a node that never becomes Ready may still run pods."""
        found = await super().adopt(machine)
        if found.kind is FoundKind.SERVING and machine.cluster == READINESS_BLOCK:
            return replace(found, kind=FoundKind.DIRTY)
        return found


class FaultReadiness:
    """Every node is Ready at once, apart from clusters whose Configure never ends in time or whose nodes never join."""

    #: A fake has nothing to wait for, so one look in a while would only slow a conformance run.
    interval_seconds = 0.05

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Return whether the node is Ready."""
        return cluster not in _NEVER_READY
