"""Defines `bigfleet provider aws`: a provider of EC2 instances.

docs/spec/aws-provider.md. boto3 comes with the extra `aws`; only this command imports it. What AWS would refuse is
reported before the state file is opened.
"""

import functools
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import structlog
import typer

from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.serve import serve
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.runtime.failures import RunFault, UsageFault

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.provider.backends.aws.boto import AwsSession
    from bigfleet.provider.backends.aws.offerings import AwsOffering

_log = structlog.get_logger("bigfleet.cli.provider.aws")

NAME: Final = "aws"
RESETS: Final = ("replace-root", "none", "delete-only")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]+")
_URL: Final = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._/-]*)?"
)
_OWNER: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PORT_MAX: Final = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsFlags:
    """The flags of `provider aws`, without those of every provider."""

    region: str
    offerings: Path
    bucket: str
    prefix: str
    node_role: str
    queue_url: str
    endpoint_url: str | None
    reset: str
    advisor: dict[str, float] | None
    launches_per_second: float
    poll_seconds: float
    user_data: str
    #: Id of a lost state file whose instances are taken over, "" for none.
    owner: str


@provider_command(without=("use_fake_backend", "seed_count", "offerings"))
def aws(
    flags: ProviderFlags,
    region: Annotated[str | None, typer.Option(help="Region of the instances, such as eu-central-1.")] = None,
    offerings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file of the slots on offer and their images; reloaded on SIGHUP."),
    ] = None,
    bootstrap: Annotated[
        str | None, typer.Option(metavar="s3://BUCKET/PREFIX", help="S3 prefix of the bootstrap data for instances.")
    ] = None,
    node_role: Annotated[
        str, typer.Option(metavar="NAME", help="Instance profile, by name or ARN, that may read and write that prefix.")
    ] = "",
    interruption_queue: Annotated[
        str, typer.Option(metavar="URL", help="SQS queue of EventBridge with EC2's events about instances.")
    ] = "",
    reset: Annotated[
        str, typer.Option(help="What a drain does to the instance: replace-root, none or delete-only.")
    ] = "replace-root",
    advisor: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of the Spot Instance Advisor's data.")
    ] = None,
    launch_rate: Annotated[float, typer.Option(help="RunInstances calls per second, after a burst of 5.")] = 2.0,
    poll_interval: Annotated[
        str, typer.Option(help="Time between checks of starting instances and of their agents' answers.")
    ] = "5s",
    owner: Annotated[
        str, typer.Option(metavar="ID", help="Owner id of a lost state file whose instances a new one takes over.")
    ] = "",
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of every AWS service, for VPC endpoints and tests.")
    ] = None,
) -> None:
    """Run a provider of Amazon EC2 instances."""
    asked = _asked(
        region=region,
        offerings=offerings,
        bootstrap=bootstrap,
        node_role=node_role,
        interruption_queue=interruption_queue,
        reset=reset,
        advisor=advisor,
        launch_rate=launch_rate,
        poll_interval=poll_interval,
        endpoint_url=endpoint_url,
        owner=owner,
    )
    process, _options = flags.process(name=NAME, may_forget=False), flags.options()
    offered = _read(asked.offerings, process.provider)
    session = _connect(asked)
    runtime.configure_logging("provider", flags.log_level)
    account = _check(session, asked, offered, process.provider)
    serve(
        flags,
        functools.partial(open_aws, asked=asked, session=session, offered=offered, account=account),
        name=NAME,
    )


