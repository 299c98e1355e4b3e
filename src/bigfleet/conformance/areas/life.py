"""Checks LIFE: the four resting states, and the states seen between them (docs/spec/provider.md §2, §8, §9).

This module must not assume that a transitional state is ever seen: a provider may be quicker than a reader.
"""

from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import expect
from bigfleet.conformance.lab import QUIET_SECONDS, Lab
from bigfleet.conformance.ports import Configure, Create, Delete, Drain, MachineSeen
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.slots import NO_RESET, RESET_LABEL, RESETS
from bigfleet.model.states import MachineState

AREA = Area("LIFE")

_ROUNDS = 4
_QUIET_READS = 8
_S = MachineState


@AREA.behaviour(1, ConformanceProfile.CORE)
async def rounds_leave_nothing(lab: Lab) -> None:
    """Four rounds IDLE → CONFIGURED → IDLE leave no cluster, metadata or error."""
    machine_id = await lab.idle()
    for number in range(_ROUNDS):
        await lab.configure(machine_id, metadata={"round": str(number), f"key-{number}": "v"})
        machine = await lab.drain(machine_id)
        expect_unbound(machine, f"round {number + 1} leaves no cluster, metadata or error")


def expect_unbound(machine: MachineSeen, expectation: str) -> None:
    """Raise Broken when a machine shows a cluster, metadata or an error."""
    expect(not machine.cluster and not machine.metadata and not machine.last_error, expectation, machine_text(machine))


@AREA.behaviour(2, ConformanceProfile.CORE)
async def only_configuring_on_the_way(lab: Lab) -> None:
    """On the way to CONFIGURED only CONFIGURING is ever seen."""
    machine_id = await lab.idle()
    way = await lab.way(Configure(machine_id, lab.new_cluster(), {"k": "v"}), _S.CONFIGURED)
    way.expect_only(_S.CONFIGURING, "on the way to CONFIGURED only CONFIGURING is seen")


@AREA.behaviour(3, ConformanceProfile.CORE)
async def only_draining_on_the_way(lab: Lab) -> None:
    """On the way from CONFIGURED to IDLE only DRAINING is ever seen."""
    machine = await lab.configured()
    way = await lab.way(Drain(machine.id), _S.IDLE)
    way.expect_only(_S.DRAINING, "on the way from CONFIGURED to IDLE only DRAINING is seen")


@AREA.behaviour(4, ConformanceProfile.CORE)
async def no_resting_state_is_skipped(lab: Lab) -> None:
    """The states seen over create, configure, drain skip no resting state."""
    machine_id = await lab.slot()
    seen = [(await lab.get(machine_id)).state]
    for request in (Create(machine_id), Configure(machine_id, lab.new_cluster(), {"k": "v"}), Drain(machine_id)):
        ack = await lab.done(request)
        seen += (await lab.way_of(machine_id, ack)).states
    passing = (_S.CREATING, _S.CONFIGURING, _S.DRAINING)
    resting = [state for place, state in enumerate(seen) if state not in passing and state is not seen[place - 1]]
    text = " → ".join(state.name for state in seen)
    expected = [_S.SPECULATIVE, _S.IDLE, _S.CONFIGURED, _S.IDLE]
    expect(resting == expected, "the resting states are SPECULATIVE, IDLE, CONFIGURED, IDLE, in this order", text)


@AREA.behaviour(5, ConformanceProfile.CORE)
async def cluster_while_bound(lab: Lab) -> None:
    """Cluster is set in CONFIGURED, and in CONFIGURING if seen; empty after the drain."""
    machine_id, cluster = await lab.idle(), lab.new_cluster()
    way = await lab.way(Configure(machine_id, cluster, {"k": "v"}), _S.CONFIGURED)
    for reading in way.readings:
        expect(reading.cluster == cluster, f"{reading.state.name} shows cluster {cluster}", machine_text(reading))
    machine = await lab.drain(machine_id)
    expect(not machine.cluster, "the drain clears the cluster", machine_text(machine))


