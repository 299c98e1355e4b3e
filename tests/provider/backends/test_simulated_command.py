"""The simulated and the fault provider as processes: bad files, the bill in `admin status`, selectors.

docs/spec/provider.md §19, §20, §21.
"""

import json
from pathlib import Path

import grpc
import pytest

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.commands import run_here
from tests.patience import wait_until
from tests.processes import free_port, serving

BAD_FILES = [
    ("--world", "w.yaml", "interruption: {waves: [{time: 3}]}", "w.yaml: interruption.waves[0].time: unknown key"),
    ("--world", "w.yaml", "faults: {transient: 2}", "w.yaml: faults.transient: 2.0 is a probability"),
    ("--world", "w.yaml", "pools: [", "w.yaml: not YAML: "),
    ("--world", "w.yaml", "interruption: {zone_outages: [{zone: moon, from_seconds: 0, to_seconds: 1}]}",
     "w.yaml: interruption.zone_outages[0].zone: no machine is in 'moon'"),
    ("--world", "w.json", '{"rack_size": "many"}', "w.json: rack_size: Expected `int`"),
    ("--catalog", "c.csv", "instance_type,vcpu\n", "c.csv: line 1: column memory_gib is missing"),
    ("--catalog", "c.csv",
     "instance_type,vcpu,memory_gib,gpus,gpu_model,on_demand_usd_per_hour,architecture\na.1,4,16,0,,-1,amd64\n",
     "c.csv: line 2: column on_demand_usd_per_hour: '-1' is not a price above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "name", "content", "message"), BAD_FILES)
def test_a_bad_file_exits_with_2_and_one_line(flag: str, name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    done = run_here("provider", "simulated", "--state", "s.db", flag, name, cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(f"bigfleet: {flag} {message}")
    assert len(done.stderr.splitlines()) == 1


def wait_for(provider: CapacityProviderStub, machine_id: str, state: "pb.MachineState.ValueType") -> pb.Machine:
    """Return the machine once it is in that state."""
    seen: list[pb.Machine] = []

    def is_so() -> bool:
        seen[:] = [provider.Get(pb.MachineRef(id=machine_id))]
        return seen[0].state == state

    wait_until(is_so, f"{machine_id} did not become {pb.MachineState.Name(state)}")
    return seen[0]


def test_admin_status_prints_what_each_pool_was_billed(tmp_path: Path) -> None:
    address, state = f"127.0.0.1:{free_port()}", tmp_path / "s.db"
    flags = ("--calm", "--time-scale=0.001", "--metrics-addr=off", "--addr", address, "--state", str(state))
    with (
        serving(address, tmp_path / "log", "provider", "simulated", *flags),
        grpc.insecure_channel(address) as channel,
    ):
        provider = CapacityProviderStub(channel)
        provider.Create(pb.CreateRequest(machine_id="simulated/on-demand/std.4x16/sim-1a/000"))
        wait_for(provider, "simulated/on-demand/std.4x16/sim-1a/000", pb.MACHINE_STATE_IDLE)
        table = run_here("provider", "admin", "--state", str(state), "status")
        asked = run_here("provider", "admin", "--state", str(state), "--output", "json", "status")

    assert table.returncode == 0, table.stderr
    assert "pool on-demand/std.4x16/sim-1a" in table.stdout
    substrate = json.loads(asked.stdout)["substrate"]
    assert substrate["pool on-demand/std.4x16/sim-1a"].startswith("8 offered, 1 hosts, billed ")
    assert substrate["pool spot/std.8x32/sim-1a"] == "6 offered, 0 hosts, billed 0 s (0.0000 host-hours)"
    assert substrate["pool bare-metal/metal.64x256/sim-1b"].startswith("8 offered, 8 hosts, billed ")


def test_the_fault_provider_has_its_selectors_and_two_seconds(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ("--addr", address, "--metrics-addr=off")
    with serving(address, tmp_path / "log", "provider", "fault", *flags), grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        machines = provider.List(pb.ListFilter()).machines
        labelled = [machine.id for machine in machines if machine.labels]
        provider.Create(pb.CreateRequest(machine_id="faultcreate-3"))
        refused = wait_for(provider, "faultcreate-3", pb.MACHINE_STATE_FAILED)
        provider.Create(pb.CreateRequest(machine_id="fake-0"))
        assert wait_for(provider, "fake-0", pb.MACHINE_STATE_IDLE).host.provider == "fault"
        provider.Configure(pb.ConfigureRequest(machine_id="fake-0", cluster_id="fault-timeout"))
        hung = wait_for(provider, "fake-0", pb.MACHINE_STATE_FAILED)

    assert len(machines) == 256 + 8
    assert labelled == [f"faultcreate-{number}" for number in range(8)]
    assert refused.last_error.startswith("BACKEND: AskedToFail: ")
    assert hung.last_error == "TIMEOUT: timeout: configure did not end in 2 s"
