"""What a caller sees of machines that are carved from physical hosts (docs/spec/provider.md §22)."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import FoundKind, Refusal
from bigfleet.provider.backends.partitioned.metrics import export
from bigfleet.provider.backends.partitioned.ports import Standing
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.store import MemoryStore
from tests.provider.backends.partitioned.hosts import PASSES_SECONDS, InstantDriver, Provider, document, group, node
from tests.provider.harness import refusal_of, settle, state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
FULL, HALF, QUARTER = "p/g/z/full/000", "p/g/z/half/000", "p/g/z/quarter/000"


def design() -> dict[str, Any]:
    """Return the design's own example: hosts that are empty, and a quarter, a half and three quarters full."""
    return document({name: node("g", filled=filled) for filled, name in enumerate("eqht")})


async def made(provider: Provider, machine_id: str) -> str:
    """Create a machine and return its host's ref."""
    await provider.core.create(machine_id)
    await settle()
    return await provider.ref(machine_id)


async def test_a_quarter_goes_where_the_design_says_and_shows_its_physical_host() -> None:
    body = design()
    body["bigfleet"]["nodes"]["t"]["labels"] = {"rack": "r1"}
    provider = await Provider(body).start()
    assert await made(provider, QUARTER) == "t/g-z-quarter-000"
    machine = (await provider.core.get(QUARTER)).machine
    assert dict(machine.labels) == {"rack": "r1", "topology.bigfleet/physical-host": "t"}
    assert dict(machine.allocatable) == {"cpu": "1", "memory": "7960Mi", "ephemeral-storage": "49960Mi"}
    assert machine.instance_type == "quarter"


async def test_the_acceptance_notes_metric_and_choice() -> None:
    provider = await Provider(design()).start()
    record = await provider.core.get(QUARTER)
    answer = provider.backend.admit(record.machine, Kind.CREATE)
    assert not isinstance(answer, Refusal)
    assert answer.note == "score: ([0,0,1],40), successes 4, failures 0 () for node(s) t"
    # Of ten quarters one is in use now, and nine still fit.
    assert (answer.add, answer.remove) == ((), ())


async def test_slots_of_other_sizes_leave_with_the_room_in_one_transaction_and_come_back_with_the_delete() -> None:
    provider = await Provider(document({"n": node("g")})).start()
    everything = await provider.ids()
    assert everything == [FULL, HALF, "p/g/z/half/001", *(f"p/g/z/quarter/00{n}" for n in range(4))]
    cursor = (await provider.core.list()).revision
    await provider.core.create(HALF)
    listing = await provider.core.list((), 0, cursor)
    # The half that is left keeps its number.
    assert set(listing.removed_ids) == {FULL, "p/g/z/quarter/003", "p/g/z/quarter/002"}
    await settle()
    assert (await refusal_of(provider.core.create(FULL)))[0] is Code.NOT_FOUND
    await provider.core.delete(HALF)
    await settle()
    assert await provider.ids(S.SPECULATIVE) == everything
    assert "topology.bigfleet/physical-host" not in (await provider.core.get(HALF)).machine.labels


async def test_calls_in_parallel_never_carve_the_same_room_twice() -> None:
    provider = await Provider(document({"n": node("g")})).start()
    calls = [provider.core.create(machine_id) for machine_id in await provider.ids()]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await settle()
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1
    assert await provider.ids() == [FULL]


async def test_a_failed_create_keeps_its_room_until_recovery_finds_its_host_gone() -> None:
    provider = await Provider(document({"n": node("g")}), failed_hold_seconds=5).start()
    provider.driver.fails["create"] = RuntimeError("the substrate broke")
    await provider.core.create(FULL)
    await settle()
    assert await state_of(provider.core, FULL) is S.FAILED
    assert await provider.ids(S.SPECULATIVE) == []
    await asyncio.sleep(10)
    assert await state_of(provider.core, FULL) is S.SPECULATIVE
    assert len(await provider.ids(S.SPECULATIVE)) == 7


async def test_an_instance_that_stands_after_a_failed_create_is_kept_with_its_room() -> None:
    driver = InstantDriver()
    provider = await Provider(document({"n": node("g")}), driver=driver, failed_hold_seconds=5).start()
    driver.fails["create"] = RuntimeError("the answer was lost")
    await provider.core.create(FULL)
    await settle()
    driver.standing["g-z-full-000"] = Standing(host="n", instance="g-z-full-000")
    await asyncio.sleep(10)
    assert await state_of(provider.core, FULL) is S.IDLE
    assert await provider.ref(FULL) == "n/g-z-full-000"
    assert await provider.ids() == [FULL]


