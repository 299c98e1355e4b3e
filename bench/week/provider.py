"""Simulates a provider whose machines take minutes to boot, change their prices, are sold out, and are lost.

It follows the transition table of docs/spec/provider.md and answers List with what changed since the cursor. A minute
passes with `tick`. It keeps what a machine costs: the price while it exists, from the Create that was taken to the end
of its Delete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.week.paths import Loss, Pool
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import (
    FenceToken,
    ListedMachine,
    Listing,
    ProviderRefusal,
    RefusalKind,
    TransitionAck,
)
from bigfleet.sim.kernel.streams import seeded

S = MachineState
#: Minutes of each transition, shortest and longest.
TRANSITION_MINUTES: Final = {S.CREATING: (1, 2), S.CONFIGURING: (2, 3), S.DRAINING: (1, 1), S.DELETING: (1, 1)}
TARGETS: Final = {S.CREATING: S.IDLE, S.CONFIGURING: S.CONFIGURED, S.DRAINING: S.IDLE, S.DELETING: S.SPECULATIVE}
#: Minutes until a lost machine's slot is on offer again.
REPAIR_MINUTES: Final = 30
_NOT_PAID: Final = frozenset({S.SPECULATIVE, S.FAILED})


class WeekProvider:
    """Implements `bigfleet.shard.ports.Provider` in memory."""

    def __init__(
        self, *, slots: int, seed: int, joined: Callable[[Machine], None], left: Callable[[str, str, Loss | None], None]
    ) -> None:
        """`joined` is called with a machine that serves; `left` with a machine that no longer does, its cluster, and
        why it was lost, None after a drain.
        """
        self.records: dict[str, Machine] = {}
        #: Every call that was taken, in order: (minute, method, machine, cluster).
        self.calls: list[tuple[int, str, str, str]] = []
        self.minute = 0
        self._slots = slots
        self._seed = seed
        self._joined = joined
        self._left = left
        self._pool_of: dict[str, Pool] = {}
        self._metadata: dict[str, dict[str, str]] = {}
        self._marks: dict[tuple[str, str], tuple[int, int]] = {}
        self._sold_out: frozenset[Pool] = frozenset()
        #: Minutes at which transitions end and lost machines are repaired.
        self._due: dict[str, int] = {}
        self._revision = 0
        self._changed: dict[str, int] = {}

    # ---- what happens ----------------------------------------------------------------------------------------------

    def set_prices(self, prices: Sequence[tuple[Pool, float]]) -> None:
        """Change the prices of pools; a pool that is new gets its machines."""
        for pool, usd_per_hour in prices:
            for number in range(self._slots):
                machine_id = f"{pool.name}-{number:03d}"
                known = self.records.get(machine_id)
                self._pool_of[machine_id] = pool
                if known is None:
                    self._put(pool.machine(number, usd_per_hour))
                elif known.price_usd_per_hour != usd_per_hour:
                    self._put(replace(known, price_usd_per_hour=usd_per_hour))

    def set_sold_out(self, pools: frozenset[Pool]) -> None:
        """Of these pools nothing can be created."""
        self._sold_out = pools

    def lose(self, machine_id: str, cause: Loss) -> bool:
        """Lose a machine if it is there; return whether it was."""
        record = self.records[machine_id]
        if record.state in _NOT_PAID:
            return False
        self._due[machine_id] = self.minute + REPAIR_MINUTES
        self._metadata.pop(machine_id, None)
        self._put(replace(record, state=S.FAILED, cluster=ClusterId(""), last_error=f"lost by {cause.value}"))
        if record.cluster and record.state is not S.CONFIGURING:
            self._left(machine_id, record.cluster, cause)
        return True

    def tick(self, minute: int) -> None:
        """Let transitions end that are due."""
        self.minute = minute
        for machine_id in [each for each, due in self._due.items() if due <= minute]:
            del self._due[machine_id]
            self._end(self.records[machine_id])

    def usd_per_hour(self) -> float:
        """Return what all machines that are there cost at present prices."""
        return sum(each.price_usd_per_hour for each in self.records.values() if each.state not in _NOT_PAID)

    def _end(self, record: Machine) -> None:
        match record.state:
            case S.CONFIGURING:
                self._put(replace(record, state=S.CONFIGURED))
                self._joined(self.records[record.id])
            case S.CREATING:
                self._put(replace(record, state=S.IDLE, host=HostRef("week", record.id)))
            case S.DRAINING:
                self._metadata.pop(record.id, None)
                self._put(replace(record, state=S.IDLE, cluster=ClusterId("")))
                self._left(record.id, record.cluster, None)
            case S.DELETING | S.FAILED:
                self._put(replace(record, state=S.SPECULATIVE, host=HostRef(), last_error=""))

    def _put(self, record: Machine) -> None:
        self.records[record.id] = record
        self._revision += 1
        self._changed[record.id] = self._revision

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Begin to create a machine. Raises ProviderRefusal when its pool is sold out."""
        if self._pool_of.get(machine_id) in self._sold_out:
            raise ProviderRefusal(RefusalKind.EXHAUSTED, "the pool is sold out")
        return self._transition("create", machine_id, token, S.SPECULATIVE, S.CREATING)

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        """Begin to bind a machine to a cluster."""
        return self._transition("configure", machine_id, token, S.IDLE, S.CONFIGURING, cluster, metadata)

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        """Begin to take a machine from its cluster."""
        return self._transition("drain", machine_id, token, S.CONFIGURED, S.DRAINING)

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Begin to give a machine back."""
        return self._transition("delete", machine_id, token, S.IDLE, S.DELETING)

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return one record."""
        if machine_id not in self.records:
            raise ProviderRefusal(RefusalKind.NOT_FOUND, f"{machine_id}: unknown machine")
        return self._listed(machine_id)

    async def list(self, since_revision: bytes) -> Listing:
        """Return what changed since the cursor."""
        since = int(since_revision or b"0")
        changed = [machine_id for machine_id, revision in self._changed.items() if revision > since]
        return Listing(
            records=[self._listed(machine_id) for machine_id in sorted(changed)],
            revision=str(self._revision).encode(),
            tombstones=bool(since_revision),
        )

    def _listed(self, machine_id: str) -> ListedMachine:
        return ListedMachine(self.records[machine_id], self._metadata.get(machine_id, {}))

    def _transition(
        self,
        method: str,
        machine_id: MachineId,
        token: FenceToken,
        source: MachineState,
        state: MachineState,
        cluster: ClusterId | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> TransitionAck:
        mark = (token.epoch, token.sequence)
        if mark <= self._marks.get((token.shard_id, machine_id), (-1, -1)):
            raise ProviderRefusal(RefusalKind.FENCED, f"{machine_id}: the token is not newer")
        self._marks[(token.shard_id, machine_id)] = mark
        record = self.records.get(machine_id)
        if record is None:
            raise ProviderRefusal(RefusalKind.NOT_FOUND, f"{machine_id}: unknown machine")
        if record.state is not source:
            text = f"{machine_id}: {method} needs {source.label}, it is {record.state.label}"
            raise ProviderRefusal(RefusalKind.REFUSED, text)
        if cluster is not None:
            record = replace(record, cluster=cluster)
            self._metadata[machine_id] = dict(metadata or {})
        self.calls.append((self.minute, method, machine_id, record.cluster))
        shortest, longest = TRANSITION_MINUTES[state]
        # Drawn for this machine and time, so that other machines' calls move nothing.
        took = seeded(f"{self._seed}/{machine_id}/{self.minute}/{method}").randint(shortest, longest)
        self._due[machine_id] = self.minute + took
        self._put(replace(record, state=state))
        return TransitionAck(operation_id=f"op-{len(self.calls)}", record=self._listed(machine_id))
