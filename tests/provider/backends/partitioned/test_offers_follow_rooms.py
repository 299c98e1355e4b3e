"""Whatever is created, deleted, fails or changes: what is offered is what fits, and the choice is the cheapest one.

docs/spec/provider.md §22. Counted from scratch after each step, and chosen by trying every host.
"""

import asyncio
import copy
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.states import MachineState
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.provider.backends.partitioned.hosts import (
    PASSES_SECONDS,
    InstantDriver,
    Provider,
    cheapest_host,
    counted_slots,
    document,
    group,
    node,
)

S = MachineState
CREATE, DELETE, FAIL, FLAG, FOREIGN, RESTART = range(6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([CREATE, CREATE, CREATE, CREATE, DELETE, DELETE, FAIL, FLAG, FOREIGN, RESTART]),
        st.integers(0, 200),
    ),
    min_size=8,
    max_size=22,
)


def hosts_file() -> dict[str, Any]:
    """Return hosts of four groups in two zones, some filled, some short of spindles."""
    groups = [
        group("g"),
        group("multi", ("half", "quarter"), disks=2, spindles=3),
        group("spare", ("half", "quarter"), policy="last_resort"),
        group("closed", ("quarter",), policy="unallocable"),
    ]
    nodes = {
        "a1": node("g"),
        "a2": node("g", filled=1),
        "a3": node("g", spindles=2),
        "b1": node("g", 8),
        "m1": node("multi", spindles=8),
        "m2": node("multi", 6),
        "s1": node("spare"),
        "s2": node("spare", 6),
        "c1": node("closed"),
    }
    return document(nodes, groups, {"b1": "y", "m2": "y", "s2": "y"}, prefixes={"multi": "m-"})


class Run:
    """A provider whose hosts change and which is restarted."""

    def __init__(self, folder: Path) -> None:
        self.body = hosts_file()
        self.state = folder / "s.db"
        self.driver = InstantDriver()
        self.provider: Provider

    async def begin(self) -> None:
        book = self.provider.book if hasattr(self, "provider") else None
        self.provider = Provider(self.body, driver=self.driver, book=book, state=self.state, failed_hold_seconds=3)
        await self.provider.start()

    async def step(self, what: int, number: int) -> None:
        provider, core = self.provider, self.provider.core
        if what in (CREATE, FAIL):
            offered = await provider.ids(S.SPECULATIVE)
            if not offered:
                return
            machine_id = offered[number % len(offered)]
            expected = cheapest_host(self.body, provider.backend.ours, machine_id)
            if what == FAIL:
                self.driver.fails["create"] = RuntimeError("no")
            await core.create(machine_id)
            await asyncio.sleep(0.001)
            self.driver.fails.clear()
            if what == CREATE:
                assert (await provider.ref(machine_id)).partition("/")[0] == expected
        elif what == DELETE:
            idle = await provider.ids(S.IDLE)
            if idle:
                await core.delete(idle[number % len(idle)])
                await asyncio.sleep(0.001)
        elif what == RESTART:
            await core.stop()
            await self.begin()
            await asyncio.sleep(PASSES_SECONDS)
        else:
            self._change_hosts(what, number)
            provider.change(self.body)
            await asyncio.sleep(PASSES_SECONDS)

    def _change_hosts(self, what: int, number: int) -> None:
        self.body = copy.deepcopy(self.body)
        names = list(self.body["nodes"])
        host = self.body["nodes"][names[number % len(names)]]
        if what == FLAG:
            flag = "drained" if number % 3 else "offline"
            host[flag] = not host[flag]
            return
        # Somebody else takes, or leaves, a quarter; the file counts nothing of ours.
        sign = -1 if host["free_memory"] > host["total_memory"] // 2 else 1
        host["free_memory"] += sign * 8_000
        host["free_disk"] += sign * 50_000
        host["reserved_cpus"] -= sign

    async def check(self) -> None:
        provider = self.provider
        offered = Counter(tuple(each.split("/")[1:4]) for each in await provider.ids(S.SPECULATIVE))
        assert dict(offered) == counted_slots(self.body, provider.backend.ours)
        for record in (await provider.core.list((S.IDLE, S.CONFIGURED))).records:
            assert record.machine.host.ref in {carved.ref for carved in provider.backend.ours.values()}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_offered_slots_are_the_vectors_counted_anew_and_the_choice_is_the_cheapest(
    steps: list[tuple[int, int]],
) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder))
            await run.begin()
            await run.check()
            for what, number in steps:
                await run.step(what, number)
                await run.check()
            await run.provider.core.stop()

    run_virtual(main)
