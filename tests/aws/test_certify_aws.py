"""`make certify-aws` before the strict shim: what it refuses, what a dry run says, and that nothing stays behind.

A run against AWS is what the command is for. It was never made; this shows its guards and its clean-up.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.boto import AwsSession
from tests.aws.client import BUCKET, REGION, ShimClient
from tests.aws.over_http import PREFIX
from tests.patience import PATIENCE_SECONDS, wait_until
from tools.certify_aws.leftovers import Leftovers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ACCOUNT = "123456789012"


def command(
    shim: ShimClient, folder: Path, *more: str, offerings: list[Mapping[str, object]] | None = None
) -> list[str]:
    """Return the command, a dry run of four machines by default."""
    path = folder / "offerings.json"
    path.write_text(json.dumps(offerings or [shim.offering()]))
    flags = [
        f"--account={ACCOUNT}",
        f"--region={REGION}",
        f"--offerings={path}",
        f"--bootstrap=s3://{BUCKET}/{PREFIX}",
        "--budget-usd=50",
        f"--endpoint-url={shim.url}",
        f"--out={folder / 'out'}",
        *more,
    ]
    return [sys.executable, "-m", "tools.certify_aws", *flags]


def certify(
    shim: ShimClient, folder: Path, *more: str, offerings: list[Mapping[str, object]] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run it to its end."""
    return subprocess.run(
        command(shim, folder, *more, offerings=offerings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def launch(shim: ShimClient, provider: str) -> str:
    """Launch an instance of a provider, past it, and return its id."""
    tags = [{"Key": "bigfleet:provider", "Value": provider}]
    launched = shim.client("ec2").run_instances(
        MinCount=1,
        MaxCount=1,
        InstanceType="m6i.large",
        ImageId=shim.place["ami"],
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    return str(launched["Instances"][0]["InstanceId"])


def ids(shim: ShimClient) -> list[str]:
    return [each["InstanceId"] for each in shim.live()]


# ---- before the start ------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_start_and_what_that_can_cost(shim: ShimClient, tmp_path: Path) -> None:
    done = certify(shim, tmp_path, "--for=2h", "--launch-rate=0.1", "--extra-usd-per-hour=0.004")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0].startswith(f"account {ACCOUNT}, region {REGION}, as arn:aws:")
    assert said[2].startswith("at most 4 instances at a time, each with the tag bigfleet:provider=certify-")
    assert said[3] == "  4 x m6i.large on demand in us-east-1a, at most 0.096 USD an hour"
    # 4 slots for 2 h and 15 min at 0.1 USD, and a minute for each of 725 launches.
    assert said[-2] == "in all at most 2.11 USD of a budget of 50.00; traffic is not in it"
    assert said[-1] == "dry run: nothing was started; CONFIRM=yes runs it"
    assert shim.calls("ec2:RunInstances") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--account=210987654321", "not of account 210987654321; nothing was started"),
        ("--account=", "not of account ; nothing was started"),
        ("--budget-usd=0.5", "USD, the budget is 0.50; offer fewer or cheaper machines, or shorten the run; nothing"),
        ("--budget-usd=nan", "USD, the budget is nan; "),
        ("--budget-usd=inf", "USD, the budget is inf; "),
        ("--for=soon", "--for: 'soon'"),
    ],
)
def test_what_is_refused_starts_nothing_even_when_it_is_confirmed(
    flag: str, text: str, shim: ShimClient, tmp_path: Path
) -> None:
    done = certify(shim, tmp_path, flag, "--confirm=yes")
    assert done.returncode == 1
    assert done.stderr.startswith("certify-aws: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert shim.calls("ec2:RunInstances") == 0


@pytest.mark.parametrize(
    ("offering", "refusal", "usd"),
    [
        # A price of the file may be too low, as that of spot: the dearer one counts.
        ({"price_per_hour": 0.01}, "", "0.096"),
        ({"price_per_hour": 0.2}, "", "0.2"),
        ({"capacity_type": "spot", "price_per_hour": 0.03}, "", "0.096"),
        ({"instance_type": "r5.large", "price_per_hour": 0.3}, "", "0.3"),
        ({"instance_type": "r5.large"}, "r5.large: the Price List has no price for it", ""),
    ],
)
def test_the_bound_takes_the_dearer_price(
    offering: Mapping[str, object], refusal: str, usd: str, shim: ShimClient, tmp_path: Path
) -> None:
    done = certify(shim, tmp_path, offerings=[shim.offering(**offering)])
    assert done.returncode == (1 if refusal else 0), done.stderr
    assert refusal in done.stderr
    assert not usd or f"at most {usd} USD an hour" in done.stdout


def test_a_price_list_that_may_not_be_asked_leaves_the_price_of_the_file(shim: ShimClient, tmp_path: Path) -> None:
    shim.fault("pricing:GetProducts", "AccessDeniedException", times=10)
    done = certify(shim, tmp_path, offerings=[shim.offering(price_per_hour=0.11)])
    assert "at most 0.11 USD an hour" in done.stdout


def test_what_an_earlier_run_has_left_is_ended_first(shim: ShimClient, tmp_path: Path) -> None:
    other, left = launch(shim, "aws"), launch(shim, "certify-0-1")
    done = certify(shim, tmp_path, "--confirm=yes")
    assert done.returncode == 1
    assert done.stderr == f"certify-aws: an earlier run has left {left}; end them with --clean first\n"

    done = certify(shim, tmp_path, "--clean")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"ending 1 instances: {left}\nnothing of a run is left\n"
    assert ids(shim) == [other]


# ---- the end ---------------------------------------------------------------------------------------------------


def leftovers(shim: ShimClient, said: list[str]) -> Leftovers:
    session = AwsSession(region=REGION, endpoint_url=shim.url)
    return Leftovers(session, SystemClock(), prefix="certify-1", say=said.append)


def test_an_instance_that_shows_up_late_is_ended_too(shim: ShimClient) -> None:
    shim.control("invisible", looks=4)
    late = launch(shim, "certify-1-a")
    said: list[str] = []
    assert leftovers(shim, said).end_all(seconds_max=60, quiet_seconds=2, poll_seconds=0.2) == []
    assert said == [f"ending 1 instances: {late}"]
    assert ids(shim) == []


def test_errors_are_tried_again_and_what_cannot_be_ended_is_named(shim: ShimClient) -> None:
    launch(shim, "certify-1-a")
    shim.fault("ec2:DescribeInstances", "RequestLimitExceeded", status=503)
    shim.fault("ec2:TerminateInstances", drop="before")
    said: list[str] = []
    assert leftovers(shim, said).end_all(seconds_max=60, quiet_seconds=0.2, poll_seconds=0.1) == []
    assert ids(shim) == []

    stays = launch(shim, "certify-1-a")
    shim.fault("ec2:TerminateInstances", "OperationNotPermitted", times=1000)
    assert leftovers(shim, said).end_all(seconds_max=1, quiet_seconds=0.2, poll_seconds=0.1) == [stays]
    assert ids(shim) == [stays]


def test_an_instance_that_ec2_refuses_to_end_does_not_hold_up_the_others(shim: ShimClient) -> None:
    launched = {launch(shim, "certify-1-a") for _ in range(3)}
    # All at once, and then the first one by itself.
    shim.fault("ec2:TerminateInstances", "OperationNotPermitted", times=2)
    found = leftovers(shim, [])
    with pytest.raises(AwsError, match="OperationNotPermitted"):
        found.terminate(found.live())
    (stays,) = ids(shim)
    assert stays in launched


def test_volumes_and_interfaces_that_stayed_behind_are_deleted(shim: ShimClient) -> None:
    ec2 = shim.client("ec2")
    subnet = shim.place["subnets"]["us-east-1a"]

    def tagged(kind: str, provider: str) -> dict[str, Any]:
        tags = [{"Key": "bigfleet:provider", "Value": provider}]
        return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags}]}

    volumes = [
        ec2.create_volume(AvailabilityZone="us-east-1a", Size=1, **tagged("volume", name))["VolumeId"]
        for name in ("certify-1-a", "aws")
    ]
    interfaces = [
        ec2.create_network_interface(SubnetId=subnet, **tagged("network-interface", name))["NetworkInterface"]
        for name in ("certify-1-a", "aws")
    ]
    said: list[str] = []
    assert leftovers(shim, said).end_all(seconds_max=60, quiet_seconds=0.2, poll_seconds=0.1) == []
    first = interfaces[0]["NetworkInterfaceId"]
    assert said == [f"deleting volume {volumes[0]}", f"deleting network interface {first}"]
    ec2.delete_volume(VolumeId=volumes[1])
    ec2.delete_network_interface(NetworkInterfaceId=interfaces[1]["NetworkInterfaceId"])


