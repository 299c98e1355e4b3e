"""Configure, Drain, Delete and the way out of a failure: what is ordered, what is left, and what is never shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.backend import AgentReady, AwsBackend
from bigfleet.provider.kit.administration import AdminRefused
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import (
    MACHINE,
    OFFERING,
    SPOT_MACHINE,
    SPOT_OFFERING,
    MemoryEc2,
    MemoryObjects,
    dropped,
    make_backend,
    refused,
)
from tests.provider.harness import make_core, refusal_of, started

pytestmark = pytest.mark.virtual_time
WHO = "uid 1000 (ada)"
BLOB = b"#!/bin/sh\nkubeadm join --token 0123456789abcdef\n"
NOT_VISIBLE = refused("DescribeReplaceRootVolumeTasks", "InvalidReplaceRootVolumeTaskId.NotFound")


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock(), objects=MemoryObjects())


async def serve(
    backend: AwsBackend,
    *,
    store: SqliteProviderStore | None = None,
    failed_hold_seconds: float = 0.0,
    reconcile_interval_seconds: float = 60.0,
) -> CapacityCore:
    options = CoreOptions(
        is_inline=True,
        failed_hold_seconds=failed_hold_seconds,
        reconcile_interval_seconds=reconcile_interval_seconds,
    )
    return await started(make_core(backend, readiness=AgentReady(backend), store=store, options=options))


def store_in(folder: Path) -> SqliteProviderStore:
    """Return a state that outlives a core."""
    return SqliteProviderStore(folder / "s.db", is_power_safe=False)


async def idle(core: CapacityCore, machine_id: str = MACHINE) -> str:
    await core.create(machine_id)
    record = await settled(core, machine_id)
    assert record.state is MachineState.IDLE, record.machine.last_error
    return record.machine.host.ref


async def configured(core: CapacityCore, machine_id: str = MACHINE, cluster: str = "team-a") -> Record:
    await core.configure(machine_id, cluster, BLOB, {})
    return await settled(core, machine_id)


async def drained(core: CapacityCore, machine_id: str = MACHINE, grace_seconds: int = 0) -> Record:
    await core.drain(machine_id, grace_seconds)
    return await settled(core, machine_id)


def objects(ec2: MemoryEc2) -> MemoryObjects:
    assert ec2.objects is not None
    return ec2.objects


async def test_a_configure_leaves_no_data_and_an_order_without_any(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    record = await configured(core)
    assert (record.state, record.machine.node_name) == (MachineState.CONFIGURED, f"node-{ref}")
    assert all(BLOB not in content for content in objects(ec2).content.values())
    assert record.operation is not None
    order = ec2.instances[ref].tags["bigfleet:configure"]
    assert order.startswith(f"{record.operation.id} ")
    assert len(order.partition(" ")[2]) == 64
    assert ec2.instances[ref].tags["bigfleet:cluster"] == "team-a"


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_configure_survives_lost_answers(is_after: bool, tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.faults["CreateTags"] = [dropped("CreateTags", is_after=is_after)] * 2
    objects(ec2).faults = [AwsError("s3:PutObject", "SlowDown", "slow", status=503)]
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    assert (await configured(core)).state is MachineState.CONFIGURED


async def test_a_bootstrap_that_fails_shows_its_exit_code_and_its_data_is_deleted(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    ec2.exit_code = 3
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    record = await configured(core)
    text = f"BACKEND: AwsRefused: the bootstrap on {ref} ended with exit code 3; see its log there"
    assert (record.state, record.machine.last_error) == (MachineState.FAILED, text)
    assert record.operation is not None
    assert list(objects(ec2).content) == [f"p/{ref}/{record.operation.id}.result"]


async def test_an_agent_that_never_answers_ends_in_a_timeout_without_data_left(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.exit_code = None
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    record = await configured(core)
    assert record.machine.last_error.startswith("TIMEOUT: timeout: configure did not end in 300 s")
    await ec2.clock.sleep(1)
    assert objects(ec2).content == {}


async def test_cloud_config_is_refused_before_a_call(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    await core.configure(MACHINE, "team-a", b"#cloud-config\nruncmd: []\n", {})
    record = await settled(core, MACHINE)
    assert "use a template that is a script" in record.machine.last_error
    assert ec2.calls["CreateTags"] == []


@pytest.mark.parametrize("content", [b"", b"x\n", b"256\nn\n", b"\xff\n", b"-1\n", b"0" * 5000])
async def test_an_answer_that_is_none_fails_the_configure(content: bytes, tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.exit_code = None
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await core.configure(MACHINE, "team-a", BLOB, {})
    await ec2.clock.sleep(1)
    (key,) = objects(ec2).content
    objects(ec2).content[f"{key}.result"] = content
    record = await settled(core, MACHINE)
    assert record.machine.last_error == f"BACKEND: AwsRefused: the answer of {ref} does not begin with an exit code"


async def test_a_node_name_that_is_none_is_left_out(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.exit_code = None
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await core.configure(MACHINE, "team-a", BLOB, {})
    await ec2.clock.sleep(1)
    (key,) = objects(ec2).content
    objects(ec2).content[f"{key}.result"] = b"0\nkubeadm join --token\n"
    record = await settled(core, MACHINE)
    assert record.state is MachineState.CONFIGURED
    assert record.machine.node_name == ec2.instances[ref].private_dns


def serve_unknown(ec2: MemoryEc2, ref: str) -> dict[str, str]:
    """Let an instance serve a cluster without the state, as after the restore of an older one; return its tags."""
    tags = {**ec2.instances[ref].tags, "bigfleet:cluster": "team-b"}
    ec2.instances[ref] = replace(ec2.instances[ref], tags=tags)
    return tags


async def test_an_instance_in_a_cluster_that_the_state_does_not_know_is_configured_for_no_other(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    """Its agent would reset a running node, and the other cluster would get its images, volumes and credentials."""
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    tags = serve_unknown(ec2, ref)
    record = await configured(core)
    assert record.state is MachineState.FAILED
    assert f"{ref} serves team-b" in record.machine.last_error
    assert dict(ec2.instances[ref].tags) == tags


async def test_an_instance_in_a_cluster_that_the_state_does_not_know_is_neither_idle_nor_deleted(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    """The next inventory shows it, and a failed machine that is bound may run pods."""
    core = await serve(make_backend(tmp_path, ec2), failed_hold_seconds=100.0, reconcile_interval_seconds=10.0)
    ref = await idle(core)
    serve_unknown(ec2, ref)
    await ec2.clock.sleep(1000)
    record = await core.get(MACHINE)
    assert (record.state, record.machine.cluster, record.machine.host.ref) == (MachineState.FAILED, "team-b", ref)
    assert [each.id for each in ec2.live()] == [ref]


# ---- drain -----------------------------------------------------------------------------------------------------


async def test_a_drain_replaces_the_root_volume_and_another_cluster_may_come(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await configured(core)
    assert (await drained(core, grace_seconds=30)).state is MachineState.IDLE
    assert list(ec2.roots.values()) == [ref]
    assert not [key for key in ec2.instances[ref].tags if key in ("bigfleet:cluster", "bigfleet:configure")]
    assert (await configured(core, cluster="team-b")).state is MachineState.CONFIGURED


@pytest.mark.parametrize(("grace_seconds", "ordered"), [(0, 0), (300, 300), (400, 400), (3600, 3480)])
async def test_the_agents_grace_leaves_time_for_the_reset(
    grace_seconds: int, ordered: int, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    await configured(core)
    await drained(core, grace_seconds=grace_seconds)
    (order,) = ec2.drains
    assert int(order.split()[1]) in (ordered, ordered - 1)


async def test_a_drain_without_an_answer_replaces_the_root_volume_all_the_same(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await configured(core)
    ec2.exit_code = None
    assert (await drained(core, grace_seconds=30)).state is MachineState.IDLE
    assert list(ec2.roots.values()) == [ref]


async def test_a_root_volume_that_is_not_replaced_leaves_the_machine_failed_and_bound(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await configured(core)
    ec2.root_state = "failed"
    record = await drained(core)
    assert (record.state, record.machine.cluster) == (MachineState.FAILED, "team-a")
    assert f"the root volume of {ref} was not replaced" in record.machine.last_error
    assert ec2.instances[ref].tags["bigfleet:cluster"] == "team-a"


async def test_a_replacement_that_ec2_does_not_show_at_once_is_waited_for(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await configured(core)
    ec2.faults["DescribeReplaceRootVolumeTasks"] = [NOT_VISIBLE] * 2
    assert (await drained(core)).state is MachineState.IDLE
    assert list(ec2.roots.values()) == [ref]


async def test_a_replacement_that_ec2_does_not_show_for_a_minute_fails_the_drain(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    await configured(core)
    ec2.faults["DescribeReplaceRootVolumeTasks"] = [NOT_VISIBLE] * 1000
    record = await drained(core)
    assert (record.state, record.machine.cluster) == (MachineState.FAILED, "team-a")
    assert "InvalidReplaceRootVolumeTaskId.NotFound" in record.machine.last_error
    assert len(ec2.calls["DescribeReplaceRootVolumeTasks"]) in (12, 13, 14)


async def test_a_tag_that_ec2_still_shows_after_a_drain_does_not_refuse_the_next_configure(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    await idle(core)
    await configured(core)
    ec2.tag_lag_seconds = 30.0
    assert (await drained(core)).state is MachineState.IDLE
    record = await configured(core, cluster="team-b")
    assert (record.state, record.machine.cluster) == (MachineState.CONFIGURED, "team-b")


async def test_a_tag_that_somebody_sets_after_a_drain_refuses_a_configure(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ref = await idle(core)
    await configured(core)
    assert (await drained(core)).state is MachineState.IDLE
    await ec2.add_tags(ref, {"bigfleet:cluster": "team-c"})
    record = await configured(core, cluster="team-b")
    assert f"{ref} serves team-c" in record.machine.last_error


async def test_with_reset_none_a_machine_returns_only_to_its_former_cluster(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2, reset="none"))
    ref = await idle(core)
    assert (await core.get(MACHINE)).machine.labels["bigfleet.dev/reset"] == "none"
    await configured(core)
    assert (await drained(core)).state is MachineState.IDLE
    assert ec2.roots == {}
    assert (await configured(core)).state is MachineState.CONFIGURED
    await drained(core)
    text = f"{MACHINE} served team-a and its drain resets nothing: it can only return to team-a, or be deleted"
    assert await refusal_of(core.configure(MACHINE, "team-b", BLOB, {})) == (Code.ABORTED, text)
    # A provider without its state knows it by the tag.
    await core.stop()
    without_state = await serve(make_backend(tmp_path, ec2, reset="none"))
    record = await configured(without_state, cluster="team-b")
    text = f"{ref} served team-a and was not reset: it can only return to team-a"
    assert record.machine.last_error == f"BACKEND: AwsRefused: {text}"


async def test_with_reset_none_a_drain_without_an_answer_fails(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2, reset="none"))
    ref = await idle(core)
    await configured(core)
    ec2.exit_code = None
    record = await drained(core, grace_seconds=30)
    assert record.machine.last_error == f"BACKEND: AwsRefused: the agent of {ref} did not drain it in 90 s"
    assert record.machine.cluster == "team-a"


@pytest.mark.parametrize(("is_refused", "reset"), [(True, "replace-root"), (False, "delete-only")])
async def test_what_is_not_reset_cannot_be_configured_again_and_stays_idle(
    is_refused: bool, reset: str, tmp_path: Path, ec2: MemoryEc2
) -> None:
    """EC2 replaces no root volume of metal types; what it refuses is treated as with delete-only."""
    core = await serve(make_backend(tmp_path, ec2, reset=reset))
    ref = await idle(core)
    await configured(core)
    if is_refused:
        ec2.faults["CreateReplaceRootVolumeTask"] = [refused("CreateReplaceRootVolumeTask", "Unsupported")]
    assert (await drained(core)).state is MachineState.IDLE
    text = f"{ref} served team-a and was not reset: delete the machine"
    assert await refusal_of(core.configure(MACHINE, "team-a", BLOB, {})) == (Code.RESOURCE_EXHAUSTED, text)
    await ec2.clock.sleep(100)
    record = await core.get(MACHINE)
    assert (record.state, record.machine.labels["bigfleet.dev/reset"]) == (MachineState.IDLE, "none")
    await core.delete(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.SPECULATIVE


async def test_a_spot_machine_is_reset_like_any_other(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2, {**SPOT_OFFERING, "price_per_hour": 0.03}))
    ref = await idle(core, SPOT_MACHINE)
    await configured(core, SPOT_MACHINE)
    await drained(core, SPOT_MACHINE)
    assert list(ec2.roots.values()) == [ref]
    assert (await configured(core, SPOT_MACHINE, cluster="team-b")).state is MachineState.CONFIGURED


async def test_a_provider_that_was_restarted_knows_what_was_not_reset(tmp_path: Path, ec2: MemoryEc2) -> None:
    """Before its first inventory a call is accepted, the instance's tag refuses it, and nothing is ordered."""
    core = await serve(make_backend(tmp_path, ec2, reset="delete-only"), store=store_in(tmp_path))
    await idle(core)
    await configured(core)
    await drained(core)
    await core.stop()
    orders = len(ec2.calls["CreateTags"])
    backend = make_backend(tmp_path, ec2, reset="delete-only")
    again = await serve(backend, store=store_in(tmp_path), failed_hold_seconds=60.0, reconcile_interval_seconds=1e6)
    record = await configured(again, cluster="team-a")
    assert "served team-a and was not reset" in record.machine.last_error
    # It is in no cluster: the binding that never came into effect is cleared.
    await ec2.clock.sleep(1000)
    record = await again.get(MACHINE)
    assert (record.state, record.machine.cluster) == (MachineState.IDLE, "")
    code, _text = await refusal_of(again.configure(MACHINE, "team-a", BLOB, {}))
    assert code is Code.RESOURCE_EXHAUSTED
    assert len(ec2.calls["CreateTags"]) == orders


