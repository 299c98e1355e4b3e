"""What a caller sees of virtual machines on hosts, and what is left on the hosts (docs/spec/libvirt-provider.md)."""

import asyncio
from dataclasses import replace

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.libvirt.domain_steps import Guest, discard_leftovers
from bigfleet.provider.backends.libvirt.hosts_file import parse_kvm_hosts
from bigfleet.provider.backends.libvirt.hypervisor import DomainRecord
from bigfleet.provider.backends.libvirt.names import domain_name, overlay_name, seed_name
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.testing import certify
from tests.conformance.certifications import certification_of
from tests.provider.backends.libvirt.memory_host import (
    IMAGE,
    RECONCILE_SECONDS,
    MemoryDomain,
    MemoryHost,
    Nodes,
    Provider,
    document,
)
from tests.provider.harness import settle, state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
SMALL, LARGE = "p/z/h/small/000", "p/z/h/large/000"
BLOB = b"#cloud-config: token 0123456789abcdef"


def passes(count: int = 1) -> float:
    """Return the seconds after which so many inventories were read, with any jitter."""
    return RECONCILE_SECONDS * 1.25 * count


# ---- slots -----------------------------------------------------------------------------------------------------------


async def test_slots_are_as_many_as_would_fit_of_each_type_and_say_host_price_and_reset() -> None:
    provider = await Provider().start()
    larges = [f"p/z/h/large/{n:03d}" for n in range(2)]
    assert await provider.ids() == larges + [f"p/z/h/small/{n:03d}" for n in range(4)]
    machine = (await provider.core.get(LARGE)).machine
    assert dict(machine.labels) == {"topology.bigfleet/physical-host": "h", "bigfleet.dev/reset": "reimage"}
    assert dict(machine.resources) == {"cpu": "2", "memory": "4096Mi", "ephemeral-storage": "40960Mi"}
    assert machine.price_usd_per_hour == pytest.approx(2 * 0.01 + 4 * 0.005)


async def test_a_machine_takes_the_room_of_slots_of_other_types_until_it_is_deleted() -> None:
    provider = await Provider().start()
    everything = await provider.ids()
    await provider.create(LARGE)
    assert await provider.ids(S.SPECULATIVE) == ["p/z/h/large/001", SMALL, "p/z/h/small/001"]
    await provider.core.delete(LARGE)
    await settle()
    assert await provider.ids(S.SPECULATIVE) == everything
    assert (provider.host.domains_by_name, provider.host.leftovers) == ({}, [])


async def test_creates_at_once_never_take_more_than_there_is() -> None:
    provider = await Provider().start()
    calls = [provider.core.create(machine_id) for machine_id in await provider.ids()]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await settle()
    taken = [domain.vcpus for domain in provider.host.domains_by_name.values()]
    assert sum(taken) == 4
    assert len(taken) == sum(not isinstance(answer, BaseException) for answer in answers)


async def test_overcommitment_multiplies_processors_and_memory() -> None:
    body = document(h={"overcommit": {"cpu": 3.0, "memory": 1.5}})
    provider = await Provider(body).start()
    assert len([each for each in await provider.ids() if "/small/" in each]) == 6


async def test_domains_of_others_take_room_and_are_neither_listed_nor_touched() -> None:
    provider = Provider()
    provider.host.domains_by_name["db"] = MemoryDomain("u", 2, 4096, None)
    await provider.start()
    assert await provider.ids() == [LARGE, SMALL, "p/z/h/small/001"]
    await asyncio.sleep(passes())
    assert provider.host.effects == []
    del provider.host.domains_by_name["db"]
    await asyncio.sleep(passes(2))
    await provider.create(SMALL)
    # What a host gains is announced with the next step.
    assert len(await provider.ids(S.SPECULATIVE)) == 4


