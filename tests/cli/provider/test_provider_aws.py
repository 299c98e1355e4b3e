"""`bigfleet provider aws`: wrong calls and files, each in one line and before AWS is asked.

What needs an AWS to talk to is in tests/aws.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.processes import free_port

OFFERING = {
    "instance_type": "m6i.large",
    "zone": "eu-central-1a",
    "count": 2,
    "ami": "ami-1",
    "allocatable": {"cpu": "1900m", "memory": "7Gi"},
}
RIGHT = {
    "--region": "eu-central-1",
    "--offerings": "offerings.json",
    "--bootstrap": "s3://bucket/machines",
    "--state": "s.db",
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"--region": None}, "--region is missing"),
        ({"--region": "Frankfurt"}, "--region: 'Frankfurt' is not a region of AWS"),
        ({"--offerings": None}, "--offerings is missing"),
        ({"--offerings": "none.json"}, "--offerings none.json: No such file"),
        ({"--bootstrap": None}, "--bootstrap is missing"),
        ({"--bootstrap": "bucket"}, "--bootstrap: 'bucket' is not a place in S3; write s3://BUCKET/PREFIX"),
        ({"--state": None}, "--state is missing"),
        ({"--reset": "wipe"}, "--reset: 'wipe' is unknown; choose replace-root, none or delete-only"),
        ({"--launch-rate": "0"}, "--launch-rate: 0 is out of range"),
        ({"--poll-interval": "soon"}, "--poll-interval: 'soon'"),
        ({"--interruption-queue": "queue"}, "--interruption-queue: 'queue' is not a URL"),
        ({"--endpoint-url": "https://a'b"}, '--endpoint-url: "https://a\'b" is not a URL'),
        ({"--endpoint-url": "http://[::1"}, "--endpoint-url: 'http://[::1' is not a URL"),
        ({"--endpoint-url": "http://::1:5000"}, "--endpoint-url: 'http://::1:5000' is not a URL"),
        ({"--endpoint-url": "http://[host]:5000"}, "--endpoint-url: 'http://[host]:5000' is not a URL"),
        ({"--endpoint-url": "http://a:65536"}, "--endpoint-url: 'http://a:65536' is not a URL"),
        ({"--advisor": "offerings.json"}, "--advisor offerings.json: not the Spot Instance Advisor's data"),
        ({"--owner": "a b"}, "--owner: 'a b' is not an owner id; take it from the tag bigfleet:owner of an instance"),
        ({"--addr": "here"}, "--addr: 'here' is not an address"),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(changes: dict[str, str | None], text: str, tmp_path: Path) -> None:
    (tmp_path / "offerings.json").write_text(json.dumps([OFFERING]))
    flags = [f"{name}={value}" for name, value in {**RIGHT, **changes}.items() if value is not None]
    done = run_here("provider", "aws", *flags, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"bigfleet: {text}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ami": None}, "ami: is missing; name an AMI or a launch_template that has one"),
        ({"ami": ""}, "ami: must be a text that is not empty"),
        ({"subnet": 1}, "subnet: must be a text that is not empty"),
        ({"launch_template_version": "3"}, "launch_template_version: needs launch_template"),
        ({"capacity_type": "bare_metal", "price_per_hour": 1}, "capacity_type: EC2 sells its .metal types as"),
        ({"capacity_reservation": "cr-1"}, "capacity_reservation: belongs to capacity_type reserved"),
        ({"allocatable": {}}, "allocatable: is missing; say what pods get of an instance"),
        ({"flexible": ["m5.large"]}, "offerings.json: entry 0: flexible: is unknown; the keys are allocatable, ami"),
        ({"price_per_hour": 0}, "offerings.json: entry 0: price_per_hour: "),
        ({"capacity_type": "spot", "interruption_probability": 0}, "entry 0: interruption_probability: "),
    ],
)
def test_a_mistake_in_the_offerings_is_named(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    entry = {name: value for name, value in {**OFFERING, **changes}.items() if value is not None}
    (tmp_path / "offerings.json").write_text(json.dumps([entry]))
    done = run_here("provider", "aws", *(f"{name}={value}" for name, value in RIGHT.items()), cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("bigfleet: --offerings ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost"])
def test_an_endpoint_that_does_not_answer_is_reached_for(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start asks AWS first, and then fails for want of a folder for its state."""
    (tmp_path / "offerings.json").write_text(json.dumps([OFFERING]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    flags = {**RIGHT, "--endpoint-url": f"http://{host}:{free_port()}", "--state": "no/such/folder/s.db"}
    done = run_here("provider", "aws", *(f"{name}={value}" for name, value in flags.items()), cwd=tmp_path)

    assert done.returncode != 0
    assert "no/such/folder" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


def test_without_boto3_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offerings.json").write_text(json.dumps([OFFERING]))
    monkeypatch.delitem(sys.modules, "bigfleet.provider.backends.aws.boto", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    done = run_here("provider", "aws", *(f"{name}={value}" for name, value in RIGHT.items()), cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bigfleet: provider aws needs boto3, which is not installed; "
        "run make setup in a checkout, or pip install 'boto3>=1.44,<2'\n"
    )