# ---- the end, and the way out of a failure ---------------------------------------------------------------------


async def test_deletes_that_come_together_are_one_call_for_a_hundred(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2, {**OFFERING, "count": 150}, launches_per_second=1e6))
    ids = [MACHINE.replace("000", f"{number:03d}") for number in range(150)]
    for each in ids:
        await core.create(each)
    for each in ids:
        await settled(core, each)
    for each in ids:
        await core.delete(each)
    for each in ids:
        assert (await settled(core, each)).state is MachineState.SPECULATIVE
    assert len(ec2.calls["TerminateInstances"]) == 2
    assert ec2.live() == []


async def test_an_unknown_id_in_a_batch_is_gone_and_the_others_end(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ids = [MACHINE.replace("000", f"00{number}") for number in range(4)]
    refs = [await idle(core, each) for each in ids]
    del ec2.instances[refs[2]]
    for each in ids:
        await core.delete(each)
    for each in ids:
        assert (await settled(core, each)).state is MachineState.SPECULATIVE
    assert ec2.live() == []


async def test_a_protected_instance_in_a_batch_fails_by_itself(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await serve(make_backend(tmp_path, ec2))
    ids = [MACHINE.replace("000", f"00{number}") for number in range(2)]
    for each in ids:
        await idle(core, each)
    fault = refused("TerminateInstances", "OperationNotPermitted")
    ec2.faults["TerminateInstances"] = [fault, fault]
    for each in ids:
        await core.delete(each)
    states = [(await settled(core, each)).state for each in ids]
    assert states == [MachineState.FAILED, MachineState.SPECULATIVE]


@pytest.mark.parametrize(
    ("tag", "state", "is_terminated"),
    [
        ("", MachineState.IDLE, False),
        # It may run pods, but no cluster is known to have it: it is given back.
        ("bigfleet:configure", MachineState.SPECULATIVE, True),
    ],
)
async def test_an_instance_of_a_create_that_timed_out_is_found_again(
    tag: str, state: MachineState, is_terminated: bool, tmp_path: Path, ec2: MemoryEc2
) -> None:
    ec2.pending_looks = 61
    core = await serve(make_backend(tmp_path, ec2), failed_hold_seconds=60.0, reconcile_interval_seconds=1e6)
    await core.create(MACHINE)
    record = await settled(core, MACHINE)
    assert record.machine.last_error.startswith("TIMEOUT")
    (instance,) = ec2.live()
    ec2.pending_looks = 0
    if tag:
        await ec2.add_tags(instance.id, {tag: "op-1 0"})
    await ec2.clock.sleep(200)
    record = await core.get(MACHINE)
    assert record.state is state
    assert (ec2.live() == []) is is_terminated


async def test_a_configure_that_ordered_nothing_frees_the_machine(tmp_path: Path, ec2: MemoryEc2) -> None:
    objects(ec2).faults = [AwsError("s3:PutObject", "AccessDenied", "no", status=403)]
    core = await serve(make_backend(tmp_path, ec2), failed_hold_seconds=60.0)
    ref = await idle(core)
    assert (await configured(core)).state is MachineState.FAILED
    await ec2.clock.sleep(200)
    record = await core.get(MACHINE)
    assert (record.state, record.machine.cluster, record.machine.host.ref) == (MachineState.IDLE, "", ref)


async def test_a_bound_machine_that_failed_stays_as_it_is(tmp_path: Path, ec2: MemoryEc2) -> None:
    """It may have joined, and run pods."""
    ec2.exit_code = 1
    core = await serve(make_backend(tmp_path, ec2), failed_hold_seconds=60.0)
    await idle(core)
    await configured(core)
    await ec2.clock.sleep(10_000)
    record = await core.get(MACHINE)
    assert (record.state, record.machine.cluster, len(ec2.live())) == (MachineState.FAILED, "team-a", 1)


# ---- the way out by hand ---------------------------------------------------------------------------------------


async def not_configured(ec2: MemoryEc2, backend: AwsBackend) -> tuple[CapacityCore, str]:
    """Return a core with a machine whose bootstrap failed, so that it is FAILED and bound; and its instance."""
    core = await serve(backend, failed_hold_seconds=60.0, reconcile_interval_seconds=10.0)
    ref = await idle(core)
    ec2.exit_code = 1
    assert (await configured(core)).state is MachineState.FAILED
    ec2.exit_code = 0
    return core, ref


@pytest.mark.parametrize("target", ["idle", "speculative"])
async def test_a_machine_that_a_person_takes_out_of_service_stays_idle_and_serves_another_cluster(
    target: str, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core, ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    await core.administration.recover(WHO, MACHINE, target, is_out_of_service=True)
    assert not {"bigfleet:cluster", "bigfleet:configure", "bigfleet:drain"} & ec2.instances[ref].tags.keys()
    await ec2.clock.sleep(40)
    for _ in range(100):
        record = await core.get(MACHINE)
        assert (record.state, record.machine.cluster, record.machine.host.ref) == (MachineState.IDLE, "", ref)
        await ec2.clock.sleep(10)
    record = await configured(core, cluster="team-b")
    assert (record.state, record.machine.cluster) == (MachineState.CONFIGURED, "team-b")


async def test_a_configure_right_after_a_recovery_does_not_meet_the_removed_tags(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    ec2.tag_lag_seconds = 30.0
    core, _ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    await core.administration.recover(WHO, MACHINE, "idle", is_out_of_service=True)
    assert (await configured(core, cluster="team-b")).state is MachineState.CONFIGURED


async def test_a_recovery_whose_tags_cannot_be_removed_is_refused_with_the_remedy(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core, ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    before = await core.get(MACHINE)
    tags = dict(ec2.instances[ref].tags)
    ec2.faults["DeleteTags"] = [refused("DeleteTags", "UnauthorizedOperation")] * 2
    with pytest.raises(AdminRefused) as refusal:
        await core.administration.recover(WHO, MACHINE, "idle", is_out_of_service=True)
    assert str(refusal.value) == (
        f"the backend did not mark host {ref} of {MACHINE} as out of service: AwsRefused: "
        "ec2:DeleteTags: UnauthorizedOperation: no (request r-1) (if this persists, delete the tags "
        f"bigfleet:cluster, bigfleet:configure, bigfleet:drain of {ref} in EC2); "
        "the machine is still FAILED, repeat the command"
    )
    assert (await core.get(MACHINE), dict(ec2.instances[ref].tags)) == (before, tags)
    # The remedy needs no right to delete tags.
    rest = {key: value for key, value in tags.items() if key not in ("bigfleet:cluster", "bigfleet:configure")}
    ec2.instances[ref] = replace(ec2.instances[ref], tags=rest)
    await core.administration.recover(WHO, MACHINE, "idle", is_out_of_service=True)
    assert (await core.get(MACHINE)).state is MachineState.IDLE


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_machine_whose_instance_is_gone_is_recovered_to_speculative(
    is_known: bool, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core, ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    instance = ec2.instances.pop(ref)
    if is_known:
        ec2.instances[ref] = replace(instance, state="terminated")
    await core.administration.recover(WHO, MACHINE, "speculative", is_out_of_service=True)
    await ec2.clock.sleep(100)
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE


async def test_an_instance_that_vanishes_while_it_is_marked_is_gone(tmp_path: Path, ec2: MemoryEc2) -> None:
    core, _ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    ec2.faults["DeleteTags"] = [refused("DeleteTags", "InvalidInstanceID.NotFound")]
    await core.administration.recover(WHO, MACHINE, "speculative", is_out_of_service=True)
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE


async def test_a_person_who_says_that_a_machine_serves_leaves_its_tags(tmp_path: Path, ec2: MemoryEc2) -> None:
    core, ref = await not_configured(ec2, make_backend(tmp_path, ec2))
    tags = dict(ec2.instances[ref].tags)
    await core.administration.recover(WHO, MACHINE, "configured", is_out_of_service=True)
    assert ((await core.get(MACHINE)).state, dict(ec2.instances[ref].tags)) == (MachineState.CONFIGURED, tags)


async def test_with_delete_only_a_machine_that_was_taken_out_of_service_can_only_be_deleted(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    """Nothing was reset, also by the word of a person."""
    core, ref = await not_configured(ec2, make_backend(tmp_path, ec2, reset="delete-only"))
    await core.administration.recover(WHO, MACHINE, "idle", is_out_of_service=True)
    text = f"{ref} served team-a and was not reset: delete the machine"
    assert await refusal_of(core.configure(MACHINE, "team-a", BLOB, {})) == (Code.RESOURCE_EXHAUSTED, text)
    await core.delete(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.SPECULATIVE
