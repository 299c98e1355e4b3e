"""Checks expectations of behaviours: one sentence each, which is the text of the failure.

This module must not call a provider.
"""

from collections.abc import Mapping
from typing import NoReturn

from bigfleet.conformance.ports import Answer

_SHOWN_CHARACTERS_MAX = 200


class Broken(Exception):
    """An expectation that did not hold: the sentence, and the value that was seen."""

    def __init__(self, expectation: str, seen: str) -> None:
        super().__init__(f"{expectation}; seen: {seen}" if seen else expectation)
        self.expectation = expectation
        self.seen = seen


class Skipped(Exception):
    """A behaviour that cannot be judged here; the text says what is missing."""


def broken(expectation: str, seen: object = "") -> NoReturn:
    """Raise Broken."""
    raise Broken(expectation, shown(seen))


def expect(holds: bool, expectation: str, seen: object = "") -> None:
    """Raise Broken with the sentence unless it holds."""
    if not holds:
        broken(expectation, seen)


def expect_ok(answer: Answer, expectation: str) -> Answer:
    """Return an answer that is OK. Raises Broken."""
    expect(answer.is_ok, f"{expectation}: OK", how(answer))
    return answer


def expect_fenced(answer: Answer, expectation: str) -> None:
    """Raise Broken unless the fence refused."""
    expect(answer.is_fenced, f"{expectation}: FAILED_PRECONDITION", how(answer))


def expect_refused(answer: Answer, expectation: str) -> None:
    """Raise Broken unless something other than the fence refused."""
    expect(answer.is_refused, f"{expectation}: refused, not by the fence", how(answer))


def expect_same_map(stored: Mapping[str, str], sent: Mapping[str, str], where: str) -> None:
    """Raise Broken unless two maps are equal, naming the first key that differs."""
    if dict(stored) == dict(sent):
        return
    for key in sorted({*stored, *sent}):
        if stored.get(key) != sent.get(key):
            expectation = f"{where}: shard_metadata comes back exactly, {len(sent)} keys"
            broken(expectation, f"key {key!r} is {shown(stored.get(key))}, sent {shown(sent.get(key))}")


def how(answer: Answer) -> str:
    """Return a status and its text."""
    return f"{answer.status.value}: {answer.details}" if answer.details else answer.status.value


def shown(seen: object) -> str:
    """Return what was seen as it may be printed: short, without control characters."""
    text = seen if isinstance(seen, str) else repr(seen)
    text = "".join(character if character.isprintable() else "�" for character in text)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…"
