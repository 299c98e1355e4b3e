"""docs/aws-provider.md is true: its commands are run in order against the strict shim, without the real AWS CLI."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from bigfleet.provider.backends.aws import boto
from bigfleet.provider.backends.aws.reclaim_queue import WARNING
from tests.aws.client import REGION, ShimClient
from tests.aws.test_events import say
from tests.guides import Terminal, blocks, executable
from tests.patience import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "aws-provider.md"
#: Rights whose names differ from the call's.
RIGHTS = {"s3:HeadBucket": "s3:ListBucket", "s3:HeadObject": "s3:GetObject", "sts:GetCallerIdentity": ""}


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(shim: ShimClient, tmp_path: Path) -> None:
    executable(
        tmp_path / "bin" / "aws",
        f'#!/bin/sh\nPYTHONPATH={ROOT}/src:{ROOT} exec {shlex.quote(sys.executable)} -m tests.aws.aws_cli "$@"\n',
    )
    replaced = {
        "https://sqs.us-east-1.amazonaws.com": shim.url,
        "ami-0123456789abcdef0": shim.place["ami"],
        "subnet-0123456789abcdef0": shim.place["subnets"]["us-east-1a"],
    }
    names = re.compile("|".join(map(re.escape, replaced)))
    terminal = Terminal(
        tmp_path,
        {"AWS_ENDPOINT_URL": shim.url, "AWS_DEFAULT_REGION": REGION},
        here=lambda text: names.sub(lambda found: replaced[found[0]], text),
    )
    run = iter(blocks(PAGE, ("sh", "console")))
    for _language, content in run:
        if content.startswith("bigfleet provider aws"):
            break
        terminal.run(content)
    status, shard, machines = (content for _language, content in run)
    with terminal.serving(content, "--addr"):
        assert re.search(r"SPECULATIVE\W+70\b", terminal.run(status), re.IGNORECASE)
        # What EC2 says reaches the queue by the rule, and the provider by the queue.
        say(shim, WARNING, instance_id="i-1")
        # Instances of tests before this one may end, which is another event.
        unknown = re.compile(r"events unknown\W+[1-9]")
        wait_until(lambda: unknown.search(terminal.run(status)), lambda: terminal.run(status))
        with terminal.serving(shard, "--listen"):
            wait_until(lambda: "0.0352" in terminal.run(machines), "the shard lists no spot machine with its price")
            assert "0.096" in terminal.run(machines)


def test_the_policy_of_the_page_has_every_right_that_the_provider_uses() -> None:
    (policy,) = (
        json.loads(content.split("<<END\n")[1].split("\nEND\n")[0])
        for _language, content in blocks(PAGE, ("sh", "console"))
        if content.startswith("cat > provider.json")
    )
    rights = {
        right
        for statement in policy["Statement"]
        for right in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }
    source = Path(boto.__file__).read_text("utf-8")
    calls = {f"ec2:{name}" for name in re.findall(r'self\._(?:call|dry_run)\(\s*"(\w+)"', source)}
    calls |= {f"{service}:{name}" for service, name in re.findall(r'"(\w+)",\s*"([A-Z]\w+)",', source)}
    calls |= set(re.findall(r'"(\w+:[A-Z]\w+)"', source))
    used = {RIGHTS.get(call, call) for call in calls} - {""}
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "s3:GetObject", "sqs:DeleteMessage"} <= used
    # A launch names a role, whose right is of another service.
    assert rights == used | {"iam:PassRole"}
