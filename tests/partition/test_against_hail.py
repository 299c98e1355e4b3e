"""Ganeti's own hail and ours, side by side on random messages: equal in output, exit code and warnings.

A difference is shrunk, and its message and hail's answer are left in tests/cases/hail/, to be kept as a case.
"""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.engine.proof import Proof, RecordProperty
from tests.partition.messages import Object, arguments, broken_messages, dumped, endless_message, messages, plain
from tests.partition.real_hail import Asked, Said, need_hail, we_say

FOLDER = Path(__file__).parent.parent / "cases" / "hail"
#: Random messages of a quick look, and of the comparison at length.
QUICK_EXAMPLES = 150
EXAMPLES_USUAL = 2_150
EXAMPLES = int(os.environ.get("BIGFLEET_HAIL_EXAMPLES", EXAMPLES_USUAL))
BROKEN_EXAMPLES = 100
SETTINGS = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


def answers(message: bytes, options: list[str]) -> tuple[Said, Said]:
    """Return what hail says and what we say."""
    asked = Asked(message, options)
    ours = we_say(message, options)
    return asked.said(), ours


def keep(name: str, message: bytes, options: list[str], theirs: Said) -> None:
    """Leave a difference beside the cases; shrinking writes again, so the smallest stays."""
    (FOLDER / f"{name}.json").write_bytes(message)
    (FOLDER / f"{name}.out").write_text(theirs.output, encoding="utf-8")
    (FOLDER / f"{name}.args").write_text(" ".join(options) + "\n", encoding="utf-8")


def kind_of(message: Object, output: str) -> str:
    """Return what a message was for the count."""
    request = plain(message)["request"]
    if "--ordinary-allocator" in output:
        return "ordinary"
    entries = request["instances"] if request["type"] == "multi-allocate" else [request]
    placed = "placed" if '"success":true' in output else "refused"
    return (
        f"{request['type']}, {'pair' if any(each['required_nodes'] == 2 for each in entries) else 'single'}, {placed}"
    )


def compare(examples: int, record_property: RecordProperty) -> Proof:
    """Ask both programs, and return how many dedicated messages of each kind there were."""
    need_hail()
    proof = Proof()
    seen = proof.features

    @settings(SETTINGS, max_examples=examples)
    @given(message=messages(), options=arguments())
    def check(message: Object, options: list[str]) -> None:
        text = dumped(message).encode()
        theirs, ours = answers(text, options)
        kind = kind_of(message, ours.output)
        seen[kind] += 1
        if kind == "ordinary":
            return
        if theirs != ours:
            keep("difference", text, options, theirs)
        with proof.example():
            assert theirs == ours

    with proof.told(record_property, "hail answers"):
        check()
    print(f"{proof.ran:,} random dedicated messages, {proof.held:,} answered as hail does: {sorted(seen.items())}")
    return proof


def test_some_random_dedicated_messages_are_answered_as_hail_does(record_property: RecordProperty) -> None:
    assert compare(QUICK_EXAMPLES, record_property).held > QUICK_EXAMPLES // 2


@pytest.mark.long
def test_two_thousand_random_dedicated_messages_are_answered_as_hail_does(record_property: RecordProperty) -> None:
    proof = compare(EXAMPLES, record_property)

    if EXAMPLES >= EXAMPLES_USUAL:
        assert proof.held >= 2_000, proof.features
        for request in ("allocate, single", "allocate, pair", "multi-allocate, single", "multi-allocate, pair"):
            assert proof.features[f"{request}, placed"] > 0, proof.features
            assert proof.features[f"{request}, refused"] > 0, proof.features


def test_broken_messages_end_with_the_same_exit_code() -> None:
    need_hail()
    same_text: Counter[bool] = Counter()

    @settings(SETTINGS, max_examples=BROKEN_EXAMPLES)
    @given(message=broken_messages())
    def check(message: Object) -> None:
        text = dumped(message).encode()
        theirs, ours = answers(text, [])
        if "--ordinary-allocator" in ours.output:
            return
        if (theirs.code, theirs.output) != (ours.code, ours.output):
            keep("difference-broken", text, [], theirs)
            assert theirs == ours
        if ours.code:
            same_text[theirs.errors == ours.errors] += 1

    check()
    print(f"of {same_text.total()} broken messages hail's words too: {same_text[True]}")
    assert same_text.total() > BROKEN_EXAMPLES // 4


def test_where_hail_never_ends_there_is_an_error() -> None:
    need_hail()
    message = endless_message()
    asked = Asked(message, [])
    ours = we_say(message)

    with pytest.raises(subprocess.TimeoutExpired):
        asked.said(seconds_max=2.0)
    assert (ours.code, ours.output) == (1, "")
    assert "'u0': key 'ipolicy'" in ours.errors
    assert "interval 1" in ours.errors
