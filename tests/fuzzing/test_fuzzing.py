"""Every reader of input from outside refuses clearly or returns a value: kept inputs, attacks, random changes."""

import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing.attacks import attacks
from tests.fuzzing.targets import BY_NAME, TARGETS, Target, comparable

CORPUS = Path(__file__).parent / "corpus"
#: Attacks of the quick test; the slow ones double a larger size.
ATTACK_BYTES = 5_000
#: What a reader may take at most: a multiple of its input, and something for the smallest.
MEMORY_PER_BYTE_MAX, MEMORY_BYTES_MAX = 1_000, 8_000_000
#: Twice the input may take so many times as long; four times is what a square takes.
DOUBLING_MAX = 3.2
#: Differences below that are noise.
SECONDS_THAT_COUNT = 0.05


def corpus_of(target: Target) -> list[bytes]:
    """Return what is kept for a target, by the names of the files."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).iterdir())]


def of_each() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(BY_NAME)
    assert len(BY_NAME) == len(TARGETS)


@of_each()
def test_what_is_kept_is_refused_or_read(target: Target) -> None:
    read = [target.feed(content) for content in corpus_of(target)]
    assert any(value is not None for value in read), "nothing of the corpus can be read: it shows nothing"


@of_each()
def test_attacks_are_refused_or_read(target: Target) -> None:
    for _name, content in (*attacks(ATTACK_BYTES), ("a long line", b"x" * 150_000)):
        target.feed(content)


@st.composite
def mutated(draw: st.DrawFn, kept: list[bytes]) -> bytes:
    """Draw a kept input with a few changes: pieces that are cut, doubled, replaced, or taken from another one."""
    content = draw(st.sampled_from(kept))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 12)))
        other = draw(st.sampled_from(kept))
        other_start = draw(st.integers(0, len(other)))
        piece = draw(
            st.one_of(
                st.just(b""),
                st.just(content[start:end] * 2),
                st.just(other[other_start : other_start + 20]),
                st.sampled_from(_PIECES),
                st.binary(max_size=6),
            )
        )
        content = content[:start] + piece + content[end:]
    return content


_PIECES = [
    b"null",
    b"-1",
    b"1e400",
    b"9" * 30,
    b"[]",
    b"{}",
    b'""',
    b"\x00",
    b"\xff",
    b"\\ud800",
    b"~",
    b".inf",
    b"true",
]


@of_each()
def test_mutations_are_refused_or_read(target: Target) -> None:
    kept = corpus_of(target)

    # The same changes in each run: `make fuzz` searches further, and a commit does not fail for what it did not change.
    @given(content=mutated(kept))
    @settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def holds(content: bytes) -> None:
        target.feed(content)

    holds()


def grown(target: Target, size_bytes: int) -> Iterator[tuple[str, bytes]]:
    yield from attacks(size_bytes)
    for number, content in enumerate(corpus_of(target)):
        if content:
            yield f"entry {number} again and again", content * (size_bytes // len(content))


def seconds_for(target: Target, content: bytes) -> float:
    found = []
    for _ in range(3):
        began_seconds = time.process_time()
        target.feed(content)
        found.append(time.process_time() - began_seconds)
    return min(found)


@pytest.mark.long
@of_each()
def test_twice_the_input_takes_at_most_about_twice_as_long(target: Target) -> None:
    too_long = []
    for (name, small), (_, large) in zip(
        grown(target, target.doubled_bytes), grown(target, 2 * target.doubled_bytes), strict=True
    ):
        if len(large) < 1.9 * len(small):
            continue
        seconds, doubled_seconds = seconds_for(target, small), seconds_for(target, large)
        if doubled_seconds > DOUBLING_MAX * max(seconds, SECONDS_THAT_COUNT):
            too_long.append(f"{name}: {seconds:.3f} s, then {doubled_seconds:.3f} s")
    assert too_long == []


@pytest.mark.long
@of_each()
def test_memory_is_bounded_by_the_input(target: Target) -> None:
    too_much = []
    for name, content in attacks(20_000):
        tracemalloc.start()
        try:
            target.feed(content)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak_bytes > MEMORY_BYTES_MAX + MEMORY_PER_BYTE_MAX * len(content):
            too_much.append(f"{name}: {peak_bytes} bytes for {len(content)}")
    assert too_much == []


def test_a_reader_that_falls_or_reads_something_else_is_found() -> None:
    """The check has teeth: other exceptions, refusals without a word, and values that change are all defects."""

    def refuses(content: bytes) -> None:
        raise KeyError

    for read, refusals, error in (
        (lambda c: int(c[0]), (ValueError,), IndexError),
        (refuses, (KeyError,), AssertionError),
    ):
        with pytest.raises(error):
            Target(name="broken", read=read, refusals=refusals).feed(b"")
    with pytest.raises(AssertionError, match="another value"):
        Target(name="broken", read=len, refusals=(), again=lambda value: b"x" * (value + 1)).feed(b"x")


def test_values_are_compared_by_what_they_say() -> None:
    """In any order of maps, and also where a number is none; anything else is another value."""
    first = ({"a": 1, "b": (float("nan"),)}, [1])
    assert comparable(first) == comparable(({"b": (float("nan"),), "a": 1}, [1]))
    for other in (({"a": 1, "b": (0.0,)}, [1]), ({"a": 1}, [1]), ({"a": 1, "b": (float("nan"),)}, [2])):
        assert comparable(first) != comparable(other)