async def test_machines_of_another_provider_take_room_as_well() -> None:
    provider, other = Provider(), "q/z/h/small/000"
    record = DomainRecord(machine_id=other, operation_id="op-1", provider="q")
    provider.host.domains_by_name[domain_name(other)] = MemoryDomain("u", 2, 4096, record)
    await provider.start()
    assert await provider.ids() == [LARGE, SMALL, "p/z/h/small/001"]


async def test_another_hosts_file_moves_slots_and_leaves_machines() -> None:
    provider = await Provider(document(a={}, b={})).start()
    await provider.create("p/z/a/small/000")
    provider.backend.replace_hosts(parse_kvm_hosts(document(b={})))
    await asyncio.sleep(passes(4))
    assert await state_of(provider.core, "p/z/a/small/000") is S.IDLE
    assert {each.split("/")[2] for each in await provider.ids(S.SPECULATIVE)} == {"b"}


# ---- create ----------------------------------------------------------------------------------------------------------


async def test_a_created_machine_is_a_domain_whose_names_follow_from_its_id() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    record = await provider.core.get(SMALL)
    name = domain_name(SMALL)
    assert (record.state, record.machine.host.ref) == (S.IDLE, f"h/{name}")
    assert list(provider.host.domains_by_name) == [name]
    assert provider.host.leftovers == [f"{name}-seed.iso", f"{name}.qcow2"]
    assert provider.host.only.is_active
    assert provider.host.only.record is not None
    assert provider.host.only.record.machine_id == SMALL


async def test_a_domain_of_others_with_the_name_of_a_machine_fails_the_create_and_is_not_touched() -> None:
    provider = Provider()
    other = MemoryDomain("u", 0, 0, None)
    provider.host.domains_by_name[domain_name(SMALL)] = other
    await provider.start()
    await provider.create(SMALL)
    record = await provider.core.get(SMALL)
    assert record.state is S.FAILED
    assert f"domain {domain_name(SMALL)} (u) was not made by BigFleet" in record.machine.last_error
    assert provider.host.domains_by_name == {domain_name(SMALL): other}
    assert provider.host.effects == []


async def test_a_domain_of_an_older_operation_fails_the_create_and_is_found_again() -> None:
    first = await Provider().start()
    await first.create(SMALL)
    # The state is lost, and the machine was offered again before the orphan was seen.
    provider = Provider(hosts=first.hosts)
    domain = provider.host.domains_by_name.pop(domain_name(SMALL))
    await provider.start()
    provider.host.domains_by_name[domain_name(SMALL)] = domain
    await provider.create(SMALL)
    assert "exists already, made by operation" in (await provider.core.get(SMALL)).machine.last_error
    assert provider.host.only is domain
    assert domain.is_active


@pytest.mark.parametrize("trouble", ["is_down", "is_full"])
async def test_a_host_that_is_down_or_full_is_a_stockout_and_other_hosts_go_on(trouble: str) -> None:
    provider = await Provider(document(a={}, b={})).start()
    setattr(provider.hosts["a"], trouble, True)
    await provider.create("p/z/a/small/000")
    await provider.create("p/z/b/small/000")
    record = await provider.core.get("p/z/a/small/000")
    assert (record.state, record.machine.last_error.partition(":")[0]) == (S.FAILED, "STOCKOUT")
    assert await state_of(provider.core, "p/z/b/small/000") is S.IDLE


@pytest.mark.parametrize("hangs", [False, True])
async def test_slots_come_back_with_their_host_however_long_it_was_away(hangs: bool) -> None:
    """More holds pass than there are tries."""
    options = CoreOptions(is_inline=True, failed_hold_seconds=600.0)
    provider = await Provider(document(a={}, b={}), options=options).start()
    everything = await provider.ids()
    host = provider.hosts["a"]
    host.is_down = True
    await provider.create("p/z/a/small/000")
    assert await state_of(provider.core, "p/z/a/small/000") is S.FAILED
    if hangs:
        host.is_down = False
        host.answers.clear()
    await asyncio.sleep(3600)
    assert await state_of(provider.core, "p/z/a/small/000") is S.FAILED
    host.is_down = False
    host.answers.set()
    await asyncio.sleep(600)
    assert await state_of(provider.core, "p/z/a/small/000") is S.SPECULATIVE
    assert await provider.ids(S.SPECULATIVE) == everything