def _asked(
    *,
    region: str | None,
    offerings: Path | None,
    bootstrap: str | None,
    node_role: str,
    interruption_queue: str,
    reset: str,
    advisor: Path | None,
    launch_rate: float,
    poll_interval: str,
    endpoint_url: str | None,
    owner: str,
) -> AwsFlags:
    """Return what was asked. Raises UsageFault naming the flag."""
    from bigfleet.provider.backends.aws.agent import BucketFault, bucket_url, read_bucket, render_agent
    from bigfleet.provider.backends.aws.interruptions import AdvisorFault, read_advisor

    if region is None:
        raise UsageFault("--region is missing: name the region of the instances, such as eu-central-1")
    if not _REGION.fullmatch(region):
        raise UsageFault(f"--region: {region!r} is not a region of AWS; write one such as eu-central-1")
    if offerings is None:
        raise UsageFault("--offerings is missing: name the JSON file of the slots on offer")
    if bootstrap is None:
        raise UsageFault("--bootstrap is missing: name the place in S3 for bootstrap data, s3://BUCKET/PREFIX")
    if reset not in RESETS:
        raise UsageFault(f"--reset: {reset!r} is unknown; choose replace-root, none or delete-only")
    if not 0 < launch_rate <= 1000:
        raise UsageFault(f"--launch-rate: {launch_rate:g} is out of range; write a number above 0 and up to 1000")
    for flag, url in (("--endpoint-url", endpoint_url), ("--interruption-queue", interruption_queue)):
        if url and not _is_url(url):
            raise UsageFault(f"{flag}: {url!r} is not a URL; write http:// or https:// and a host")
    if owner and not _OWNER.fullmatch(owner):
        raise UsageFault(f"--owner: {owner!r} is not an owner id; take it from the tag bigfleet:owner of an instance")
    poll_seconds = parse_positive_duration_seconds(poll_interval, "--poll-interval")
    try:
        bucket, prefix = read_bucket(bootstrap)
    except BucketFault as fault:
        raise UsageFault(f"--bootstrap: {fault}") from fault
    try:
        advised = None if advisor is None else read_advisor(advisor, region)
    except AdvisorFault as fault:
        raise UsageFault(f"--advisor {fault}") from fault
    url = bucket_url(bucket, prefix, region=region, endpoint_url=endpoint_url)
    return AwsFlags(
        region=region,
        offerings=offerings,
        bucket=bucket,
        prefix=prefix,
        node_role=node_role,
        queue_url=interruption_queue,
        endpoint_url=endpoint_url,
        reset=reset,
        advisor=advised,
        launches_per_second=launch_rate,
        poll_seconds=poll_seconds,
        user_data=render_agent(url, region=region, interval_seconds=poll_seconds),
        owner=owner,
    )


def _is_url(text: str) -> bool:
    found = _URL.fullmatch(text)
    if found is None or int(found["port"] or 0) > _PORT_MAX:
        return False
    try:
        return found["ipv6"] is None or bool(ipaddress.IPv6Address(found["ipv6"]))
    except ipaddress.AddressValueError:
        return False


def _read(path: Path, provider: str) -> "tuple[AwsOffering, ...]":
    """Return the offerings. Raises UsageFault naming each mistake."""
    from bigfleet.provider.backends.aws.offerings import OfferingsFault, read_aws_offerings
    from bigfleet.provider.inventory.offerings import OfferingsUnreadable

    try:
        return read_aws_offerings(path, provider)
    except (OfferingsFault, OfferingsUnreadable) as fault:
        raise UsageFault(f"--offerings {fault}") from fault


def _connect(asked: AwsFlags) -> "AwsSession":
    try:
        from bigfleet.provider.backends.aws.boto import AwsSession
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("boto3", "botocore"):
            raise
        raise UsageFault(
            "provider aws needs boto3, which is not installed; "
            "run make setup in a checkout, or pip install 'boto3>=1.44,<2'"
        ) from error
    return AwsSession(region=asked.region, endpoint_url=asked.endpoint_url)


