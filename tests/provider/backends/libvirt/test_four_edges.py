"""Random courses of calls and restarts over a host in memory, of machines that do not share room with each other."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.backends.libvirt.backend import LibvirtReadiness
from bigfleet.provider.testing import four_edges
from tests.provider.backends.libvirt.memory_host import Provider, document


def make_provider() -> tuple[Backend, Ready | ConfigureWaits]:
    body = document()
    # The state machine wants every slot to stay.
    del body["types"]["large"]
    provider = Provider(body)
    return provider.backend, LibvirtReadiness(provider.backend, provider.driver)


def test_random_courses_follow_the_four_edges() -> None:
    run_state_machine_as_test(four_edges(make_provider), settings=settings(max_examples=8, stateful_step_count=20))
