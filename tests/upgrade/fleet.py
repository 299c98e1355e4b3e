"""Runs coordinator, provider and shard, each from a program of its own, and watches the machines of their clusters."""

import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import grpc

from bigfleet.rpc.wire.gen import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    provider_pb2,
    provider_pb2_grpc,
    shardread_pb2,
    shardread_pb2_grpc,
)
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port, open_channel, wait_until_serving
from tests.upgrade.cluster import Cluster
from tests.upgrade.previous import environment_of, words_of

#: In the order of an upgrade: a server before its clients.
ROLES = ("coordinator", "provider", "shard")
#: Processors that each cluster asks for at first; the largest machines have 96.
FIRST_DEMAND: Mapping[str, int] = {"blue": 300, "green": 100}
_POLL_SECONDS = 0.2
_CALL_SECONDS = 60.0


class Fleet:
    """The processes and their state in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = {role: f"127.0.0.1:{free_port()}" for role in ROLES}
        self.clusters: dict[str, Cluster] = {}
        #: A line for each machine that changed or left its cluster while it was watched.
        self.harmed: list[str] = []
        #: Of the file of each role, as the process left it that was stopped last.
        self.schemas: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # ---- processes

    def start(self, role: str, program: Path) -> None:
        """Start a process and return when it serves."""
        log = self.folder / f"{role}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                words_of(*self._arguments(role)),
                cwd=self.folder,
                env=environment_of(program),
                stdout=output,
                stderr=output,
            )
        self._processes[role] = process
        wait_until_serving(self.addresses[role], process, log)

    def stop(self, role: str) -> None:
        """End a process in order, and note the schema of the file that it leaves."""
        process = self._processes.pop(role)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_SECONDS)
        assert code == 0, f"{role} ended with {code}:\n{self.log(role)}"
        self.schemas[role] = self._schema(role)

    def replace(self, role: str, program: Path) -> None:
        """Run a role with another program, on the same state and address."""
        self.stop(role)
        self.start(role, program)

    def kill(self) -> None:
        """End every process that is left."""
        for process in self._processes.values():
            process.kill()
            process.wait(PATIENCE_SECONDS)

    def refusal(self, role: str, program: Path) -> str:
        """Return what a program says that does not start on the state; it must end with 1."""
        done = self._run(program, self._arguments(role))
        assert done.returncode == 1, done.stdout
        return done.stdout

    def run(self, program: Path, *arguments: str) -> None:
        """Run a command to its end; it must succeed."""
        done = self._run(program, arguments)
        assert done.returncode == 0, done.stdout

    def _run(self, program: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words_of(*arguments),
            cwd=self.folder,
            env=environment_of(program),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text(encoding="utf-8", errors="replace")

    def _arguments(self, role: str) -> Sequence[str]:
        address = self.addresses
        off = ("--metrics-addr", "off")
        match role:
            case "coordinator":
                store = f"sqlite://{self.folder}/coordinator.db"
                return ("coordinator", "--store", store, "--listen", address[role], "--report-interval", "1s", *off)
            case "provider":
                simulated = ("provider", "simulated", "--calm", "--time-scale", "0.001")
                return (*simulated, "--addr", address[role], "--state", f"{self.folder}/provider.db", *off)
            case _:
                peers = ("--provider-addr", address["provider"], "--coordinator-addr", address["coordinator"])
                times = ("--cycle-interval", "500ms", "--report-interval", "1s", "--reclaim-after", "0s")
                return ("shard", "--listen", address[role], "--data-dir", str(self.folder), *peers, *times, *off)

    # ---- state

    def _schema(self, role: str) -> int:
        asked = {"shard": "SELECT value FROM meta WHERE key = 'schema'"}.get(role, "PRAGMA user_version")
        with closing(sqlite3.connect(f"file:{self.folder}/{role}.db?mode=ro", uri=True)) as file:
            ((version,),) = file.execute(asked)
        return int(version)

    def bound(self) -> dict[str, tuple[str, str]]:
        """Return cluster and host of each machine that serves one, as the provider has it. Raises grpc.RpcError."""
        with open_channel(self.addresses["provider"]) as channel:
            stub = provider_pb2_grpc.CapacityProviderStub(channel)
            listed = stub.List(provider_pb2.ListFilter(), timeout=_CALL_SECONDS)
        return {
            machine.id: (machine.cluster, machine.host.ref)
            for machine in listed.machines
            if machine.state == provider_pb2.MACHINE_STATE_CONFIGURED
        }

    def registered_epoch(self) -> int:
        """Return the epoch of the shard that the coordinator knows, 0 for none."""
        with open_channel(self.addresses["coordinator"]) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            try:
                listed = stub.ListShards(coordinator_pb2.ListShardsRequest(), timeout=_CALL_SECONDS)
            except grpc.RpcError:
                return 0
        return max((int(shard.shard_epoch) for shard in listed.shards), default=0)

    def wait_until_registered(self, epoch: int) -> None:
        """Return once the coordinator knows the shard with this epoch or a later one."""
        wait_until(lambda: self.registered_epoch() >= epoch, lambda: f"no report:\n{self.log('coordinator')[-4000:]}")

    def wait_until_met(self) -> None:
        """Return once the shard has decided on the demand that every cluster has now, and all of it is bound."""
        wait_until(self._is_met, lambda: f"demand is not met:\n{self.log('shard')[-4000:]}")

    def _is_met(self) -> bool:
        with open_channel(self.addresses["shard"]) as channel:
            stub = shardread_pb2_grpc.ShardReadStub(channel)
            try:
                frames = list(stub.InspectNeeds(shardread_pb2.InspectNeedsRequest(), timeout=_CALL_SECONDS))
                bound = self.bound()
            except grpc.RpcError:
                return False
        rows = [frame.need for frame in frames if frame.WhichOneof("frame") == "need"]
        asked = {row.cluster_id: row.need.aggregate_resources["cpu"] for row in rows}
        claimed = sum(row.claimed_machine_count for row in rows)
        return (
            asked == {name: str(cluster.cpus) for name, cluster in self.clusters.items()}
            and all(row.satisfied and not row.bootstrap_count + row.provision_count for row in rows)
            and claimed == len(bound)
        )

    # ---- watching

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record in `harmed` what becomes of machines that serve a cluster while the context lasts."""
        is_over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join(PATIENCE_SECONDS)

    def _watch(self, is_over: threading.Event) -> None:
        seen: dict[str, tuple[str, str]] = {}
        while not is_over.wait(_POLL_SECONDS):
            try:
                now = self.bound()
            except grpc.RpcError:
                continue  # The provider is being replaced.
            self.harmed += [
                f"{machine} of {before[0]} became {now.get(machine)}"
                for machine, before in seen.items()
                if now.get(machine) != before
            ]
            seen = now


@contextmanager
def fleet_of(program: Path, folder: Path) -> Iterator[Fleet]:
    """Run a fleet while the context lasts, from the moment that the first demand is met."""
    fleet = Fleet(folder)
    try:
        for role in ROLES:
            fleet.start(role, program)
        for name, cpus in FIRST_DEMAND.items():
            fleet.clusters[name] = Cluster(name, fleet.addresses["shard"], cpus)
        fleet.wait_until_met()
        yield fleet
    finally:
        for cluster in fleet.clusters.values():
            cluster.close()
        fleet.kill()
