"""Wrong values of flags end a command with exit code 2 and one line that names the flag and the remedy."""

from pathlib import Path

import pytest

from bigfleet.cli.flags.values import parse_address, parse_share
from bigfleet.cli.runtime.failures import UsageFault
from tests.commands import run_here

SHARD = ("shard", "--fake-provider", "1")


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        (("plan", "--inventory", "", "--demand", "x"), "--inventory"),
        (("plan", "--inventory=", "--demand", "x"), "--inventory"),
        (("plan", "--inventory", "x", "--demand", ""), "--demand"),
        ((*SHARD, "--audit-log", ""), "--audit-log"),
        ((*SHARD, "--data-dir="), "--data-dir"),
        (("shard", "backup", ""), "FILE"),
        (("audit", "verify", "x", ""), "FILE"),
        (("certs", "dev", ""), "DIR"),
        (("provider", "fault", "--state", ""), "--state"),
        (("coordinator", "--tls-key", ""), "--tls-key"),
        (("operator", "--kubeconfig", ""), "--kubeconfig"),
        (("partition", "show", ""), "FILE"),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_a_wrong_call(tmp_path: Path, arguments: tuple[str, ...], label: str) -> None:
    """It would be the current directory; a variable of a shell that is not set leads to one."""
    done = run_here(*arguments, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"bigfleet: {label} is empty; name a file or directory")
    assert list(tmp_path.iterdir()) == []


def test_a_dot_is_the_current_directory(tmp_path: Path) -> None:
    done = run_here("certs", "dev", ".", cwd=tmp_path)

    assert done.returncode == 0
    assert (tmp_path / "ca.crt").exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--audit-log", "x.log"), ("--record", "x.log")),
        (("--audit-log", "x.log"), ("--record", "./link")),
        (("--record", "data/shard.db"), ("--data-dir", "data")),
        (("--audit-log", "policy.yaml"), ("--cluster-policy", "link/../policy.yaml")),
        (("--record", "policy.yaml"), ("--tls-key", "policy.yaml")),
    ],
    ids=["twice", "link", "state file", "policy", "key"],
)
def test_a_shard_writes_no_two_things_to_one_file(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str]
) -> None:
    """Each would damage the other, and nothing shows it before the file is read."""
    (tmp_path / "link").symlink_to("x.log")
    (tmp_path / "policy.yaml").write_text("clusters: {}\n", encoding="utf-8")
    if first[1] == "policy.yaml" and second[0] == "--cluster-policy":
        (tmp_path / "link").unlink()
        (tmp_path / "link").mkdir()
    done = run_here(*SHARD, *first, *second, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bigfleet: --")
    assert {flag for flag in (first[0], second[0]) if flag in done.stderr} == {first[0], second[0]}
    assert "name the same file" in done.stderr


@pytest.mark.parametrize(
    "text", ["[::1", "[::1:7780", "::1]:7780", "[]:7780", "[localhost]:7780", "[::1]]:7780", "a:b:7780", "[::1]7780"]
)
def test_an_address_with_wrong_brackets_is_refused(text: str) -> None:
    with pytest.raises(UsageFault, match=r"--listen: .* is not an address; write HOST:PORT, \[IPV6\]:PORT or :PORT"):
        parse_address(text, "--listen")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[::1]:7780", ("::1", 7780)),
        ("[fe80::1%eth0]:7780", ("fe80::1%eth0", 7780)),
        ("::1:7780", ("::1", 7780)),
        (":7780", ("0.0.0.0", 7780)),
        ("host.example:0", ("host.example", 0)),
    ],
)
def test_an_address_may_be_a_name_or_ipv6(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--listen") == address


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("5%", "write 0.05"),
        ("12.5%", "write 0.125"),
        ("100%", "write 1"),
        ("101%", "write a number from 0 to 1, such as 0.05"),
        ("1.5", "write a number from 0 to 1, such as 0.05"),
        ("-0.1", "write a number from 0 to 1, such as 0.05"),
        ("nan", "write a number from 0 to 1, such as 0.05"),
        ("", "write a number from 0 to 1, such as 0.05"),
    ],
)
def test_a_wrong_share_shows_the_form_of_a_right_one(text: str, remedy: str) -> None:
    done = run_here(*SHARD, f"--reclaim-cap-fraction={text}")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"bigfleet: --reclaim-cap-fraction: {text!r} is not a share; {remedy}\n"


@pytest.mark.parametrize(("text", "share"), [("0", 0.0), ("0.05", 0.05), (".5", 0.5), ("1.", 1.0), ("1", 1.0)])
def test_a_share_is_a_number_from_0_to_1(text: str, share: float) -> None:
    assert parse_share(text, "--flag") == share
