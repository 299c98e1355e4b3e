"""The process of the honest clusters: real sessions of `bigfleet.operator`, whose demand grows when they are asked."""

import asyncio
import statistics
import sys
import time
from contextlib import suppress

from bench.processes.streams import WantingCluster, next_command, say, share_of
from bench.workloads.shard import cluster_id
from bigfleet.cli.runtime.system import SystemClock, configure_logging, run_loop, system_rng
from bigfleet.model.frames import ECHO_ROLLUP, Acknowledgement, NodeStateUpdate
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.ports import SessionEnded
from bigfleet.operator.session import SessionClient, SessionSettings
from bigfleet.rpc.clients.session import GrpcSessionDialer

#: Often enough that a shard that does not answer is noticed.
SETTINGS = SessionSettings(rollup_interval_seconds=5.0, rollup_gap_seconds=1.0)


class GrowingCluster(WantingCluster):
    """Wants one machine more after each step, and notes what it hears."""

    def __init__(self, cluster: ClusterId) -> None:
        super().__init__(cluster, 1)
        self.wants = True
        self.sessions_lost = 0
        self.lost_because: list[str] = []
        #: Timestamp of the newest roll-up, and of the newest that was acknowledged.
        self.reported_unix_nanos = self.acknowledged_unix_nanos = 0
        self.latencies_ms: list[float] = []
        #: Machines that are Configured for this cluster now.
        self.configured: set[str] = set()
        self.changed_unix_nanos = 0

    @property
    def machines(self) -> int:
        """How many machines it wants."""
        return self._machines

    def grow(self) -> None:
        """Want one more."""
        self._machines += 1
        self.changed_unix_nanos = time.time_ns()

    @property
    def is_settled(self) -> bool:
        """Return whether the last change was acknowledged and carried out."""
        is_acknowledged = self.acknowledged_unix_nanos >= self.changed_unix_nanos
        return self.connected.is_set() and is_acknowledged and len(self.configured) == self._machines

    def session_closed(self, ended: SessionEnded) -> None:
        """Count it."""
        super().session_closed(ended)
        self.sessions_lost += 1
        self.lost_because.append(str(ended))

    def acknowledged(self, ack: Acknowledgement) -> None:
        """Note how long the shard took."""
        if ack.echo == ECHO_ROLLUP:
            self.acknowledged_unix_nanos = max(self.acknowledged_unix_nanos, ack.rollup_timestamp_unix_nanos)
            self.latencies_ms.append((time.time_ns() - ack.rollup_timestamp_unix_nanos) / 1e6)

    def node_state(self, update: NodeStateUpdate) -> None:
        """Note which machines the cluster has."""
        super().node_state(update)
        if update.state is MachineState.CONFIGURED:
            self.configured.add(update.machine_id)
        else:
            self.configured.discard(update.machine_id)


async def run_honest(port: int, clusters: int) -> int:
    """Hold the sessions until standard input ends."""
    agents = [GrowingCluster(cluster_id(number)) for number in range(clusters)]
    clients = [
        SessionClient(
            cluster=cluster_id(number),
            agent=agent,
            dialer=GrpcSessionDialer(f"127.0.0.1:{port}"),
            clock=SystemClock(),
            rng=system_rng(),
            settings=SETTINGS,
        )
        for number, agent in enumerate(agents)
    ]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for agent in agents:
        await agent.connected.wait()
    say(sessions=len(agents))
    while word := await next_command():
        match word:
            case "step":
                for agent, client in zip(agents, clients, strict=True):
                    agent.grow()
                    client.demand_changed()
            case "latencies":
                found = sorted(ms for agent in agents for ms in agent.latencies_ms)
                for agent in agents:
                    agent.latencies_ms.clear()
                say(
                    acknowledgements=len(found),
                    p50_ms=statistics.median(found) if found else 0.0,
                    p99_ms=share_of(found, 99) if found else 0.0,
                    most_ms=found[-1] if found else 0.0,
                )
            case "count":
                say(
                    wanted=[agent.machines for agent in agents],
                    configured=[len(agent.configured) for agent in agents],
                    settled=sum(agent.is_settled for agent in agents),
                    connected=sum(agent.connected.is_set() for agent in agents),
                    lost=sum(agent.sessions_lost for agent in agents),
                    because=[reason for agent in agents for reason in agent.lost_because][:5],
                    cpu_seconds=time.process_time(),
                )
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        await asyncio.gather(*tasks, return_exceptions=True)
    return 0


def main() -> None:
    """Run with port and number of clusters."""
    port, clusters = map(int, sys.argv[1:])
    configure_logging("bench-honest", "error")
    sys.exit(run_loop(lambda: run_honest(port, clusters)))


if __name__ == "__main__":
    main()
