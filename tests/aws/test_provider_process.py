"""`bigfleet provider aws` as a process: refusals at the start, and kills in the middle of each call."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.aws.client import BUCKET, ShimClient
from tests.aws.command import Provider, flags
from tests.aws.over_http import MACHINE, PREFIX
from tests.cli.provider.provider_client import STATES, VERBS
from tests.patience import wait_until
from tests.processes import free_port, run_bigfleet

pytestmark = pytest.mark.slow


def start(shim: ShimClient, folder: Path, *more: str) -> tuple[int, list[str]]:
    """Start a provider that AWS is going to refuse; return exit code and what it says on standard error."""
    shim.bucket()
    done = run_bigfleet("provider", "aws", *flags(shim, folder), f"--state={folder / 's.db'}", *more)
    # Without the log, which names the caller.
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("{")]


def test_each_refusal_at_the_start_is_one_line_and_the_exit_code_is_1(shim: ShimClient, tmp_path: Path) -> None:
    shim.fault("ec2:RunInstances", "UnauthorizedOperation", message="no", is_dry_run=True)
    shim.fault("ec2:TerminateInstances", "UnauthorizedOperation", message="not you", is_dry_run=True)
    code, lines = start(shim, tmp_path, f"--bootstrap=s3://no-such-bucket/{PREFIX}")

    assert code == 1
    subnet = shim.place["subnets"]["us-east-1a"]
    assert lines == [
        f"bigfleet: aws: ec2:RunInstances refused for m6i.large in {subnet}: UnauthorizedOperation: no",
        "aws: ec2:TerminateInstances refused: UnauthorizedOperation: not you",
        "aws: s3:HeadBucket refused for bucket no-such-bucket: 404: Not Found",
    ]
    assert not (tmp_path / "s.db").exists()


def test_a_type_of_xen_is_refused_at_the_start(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    offerings = [shim.offering(), shim.offering(instance_type="t2.large")]
    done = run_bigfleet("provider", "aws", *flags(shim, tmp_path, *offerings), f"--state={tmp_path / 's.db'}")
    assert done.returncode == 1
    assert "bigfleet: aws: t2.large is not built on the Nitro System: " in done.stderr
    assert "m6i.large" not in done.stderr


def test_a_bucket_that_may_not_be_listed_is_a_warning_that_says_what_it_costs(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    shim.fault("s3:HEAD", "AccessDenied", status=403, times=2)
    provider = Provider(shim, tmp_path, f"127.0.0.1:{free_port()}")
    with provider.served():
        warnings = [
            json.loads(line) for line in provider.log.read_text().splitlines() if "aws.bucket_not_listed" in line
        ]
    assert [(each["level"], each["bucket"], each["prefix"]) for each in warnings] == [("warning", BUCKET, PREFIX)]
    assert "answers 403 in place of 404" in warnings[0]["advice"]


def test_without_credentials_the_start_ends_with_one_line(
    shim: ShimClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # botocore's chain finds none: no environment, no file, no metadata service.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    done = run_bigfleet("provider", "aws", *flags(shim, tmp_path), f"--state={tmp_path / 's.db'}")
    assert done.returncode == 1
    assert (
        done.stderr
        == "bigfleet: aws: sts:GetCallerIdentity refused: NoCredentialsError: Unable to locate credentials\n"
    )


def test_a_machine_goes_all_the_way_and_no_data_stays_in_the_bucket(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    with Provider(shim, tmp_path, f"127.0.0.1:{free_port()}").served() as (client, _pid):
        for verb in VERBS:
            client.accept(verb, MACHINE)
            machine = client.settled(MACHINE)
            assert machine.state == STATES[verb], machine.last_error
            if verb == "configure":
                (instance,) = shim.live()
                assert machine.node_name == f"node-{instance['InstanceId']}"
                tags = {each["Key"]: each["Value"] for each in instance["Tags"]}
                assert tags["bigfleet:cluster"] == "team-a"
            if verb == "drain":
                tags = {each["Key"]: each["Value"] for each in shim.live()[0]["Tags"]}
                assert not {"bigfleet:cluster", "bigfleet:configure", "bigfleet:drain"} & tags.keys()
    names = [each["Key"] for each in shim.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    assert all(name.endswith(".result") for name in names)
    assert shim.live() == []


def test_a_state_of_another_region_ends_the_start_with_one_line(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    provider = Provider(shim, tmp_path, f"127.0.0.1:{free_port()}")
    with provider.served():
        pass
    # The shim has zones of one region.
    offering = {key: value for key, value in shim.offering().items() if key != "subnet"}
    more = flags(shim, tmp_path, offering)
    done = run_bigfleet("provider", "aws", *more, "--region=us-west-2", f"--state={provider.state}")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, lines) == (
        1,
        [
            "bigfleet: --state: the machines of this file are in account 123456789012, region us-east-1, and the "
            "provider was started for account 123456789012, region us-west-2; start it with the credentials "
            "and the --region of the file, or name another file"
        ],
    )


#: The calls of each verb in their order, with the number of calls of that name that pass first.
CALLS = {
    "create": [("ec2:RunInstances", 0), ("ec2:DescribeInstances", 0)],
    "configure": [
        ("ec2:DescribeInstances", 0),
        ("s3:GET", 0),
        ("s3:PUT", 0),
        ("ec2:CreateTags", 0),
        ("s3:GET", 1),
        ("s3:DELETE", 0),
        # The checker of readiness looks once more, and deletes what a start of before may have left.
        ("s3:DELETE", 1),
    ],
    "drain": [
        ("ec2:DescribeInstances", 0),
        ("s3:GET", 0),
        ("ec2:CreateTags", 0),
        ("s3:GET", 1),
        ("ec2:DeleteTags", 0),
        ("ec2:CreateReplaceRootVolumeTask", 0),
        ("ec2:DescribeReplaceRootVolumeTasks", 0),
        ("ec2:DeleteTags", 1),
        ("ec2:DeleteTags", 2),
    ],
    "delete": [("ec2:TerminateInstances", 0)],
}
KILLS = [
    (verb, action, skip, drop)
    for verb, calls in CALLS.items()
    for action, skip in calls
    for drop in ("before", "after")
]
#: Polled until something is there.
POLLED = ("ec2:DescribeInstances", "s3:GET", "ec2:DescribeReplaceRootVolumeTasks")


def test_the_table_of_kills_has_each_call_of_each_verb(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    with Provider(shim, tmp_path, f"127.0.0.1:{free_port()}", "--reconcile-interval=1h").served() as (client, _pid):
        for verb, calls in CALLS.items():
            known = len(shim.control("calls"))
            client.accept(verb, MACHINE)
            assert client.settled(MACHINE).state == STATES[verb]
            made = shim.control("calls")[known:]
            # In the order of their first occurrence.
            assert list(dict.fromkeys(made)) == list(dict.fromkeys(action for action, _skip in calls))
            for action, count in Counter(action for action, _skip in calls).items():
                assert made.count(action) == count or (action in POLLED and made.count(action) > count), action


@pytest.mark.parametrize(
    ("verb", "action", "skip", "drop"),
    [pytest.param(*each, marks=[] if number % 5 == 0 else pytest.mark.long) for number, each in enumerate(KILLS)],
)
def test_a_kill_in_the_middle_of_a_call_leaves_one_instance_and_the_same_operation(
    verb: str, action: str, skip: int, drop: str, shim: ShimClient, tmp_path: Path
) -> None:
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    provider = Provider(shim, tmp_path, f"127.0.0.1:{free_port()}")
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        shim.fault(action, drop=drop, skip=skip, is_stalled=True)
        operation_id = client.accept(verb, MACHINE)
        wait_until(lambda: shim.control("stalled"), provider.log.read_text)
        os.kill(pid, signal.SIGKILL)
    shim.control("release")
    with provider.served() as (client, _pid):
        machine = client.settled(MACHINE)
        assert machine.state == STATES[verb], machine.last_error
        # The same call again is the same operation.
        assert client.accept(verb, MACHINE) == operation_id
    if verb == "drain":
        assert len(shim.control("roots")) == 1
    refs = [each["InstanceId"] for each in shim.live()]
    assert refs == ([] if verb == "delete" else [machine.host.ref])
    names = [each["Key"] for each in shim.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    assert all(name.endswith(".result") for name in names)


@pytest.mark.long
def test_a_second_kill_while_the_first_is_made_good_leaves_one_instance(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    provider = Provider(shim, tmp_path, f"127.0.0.1:{free_port()}")
    with provider.served() as (client, pid):
        shim.fault("ec2:RunInstances", drop="after", is_stalled=True)
        operation_id = client.accept("create", MACHINE)
        wait_until(lambda: shim.control("stalled"), provider.log.read_text)
        # The next start looks for what the first one launched.
        shim.fault("ec2:DescribeInstances", drop="after", is_stalled=True, times=2)
        looks = shim.calls("ec2:DescribeInstances")
        os.kill(pid, signal.SIGKILL)
    with provider.served() as (_client, pid):
        # One for the operation, one for the inventory.
        wait_until(lambda: shim.calls("ec2:DescribeInstances") == looks + 2, provider.log.read_text)
        os.kill(pid, signal.SIGKILL)
    shim.control("release")
    with provider.served() as (client, _pid):
        machine = client.settled(MACHINE)
        assert machine.state == STATES["create"], machine.last_error
        assert client.accept("create", MACHINE) == operation_id
    assert [each["attempt"] for each in provider.events("operation.resumed")] == [2, 3]
    assert [each["InstanceId"] for each in shim.live()] == [machine.host.ref]
