"""A provider that is killed at any effect on a host: the next start carries the operation on.

docs/spec/libvirt-provider.md §3. Each operation is killed before and after each of its effects, on hosts in memory.
"""

import asyncio
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.libvirt.names import domain_name, domain_uuid, overlay_name, seed_name
from bigfleet.provider.backends.partitioned.book import MemoryInstanceBook
from bigfleet.provider.kit.options import CoreOptions
from tests.provider.backends.libvirt.memory_host import MemoryHost, Provider
from tests.provider.harness import state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
SMALL = "p/z/h/small/000"
BLOB = b"#cloud-config: token 0123456789abcdef"
OPTIONS = CoreOptions(is_inline=True, failed_hold_seconds=0.0, intent_key=bytes(32))
#: Effects of each operation, in order.
EFFECTS = {
    "create": ["make_overlay", "write_volume", "define", "start"],
    "configure": ["destroy", "write_record", "delete_volume", "write_volume", "make_overlay", "start"],
    "drain": ["destroy", "delete_volume", "write_volume", "write_record"],
    "delete": ["destroy", "delete_volume", "write_volume", "delete_volume", "undefine"],
}
REACHED = {"create": S.IDLE, "configure": S.CONFIGURED, "drain": S.IDLE, "delete": S.SPECULATIVE}
#: What follows on a Configure once the node is Ready: the bootstrap data is overwritten.
AFTERWARDS = {"configure": ["write_volume", "write_record"]}
POINTS = [
    (verb, number, is_after)
    for verb, effects in EFFECTS.items()
    for number in range(len(effects) + len(AFTERWARDS.get(verb, ())))
    for is_after in (False, True)
]


async def call(provider: Provider, verb: str) -> None:
    if verb == "create":
        await provider.core.create(SMALL)
    elif verb == "configure":
        await provider.core.configure(SMALL, "team-a", BLOB, {})
    elif verb == "drain":
        await provider.core.drain(SMALL, 0)
    else:
        await provider.core.delete(SMALL)


async def brought_before(provider: Provider, verb: str) -> None:
    """Bring a slot to where an operation begins."""
    if verb != "create":
        await provider.create(SMALL)
    if verb == "drain":
        await provider.configure(SMALL, "team-a", BLOB)


@pytest.mark.parametrize("verb", list(EFFECTS))
async def test_these_are_the_effects_of_an_operation(verb: str, tmp_path: Path) -> None:
    provider = await Provider(state=tmp_path / "s.db", options=OPTIONS).start()
    await brought_before(provider, verb)
    begun = len(provider.host.effects)
    await call(provider, verb)
    await asyncio.sleep(5)
    assert provider.host.effects[begun:] == EFFECTS[verb] + AFTERWARDS.get(verb, [])
    await provider.core.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "number", "is_after"), POINTS)
async def test_an_operation_killed_at_an_effect_is_carried_on_and_leaves_one_of_each(
    verb: str, number: int, is_after: bool, tmp_path: Path
) -> None:
    host, book, state = MemoryHost(), MemoryInstanceBook(), tmp_path / "s.db"
    first = await Provider(hosts={"h": host}, state=state, options=OPTIONS, book=book).start()
    await brought_before(first, verb)
    host.kill_at = (len(host.effects) + number, is_after)
    await call(first, verb)
    operation = (await first.core.get(SMALL)).operation
    await asyncio.sleep(5)
    await first.core.stop()
    assert len(host.effects) == host.kill_at[0] + 1, "it was killed there"

    second = await Provider(hosts={"h": host}, state=state, options=OPTIONS, book=book).start()
    await asyncio.sleep(10)
    assert await state_of(second.core, SMALL) is REACHED[verb]
    assert not host.holds(BLOB)
    name = domain_name(SMALL)
    if verb == "delete":
        assert (host.domains_by_name, host.leftovers) == ({}, [])
        return
    assert list(host.domains_by_name) == [name]
    if verb == "create":
        assert operation is not None
        assert host.only.uuid == domain_uuid(SMALL, operation.id)
    overlays = [] if verb == "drain" else [overlay_name(name)]
    assert host.leftovers == sorted([*overlays, seed_name(name)])
    assert host.only.is_active == (verb != "drain")
    if verb == "configure":
        # Once it was started for the operation it is not started a second time.
        was_started = number > EFFECTS[verb].index("start") or (EFFECTS[verb][number] == "start" and is_after)
        assert len(host.only.boots) == 2 or not was_started
    await second.core.stop()


async def test_without_a_stored_blob_a_configure_ends_as_the_node_says(tmp_path: Path) -> None:
    host, book, state = MemoryHost(), MemoryInstanceBook(), tmp_path / "s.db"
    options = CoreOptions(is_inline=True, failed_hold_seconds=0.0)
    first = await Provider(hosts={"h": host}, state=state, options=options, book=book).start()
    await first.create(SMALL)
    first.nodes.are_ready = False
    await first.configure(SMALL, "team-a", BLOB)
    await first.core.stop()
    assert host.holds(BLOB)

    second = await Provider(hosts={"h": host}, state=state, options=options, book=book, nodes=first.nodes).start()
    await asyncio.sleep(60)
    assert await state_of(second.core, SMALL) is S.CONFIGURING
    assert host.holds(BLOB)
    first.nodes.are_ready = True
    await asyncio.sleep(5)
    assert await state_of(second.core, SMALL) is S.CONFIGURED
    assert not host.holds(BLOB)
    await second.core.stop()


@pytest.mark.parametrize("is_bound", [False, True])
async def test_bootstrap_data_that_a_killed_provider_left_is_removed_when_the_configure_failed(
    is_bound: bool, tmp_path: Path
) -> None:
    host, book, state = MemoryHost(), MemoryInstanceBook(), tmp_path / "s.db"
    options = CoreOptions(is_inline=True, failed_hold_seconds=0.0)
    first = await Provider(hosts={"h": host}, state=state, options=options, book=book).start()
    await first.create(SMALL)
    first.nodes.are_ready = False
    if not is_bound:
        # Killed with the data written, before the machine was started.
        host.kill_at = (len(host.effects) + 3, True)
    await first.configure(SMALL, "team-a", BLOB)
    await first.core.stop()
    assert host.holds(BLOB)

    second = await Provider(hosts={"h": host}, state=state, options=options, book=book, nodes=first.nodes).start()
    await asyncio.sleep(320)
    assert await state_of(second.core, SMALL) is S.FAILED
    assert not host.holds(BLOB)
    await second.core.stop()
