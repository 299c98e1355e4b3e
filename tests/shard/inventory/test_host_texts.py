"""Packed texts of many machines come out of one piece of memory as they went in."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.shard.inventory import host_texts
from bigfleet.shard.inventory.host_texts import HostTextColumn, HostTexts, PickedTexts, gathered, pack
from tests.engine.proof import in_proportion

short = st.sampled_from(["", "i-0123", "node-7", "é", "\x00", "r" * 127])
#: What can be packed, and what cannot: an error, a lone surrogate, a text that is too long for the column.
packed = st.builds(pack, short, short, st.just(""))
others = st.sampled_from([pack("r", "n", "broken"), pack("\ud800", "", ""), pack("r", "n" * 70_000, "")])
numbers = st.lists(st.integers(0, 1_000), max_size=8)
steps = st.one_of(
    st.tuples(st.just("append"), packed | others),
    st.tuples(st.just("put"), st.integers(0, 1_000), packed | others),
    st.tuples(st.just("extend"), st.lists(packed, max_size=8)),
    st.tuples(st.just("pick"), numbers),
)


@given(st.lists(steps, max_size=40), st.sampled_from([0, 8, 1_048_576]))
@settings(max_examples=in_proportion(200), deadline=None)
def test_a_column_is_a_list_of_texts(story: list[tuple[object, ...]], unused_max: int) -> None:
    """Added singly and many at once, replaced, and picked from another column, also where bytes are given back."""
    column, expected = HostTextColumn(), list[HostTexts]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_texts, "_UNUSED_MAX", unused_max)
        for step in story:
            match step:
                case ("append", texts):
                    assert isinstance(texts, bytes | tuple)
                    column.append(texts)
                    expected.append(texts)
                case ("put", int(number), texts) if expected:
                    assert isinstance(texts, bytes | tuple)
                    column[number % len(expected)] = texts
                    expected[number % len(expected)] = texts
                case ("extend", list(many)):
                    column.extend(b"".join(many), np.array([len(each) for each in many], np.int64))
                    expected += many
                case ("pick", list(picks)) if expected:
                    places = [pick % len(expected) for pick in picks]
                    chosen = HostTextColumn()
                    chosen.extend_from(PickedTexts(column, np.array(places, np.int64)))
                    assert [chosen[each] for each in range(len(chosen))] == [expected[place] for place in places]
            assert [column[each] for each in range(len(column))] == expected
            held = sum(len(each) for each in expected if isinstance(each, bytes) and len(each) <= 65_535)
            assert column._unused == len(column._content) - held <= max(unused_max, len(column._content) // 2)


@given(st.lists(packed, max_size=8), st.integers(0, 8), st.integers(0, 8))
@settings(max_examples=in_proportion(100), deadline=None)
def test_which_machines_have_a_reference(many: list[bytes], first: int, last: int) -> None:
    """A reference of no characters is none."""
    column = HostTextColumn()
    column.extend(b"".join(many), np.array([len(each) for each in many], np.int64))
    expected = [bool(each) and each[0] != 0 for each in many]
    assert column.have_ref(first, last).tolist() == expected[first:last]


#: Characters that are also the number of a reference's bytes, so that pieces of other machines look alike.
words = st.sampled_from(["", "a", "b", "\x01", "\x01a", "a\x01b"])
refs_and_names = st.tuples(words, words)
oddities = st.sampled_from([("r" * 128, ""), ("é", "n"), ("", "é"), ("\ud800", ""), ("", "n" * 70_000)])
#: What a machine has, and what it is asked for.
compared = st.tuples(
    st.one_of(
        refs_and_names.map(lambda pair: pack(*pair, "")),
        oddities.map(lambda pair: pack(*pair, "")),
        st.just(pack("", "", "broken")),
    ),
    refs_and_names,
)


@given(st.lists(compared, max_size=8), st.lists(oddities, max_size=1), st.randoms())
@settings(max_examples=in_proportion(400), deadline=None)
def test_texts_of_many_machines_are_compared(
    many: list[tuple[HostTexts, tuple[str, str]]], asked_oddities: list[tuple[str, str]], order: Random
) -> None:
    """Exactly while plain texts are asked for; otherwise nothing is said to be equal that is not."""
    column = HostTextColumn()
    pairs = [(has, pair) for has, pair in many] + [(pack(*pair, ""), pair) for pair in asked_oddities]
    # Half of the machines are asked for what they have.
    pairs += [(pack(*pair, ""), pair) for _has, pair in many]
    order.shuffle(pairs)
    for has, _pair in pairs:
        column.append(has)
    numbers = list(range(len(pairs)))
    for each in (numbers, order.sample(numbers, len(numbers))):
        asked = [pairs[number][1] for number in each]
        said = column.are(np.array(each, np.int64), [ref for ref, _name in asked], [name for _ref, name in asked])
        expected = [pairs[number][0] == pack(*pairs[number][1], "") for number in each]
        if asked_oddities:
            assert not (said & ~np.array(expected, np.bool_)).any()
        else:
            assert said.tolist() == expected


@pytest.mark.parametrize(
    ("has", "asked"),
    [
        (pack("", "", "broken"), ("", "")),
        (pack("", "n" * 70_000, ""), ("", "")),
        (pack("ab", "", ""), ("a", "b")),
        (pack("a", "", ""), ("é", "")),
        (pack("é", "", ""), ("é", "")),
        (pack("\ud800", "", ""), ("\ud800", "")),
        (pack("r" * 128, "", ""), ("r" * 128, "")),
    ],
)
def test_texts_that_need_a_look_are_not_said_to_be_equal(has: HostTexts, asked: tuple[str, str]) -> None:
    """Next to a machine that has what it is asked for."""
    column = HostTextColumn()
    column.append(has)
    column.append(pack("r", "n", ""))
    said = column.are(np.arange(2), [asked[0], "r"], [asked[1], "n"])
    assert not said[0]
    assert column.are(np.array([1]), ["r"], ["n"]).tolist() == [True]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12))
@settings(max_examples=in_proportion(100), deadline=None)
def test_pieces_stand_one_behind_the_other(pieces: list[tuple[int, int]]) -> None:
    """Whether they were neighbours, overlapped, or were empty."""
    content = bytes(range(40))
    starts, sizes = (np.array([piece[each] for piece in pieces], np.int64) for each in (0, 1))
    expected = b"".join(content[start : start + size] for start, size in pieces)
    assert gathered(np.frombuffer(content, np.uint8), starts, sizes) == expected
