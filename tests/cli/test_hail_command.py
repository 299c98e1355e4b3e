"""`hail-dedicated` and `bigfleet hail`: what a caller sees, and what it never sees (docs/partitioned-hosts.md)."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.proof import in_proportion
from tests.partition.messages import Object, broken_messages, dumped, endless_message, messages
from tests.partition.real_hail import Said, we_say
from tests.processes import run_bigfleet

CASES = Path(__file__).parent.parent / "cases" / "hail"
QUARTER = CASES / "001-design-quarter.json"
PROGRAM = "from bigfleet.cli.hail.program import main; main()"
#: What none of the program's time may go to.
UNWANTED = ("typer", "click", "rich", "numpy", "msgspec", "grpc", "asyncio", "dataclasses", "bigfleet.cli.main")


def recorded(case: str) -> str:
    """Return what hail printed for a case."""
    return (CASES / f"{case}.out").read_text(encoding="utf-8")


def run_program(*arguments: str, stdin: bytes = b"") -> Said:
    """Run the console script's code as a process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], input=stdin, capture_output=True, timeout=120, check=False
    )
    return Said(done.returncode, done.stdout.decode(), done.stderr.decode())


def message(case: str, **changes: Any) -> dict[str, Any]:
    """Return the message of a case; a changed key of the request wins."""
    loaded: dict[str, Any] = json.loads((CASES / f"{case}.json").read_bytes())
    loaded["request"].update(changes)
    return loaded


def reply_to(asked: dict[str, Any], *arguments: str) -> dict[str, Any]:
    """Return our reply."""
    said = we_say(json.dumps(asked).encode(), arguments)
    assert said.code == 0, said
    reply: dict[str, Any] = json.loads(said.output)
    return reply


def test_both_names_of_the_program_answer_alike() -> None:
    by_script = run_program(str(QUARTER))
    by_command = run_bigfleet("hail", str(QUARTER))

    assert (
        by_script.output
        == by_command.stdout
        == recorded("001-design-quarter") + "\n" * (not recorded("001-design-quarter").endswith("\n"))
    )
    assert by_script.code == by_command.returncode == 0
    assert by_script.errors == by_command.stderr


def test_the_program_starts_without_what_it_does_not_need() -> None:
    looked = subprocess.run(
        [sys.executable, "-c", f"import sys, bigfleet.cli.hail.program; print({UNWANTED} & sys.modules.keys())".replace(
            str(UNWANTED), repr(set(UNWANTED))
        )],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )  # fmt: skip

    assert looked.stdout.strip() == "set()"


def test_the_message_comes_from_standard_input_and_options_may_follow_it() -> None:
    said = run_program("-", "-v", "-v", "--no-capacity-checks", stdin=QUARTER.read_bytes())

    assert json.loads(said.output)["result"] == ["t"]
    assert said.errors.endswith("\nAllocation on a dedicated cluster; using lost-allocations metrics.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ((), 1, "Error: This program needs an input file."),
        (("a", "b"), 1, "Error: Only one argument is accepted (the input file)"),
        (("/nowhere/message",), 1, "Error: /nowhere/message: No such file or directory"),
        (("",), 1, "Error: The name of the input file is empty."),
        (("a\nb\x1b[31m",), 1, "Error: a\\nb\\x1b[31m: No such file or directory"),
        (("/",), 1, "Error: /: Is a directory"),
        (("/dev/zero",), 1, "Error: /dev/zero: Is a device"),
        (("-", "--static-kvm-node-memory=x"), 1, "Error: --static-kvm-node-memory: 'x' is no whole number of MiB"),
        (("-", "--unheard-of"), 2, "hail-dedicated: unrecognized arguments: --unheard-of; see hail-dedicated --help"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments: tuple[str, ...], code: int, line: str) -> None:
    assert run_program(*arguments, stdin=QUARTER.read_bytes()) == Said(code, "", line + "\n")


def test_a_sparse_file_is_refused_unread(tmp_path: Path) -> None:
    """A terabyte without a block on the disk."""
    sparse = tmp_path / "message"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    assert run_program(str(sparse)) == Said(1, "", f"Error: {sparse}: Has more than 268,435,456 bytes\n")


def test_help_names_every_option_of_the_page() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "partitioned-hosts.md").read_text(encoding="utf-8")
    shown = run_program("--help").output

    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) <= set(re.findall(r"--[a-z-]+", shown))
    assert run_bigfleet("hail", "--help").stdout.startswith("usage: bigfleet hail ")


