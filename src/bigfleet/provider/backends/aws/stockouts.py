"""Remembers which types have no capacity in which zone, so that further Creates there fail without a call.

docs/spec/aws-provider.md §3.
"""

from dataclasses import dataclass

from bigfleet.model.clock import Clock
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import MachineView, Stockout
from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.errors import STOCKOUT_RETRY_SECONDS, memory_seconds, text_of


@dataclass(frozen=True, slots=True)
class _Remembered:
    until_seconds: float
    text: str


class StockoutMemory:
    """Holds the stockouts of this process by type, zone and capacity type."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stockouts: dict[tuple[str, str, CapacityType], _Remembered] = {}

    def __len__(self) -> int:
        """Return how many kinds of machines are out of stock now."""
        now_seconds = self._clock.monotonic_seconds()
        return sum(each.until_seconds > now_seconds for each in self._stockouts.values())

    def note(self, machine: MachineView, error: AwsError) -> None:
        """Remember that a launch of this kind of machine met no capacity."""
        self.note_text(machine, text_of(error), memory_seconds(error.code))

    def note_text(self, machine: MachineView, text: str, seconds: float) -> None:
        """Remember that there is no capacity for this kind of machine, for so long."""
        self._stockouts[_key(machine)] = _Remembered(self._clock.monotonic_seconds() + seconds, text)

    def check(self, machine: MachineView) -> None:
        """Raise Stockout while a stockout of this kind of machine is remembered."""
        remembered = self._stockouts.get(_key(machine))
        if remembered is None:
            return
        left_seconds = remembered.until_seconds - self._clock.monotonic_seconds()
        if left_seconds <= 0:
            del self._stockouts[_key(machine)]
            return
        text = f"not asked again for {left_seconds:.0f} s: {remembered.text}"
        raise Stockout(text, max(left_seconds, STOCKOUT_RETRY_SECONDS))


def _key(machine: MachineView) -> tuple[str, str, CapacityType]:
    return machine.instance_type, machine.zone, machine.capacity_type