async def test_volumes_that_a_create_needs_are_not_taken_for_leftovers() -> None:
    host = MemoryHost()
    guest = Guest(machine_id=SMALL, provider="p", pool="default", image=IMAGE, disk_mib=1)
    host.volumes[guest.overlay] = host.volumes[guest.seed] = b""
    discard_leftovers(host, guest, lambda: True)
    assert host.leftovers == sorted([guest.overlay, guest.seed])
    discard_leftovers(host, guest, lambda: False)
    assert host.leftovers == []


async def test_a_full_host_recovers_by_itself_and_leaves_no_volume_behind() -> None:
    provider = await Provider(options=CoreOptions(is_inline=True, failed_hold_seconds=60.0)).start()
    provider.host.is_full = True
    await provider.create(SMALL)
    assert await state_of(provider.core, SMALL) is S.FAILED
    provider.host.is_full = False
    await asyncio.sleep(600)
    assert await state_of(provider.core, SMALL) is S.SPECULATIVE
    assert provider.host.leftovers == []
    await provider.create(SMALL)
    assert await state_of(provider.core, SMALL) is S.IDLE


# ---- configure, drain, delete ----------------------------------------------------------------------------------------


async def test_a_configured_machine_booted_first_into_its_cluster_and_its_bootstrap_data_is_gone() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL, blob=BLOB)
    record = await provider.core.get(SMALL)
    assert record.state is S.CONFIGURED
    first, second = provider.host.only.boots
    assert BLOB not in first
    assert BLOB in second
    assert b'"local-hostname": "' + record.machine.node_name.encode() in second
    # That boot had a new disk.
    assert provider.host.volumes[overlay_name(domain_name(SMALL))] == b"written by c-1"
    assert not provider.host.holds(BLOB)
    # cloud-init takes a later boot for one of the same instance.
    seed = provider.host.volumes[seed_name(domain_name(SMALL))]
    instance = second[second.index(b'{"instance-id"') :].partition(b",")[0]
    assert instance in seed


async def test_a_machine_is_configured_only_after_its_bootstrap_data_was_removed() -> None:
    nodes = Nodes()
    nodes.are_ready = False
    provider = await Provider(nodes=nodes).start()
    await provider.create(SMALL)
    await provider.configure(SMALL, blob=BLOB)
    nodes.are_ready, provider.host.writes_fail = True, True
    await asyncio.sleep(60)
    assert await state_of(provider.core, SMALL) is S.CONFIGURING
    provider.host.writes_fail = False
    await asyncio.sleep(5)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED
    assert not provider.host.holds(BLOB)


async def test_each_binding_has_a_node_name_of_its_own() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    names = []
    for _ in range(2):
        await provider.configure(SMALL)
        names.append((await provider.core.get(SMALL)).machine.node_name)
        await provider.drain(SMALL)
    assert len(set(names)) == 2
    assert all(name.startswith(domain_name(SMALL)) for name in names)


async def test_a_node_that_never_gets_ready_fails_the_configure_and_the_bootstrap_data_is_removed() -> None:
    nodes = Nodes()
    nodes.are_ready = False
    provider = await Provider(nodes=nodes).start()
    await provider.create(SMALL)
    await provider.configure(SMALL, blob=BLOB)
    # Something else on the host is looked after meanwhile.
    await provider.create("p/z/h/small/001")
    await provider.core.delete("p/z/h/small/001")
    await asyncio.sleep(passes(3))
    assert await state_of(provider.core, SMALL) is S.CONFIGURING
    assert provider.host.holds(BLOB)
    await asyncio.sleep(320)
    record = await provider.core.get(SMALL)
    assert (record.state, record.machine.last_error.partition(":")[0]) == (S.FAILED, "NOT_READY")
    assert not provider.host.holds(BLOB)