@pytest.mark.parametrize(
    ("output", "errors"),
    [("/dev/full", "Error: the answer could not be written: No space left on device\n"), ("&-", "")],
    ids=["full", "closed"],
)
def test_an_answer_that_cannot_be_written_is_told_in_one_line(output: str, errors: str) -> None:
    quiet = CASES / "013-tie-last-listed-wins.json"
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -c '{PROGRAM}' '{quiet}' >{output}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stderr) == (1, errors)


def test_the_command_lines_list_of_hosts_takes_the_place_of_the_requests() -> None:
    asked = message("045-restrict-in-request")

    assert reply_to(asked)["result"] == ["h"]
    assert reply_to(asked, "--restrict-allocation-to=e,q")["result"] == ["q"]
    assert "No online nodes" in reply_to(asked, "--restrict-allocation-to=")["info"]


# ---- one after another -----------------------------------------------------------------------------------------------


def test_one_after_another_no_two_instances_take_the_same_room() -> None:
    asked = message("083-multi-group-partial")
    compatible, corrected = reply_to(asked), reply_to(asked, "--sequential")

    assert compatible["result"][0] == [["x", ["h"]], ["z", ["h"]]]
    assert corrected["result"][0] == [["x", ["h"]]]
    assert [name for name, _reason in corrected["result"][1]] == ["y", "z"]
    assert corrected["info"] == ("Request successful: 2 instances failed to allocate and 1 were allocated successfully")


def test_one_after_another_later_instances_may_go_to_any_group() -> None:
    asked = message("085-multi-two-groups")

    assert reply_to(asked)["success"] is False
    placed, failed = reply_to(asked, "--sequential")["result"]
    assert dict(placed)["f2"] == ["a1"]
    assert failed == []


def test_one_after_another_an_instance_that_fails_fails_alone() -> None:
    asked = message("081-multi-mixed-sizes")
    asked["request"]["instances"][1]["required_nodes"] = 3
    placed, failed = reply_to(asked, "--sequential")["result"]

    assert [name for name, _hosts in placed] == ["a", "c", "d", "e"]
    assert failed == [["b", "Group g1: error Unsupported number of nodes, only one or two  supported"]]


# ---- requests that are not dedicated ---------------------------------------------------------------------------------


def script(folder: Path, text: str) -> str:
    """Write a program and return its path."""
    path = folder / "allocator"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_ordinary_allocator_gets_message_and_options_and_its_words_are_passed_on(tmp_path: Path) -> None:
    program = script(tmp_path, f'cat > {tmp_path}/message; echo "$@"; echo aside >&2; exit 7')
    path = str(CASES / "089-relocate.json")
    said = run_program(path, "--ordinary-allocator", program, "--ignore-soft-errors", "--restrict-allocation-to=a,b")

    assert said == Said(
        7, "- --ignore-soft-errors --restrict-allocation-to=a,b --static-kvm-node-memory=4096\n", "aside\n"
    )
    assert (tmp_path / "message").read_bytes() == Path(path).read_bytes()


def test_a_dedicated_request_is_not_handed_on(tmp_path: Path) -> None:
    assert run_program(str(QUARTER), "--ordinary-allocator", script(tmp_path, "exit 9")).code == 0


def test_a_missing_ordinary_allocator_is_named() -> None:
    said = run_program(str(CASES / "089-relocate.json"), "--ordinary-allocator=/nowhere/hail")

    assert said == Said(1, "", "Error: --ordinary-allocator /nowhere/hail: No such file or directory\n")


def test_an_ordinary_allocator_that_is_ourselves_refuses_instead_of_asking_for_ever(tmp_path: Path) -> None:
    program = script(tmp_path, f'exec {sys.executable} -c "{PROGRAM}" "$@" --ordinary-allocator "$0"')
    said = run_program(str(CASES / "089-relocate.json"), "--ordinary-allocator", program)

    assert (said.code, json.loads(said.output)["success"]) == (0, False)


