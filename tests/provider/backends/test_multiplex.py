"""One provider over several backends (docs/spec/provider.md §16)."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import cast

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import (
    Admission,
    ExistingHost,
    Feed,
    Feeds,
    Host,
    KindLimits,
    LateResult,
    Limits,
    MachineView,
    Op,
    Refusal,
    Slot,
)
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.backends.multiplex import Multiplex
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.records.validate import Reason
from tests.patience import wait_until_async
from tests.provider.harness import bring_to, make_core, metric, refusal_of, settle, started, state_of

S = MachineState
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)


class Part(FakeBackend):
    """A fake whose ids have a prefix, and whose inventory breaks when told."""

    def __init__(self, prefix: str, count: int = 2, limits: Limits | None = None) -> None:
        super().__init__(0, limits=limits)
        self.slots = [fake_slot(number, id=f"{prefix}{number}") for number in range(count)]
        self.is_down = False

    async def inventory(self) -> Iterable[Slot]:
        if self.is_down:
            raise ConnectionError("down")
        return await super().inventory()


class Bare:
    """What a backend must have, and nothing else; all of it plain functions."""

    provider = "bare"
    limits = Limits(kinds={kind: KindLimits(timeout_seconds=TIMEOUT_SECONDS[kind], queue_max=7) for kind in Kind})

    def __init__(self) -> None:
        self.created: set[str] = set()

    def inventory(self) -> Iterable[Slot]:
        slot = fake_slot(0, id="bare/0")
        yield slot
        if self.created:
            yield ExistingHost.of(slot, host_ref="bare-host")

    def create(self, machine: MachineView, op: Op) -> Host:
        self.created.add(machine.id)
        return Host(ref="bare-host")

    def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        return None

    def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        return None


async def two() -> tuple[CapacityCore, Part, Part]:
    aws, gcp = Part("aws/"), Part("gcp/")
    core = await started(make_core(Multiplex({"aws/": aws, "gcp/": gcp}), options=NO_WAY_OUT))
    return core, aws, gcp


async def ids(core: CapacityCore) -> set[str]:
    return {record.id for record in (await core.list()).records}


@pytest.mark.virtual_time
async def test_each_machine_is_driven_by_the_part_of_its_prefix() -> None:
    core, aws, gcp = await two()
    assert await ids(core) == {"aws/0", "aws/1", "gcp/0", "gcp/1"}
    await core.create("aws/0")
    await core.create("gcp/1")
    await settle()
    await core.configure("gcp/1", "c", b"", {})
    await settle()
    await core.drain("gcp/1", 0)
    await settle()
    await core.delete("gcp/1")
    await settle()
    assert [(kind, machine) for kind, machine, _op in aws.calls] == [(Kind.CREATE, "aws/0")]
    assert [(kind, machine) for kind, machine, _op in gcp.calls] == [
        (kind, "gcp/1") for kind in (Kind.CREATE, Kind.CONFIGURE, Kind.DRAIN, Kind.DELETE)
    ]


@pytest.mark.virtual_time
async def test_a_part_that_cannot_be_read_discards_its_own_part_alone() -> None:
    core, aws, gcp = await two()
    await core.create("aws/0")
    await settle()
    aws.is_down = True
    aws.hosts.clear()
    gcp.slots = [*gcp.slots[:1], fake_slot(5, id="gcp/5")]
    await asyncio.sleep(400)
    assert await ids(core) == {"aws/0", "aws/1", "gcp/0", "gcp/5"}
    assert await state_of(core, "aws/0") is S.IDLE
    aws.is_down = False
    await asyncio.sleep(250)
    assert await state_of(core, "aws/0") is S.FAILED


@pytest.mark.virtual_time
async def test_an_inventory_of_which_nothing_could_be_read_is_no_inventory() -> None:
    core, aws, gcp = await two()
    before = metric(core, "reconcile_last_success_timestamp_seconds")
    aws.is_down = gcp.is_down = True
    await asyncio.sleep(400)
    assert len(await ids(core)) == 4
    assert metric(core, "reconcile_last_success_timestamp_seconds") == before


@pytest.mark.virtual_time
async def test_facts_and_pushes_outside_the_prefix_are_refused() -> None:
    class Feeding(Part):
        async def feed(self, feed: Feed) -> None:
            await asyncio.sleep(100)
            await feed.report_lost("gcp/0", "not mine")
            await feed.report_price(["gcp/0", "aws/0"], 0.9)
            raise RuntimeError("and then it broke")

    aws, gcp = Feeding("aws/"), Part("gcp/")
    core = await started(make_core(Multiplex({"aws/": aws, "gcp/": gcp}), options=NO_WAY_OUT))
    aws.slots.append(fake_slot(7, id="gcp/7"))
    await asyncio.sleep(150)
    assert await ids(core) == {"aws/0", "aws/1", "gcp/0", "gcp/1"}
    assert metric(core, "records_quarantined", reason="id") == 1
    assert (await core.get("aws/0")).machine.price_usd_per_hour == 0.9
    assert (await core.get("gcp/0")).machine.price_usd_per_hour == 0.4


@pytest.mark.virtual_time
async def test_optional_methods_are_there_when_a_part_has_them() -> None:
    class Admitting(Part):
        def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
            return Refusal("full") if machine.id == "aws/0" else Admission()

        def settle(self, machine: MachineView, reached: MachineState) -> Admission:
            return Admission()

        async def compensate(self, machine: MachineView, late: LateResult) -> None:
            return None

    bare = Bare()
    multiplex = Multiplex({"bare/": bare})
    assert not any(hasattr(multiplex, name) for name in ("delete", "adopt", "compensate", "admit", "settle", "feed"))
    multiplex = Multiplex({"aws/": Admitting("aws/"), "bare/": bare})
    assert not isinstance(multiplex, Feeds)
    core = await started(make_core(multiplex, options=NO_WAY_OUT))
    assert (await refusal_of(core.create("aws/0")))[0] is Code.RESOURCE_EXHAUSTED
    await core.create("bare/0")
    await settle()
    assert (await core.get("bare/0")).machine.host == ("multiplex", "bare-host")
    code, text = await refusal_of(core.delete("bare/0"))
    assert (code, "fixed" in text) == (Code.UNIMPLEMENTED, True)


@pytest.mark.virtual_time
async def test_a_part_removes_its_own_mark_and_parts_without_one_have_nothing_to_remove() -> None:
    class Marking(Part):
        marked = ""

        async def mark_out_of_service(self, machine: MachineView) -> None:
            self.marked = machine.id

    aws = Marking("aws/")
    core = await started(make_core(Multiplex({"aws/": aws, "gcp/": Part("gcp/")}), options=NO_WAY_OUT))
    for machine_id in ("aws/0", "gcp/0"):
        await bring_to(core, S.CONFIGURED, machine_id)
        await core.feed.report_lost(machine_id, "pulled out")
        await core.administration.recover("ada", machine_id, "idle", is_out_of_service=True)
        assert await state_of(core, machine_id) is S.IDLE
    assert aws.marked == "aws/0"


@pytest.mark.virtual_time
async def test_a_late_host_of_a_part_without_compensation_is_deleted() -> None:
    class Stubborn(Part):
        async def create(self, machine: MachineView, op: Op) -> Host:
            try:
                await asyncio.sleep(10_000)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
            self.hosts[machine.id] = "late"
            return Host(ref="late")

    class Compensating(Part):
        async def compensate(self, machine: MachineView, late: LateResult) -> None:
            raise AssertionError("the other part's")

    late = Stubborn("late/")
    core = await started(make_core(Multiplex({"late/": late, "aws/": Compensating("aws/")}), options=NO_WAY_OUT))
    await core.create("late/0")
    await asyncio.sleep(320)
    assert late.hosts == {}


@pytest.mark.virtual_time
async def test_a_part_that_cannot_adopt_waits_for_a_person() -> None:
    class Mute(Bare):
        def delete(self, machine: MachineView, op: Op) -> None:
            return None

    core = await started(
        make_core(
            Multiplex({"bare/": Mute(), "aws/": Part("aws/")}),
            options=CoreOptions(is_inline=True, failed_hold_seconds=10, reconcile_interval_seconds=1e6),
        )
    )
    for machine_id in ("bare/0", "aws/0"):
        await core.create(machine_id)
        await settle()
        await core.feed.report_lost(machine_id, "gone")
    await asyncio.sleep(5000)
    assert (await state_of(core, "bare/0"), await state_of(core, "aws/0")) == (S.FAILED, S.IDLE)


def test_prefixes_must_not_overlap_and_the_most_careful_part_sets_the_pace() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Multiplex({})
    with pytest.raises(ValueError, match="prefix"):
        Multiplex({"a/": Part("a/"), "a/b/": Part("a/b/")})
    with pytest.raises(ValueError, match="prefix"):
        Multiplex({"": Part("")})
    slow = Limits(
        kinds={kind: KindLimits(timeout_seconds=900, concurrency_max=3, rate_per_second=0.5) for kind in Kind},
        resumable=frozenset({Kind.DRAIN}),
    )
    limits = Multiplex({"a/": Part("a/", limits=slow), "bare/": Bare()}).limits
    create = limits.kinds[Kind.CREATE]
    assert (create.timeout_seconds, create.concurrency_max, create.queue_max, create.rate_per_second) == (
        900,
        3,
        7,
        0.5,
    )
    assert limits.resumable == frozenset()


async def test_plain_functions_and_generators_run_beside_coroutines() -> None:
    """On real threads."""

    class Paged(Part):
        def inventory(self) -> AsyncIterator[Slot]:  # type: ignore[override]
            async def pages() -> AsyncIterator[Slot]:
                for slot in self.slots:
                    yield slot

            return pages()

    core = make_core(Multiplex({"bare/": Bare(), "aws/": Paged("aws/")}), options=CoreOptions(failed_hold_seconds=0))
    await started(core)
    assert await ids(core) == {"bare/0", "aws/0", "aws/1"}
    await core.create("bare/0")
    await core.create("aws/0")

    async def are_idle() -> bool:
        return {await state_of(core, i) for i in ("bare/0", "aws/0")} == {S.IDLE}

    await wait_until_async(are_idle)
    await core.stop()


@pytest.mark.virtual_time
async def test_a_bad_value_in_one_part_is_quarantined_and_the_rest_of_both_parts_goes_on() -> None:
    core, aws, gcp = await two()
    aws.slots[0] = replace(aws.slots[0], labels=cast(dict[str, str], None))
    for part in (aws, gcp):
        part.slots[1] = replace(part.slots[1], price_usd_per_hour=9.0)
    await asyncio.sleep(70)
    assert core.quarantine.faults["aws/0"].reason is Reason.TYPE
    for machine_id in ("aws/1", "gcp/1"):
        assert (await core.get(machine_id)).machine.price_usd_per_hour == 9.0


@pytest.mark.virtual_time
async def test_an_entry_without_an_id_discards_its_own_part_alone() -> None:
    class Nameless(Part):
        is_nameless = False

        async def inventory(self) -> Iterable[Slot]:
            found = await super().inventory()
            return [cast(Slot, None)] if self.is_nameless else found

    aws, gcp = Nameless("aws/"), Part("gcp/")
    core = await started(make_core(Multiplex({"aws/": aws, "gcp/": gcp}), options=NO_WAY_OUT))
    aws.is_nameless = True
    gcp.slots[1] = replace(gcp.slots[1], price_usd_per_hour=9.0)
    await asyncio.sleep(300)
    assert await ids(core) == {"aws/0", "aws/1", "gcp/0", "gcp/1"}
    assert (await core.get("gcp/1")).machine.price_usd_per_hour == 9.0