async def test_a_drained_machine_has_no_disk_and_the_next_cluster_finds_nothing_of_the_former() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL, "team-a", BLOB)
    await provider.drain(SMALL)
    assert await state_of(provider.core, SMALL) is S.IDLE
    domain = provider.host.only
    assert not domain.is_active
    assert domain.record is not None
    assert (domain.record.cluster, domain.record.configured_by) == ("", "")
    assert provider.host.leftovers == [seed_name(domain_name(SMALL))]
    await provider.configure(SMALL, "team-b", b"other")
    assert not provider.host.holds(b"team-a")
    assert provider.host.holds(b"written by team-b")


async def test_a_guest_has_its_grace_to_shut_down_and_is_then_switched_off() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL)
    provider.host.obeys_shutdown = False
    await provider.core.drain(SMALL, 60)
    await asyncio.sleep(55)
    assert await state_of(provider.core, SMALL) is S.DRAINING
    assert provider.host.only.is_active
    await asyncio.sleep(10)
    assert await state_of(provider.core, SMALL) is S.IDLE
    assert not provider.host.only.is_active


async def test_the_image_is_never_deleted() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    # Its disk is a second name of the image.
    provider.host.keys[overlay_name(domain_name(SMALL))] = provider.host.volume_key("default", IMAGE) or ""
    await provider.core.delete(SMALL)
    await settle()
    record = await provider.core.get(SMALL)
    assert record.state is S.FAILED
    assert f"is the image {IMAGE}; it is not deleted" in record.machine.last_error
    assert IMAGE in provider.host.volumes


async def test_a_delete_of_what_others_removed_succeeds() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    provider.host.domains_by_name.clear()
    await provider.core.delete(SMALL)
    await settle()
    assert await state_of(provider.core, SMALL) is S.SPECULATIVE
    assert provider.host.leftovers == []


# ---- facts -----------------------------------------------------------------------------------------------------------


async def test_a_domain_that_others_undefined_is_reported_when_libvirt_says_so() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    name = domain_name(SMALL)
    del provider.host.domains_by_name[name]
    provider.host.on_change(name)
    await settle()
    record = await provider.core.get(SMALL)
    assert (record.state, record.machine.last_error.partition(":")[0]) == (S.FAILED, "HOST_LOST")
    assert f"domain {name} is gone" in record.machine.last_error


async def test_a_guest_that_stopped_is_started_again_three_times_and_then_reported() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL)
    domain, name = provider.host.only, domain_name(SMALL)
    for restarts in range(1, 4):
        domain.is_active = False
        provider.host.on_change(name)
        await settle()
        assert domain.is_active
        assert len(domain.boots) == 2 + restarts
        assert await state_of(provider.core, SMALL) is S.CONFIGURED
    domain.is_active = False
    provider.host.on_change(name)
    await settle()
    assert await state_of(provider.core, SMALL) is S.FAILED
    assert "the guest stopped 4 times in 10 minutes" in (await provider.core.get(SMALL)).machine.last_error


async def test_restarts_long_ago_do_not_count() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL)
    for _ in range(6):
        provider.host.only.is_active = False
        provider.host.on_change(domain_name(SMALL))
        await asyncio.sleep(250)
    assert await state_of(provider.core, SMALL) is S.CONFIGURED
    assert provider.host.only.is_active


async def test_a_stopped_guest_is_seen_by_the_inventory_when_no_event_came() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL)
    provider.host.only.is_active = False
    await asyncio.sleep(passes(2))
    assert provider.host.only.is_active


