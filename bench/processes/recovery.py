"""Runs what a shard needs while `bench.workloads.recovery` measures it: a fleet's state file, and its operators.

`fleet STATE MACHINES` writes the state file of a provider. `operators PORT MACHINES` holds the session of each cluster
of that fleet, which sends the rows of its machines each time that it is opened. None of that is timed.
"""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from bench.engine_fleets import cluster_rows
from bench.processes.streams import WantingCluster, next_command, say
from bench.provider_fleet import recovery_records, write_records
from bigfleet.cli.runtime.system import SystemClock, configure_logging, run_loop, system_rng
from bigfleet.model.frames import RollUp
from bigfleet.operator.session import SessionClient
from bigfleet.rpc.clients.session import GrpcSessionDialer

CLUSTERS = 100


class ReportingCluster(WantingCluster):
    """A cluster that reports the rows of W8's machines."""

    def __init__(self, number: int, machines: int) -> None:
        self.rows = tuple(cluster_rows(number, machines * 8 // 10 // CLUSTERS))
        self.cluster = self.rows[0].cluster
        super().__init__(self.cluster, machines)

    def roll_up(self) -> RollUp | None:
        """Return the rows."""
        return RollUp(cluster_id=self.cluster, timestamp_unix_nanos=time.time_ns(), needs=self.rows)


def fleet_size(machines: int) -> int:
    """Return how many machines there are: shares of archetypes are rounded."""
    return sum(1 for _record in recovery_records(machines, CLUSTERS))


async def run_operators(port: int, machines: int) -> int:
    """Hold the sessions until the input ends."""
    agents = [ReportingCluster(number, machines) for number in range(CLUSTERS)]
    clients = [
        SessionClient(
            cluster=agent.cluster,
            agent=agent,
            dialer=GrpcSessionDialer(f"127.0.0.1:{port}"),
            clock=SystemClock(),
            rng=system_rng(),
        )
        for agent in agents
    ]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for agent in agents:
        await agent.connected.wait()
    say(rows=sum(len(agent.rows) for agent in agents), sessions=len(agents))
    while await next_command():
        pass
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        await asyncio.gather(*tasks, return_exceptions=True)
    return 0


def main() -> int:
    """Run what the command line names."""
    configure_logging("bench", "error")
    if sys.argv[1] == "fleet":
        path, machines = Path(sys.argv[2]), int(sys.argv[3])
        size = fleet_size(machines)
        write_records(path, recovery_records(machines, CLUSTERS), size)
        say(machines=size)
        return 0
    return run_loop(lambda: run_operators(int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    os._exit(main())