async def test_a_failed_commit_gives_the_room_back() -> None:
    store = MemoryStore()
    provider = await Provider(document({"n": node("g")}), store=store).start()
    store.is_failing = True
    assert (await refusal_of(provider.core.create(FULL)))[0] is Code.UNAVAILABLE
    store.is_failing = False
    await asyncio.sleep(3)
    assert provider.backend.ours == {}
    assert len(await provider.ids(S.SPECULATIVE)) == 7
    await made(provider, FULL)
    assert await provider.ids() == [FULL]


async def test_a_settlement_that_is_committed_late_brings_its_slots_all_the_same() -> None:
    store = MemoryStore()
    provider = await Provider(document({"n": node("g")}), store=store).start()
    await made(provider, FULL)
    await provider.core.delete(FULL)
    store.is_failing = True
    await asyncio.sleep(3)
    assert await provider.ids(S.SPECULATIVE) == []
    store.is_failing = False
    await asyncio.sleep(5)
    assert len(await provider.ids(S.SPECULATIVE)) == 7


async def test_an_unallocable_group_offers_nothing_and_a_last_resort_steps_in_when_the_preferred_one_is_full() -> None:
    groups = [
        group("g", ("quarter",)),
        group("spare", ("quarter",), policy="last_resort"),
        group("closed", ("quarter",), policy="unallocable"),
    ]
    nodes = {"a": node("g", 1), "b": node("spare", 1), "c": node("closed")}
    provider = await Provider(document(nodes, groups)).start()
    assert await provider.ids() == [QUARTER]
    await made(provider, QUARTER)
    assert await provider.ids(S.SPECULATIVE) == ["p/spare/z/quarter/000"]
    await provider.core.delete(QUARTER)
    await settle()
    assert await provider.ids(S.SPECULATIVE) == [QUARTER]


async def test_disks_and_spindles_of_the_real_instance_lower_what_is_offered() -> None:
    groups = [group("g", ("quarter",), disks=2, spindles=3)]
    # Two disks of two spindles each, rounded up.
    provider = Provider(document({"n": node("g", spindles=9)}, groups))
    body = document({"n": node("g", spindles=9)}, groups)
    for interval in body["nodegroups"]["g"]["ipolicy"]["minmax"]:
        interval["max"]["spindle-use"] = 4
    provider = await Provider(body).start()
    assert await provider.ids() == [QUARTER, "p/g/z/quarter/001"]


async def test_instances_of_others_take_room_and_are_not_listed() -> None:
    theirs = {
        "memory": 7_960,
        "vcpus": 1,
        "disk_space_total": 49_960,
        "disks": [{"size": 49_960, "spindles": 1}],
        "spindle_use": 1,
        "tags": [],
        "disk_template": "plain",
        "nics": [],
        "admin_state": "up",
        "nodes": ["n"],
    }
    body = document({"n": node("g", filled=1)}, theirs=theirs)
    body["nodes"]["n"]["reserved_cpus"] = 0
    provider = await Provider(body).start()
    assert await provider.ids() == [HALF, *(f"p/g/z/quarter/00{n}" for n in range(3))]
    body["instances"]["g-z-half-000"] = {**theirs, "nodes": ["n"]}
    await made(provider, HALF)
    # A file that is read later lists ours, too; its room is not taken twice.
    body["instances"]["g-z-half-000"].update(memory=15_960, vcpus=2, disk_space_total=99_960)
    body["nodes"]["n"]["free_memory"] -= 15_960
    body["nodes"]["n"]["free_disk"] -= 99_960
    body["nodes"]["n"]["free_spindles"] -= 1
    provider.change(body)
    await settle()
    assert await provider.ids(S.SPECULATIVE) == [QUARTER]


async def test_a_drained_host_offers_nothing_and_keeps_its_machines_and_an_offline_one_counts_as_missing() -> None:
    body = document({"n": node("g")})
    provider = await Provider(body).start()
    await made(provider, HALF)
    changed = copy.deepcopy(body)
    changed["nodes"]["n"]["drained"] = True
    provider.change(changed)
    await settle()
    assert await provider.ids() == [HALF]
    await asyncio.sleep(4 * PASSES_SECONDS)
    assert await state_of(provider.core, HALF) is S.IDLE
    changed["nodes"]["n"].update(drained=False, offline=True)
    provider.change(changed)
    await asyncio.sleep(4 * PASSES_SECONDS)
    assert (await provider.core.get(HALF)).machine.last_error.startswith("HOST_LOST: ")


