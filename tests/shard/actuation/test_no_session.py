"""Demand of a cluster whose operator is gone: attempts back off, and one audit record counts them."""

import asyncio

import pytest

from bigfleet.model.states import MachineState
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import FakeOperator, World, machine, need

pytestmark = pytest.mark.virtual_time

MACHINES = 60
#: Cycles of ten seconds.
CYCLES = 180


def abandoned(log: MemoryAuditLog) -> tuple[World, FakeOperator]:
    """Return a world whose one cluster asks for all machines and has lost its operator."""
    world = World(audit_log=log)
    world.provider.add(*(machine(f"m{number:03d}", MachineState.IDLE) for number in range(MACHINES)))
    operator = world.connect("c1")
    operator.report(need("c1", str(4 * MACHINES)))
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    return world, operator


@pytest.mark.rule("shard 9.2/5")
async def test_half_an_hour_without_an_operator_is_a_handful_of_records() -> None:
    log = MemoryAuditLog()
    world, _operator = abandoned(log)
    for _ in range(CYCLES):
        await world.cycle()
        await asyncio.sleep(10)

    attempts = world.metric("action_execute_outcomes_total", kind="Bootstrap", outcome="no_session")
    assert {record["outcome"] for record in log.records} == {"no_session"}
    assert len(log.records) <= 7, "30 s, 1, 2, 4, 8 and 10 minutes"
    counted = sum(int(record["message"].rpartition(": ")[2]) for record in log.records)
    assert counted == attempts - (MACHINES - 1), "the attempts after the last record are in the next one"
    assert world.provider.calls == []


@pytest.mark.rule("shard 9.2/5")
async def test_a_session_ends_the_back_off() -> None:
    log = MemoryAuditLog()
    world, _operator = abandoned(log)
    for _ in range(CYCLES):
        await world.cycle()
        await asyncio.sleep(10)
    world.connect("c1")
    await world.cycle()

    assert len([call for call in world.provider.calls if call[0] == "configure"]) == MACHINES
