"""Defines `bigfleet provider fault`: serves the backend that fails on request, for conformance runs.

docs/spec/provider.md §20. This module does not decide anything.
"""

from typing import TYPE_CHECKING

from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.serve import serve

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import Substrate

SEED_COUNT = 256
#: Short, so that a run which waits for time-outs is over soon.
TRANSITION_TIMEOUT = "2s"


@provider_command(
    without=("offerings", "intent_key", "use_fake_backend"),
    seed_count=SEED_COUNT,
    transition_timeout=TRANSITION_TIMEOUT,
)
def fault(flags: ProviderFlags) -> None:
    """Run a fake provider with injected faults, for bigfleet conformance --profile fault."""
    serve(flags, _open, name="fault", may_forget=True)


def _open(process: "ProviderProcessSettings") -> "Substrate":
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.fault import FaultBackend, FaultReadiness

    assert process.seed_count is not None, "the flag has a default"
    backend = FaultBackend(process.seed_count, clock=SystemClock())
    return Substrate(backend=backend, readiness=FaultReadiness(), seeds_itself=True)