async def test_new_hosts_are_offered_with_the_next_inventory() -> None:
    body = document({"n": node("g", 1)})
    provider = await Provider(body).start()
    provider.change(document({"n": node("g", 1), "m": node("g", 2)}))
    await asyncio.sleep(PASSES_SECONDS)
    assert await provider.ids() == [HALF, *(f"p/g/z/quarter/00{n}" for n in range(3))]


async def test_a_slot_that_lost_its_room_to_a_host_change_is_refused_even_before_it_is_gone() -> None:
    provider = await Provider(document({"n": node("g")})).start()
    machine = (await provider.core.get(FULL)).machine
    provider.change(document({"n": node("g", filled=1)}))
    answer = provider.backend.admit(machine, Kind.CREATE)
    assert answer == Refusal("there is no room for it any more; take another slot")
    await settle()
    assert await provider.ids() == [HALF, *(f"p/g/z/quarter/00{n}" for n in range(3))]


async def test_a_restart_keeps_rooms_of_hosts_of_failures_and_of_creates_that_were_not_begun(tmp_path: Path) -> None:
    body, state = document({"n": node("g"), "m": node("g", filled=1)}), tmp_path / "s.db"
    provider = await Provider(body, state=state).start()
    first_ref = await made(provider, HALF)
    provider.driver.fails["create"] = RuntimeError("no")
    await provider.core.create("p/g/z/half/001")
    await settle()
    provider.driver.fails.clear()
    provider.driver.gate.clear()
    await provider.core.create(QUARTER)
    await settle()
    put = provider.book.put
    provider.book.put = lambda _id, _row: asyncio.Event().wait()  # type: ignore[assignment,method-assign,return-value]
    await provider.core.create("p/g/z/quarter/001")
    await settle()
    provider.book.put = put  # type: ignore[method-assign]
    assert set(provider.book.load()) == {HALF, "p/g/z/half/001", QUARTER}
    before = await provider.ids(S.SPECULATIVE)
    ours = provider.backend.ours
    await provider.core.stop()
    provider.driver.gate.set()

    again = await Provider(body, driver=provider.driver, book=provider.book, state=state).start()
    assert again.backend.ours == ours
    assert await again.ids(S.SPECULATIVE) == before
    await settle()
    assert await again.ref(HALF) == first_ref
    assert await state_of(again.core, "p/g/z/half/001") is S.FAILED
    for number in range(2):
        assert await again.ref(f"p/g/z/quarter/00{number}") == ours[f"g-z-quarter-00{number}"].ref
    await again.core.stop()


@pytest.mark.parametrize("is_there_first", [True, False])
async def test_a_host_that_stands_for_a_slot_is_found_and_takes_its_room(is_there_first: bool) -> None:
    provider = Provider(document({"n": node("g")}))
    if not is_there_first:
        await provider.start()
        await settle()
    for name in ("g-z-half-001", "somebody"):
        provider.driver.standing[name] = Standing(host="n", instance=name)
    if is_there_first:
        await provider.start()
    await asyncio.sleep(PASSES_SECONDS + 10)
    assert await state_of(provider.core, "p/g/z/half/001") is S.IDLE
    assert await provider.ids(S.SPECULATIVE) == [HALF, QUARTER, "p/g/z/quarter/001"]


async def test_a_machine_that_may_run_pods_stays_failed() -> None:
    driver = InstantDriver()
    driver.found = FoundKind.DIRTY
    provider = await Provider(document({"n": node("g")}), driver=driver, failed_hold_seconds=5).start()
    await made(provider, FULL)
    driver.fails["configure"] = RuntimeError("no")
    await provider.core.configure(FULL, "c-1", b"", {})
    await asyncio.sleep(30)
    assert await state_of(provider.core, FULL) is S.FAILED
    assert "g-z-full-000" in driver.standing


async def test_metrics_tell_slots_losses_and_free_disk() -> None:
    provider = await Provider(document({"n": node("g")})).start()
    registry = CollectorRegistry()
    export(provider.backend, registry)
    await made(provider, QUARTER)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"bigfleet_provider_partition_{name}", labels)

    assert value("slots", group="g", interval="quarter") == 3
    assert value("slots", group="g", interval="full") == 0
    assert value("lost_allocations_total", group="g", interval="full") == 1
    assert value("lost_allocations_total", group="g", interval="half") == 1
    assert value("free_disk_mebibytes", group="g") == 150_040
    assert provider.backend.status() == {"group g": "1 hosts, 4 slots, 1 instances, 150040 MiB of disk free"}
