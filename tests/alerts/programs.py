"""Processes of BigFleet that a test starts, breaks and mends: each scraped by Prometheus under a name of its own."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.alerts.clusters import Cluster
from tests.alerts.prometheus_server import Prometheus
from tests.coordinator.stores.etcd_process import Cluster as Etcd
from tests.e2e.fault_world import LiveProvider
from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, free_port

ROOT = Path(__file__).parents[2]
#: Durations of the processes, divided by the same factor as those of the rules: a cycle of 10 s, a report and a
#: reconcile of the inventory in a time that the rules assume.
CYCLE, REPORT, INVENTORY = "170ms", "500ms", "1s"


class Program:
    """One process, or none while it is dead; it keeps its addresses and its files over restarts."""

    def __init__(
        self, server: Prometheus, folder: Path, name: str, job: str, *command: str, is_deployed: bool = False
    ) -> None:
        """`{addr}`, `{http}` and `{dir}` are replaced in the command: one of bigfleet, or `-m` and a module.

        One that `is_deployed` is started again when it ends by itself, as by a Deployment of Kubernetes.
        """
        self.name, self.job = name, job
        self.folder = folder / name
        self.folder.mkdir()
        self.log = folder / f"{name}.log"
        self.address, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._server = server
        self._command = command
        self._is_deployed = is_deployed
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self.scrape()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process that runs."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process

    def start(self, *more: str) -> None:
        """Start it; with flags that a later start does not have."""
        assert self._process is None, f"{self.name} runs already"
        places = {"addr": self.address, "http": self.http, "dir": str(self.folder)}
        places["port"] = self.address.rpartition(":")[2]
        words = [word.format(**places) for word in (*self._command, *more)]
        program = [sys.executable, "-m", *words[1:]] if words[0] == "-m" else bigfleet(*words)
        # Through a pipe, as to a service manager: it goes on when there is no room for the process.
        self._process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()

    def kill(self) -> None:
        """End it without a warning."""
        process, self._process = self.process, None
        process.kill()
        process.wait(PATIENCE_SECONDS)

    def restart(self, *more: str) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start(*more)

    def close(self) -> None:
        """Kill it if it runs."""
        if self._process is not None:
            self.thaw()
            self.kill()

    def freeze(self) -> None:
        """Stop it so that it keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """End `freeze`."""
        self.process.send_signal(signal.SIGCONT)

    def reload(self) -> None:
        """Have it read its files again."""
        self.process.send_signal(signal.SIGHUP)

    def fill_disk(self) -> None:
        """Have the kernel refuse every write beyond the first byte of a file."""
        _soft, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1, hard))

    def make_room(self) -> None:
        """End `fill_disk`."""
        _soft, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def scrape(self) -> None:
        """Have Prometheus scrape it."""
        self._server.scrape(self.name, self.job, self.http)

    def vanish(self) -> None:
        """Kill it, and have service discovery list it no more."""
        self.kill()
        self._server.forget(self.name)

    def come_back(self) -> None:
        """End `vanish`."""
        self.start()
        self.scrape()

    def lose(self, *names: str) -> None:
        """Move files of the process aside."""
        for name in names:
            os.rename(self.folder / name, self.folder / f"{name}.aside")

    def find(self, *names: str) -> None:
        """Move files back that `lose` moved."""
        for name in names:
            os.rename(self.folder / f"{name}.aside", self.folder / name)

    def suffer(self, **faults: object) -> None:
        """Have a breakable provider suffer these faults from now on, or none."""
        draft = self.folder / "faults.draft"
        draft.write_text(json.dumps(faults), encoding="utf-8")
        draft.replace(self.folder / "faults.json")

    def start_anew(self) -> None:
        """Kill it and start it without its state."""
        self.kill()
        for path in self.folder.iterdir():
            if path.name != "faults.json":
                path.unlink()
        self.start()

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Copy what a process writes to the log until it ends."""
        assert process.stdout is not None
        with self.log.open("ab", buffering=0) as file:
            file.writelines(process.stdout)
        process.wait(PATIENCE_SECONDS)
        if self._is_deployed and self._process is process:
            self._process = None
            self.start()


LISTEN: Final = ("--listen", "{addr}", "--metrics-addr", "{http}")


class Fleet:
    """The programs of one world by name, and the server that scrapes them."""

    def __init__(self, server: Prometheus, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.programs: dict[str, Program] = {}
        self.clusters: dict[str, Cluster] = {}
        self.providers: dict[str, LiveProvider] = {}
        self.etcd: Etcd | None = None

    def __getitem__(self, name: str) -> Program:
        return self.programs[name]

    def shard(self, name: str, *flags: str) -> Program:
        """Run a shard; without --provider-addr on a few fake machines."""
        provider = () if "--provider-addr" in flags else ("--fake-provider", "4")
        paced = ("--cycle-interval", CYCLE, "--report-interval", REPORT, "--reclaim-after", "0s", "--plan-workers", "0")
        return self._run(name, "shard", "shard", "--data-dir", "{dir}", *LISTEN, *paced, *provider, *flags)

    def coordinator(self, name: str, *flags: str) -> Program:
        """Run a replica on a file of its own."""
        store = () if "--store" in flags else ("--store", "sqlite://{dir}/c.db")
        own = ("--advertise-addr", "{addr}", "--report-interval", REPORT, "--id", name)
        return self._run(name, "coordinator", "coordinator", *LISTEN, *own, *store, *flags)

    def provider(self, name: str, kind: str, *flags: str) -> Program:
        """Run a provider with a state file: one of bigfleet's, or `breakable`, which `suffer` breaks."""
        program = ("-m", "tests.alerts.breakable_provider") if kind == "breakable" else ("provider", kind)
        listen = ("--addr", "{addr}", "--metrics-addr", "{http}", "--state", "{dir}/p.db")
        return self._run(name, "provider", *program, *listen, "--reconcile-interval", INVENTORY, *flags)

    def cluster(self, name: str, shard: str, *, answers: bool = True, joins: bool = True) -> Cluster:
        """Open a session of a cluster once its shard serves."""
        self.clusters[name] = Cluster(self[shard].address, name, answers=answers, joins=joins)
        return self.clusters[name]

    def kill_etcd(self) -> None:
        """Kill every member of etcd."""
        assert self.etcd is not None
        self.etcd.kill()

    def start_etcd(self) -> None:
        """End `kill_etcd`."""
        assert self.etcd is not None
        self.etcd.start()

    def cluster_program(self, name: str, kind: str, wanted: Mapping[str, object], *flags: str) -> Program:
        """Run an operator or a pod controller on a simulated API server."""
        self.set_cluster(name, wanted)
        module = ("-m", "tests.alerts.simulated_cluster", str(self.folder / f"{name}-cluster"))
        common = ("--namespace", "fleet", "--metrics-addr", "{http}")
        return self._run(name, kind, *module, kind, *common, *flags, is_deployed=True)

    def set_cluster(self, name: str, wanted: Mapping[str, object]) -> None:
        """Say what there is in the cluster of a program, and what is wrong with it."""
        folder = self.folder / f"{name}-cluster"
        folder.mkdir(exist_ok=True)
        (folder / "draft").write_text(json.dumps(wanted), encoding="utf-8")
        (folder / "draft").replace(folder / "cluster.json")

    def live_provider(self, name: str, slots: int) -> LiveProvider:
        """Serve a provider from a thread of the test, whose answers can be falsified."""
        folder = self.folder / name
        folder.mkdir()
        self.providers[name] = LiveProvider(folder, slots)
        self.providers[name].start()
        return self.providers[name]

    def close(self) -> None:
        """Kill what runs."""
        for served in self.providers.values():
            served.stop()
        if self.etcd is not None:
            self.etcd.kill()
        for session in self.clusters.values():
            session.close()
        for each in self.programs.values():
            each.close()

    def _run(self, name: str, job: str, *command: str, is_deployed: bool = False) -> Program:
        self.programs[name] = Program(self.server, self.folder, name, job, *command, is_deployed=is_deployed)
        return self.programs[name]