def _check(session: "AwsSession", asked: AwsFlags, offered: "tuple[AwsOffering, ...]", provider: str) -> str:
    """Ask AWS whether it would allow what is going to be done; return the account, "" while AWS does not answer.

    Raises RunFault with a line for each refusal.
    """
    from bigfleet.provider.backends.aws.boto import BotoStart
    from bigfleet.provider.backends.aws.launch import LaunchFault
    from bigfleet.provider.backends.aws.start_checks import check_start

    calls = BotoStart(session)
    try:
        refusals = check_start(
            calls,
            offered,
            provider=provider,
            node_role=asked.node_role,
            user_data=asked.user_data,
            bucket=asked.bucket,
            prefix=asked.prefix,
        )
    except LaunchFault as fault:
        raise UsageFault(f"provider aws: {fault}") from fault
    if refusals:
        raise RunFault(*refusals)
    return calls.account


def _warn(asked: AwsFlags) -> None:
    """Log what the flags leave unknown or unsafe."""
    from bigfleet.provider.backends.aws.interruptions import UNKNOWN_PROBABILITY

    if asked.advisor is None:
        text = f"spot machines are declared with {UNKNOWN_PROBABILITY:g} an hour; --advisor says better"
        _log.warning("aws.interruption_probability_unknown", advice=text)
    if asked.reset != "replace-root":
        text = "machines keep what their cluster left; let the shard release them at once (hold of 0)"
        _log.warning("aws.reset_leaves_data", reset=asked.reset, advice=text)


def open_aws(
    process: "ProviderProcessSettings",
    asked: AwsFlags,
    session: "AwsSession",
    offered: "tuple[AwsOffering, ...]",
    account: str = "",
) -> "Substrate":
    """Return the backend over EC2; `account` is that of the credentials, "" while AWS did not say it."""
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.cli.runtime.system import SystemClock, SystemIds
    from bigfleet.provider.backends.aws.backend import AgentReady, AwsBackend, AwsSettings
    from bigfleet.provider.backends.aws.boto import BotoEc2, BotoObjects, BotoPrices, BotoQueue
    from bigfleet.provider.backends.aws.channel import Channel
    from bigfleet.provider.backends.aws.identity import Place
    from bigfleet.provider.backends.aws.interruptions import Interruptions
    from bigfleet.provider.backends.aws.prices import AwsPrices

    assert process.state_path is not None, "only a fake may run without a state file"
    clock, ec2 = SystemClock(), BotoEc2(session)
    prices = AwsPrices(
        ec2,
        BotoPrices(session),
        clock,
        region=asked.region,
        path=process.state_path.with_name(process.state_path.name + ".prices"),
    )
    _warn(asked)
    backend = AwsBackend(
        ec2,
        Channel(
            ec2, BotoObjects(session, asked.bucket), clock, prefix=asked.prefix, interval_seconds=asked.poll_seconds
        ),
        prices,
        Interruptions(clock, asked.advisor),
        settings=AwsSettings(
            provider=process.provider,
            node_role=asked.node_role,
            user_data=asked.user_data,
            place=Place(account=account, region=asked.region, owner=asked.owner, new_owner=SystemIds().new_id()),
            reset=asked.reset,
            launches_per_second=asked.launches_per_second,
            poll_seconds=asked.poll_seconds,
        ),
        clock=clock,
        queue=BotoQueue(session, asked.queue_url) if asked.queue_url else None,
    )
    backend.set_offerings(offered)

    def reload() -> None:
        try:
            backend.set_offerings(_read(asked.offerings, process.provider))
        except UsageFault as fault:
            _log.error("offerings.load_failed", error=str(fault), advice="the previous offerings stay in force")
            return
        _log.info("offerings.loaded", path=str(asked.offerings))

    def status() -> dict[str, object]:
        return {
            "region": asked.region,
            "instances that start": backend.watch.waiting,
            "kinds out of stock": len(backend.stockouts),
            "spot prices refused": prices.refused,
            **{f"events {outcome}": count for outcome, count in sorted(backend.event_counts.items())},
        }

    return Substrate(backend=backend, readiness=AgentReady(backend), reload=reload, status=status, close=session.close)
