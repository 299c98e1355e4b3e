"""Finds the leader among the coordinators and sends it reports.

docs/spec/coordinator.md §8, point 2. It tries the addresses in turn and follows the hints of followers. It never waits
longer than a call may take. A report that no leader accepted is dropped, because the next one contains all of it.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.model.clock import Clock
from bigfleet.model.shard_report import ShardReport

CALL_SECONDS: Final = 5.0
#: How often one attempt is handed on from a replica to the one that it names.
HOPS_MAX: Final = 3
#: Least time between two warnings that no replica answers.
WARNING_SECONDS: Final = 60.0

_log = structlog.get_logger("bigfleet.link.client")


class NotAnswered(Exception):
    """A report that was not answered there; `leader` is the address that a follower named, empty without one."""

    def __init__(self, text: str, *, leader: str = "") -> None:
        super().__init__(text)
        self.leader = leader


class Coordinators(Protocol):
    """The way to coordinators, by address."""

    async def addresses(self, name: str) -> Sequence[str]:
        """Return the addresses that a name stands for, at least one, each in the form that `report` takes."""
        ...

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        """Return the answer of the coordinator at an address, within CALL_SECONDS. Raises NotAnswered."""
        ...


class Client:
    """One shard's client of the leader."""

    def __init__(
        self,
        names: Sequence[str],
        coordinators: Coordinators,
        clock: Clock,
        *,
        on_redirect: Callable[[], None] = lambda: None,
    ) -> None:
        """`names` are HOST:PORT, at least one. `on_redirect` is called for each follower that named another address."""
        assert names, "a shard without a coordinator has no link"
        self._names = tuple(names)
        self._coordinators = coordinators
        self._clock = clock
        self._on_redirect = on_redirect
        self._leader = ""
        #: The first address to try when the leader is not known.
        self._next = 0
        self._warned_at_seconds = float("-inf")

    async def send(self, report: ShardReport) -> ReportAnswer | None:
        """Return the leader's answer; None when no replica answered, which is logged once a minute at most."""
        faults: dict[str, str] = {}
        for address in await self._order():
            answer = await self._ask(address, report, faults)
            if answer is not None:
                return answer
        self._leader = ""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._warned_at_seconds >= WARNING_SECONDS:
            self._warned_at_seconds = now_seconds
            _log.warning(
                "link.coordinator_unreachable",
                asked=faults,
                advice="acknowledgements are stored until a coordinator answers",
            )
        return None

    async def _order(self) -> list[str]:
        expanded = [address for name in self._names for address in await self._coordinators.addresses(name)]
        first = self._next % len(expanded)
        self._next += 1
        ordered = [*expanded[first:], *expanded[:first]]
        return list(dict.fromkeys([self._leader, *ordered] if self._leader else ordered))

    async def _ask(self, address: str, report: ShardReport, faults: dict[str, str]) -> ReportAnswer | None:
        """Ask one address, then the leader that it names; no address twice in one attempt."""
        for _hop in range(1 + HOPS_MAX):
            if address in faults:
                return None
            try:
                answer = await self._coordinators.report(address, report)
            except NotAnswered as fault:
                faults[address] = str(fault)
                if not fault.leader:
                    return None
                self._on_redirect()
                address = fault.leader
                continue
            self._leader = address
            return answer
        return None
