"""Profiles and fingerprints: what makes demand equal (docs/spec/model.md §7)."""

import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from tests.strategies import any_profiles


@given(any_profiles, any_profiles)
def test_equal_text_means_equal_profile(left: Profile, right: Profile) -> None:
    assert (left.fingerprint == right.fingerprint) == (left == right)


@given(any_profiles, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(profile: Profile, random: st.DataObject) -> None:
    requirements = [*profile.requirements, *profile.requirements]
    spreads = [*profile.spreads, *profile.spreads]
    random.shuffle(requirements)  # type: ignore[attr-defined]
    random.shuffle(spreads)  # type: ignore[attr-defined]

    twisted = replace(profile, requirements=tuple(requirements), spreads=tuple(spreads))

    assert twisted == profile
    assert twisted.fingerprint == profile.fingerprint


@given(any_profiles)
def test_a_fingerprint_has_no_control_characters_and_parses_back(profile: Profile) -> None:
    """Split at the separators and unescape: nothing of the profile is lost, so no two profiles can share a text."""
    text = profile.fingerprint
    assert not any(unicodedata.category(character) == "Cc" for character in text)
    head, requirements, spreads = (
        text.split("|reqs=")[0],
        text.split("|reqs=")[1].split("|spr=")[0],
        text.split("|spr=")[1],
    )

    assert head == f"p={profile.priority}|ipb={profile.interruption_bucket}|rpb={profile.reclamation_bucket}"
    assert tuple(_requirement(part) for part in requirements.split(";")[:-1]) == profile.requirements
    assert tuple(_spread(part) for part in spreads.split(";")[:-1]) == profile.spreads


def _unescaped(text: str) -> str:
    data, position = bytearray(), 0
    while position < len(text):
        if text[position] == "%":
            data.append(int(text[position + 1 : position + 3], 16))
            position += 3
        else:
            data += text[position].encode()
            position += 1
    return data.decode()


def _requirement(text: str) -> Requirement:
    key, operator, values = text.split(":")
    parts = () if values == "" else tuple("" if part == "%" else _unescaped(part) for part in values.split(","))
    return Requirement(_unescaped(key), Operator(int(operator)), parts)


def _spread(text: str) -> TopologySpread:
    key, skew, mode = text.split(":")
    return TopologySpread(_unescaped(key), int(skew), SpreadMode(int(mode)))


@pytest.mark.parametrize(
    ("value", "escaped"),
    [
        ("a,b", "a%2Cb"),
        ("%", "%25"),
        ("", "%"),
        ("\n", "%0A"),
        ("\x85", "%C2%85"),
        ("=", "%3D"),
        ("ü", "ü"),
        (" ", " "),
    ],
)
def test_separators_and_control_characters_are_escaped_per_byte(value: str, escaped: str) -> None:
    profile = Profile((Requirement("k", Operator.IN, (value,)),))

    assert profile.fingerprint == f"p=0|ipb=0|rpb=0|reqs=k:1:{escaped};|spr="


def test_the_same_key_is_that_of_the_first_same_in_canonical_order() -> None:
    profile = Profile(
        (Requirement("z", Operator.SAME), Requirement("a", Operator.IN, ("x",)), Requirement("m", Operator.SAME))
    )

    assert profile.same_key == "m"
    assert Profile().same_key is None


def test_the_strict_spread_is_the_first_and_has_a_skew_of_at_least_one() -> None:
    loose = TopologySpread("a", 1, SpreadMode.SCHEDULE_ANYWAY)
    strict = TopologySpread("b", 0, SpreadMode.DO_NOT_SCHEDULE)
    other = TopologySpread("c", 3, SpreadMode.DO_NOT_SCHEDULE)

    profile = Profile(spreads=(other, strict, loose))

    assert profile.strict_spread == TopologySpread("b", 1, SpreadMode.DO_NOT_SCHEDULE)
    assert Profile(spreads=(loose,)).strict_spread is None


def test_same_beats_spread() -> None:
    spread = TopologySpread("b", 1, SpreadMode.DO_NOT_SCHEDULE)

    assert Profile((Requirement("a", Operator.SAME),), (spread,)).strict_spread is None


def test_precedence_is_priority_then_interruption_then_reclamation() -> None:
    assert Profile(priority=1).precedence > Profile(interruption_bucket=27, reclamation_bucket=27).precedence
    assert Profile(interruption_bucket=1).precedence > Profile(reclamation_bucket=27).precedence