# ---- bad input -------------------------------------------------------------------------------------------------------

USUAL = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=in_proportion(150))


def assert_orderly(said: Said) -> None:
    """Check that there is an answer of one line, or none and one line that says why."""
    assert "Traceback" not in said.errors
    if said.code == 0:
        assert said.output.count("\n") == 1
        assert set(json.loads(said.output)) == {"success", "info", "result"}
    else:
        assert (said.code, said.output) == (1, "")
        assert re.fullmatch(r"Error: [^\n]+\n", said.errors)


@USUAL
@given(broken_messages())
def test_a_broken_message_never_ends_in_a_traceback(broken: Object) -> None:
    assert_orderly(we_say(dumped(broken).encode()))


@USUAL
@given(st.binary(max_size=40))
def test_no_bytes_end_in_a_traceback(content: bytes) -> None:
    assert_orderly(we_say(content))
    assert_orderly(we_say(b'{"request":' + content))


@settings(USUAL, max_examples=60)
@given(messages(), st.integers(0, 3_000), st.binary(max_size=2))
def test_a_message_with_bytes_changed_never_ends_in_a_traceback(sound: Object, at: int, instead: bytes) -> None:
    text = dumped(sound).encode()
    place = at % len(text)

    assert_orderly(we_say(text[:place] + instead + text[place + len(instead) :]))
    assert_orderly(we_say(text[:place]))


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("request", "memory"), "8000", "invalid data for instance 'new1': key 'memory': Unable to read Int"),
        (("request", "memory"), None, "invalid data for instance 'new1': key 'memory': Unable to read Int"),
        (("request", "disk_template"), "tape", "key 'disk_template': Invalid string value for type DiskTemplate"),
        (("request", "type"), "guess", "invalid request dict: key 'type': Invalid request type 'guess'"),
        (("request", "disks"), [1], "invalid data for instance 'new1': key 'disks': not an object"),
        (("nodes", "h", "offline"), 0, "invalid data for node 'h': key 'offline': Unable to read Bool"),
        (("nodes", "h", "total_cpus"), [], "invalid data for node 'h': key 'total_cpus': Unable to read Double"),
        (("nodes", "h", "group"), "u9", "Unknown group 'u9' for node h"),
        (("nodes", "h"), 3, "invalid iallocator message: key 'nodes': 'h' is not an object"),
        (("nodegroups", "u1", "alloc_policy"), "x", "group 'u1': key 'alloc_policy': Invalid string value for type"),
        (("nodegroups", "u1", "ipolicy", "minmax", 0, "min", "disk-size"), "x", "for 'min': key 'disk-size': Unable"),
        (("cluster_tags",), {}, "invalid iallocator message: key 'cluster_tags': Unable to read list"),
        (("enabled_hypervisors",), ["z/OS"], "key 'enabled_hypervisors': Invalid string value for type Hypervisor"),
        (("instances", "i"), {"disks": []}, "invalid data for instance 'i': key 'disk_space_total' not found, object"),
    ],
)  # fmt: skip
def test_an_error_names_owner_and_key(place: tuple[Any, ...], value: object, told: str) -> None:
    asked = message("001-design-quarter")
    where: Any = asked
    for step in place[:-1]:
        where = where[step]
    where[place[-1]] = value
    said = we_say(json.dumps(asked).encode())

    assert_orderly(said)
    assert said.code == 1
    assert told in said.errors


@pytest.mark.parametrize("number", ["1e401", "1e999999999", "9" * 5_000, "NaN", "Infinity"])
def test_a_number_beyond_reason_is_refused(number: str) -> None:
    text = json.dumps(message("001-design-quarter", memory="NUMBER")).replace('"NUMBER"', number)
    said = we_say(text.encode())

    assert_orderly(said)
    assert said.code == 1


def test_an_interval_that_nothing_limits_is_an_error_that_names_it() -> None:
    said = we_say(endless_message())

    assert_orderly(said)
    assert "invalid data for group 'u0': key 'ipolicy'" in said.errors
    assert "interval 1 limit neither memory nor disk nor CPUs" in said.errors
