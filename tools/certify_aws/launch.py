"""Becomes one provider of a run, after the end of the instances of those before it.

python -m tools.certify_aws.launch RUN ADDRESS STATE FLAG...

The suite kills a provider and starts it again with the same state: its instances stay.
"""

import os
import sys

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backends.aws.boto import AwsSession
from tools.certify_aws.leftovers import Leftovers
from tools.certify_aws.run import lane_name, provider_command


def main(run_name: str, address: str, state: str, flags: list[str]) -> None:
    """End what other providers of the run have left, and become this one."""
    values = dict(flag.partition("=")[::2] for flag in flags)
    session = AwsSession(region=values["--region"], endpoint_url=values.get("--endpoint-url"))
    leftovers = Leftovers(session, SystemClock(), prefix=run_name, say=lambda _text: None)
    leftovers.terminate(leftovers.live(besides=lane_name(run_name, state)))
    session.close()
    command = provider_command(run_name, address, state, flags)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted: the suite kills the process that it started


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
