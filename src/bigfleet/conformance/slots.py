"""Lends free slots to behaviours, each to one behaviour at a time.

Slots with a `conformance.fault/…` label are for the fault area. A machine whose host cannot be deleted is reserved for
behaviours that need an Idle machine. A machine that was not SPECULATIVE before the run is never lent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.ports import MachineSeen, SiteFault
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

FAULT_LABEL_PREFIX = "conformance.fault/"
#: What a drain of the machine resets (docs/spec/provider.md §8); absent is not declared.
RESET_LABEL = "bigfleet.dev/reset"
NO_RESET = "none"
RESETS = (NO_RESET, "reboot", "reimage")
_CORE_SLOTS_MIN = 64
_SLOTS_MIN = 16


class NoSlots(Exception):
    """Every slot is lent out or used up."""


@dataclass(slots=True)
class Slots:
    """The machines of one site. An id is in at most one of the collections."""

    #: SPECULATIVE as far as the suite knows.
    free: list[str] = field(default_factory=list)
    #: Made by the suite and left IDLE, because this provider deletes nothing.
    idle: list[str] = field(default_factory=list)
    #: Free slots by the selector of the fault area that they carry, such as `create=error`.
    faulty: dict[str, list[str]] = field(default_factory=dict)
    #: False once a Delete was answered UNIMPLEMENTED.
    can_delete: bool = True

    @classmethod
    def found_in(cls, machines: Iterable[MachineSeen]) -> "Slots":
        """Return the free slots of a full list, in the order of their ids."""
        slots = cls()
        for machine in sorted(machines, key=lambda seen: seen.id):
            if machine.state is not MachineState.SPECULATIVE:
                continue
            selector = fault_selector(machine.labels)
            if selector is None:
                slots.free.append(machine.id)
            else:
                slots.faulty.setdefault(selector, []).append(machine.id)
        return slots

    def take_free(self, draws: BehaviourDraws) -> str:
        """Return a slot, drawn from the free ones. Raises NoSlots."""
        return _drawn(self.free, draws)

    def take_idle(self, draws: BehaviourDraws) -> str | None:
        """Return a machine that the suite left IDLE, None when there is none."""
        return _drawn(self.idle, draws) if self.idle else None

    def take_faulty(self, selector: str, draws: BehaviourDraws) -> str:
        """Return a slot that carries the selector. Raises NoSlots."""
        if not self.faulty.get(selector):
            raise NoSlots(f"no free slot with the label {FAULT_LABEL_PREFIX}{selector} is left")
        return _drawn(self.faulty[selector], draws)


def fault_selector(labels: Mapping[str, str]) -> str | None:
    """Return `create=error` for the label `conformance.fault/create=error`, None without such a label."""
    for key, value in labels.items():
        if key.startswith(FAULT_LABEL_PREFIX):
            return f"{key.removeprefix(FAULT_LABEL_PREFIX)}={value}"
    return None


def _drawn(ids: list[str], draws: BehaviourDraws) -> str:
    if not ids:
        raise NoSlots("no free slot is left")
    return ids.pop(draws.below(len(ids)))


def slots_min(profiles: Iterable[ConformanceProfile], scale_count: int) -> int:
    """Return how many slots a run needs: 64 for core, the asked count for scale."""
    needed = [
        scale_count
        if profile is ConformanceProfile.SCALE
        else _CORE_SLOTS_MIN
        if profile is ConformanceProfile.CORE
        else _SLOTS_MIN
        for profile in profiles
    ]
    return max(needed, default=0)


def check_enough(slots: Slots, needed: int, address: str) -> None:
    """Raise SiteFault when there are too few slots: a starved run proves nothing."""
    if len(slots.free) < needed:
        raise SiteFault(
            f"{address}: {len(slots.free)} SPECULATIVE slots, {needed} are needed; "
            "offer more, or ask for fewer profiles"
        )