async def test_a_machine_with_an_operation_in_flight_is_not_started_again() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    await provider.configure(SMALL)
    boots = len(provider.host.only.boots)
    await provider.core.drain(SMALL, 60)
    provider.host.on_change(domain_name(SMALL))
    await asyncio.sleep(passes(4))
    assert await state_of(provider.core, SMALL) is S.IDLE
    provider.host.on_change(domain_name(SMALL))
    await settle()
    assert len(provider.host.only.boots) == boots


async def test_machines_of_a_host_that_is_down_stay_as_they_are_and_its_operations_wait() -> None:
    provider = await Provider(document(a={}, b={})).start()
    machines = ["p/z/a/small/000", "p/z/b/small/000"]
    for machine_id in machines:
        await provider.create(machine_id)
        await provider.configure(machine_id)
    provider.hosts["a"].is_down = True
    await provider.core.drain(machines[0], 0)
    await asyncio.sleep(passes(6))
    assert provider.backend.status() == {"host a": "does not answer: connection refused"}
    assert await state_of(provider.core, machines[0]) is S.DRAINING
    assert await state_of(provider.core, machines[1]) is S.CONFIGURED
    await provider.drain(machines[1])
    assert await state_of(provider.core, machines[1]) is S.IDLE
    provider.hosts["a"].is_down = False
    await asyncio.sleep(passes())
    assert await state_of(provider.core, machines[0]) is S.IDLE
    assert provider.backend.status() == {}


async def test_a_host_that_hangs_delays_no_look_at_another() -> None:
    provider = await Provider(document(a={}, b={})).start()
    machines = ["p/z/a/small/000", "p/z/b/small/000"]
    for machine_id in machines:
        await provider.create(machine_id)
        await provider.configure(machine_id)
    provider.hosts["a"].answers.clear()
    for name, machine_id in zip("ab", machines, strict=True):
        provider.hosts[name].only.is_active = False
        provider.hosts[name].on_change(domain_name(machine_id))
    await settle()
    assert [provider.hosts[name].only.is_active for name in "ab"] == [False, True]
    provider.hosts["a"].answers.set()
    await settle()
    assert provider.hosts["a"].only.is_active


async def test_resting_machines_of_a_host_that_is_down_are_not_lost() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    everything = await provider.ids()
    provider.host.is_down = True
    await asyncio.sleep(passes(8))
    assert await state_of(provider.core, SMALL) is S.IDLE
    assert await provider.ids() == everything


async def test_the_machines_are_found_again_when_the_state_was_lost() -> None:
    first = await Provider().start()
    await first.create(LARGE)
    provider = await Provider(hosts=first.hosts).start()
    assert await provider.ids(S.IDLE) == [LARGE]
    assert await provider.ids(S.SPECULATIVE) == ["p/z/h/large/001", SMALL, "p/z/h/small/001"]
    record = (await provider.core.get(LARGE)).machine
    assert record.host.ref == f"h/{domain_name(LARGE)}"


async def test_a_domain_of_another_provider_is_not_deleted() -> None:
    provider = await Provider().start()
    await provider.create(SMALL)
    domain = provider.host.only
    assert domain.record is not None
    domain.record = replace(domain.record, provider="q")
    await provider.core.delete(SMALL)
    await settle()
    record = await provider.core.get(SMALL)
    assert (record.state, record.machine.last_error.partition(";")[0]) == (
        S.FAILED,
        f"BACKEND: NotOurs: domain {domain_name(SMALL)} belongs to machine {SMALL} of provider q",
    )
    assert domain.is_active


# ---- the suite -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_backend_is_certified_on_hosts_in_memory(request: pytest.FixtureRequest) -> None:
    certification = certification_of(request)
    body = document(h={"cpus": 80, "memory": "160Gi", "disk": "8Ti"})
    body["hosts"][0]["disk"] = "8000Gi"
    provider = await Provider(body).start()
    report = await certify(provider.core, profiles=certification.profiles)
    assert [result for result in report.results if result.outcome.name != "PASSED"] == []
    certification.expect(report)
