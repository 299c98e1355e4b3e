"""Measures latencies: from the first report of a need to its first machine, and between machine states.

docs/spec/shard.md §11.2 and §14. Each transition gives one sample, regardless of the part that observed it, and each
first report gives at most one. No decision reads them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from bigfleet.engine.folding import folded_profile
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.model.validation import ensure

#: The phases that are measured: where each starts, and where it must end to count.
PHASES: Mapping[MachineState, MachineState] = MappingProxyType(
    {
        MachineState.CREATING: MachineState.IDLE,
        MachineState.CONFIGURING: MachineState.CONFIGURED,
        MachineState.DRAINING: MachineState.IDLE,
    }
)


class PhaseTimes:
    """Since when each machine on its way is in its state; bounded by the machines that are on their way."""

    def __init__(self, observe: Callable[[MachineState, float], None]) -> None:
        """`observe` is called with (state that was left, seconds in it) of each phase that ended where it should."""
        self._observe = observe
        self._since_seconds: dict[str, float] = {}

    def changed(self, before: Machine | None, after: Machine, now_seconds: float) -> None:
        """Follow one machine's change. One that is met on its way has an unknown start and gives no sample."""
        if before is None or before.state is after.state:
            return
        since_seconds = self._since_seconds.pop(after.id, None)
        if since_seconds is not None and PHASES[before.state] is after.state:
            self._observe(before.state, now_seconds - since_seconds)
        if after.state in PHASES:
            self._since_seconds[after.id] = now_seconds

    def removed(self, machine_id: MachineId) -> None:
        """Forget a machine that is gone."""
        self._since_seconds.pop(machine_id, None)


class ProvisioningLatency:
    """When each (cluster, fingerprint) was first asked for, until a machine answers it.

    Invariant: all and only fingerprints of rows in force, less those that were answered since their roll-up.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe` is called with the seconds of each sample."""
        self._observe = observe
        self._first_seen_seconds: dict[str, dict[str, float]] = {}
        #: Answered since the last roll-up; the next one that still asks counts again.
        self._answered: dict[str, set[str]] = {}
        self._rows: dict[str, Sequence[Need]] = {}
        #: Fingerprints of the gangs behind a folded one, by cluster; made when a machine first asks.
        self._folded: dict[str, dict[str, list[str]]] = {}

    def demand_taken(self, cluster: str, rows: Sequence[Need], now_seconds: float) -> None:
        """Take a roll-up that came into force: what left is forgotten, what is new starts."""
        known = self._first_seen_seconds.pop(cluster, {})
        self._answered.pop(cluster, None)
        self._folded.pop(cluster, None)
        self._rows.pop(cluster, None)
        if rows:
            self._rows[cluster] = rows
            self._first_seen_seconds[cluster] = {
                row.fingerprint: known.get(row.fingerprint, now_seconds) for row in rows
            }

    def demand_repeated(self, cluster: str, now_seconds: float) -> None:
        """Take a roll-up that changed nothing: what was answered and is still asked for starts again."""
        for fingerprint in self._answered.pop(cluster, ()):
            self._first_seen_seconds[cluster].setdefault(fingerprint, now_seconds)

    def changed(self, before: Machine | None, after: Machine, now_seconds: float) -> None:
        """Take a sample when a machine went from Configuring to Configured for a need that waits for one."""
        if before is None or (before.state, after.state) != (MachineState.CONFIGURING, MachineState.CONFIGURED):
            return
        cluster, fingerprint = after.cluster, after.assigned_need_fingerprint
        waiting = self._first_seen_seconds.get(cluster, {})
        asked = [name for name in self._asking(cluster, fingerprint) if name in waiting]
        if asked:
            self._observe(now_seconds - min(waiting.pop(name) for name in asked))
            self._answered.setdefault(cluster, set()).update(asked)

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        ensure(self._first_seen_seconds.keys() == self._rows.keys(), "latency: clusters with and without rows")
        for cluster, rows in self._rows.items():
            waiting, answered = self._first_seen_seconds[cluster].keys(), self._answered.get(cluster, set())
            ensure(waiting.isdisjoint(answered), f"latency: {cluster}: a fingerprint waits and is answered")
            in_force = {row.fingerprint for row in rows}
            ensure(waiting | answered == in_force, f"latency: {cluster}: fingerprints are not those of the rows")

    def _asking(self, cluster: str, fingerprint: str) -> Iterable[str]:
        """Return the reported fingerprints that a machine's stamp stands for: its own, or those of folded gangs."""
        if fingerprint in self._first_seen_seconds.get(cluster, {}):
            return (fingerprint,)
        folded = self._folded.get(cluster)
        if folded is None:
            folded = self._folded[cluster] = {}
            gangs = {
                row.fingerprint: row.profile for row in self._rows.get(cluster, ()) if row.profile.same_key is not None
            }
            for name, profile in gangs.items():
                folded.setdefault(folded_profile(profile).fingerprint, []).append(name)
        return folded.get(fingerprint, ())


assert PHASES.keys() <= TRANSITIONAL_STATES, "only what is on its way is timed"
