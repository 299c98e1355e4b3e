"""A backend that reads the provider's state: what it is shown, and through which backends."""

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Consults, ConsultsHosts, HostsLookup, MachineLookup
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.backends.multiplex import Multiplex
from tests.provider.harness import SLOT, bring_to, make_core, settle, started


class Consulting(FakeBackend):
    """A fake that keeps the lookup."""

    lookup: MachineLookup

    def consult(self, lookup: MachineLookup) -> None:
        self.lookup = lookup


@pytest.mark.virtual_time
async def test_the_state_of_a_machine_and_its_latest_operation_are_shown_as_they_are_now() -> None:
    backend = Consulting(2)
    core = make_core(backend)
    # Before the state is loaded there is nothing to show.
    assert backend.lookup(SLOT) is None
    await started(core)
    known = backend.lookup(SLOT)
    assert known is not None
    assert (known.machine.state, known.operation_id) == (MachineState.SPECULATIVE, "")

    accepted = await core.create(SLOT)
    await settle()
    known = backend.lookup(SLOT)
    assert known is not None
    assert (known.machine, known.operation_id) == ((await core.get(SLOT)).machine, accepted.operation_id)
    assert known.machine.host.ref
    assert backend.lookup("none") is None


@pytest.mark.virtual_time
async def test_each_part_of_a_multiplex_that_wants_it_is_shown_the_state() -> None:
    parts = {"fake-": Consulting(2), "other-": FakeBackend(0)}
    core = await started(make_core(Multiplex(parts)))
    await bring_to(core, MachineState.IDLE)
    part = parts["fake-"]
    assert isinstance(part, Consulting)
    known = part.lookup(SLOT)
    assert known is not None
    assert known.machine.state is MachineState.IDLE


@pytest.mark.virtual_time
async def test_a_part_with_two_prefixes_is_given_the_lookup_once() -> None:
    lookups: list[MachineLookup] = []

    class Counting(FakeBackend):
        def consult(self, lookup: MachineLookup) -> None:
            lookups.append(lookup)

    part = Counting(0)
    make_core(Multiplex({"a-": part, "b-": part}))
    assert len(lookups) == 1


def test_a_multiplex_consults_only_if_a_part_does() -> None:
    assert not isinstance(Multiplex({"a-": FakeBackend(0)}), Consults)
    assert isinstance(Multiplex({"a-": FakeBackend(0), "b-": Consulting(0)}), Consults)


def test_a_consult_that_cannot_be_called_is_refused_at_the_start() -> None:
    class Wrong(FakeBackend):
        def consult(self) -> None: ...

    with pytest.raises(TypeError, match=r"Wrong\.consult must be callable as consult\(self, lookup\)"):
        make_core(Wrong(1))


class WithHosts(FakeBackend):
    """A fake that retains what returns the hosts of the state."""

    host_lookup: HostsLookup

    def consult_hosts(self, hosts: HostsLookup) -> None:
        self.host_lookup = hosts


@pytest.mark.virtual_time
async def test_the_hosts_of_the_state_are_shown_as_they_are_now() -> None:
    backend = WithHosts(2)
    core = make_core(backend)
    assert list(backend.host_lookup()) == []
    await started(core)
    assert list(backend.host_lookup()) == []
    await bring_to(core, MachineState.IDLE)
    assert list(backend.host_lookup()) == [(await core.get(SLOT)).machine]


@pytest.mark.virtual_time
async def test_a_part_of_a_multiplex_is_shown_its_own_hosts() -> None:
    part, other = WithHosts(2), WithHosts(0)
    core = await started(make_core(Multiplex({"fake-": part, "other-": other})))
    await bring_to(core, MachineState.IDLE)
    assert [machine.id for machine in part.host_lookup()] == [SLOT]
    assert list(other.host_lookup()) == []
    assert not isinstance(Multiplex({"a-": FakeBackend(0)}), ConsultsHosts)