@AREA.behaviour(6, ConformanceProfile.CORE)
async def host_in_the_states_that_have_one(lab: Lab) -> None:
    """Host absent in SPECULATIVE, present in IDLE and CONFIGURED; a resting machine never reads as transitional."""
    machine_id = await lab.slot()
    await _expect_host(lab, machine_id, _S.SPECULATIVE, has_host=False)
    await lab.create(machine_id)
    await _expect_host(lab, machine_id, _S.IDLE, has_host=True)
    await lab.configure(machine_id)
    await _expect_host(lab, machine_id, _S.CONFIGURED, has_host=True)
    await lab.drain(machine_id)
    await _expect_host(lab, machine_id, _S.IDLE, has_host=True)


async def _expect_host(lab: Lab, machine_id: str, state: MachineState, *, has_host: bool) -> None:
    machine = await lab.stays(machine_id, state, f"a machine that rests in {state.name} reads as that")
    for reading in (machine, await lab.listed(machine_id)):
        expect(reading.state is state, f"a machine that rests in {state.name} reads as that", machine_text(reading))
        is_hosted = reading.host is not None and bool(reading.host.provider and reading.host.ref)
        expectation = f"{state.name} {'names a host' if has_host else 'has no host'}"
        expect(is_hosted if has_host else reading.host is None, expectation, machine_text(reading))


@AREA.behaviour(7, ConformanceProfile.CORE)
async def settled_machines_stay(lab: Lab) -> None:
    """A settled machine does not move by itself."""
    settled = [
        await lab.get(await lab.slot()),
        await lab.get(await lab.idle()),
        await lab.configured(),
    ]
    for _ in range(_QUIET_READS):
        await lab.clock.sleep(QUIET_SECONDS)
        listed = {machine.id: machine for machine in (await lab.list_machines()).machines}
        for before in settled:
            for now in (await lab.get(before.id), listed.get(before.id)):
                expect(now is not None, f"{before.id} stays in List")
                if now is not None:
                    expect(_position(now) == _position(before), f"{before.state.name} stays", machine_text(now))


def _position(machine: MachineSeen) -> tuple[object, ...]:
    return machine.state, machine.host, machine.cluster, dict(machine.metadata)


@AREA.behaviour(8, ConformanceProfile.CLOUD)
async def only_deleting_on_the_way(lab: Lab) -> None:
    """While deleting only DELETING is seen; it ends SPECULATIVE without host."""
    machine_id = await lab.idle()
    way = await lab.way(Delete(machine_id), _S.SPECULATIVE)
    way.expect_only(_S.DELETING, "while deleting only DELETING is seen")
    expect(way.end.host is None, "SPECULATIVE has no host after a Delete", machine_text(way.end))


@AREA.behaviour(9, ConformanceProfile.CORE)
async def no_other_cluster_without_a_reset(lab: Lab) -> None:
    """A drained machine with label `bigfleet.dev/reset=none` goes to its former cluster only, any other one to each."""
    machine = await lab.configured()
    former, reset = machine.cluster, machine.labels.get(RESET_LABEL)
    expect(reset in (None, *RESETS), f"label {RESET_LABEL} is one of {', '.join(RESETS)}", repr(reset))
    await lab.drain(machine.id)
    request = Configure(machine.id, lab.new_cluster(), {"k": "v"}, lab.blob)
    if reset != NO_RESET:
        await lab.way(request, _S.CONFIGURED)
        return
    answer = await lab.call(lab.stamped(request))
    end = (await lab.way_of(machine.id)).end
    expect(end.state is not _S.CONFIGURED, "a machine that was not reset serves no other cluster", machine_text(end))
    if answer.is_ok:
        # The provider found it out later: the operation failed, and the machine waits for its recovery.
        return
    expect(answer.is_refused, "Configure into another cluster is refused, not by the fence", answer.status.value)
    expect(end.state is _S.IDLE, "the refusal leaves the machine IDLE", machine_text(end))
    expect_unbound(end, "the refusal binds nothing")
    await lab.configure(machine.id, former)