def test_a_provider_ends_those_of_other_states_and_not_its_own(shim: ShimClient) -> None:
    own, former = launch(shim, "certify-1-own"), launch(shim, "certify-1-former")
    found = leftovers(shim, [])
    assert sorted(found.live()) == sorted([own, former])
    found.terminate(found.live(besides="certify-1-own"))
    assert ids(shim) == [own]


# ---- a run -----------------------------------------------------------------------------------------------------

QUICK = ("--confirm=yes", "--patience=60s", "--poll-interval=50ms", "--launch-rate=1000", "--quiet=1s")


@contextmanager
def running(shim: ShimClient, folder: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a run of the core profile, and yield its process once it has launched something."""
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    whole = command(
        shim, folder, *QUICK, "--profile=core", "--budget-usd=1e6", *more, offerings=[shim.offering(count=80)]
    )
    process = subprocess.Popen(whole, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def suite_of(said: str) -> int:
    """Return the process id of the suite, which is its group."""
    (line,) = (each for each in said.splitlines() if each.startswith("process "))
    return int(line.split()[1])


def is_group_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_ends_with_the_suites_verdict_and_leaves_nothing(shim: ShimClient, tmp_path: Path) -> None:
    other = launch(shim, "aws")
    with running(shim, tmp_path, "--only=LIFE-1,EDGE-13") as process:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    results = {each["id"]: each["outcome"] for each in report["behaviours"] if each["outcome"] != "not run"}
    assert results == {"LIFE-1": "passed", "EDGE-13": "passed"}, said
    # Two behaviours certify nothing.
    assert process.returncode == 1
    assert "nothing that was launched is left" in said
    assert shim.calls("ec2:RunInstances") > 2
    assert ids(shim) == [other]
    assert not is_group_there(suite_of(said))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_suite_and_what_it_launched(number: int, shim: ShimClient, tmp_path: Path) -> None:
    with running(shim, tmp_path) as process:
        wait_until(lambda: ids(shim) or process.poll() is not None, "nothing was launched")
        assert process.poll() is None
        # The first attempt to end them is refused; more signals change nothing.
        shim.fault("ec2:TerminateInstances", "RequestLimitExceeded", status=503, times=2)
        process.send_signal(number)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "interrupted; ending what was launched" in said
    assert said.endswith("nothing that was launched is left\n")
    assert ids(shim) == []
    assert not is_group_there(suite_of(said))


def test_a_clean_up_needs_no_reader_of_what_it_says(shim: ShimClient, tmp_path: Path) -> None:
    with running(shim, tmp_path) as process:
        wait_until(lambda: ids(shim) or process.poll() is not None, "nothing was launched")
        assert process.stdout is not None
        # As with `| tee`, which the same Ctrl-C ends.
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
    assert ids(shim) == []


def test_a_suite_that_takes_too_long_is_ended(shim: ShimClient, tmp_path: Path) -> None:
    with running(shim, tmp_path, "--for=20s", "--patience=10m") as process:
        # No agent answers: the first Configure goes on for ever.
        shim.control("agent", bucket=BUCKET, prefix="elsewhere")
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "the suite took more than 0 min" in said
    assert said.endswith("nothing that was launched is left\n")
    assert shim.calls("ec2:RunInstances") > 0
    assert ids(shim) == []
    assert not is_group_there(suite_of(said))
