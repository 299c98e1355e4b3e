"""A provider of machines in memory that a test breaks while it runs: its own program, made with the provider kit.

python -m tests.alerts.breakable_provider FLAGS OF A PROVIDER

`faults.json` beside the state file says what is broken; it is read at each call. Without the file nothing is.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Admission, Host, MachineView, Op, Refusal, Slot, Transient
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.run import run

SLOTS = 24


class BreakableBackend(FakeBackend):
    """The fake's slots, and what is broken of them now."""

    def __init__(self, faults: Path) -> None:
        super().__init__(SLOTS)
        self.provider = "breakable"
        self._path = faults

    @property
    def faults(self) -> dict[str, Any]:
        """What is broken now, by name."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found

    async def inventory(self) -> Iterable[Slot]:
        """Return the slots; fail, leave some out, or give some a price that is no number."""
        faults = self.faults
        if faults.get("inventory_fails"):
            raise RuntimeError("the inventory cannot be read")
        known = list(await super().inventory())
        if faults.get("price_is_nan"):
            return [replace(each, price_usd_per_hour=float("nan")) for each in known]
        return known[faults.get("missing", 0) :]

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Make a host, or ask to be called again."""
        if self.faults.get("create_is_away"):
            raise Transient("no answer of the cloud")
        return await super().create(machine, op)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Bind the host, or hang, or err."""
        if self.faults.get("configure_hangs"):
            await asyncio.Event().wait()
        if self.faults.get("configure_fails"):
            raise RuntimeError("no network for the host")
        return await super().configure(machine, cluster, blob, op)

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        """Refuse a Configure, or let it begin."""
        if kind is Kind.CONFIGURE and self.faults.get("refuses"):
            return Refusal("no room")
        return Admission()

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        """Change nothing."""
        return Admission()


class Joined:
    """Every node is Ready at once."""

    interval_seconds = 0.05

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Say so."""
        return True


if __name__ == "__main__":
    state = Path(sys.argv[sys.argv.index("--state") + 1])
    run(BreakableBackend(state.with_name("faults.json")), readiness=Joined())
