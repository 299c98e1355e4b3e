"""Defines `python -m tools.certify_aws`: what `make certify-aws` runs.

Exit 0 for CERTIFIED and for a dry run, 1 for a refusal, another verdict, or something that could not be ended.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.system import SystemClock, SystemIds
from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.boto import AwsSession, BotoPrices, BotoStart
from bigfleet.provider.backends.aws.launch import TAG_PROVIDER
from bigfleet.provider.backends.aws.offerings import OfferingsFault, read_aws_offerings
from bigfleet.provider.inventory.offerings import OfferingsUnreadable
from tools.certify_aws.guard import CertifyFault, Limits, bound_of, check_account, check_budget, described
from tools.certify_aws.leftovers import Leftovers
from tools.certify_aws.run import NAME, QUIET_SECONDS, Run, carry_out

CONFIRMED: Final = "yes"
#: Until all that a run launched is terminated.
CLEAN_UP_SECONDS: Final = 900.0


def main(arguments: list[str], clock: Clock, run_id: str) -> int:
    """Check, and run if it was confirmed; return the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        session = AwsSession(region=chosen.region, endpoint_url=chosen.endpoint_url)
        arn = BotoStart(session).identity()
        check_account(arn, chosen.account)
        if chosen.clean:
            return _clean(session, clock)
        _say(f"account {chosen.account}, region {chosen.region}, as {arn}")
        return _certify(chosen, session, clock, f"{NAME}{run_id.lower()}")
    except (CertifyFault, AwsError, OfferingsFault, OfferingsUnreadable, UsageFault) as fault:
        sys.stderr.write(f"certify-aws: {fault}\n")
        return 1


def _certify(chosen: argparse.Namespace, session: AwsSession, clock: Clock, name: str) -> int:
    limits = Limits(
        run_seconds=parse_positive_duration_seconds(chosen.run_for, "--for"),
        clean_up_seconds=CLEAN_UP_SECONDS,
        launches_per_second=chosen.launch_rate,
        extra_usd_per_hour=chosen.extra_usd_per_hour,
    )
    bound = bound_of(read_aws_offerings(chosen.offerings, name), BotoPrices(session), limits)
    for line in described(bound, tag=f"{TAG_PROVIDER}={name}-*", profiles=chosen.profile, budget_usd=chosen.budget_usd):
        _say(line)
    left = Leftovers(session, clock, prefix=NAME, say=_say).live()
    if left:
        raise CertifyFault(f"an earlier run has left {', '.join(left)}; end them with --clean first")
    check_budget(bound, chosen.budget_usd)
    if chosen.confirm != CONFIRMED:
        _say(f"dry run: nothing was started; CONFIRM={CONFIRMED} runs it")
        return 0
    run = Run(
        name=name,
        region=chosen.region,
        endpoint_url=chosen.endpoint_url,
        offerings=chosen.offerings,
        bootstrap=chosen.bootstrap,
        node_role=chosen.node_role,
        profiles=chosen.profile,
        only=chosen.only,
        patience=chosen.patience,
        poll_interval=chosen.poll_interval,
        quiet_seconds=parse_positive_duration_seconds(chosen.quiet, "--quiet"),
        out=chosen.out.resolve(),
        limits=limits,
    )
    return carry_out(run, session, clock, _say)


def _clean(session: AwsSession, clock: Clock) -> int:
    """End what every run has left, also one that runs now."""
    left = Leftovers(session, clock, prefix=NAME, say=_say).end_all(seconds_max=CLEAN_UP_SECONDS, quiet_seconds=0.0)
    if left:
        raise CertifyFault(f"still there, and billed: {', '.join(left)}")
    _say("nothing of a run is left")
    return 0


def _say(text: str) -> None:
    # A clean-up goes on without a reader: Ctrl-C also ends what comes behind a pipe.
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _amount(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write one such as 30") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.certify_aws",
        description="Certify the EC2 provider against an account of AWS. Without --confirm yes it starts nothing.",
    )
    add: Callable[..., argparse.Action] = parser.add_argument
    add("--account", required=True, metavar="ID", help="account that the credentials must belong to")
    add("--region", required=True, help="such as eu-central-1")
    add("--offerings", required=True, type=Path, metavar="FILE", help="what may be launched: docs/aws-provider.md")
    add("--budget-usd", required=True, type=_amount, metavar="USD", help="the most that the run may cost")
    add("--bootstrap", required=True, metavar="s3://BUCKET/PREFIX", help="place for bootstrap data")
    add("--node-role", default="", metavar="NAME", help="instance profile that may read and write there")
    add("--confirm", default="", metavar="yes", help="run it; anything else is a dry run")
    add("--clean", action="store_true", help="end what earlier runs have left, and do nothing else")
    add("--profile", default="core,cloud,delta,spot,durable", metavar="LIST", help="profiles of the suite")
    add("--only", default="", metavar="ID,…", help="behaviours of the suite; does not certify")
    add("--for", dest="run_for", default="3h", metavar="TIME", help="the suite is ended after it [3h]")
    add("--launch-rate", type=_amount, default=0.5, metavar="N", help="launches per second [0.5]")
    add("--extra-usd-per-hour", type=_amount, default=0.02, metavar="USD", help="volume, address, requests [0.02]")
    add("--patience", default="10m", metavar="TIME", help="timeout of one step of the suite [10m]")
    add("--poll-interval", default="5s", metavar="TIME", help="of the provider [5s]")
    add("--quiet", default=f"{QUIET_SECONDS:.0f}s", metavar="TIME", help="nothing may show up for so long at the end")
    add("--out", type=Path, default=Path("build/certify-aws"), metavar="DIR", help="reports [build/certify-aws]")
    add("--endpoint-url", default=None, metavar="URL", help="address of every AWS service, for tests")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], SystemClock(), SystemIds().new_id()))
