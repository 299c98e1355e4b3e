"""The simulated network: what arrives, what does not, and what each side learns of it."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from bigfleet.sim.kernel.loop import KernelClock, KernelLoop, run_kernel
from bigfleet.sim.kernel.network import FRAMES_MAX, KEEPALIVE_SECONDS, ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process

T = TypeVar("T")


def run(main: Callable[[Network, Process, Process], Coroutine[Any, Any, T]]) -> T:
    """Run with a network and two processes."""

    async def begin(loop: KernelLoop) -> T:
        network = Network(KernelClock(loop), random.Random(1))
        return await main(network, Process("client"), Process("server"))

    return run_kernel(begin, random.Random(1))


def test_a_call_comes_back_and_its_work_outlives_the_caller() -> None:
    async def main(network: Network, client: Process, server: Process) -> tuple[int, bool]:
        is_done = False

        async def work() -> int:
            nonlocal is_done
            await asyncio.sleep(5)
            is_done = True
            return 7

        answer = await network.call("client", server, work)
        is_done = False
        calling = client.spawn(network.call("client", server, work))
        await asyncio.sleep(1)
        client.kill()
        await asyncio.sleep(10)
        assert not calling.done()
        return answer, is_done

    assert run(main) == (7, True)


@pytest.mark.parametrize("cut", [("client", "server"), ("server", "client")])
def test_a_call_over_a_cut_link_is_lost_and_may_have_been_done(cut: tuple[str, str]) -> None:
    async def main(network: Network, _client: Process, server: Process) -> int:
        done = 0

        async def work() -> None:
            nonlocal done
            done += 1

        network.link(*cut).is_cut = True
        with pytest.raises(ConnectionLost):
            await network.call("client", server, work)
        return done

    assert run(main) == (cut == ("server", "client"))


def test_a_server_that_dies_takes_the_call_with_it() -> None:
    async def main(network: Network, client: Process, server: Process) -> str:
        async def work() -> None:
            await asyncio.sleep(60)

        calling = client.spawn(network.call("client", server, work))
        await asyncio.sleep(1)
        server.kill()
        with pytest.raises(ConnectionLost) as lost:
            await calling
        with pytest.raises(ConnectionLost):
            await network.call("client", server, work)
        return str(lost.value)

    assert run(main) == "server went away with the call"


def test_frames_arrive_in_order_and_a_stalled_link_brings_them_later() -> None:
    async def main(network: Network, client: Process, server: Process) -> tuple[list[int], float]:
        connection = network.connect(client, server)
        for number in range(20):
            await connection.to_server.send(number)
        network.link("client", "server").stalled_until_seconds = 9.0
        seen = [await connection.to_server.receive() for _ in range(20)]
        return seen, network.clock.monotonic_seconds()

    assert run(main) == (list(range(20)), 9.0)


def test_a_writer_waits_for_a_reader_that_takes_nothing() -> None:
    async def main(network: Network, client: Process, server: Process) -> int:
        connection, sent = network.connect(client, server), 0

        async def write() -> None:
            nonlocal sent
            while True:
                await connection.to_server.send(sent)
                sent += 1

        client.spawn(write())
        await asyncio.sleep(60)
        return sent

    assert run(main) == FRAMES_MAX


def test_a_peer_that_is_not_heard_of_is_given_up() -> None:
    async def main(network: Network, client: Process, server: Process) -> float:
        connection = network.connect(client, server)
        network.link("server", "client").is_cut = True
        with pytest.raises(ConnectionLost):
            await connection.to_client.receive()
        assert connection.is_broken
        return network.clock.monotonic_seconds()

    assert KEEPALIVE_SECONDS <= run(main) <= KEEPALIVE_SECONDS + 10


def test_streams_of_the_dead_are_closed_at_once_and_no_others() -> None:
    async def main(network: Network, client: Process, server: Process) -> list[str]:
        other = Process("other")
        connections = [network.connect(client, server), network.connect(server, other), network.connect(client, other)]
        server.kill()
        network.close_streams_of(server)
        # Nobody has looked at one of them.
        return [connection.reason for connection in connections]

    assert run(main) == ["a process died", "a process died", ""]


def test_a_process_that_dies_has_no_outcome() -> None:
    """What it was asked for is not done, and who asked goes on."""

    async def main(network: Network, _client: Process, server: Process) -> tuple[int, bool, float]:
        async def work() -> int:
            await asyncio.sleep(3)
            return 7

        first = await server.outcome(work())
        asyncio.get_running_loop().call_later(1, server.kill)
        second = await server.outcome(work())
        assert first is not None
        return first.result(), second is None, network.clock.monotonic_seconds()

    assert run(main) == (7, True, 4.0)


def test_a_death_ends_the_stream_for_the_other_side() -> None:
    async def main(network: Network, client: Process, server: Process) -> str:
        connection = network.connect(client, server)
        server.kill()
        with pytest.raises(ConnectionLost) as lost:
            await connection.to_client.receive()
        return str(lost.value)

    assert run(main) == "a process died"
