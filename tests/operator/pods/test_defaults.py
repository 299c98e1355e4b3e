"""How the file of `--priority-class-defaults` is read, and what is said of a wrong one."""

from pathlib import Path

import msgspec
import pytest

from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import INTERRUPTION_PENALTY_ANNOTATION
from bigfleet.operator.pods.defaults import (
    FILE_BYTES_MAX,
    ClassPenalties,
    PenaltyDefaults,
    PenaltyDefaultsFault,
    read_penalty_defaults,
)
from bigfleet.operator.pods.findings import InexpressibleReason
from bigfleet.operator.pods.mapping import map_pod


def read(directory: Path, text: str) -> PenaltyDefaults:
    path = directory / "defaults.yaml"
    path.write_text(text, encoding="utf-8")
    return read_penalty_defaults(path)


def test_each_class_has_its_penalties(tmp_path: Path) -> None:
    text = """
high:
  interruptionPenalty: 100
  reclamationPenalty: 2.5
batch: {reclamationPenalty: 500m}
idle: {}
"""
    defaults = read(tmp_path, text)

    assert defaults.of("high") == ClassPenalties(interruption_penalty="100", reclamation_penalty="2500m")
    assert defaults.of("batch") == ClassPenalties(reclamation_penalty="500m")
    assert defaults.of("idle") == ClassPenalties()
    assert defaults.of("unnamed") == ClassPenalties()
    assert defaults.of("") == ClassPenalties()


def test_an_empty_mapping_names_no_class(tmp_path: Path) -> None:
    assert read(tmp_path, "{}") == PenaltyDefaults()


@pytest.mark.parametrize("text", ["", "# high: {}\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PenaltyDefaultsFault, match=r"defaults\.yaml: is empty; write `\{\}` for no defaults"):
        read(tmp_path, text)


def test_classes_that_a_cluster_lacks_are_named(tmp_path: Path) -> None:
    defaults = read(tmp_path, "b: {}\na: {}\nc: {}\n")

    assert defaults.unknown_classes(["b", "x"]) == ["a", "c"]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("high:\n  interruptionpenalty: 1\n", 2, "high: 'interruptionpenalty' is unknown; write interruptionPenalty"),
        ("high:\n  reclamationPenalty: $20\n", 2, "high.reclamationPenalty: '$20' is no quantity"),
        ("high:\n  reclamationPenalty: -1\n", 2, "high.reclamationPenalty: '-1' is negative"),
        ("high:\n  reclamationPenalty:\n", 2, "high.reclamationPenalty: '' is no quantity"),
        ("high:\n  reclamationPenalty: [1]\n", 2, "high.reclamationPenalty: is not a quantity"),
        ("low: {}\nhigh: 20\n", 2, "high: is not a mapping; write interruptionPenalty or reclamationPenalty"),
        ("low: {}\nhigh:\n", 2, "high: is not a mapping"),
        ("- high\n", 1, "the file: is not a mapping; write the name of a PriorityClass"),
        ("high: {}\nlow: {}\nhigh: {}\n", 3, "'high' is already in line 1; remove one"),
        ("high:\n  reclamationPenalty: 1\n  reclamationPenalty: 2\n", 3, "is already in line 2"),
        ("'': {}\n", 1, "an empty name cannot be a key here"),
        ("[a]: {}\n", 1, "a key is not text"),
        ("high: {}\n low: {}\n", 2, "is not YAML"),
        ("high: [\n", 2, "is not YAML"),
    ],
)
def test_a_fault_names_its_line_and_the_remedy(tmp_path: Path, text: str, line: int, part: str) -> None:
    with pytest.raises(PenaltyDefaultsFault) as caught:
        read(tmp_path, text)

    assert str(caught.value).startswith(f"{tmp_path / 'defaults.yaml'}:{line}: ")
    assert part in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PenaltyDefaultsFault, match=r"absent\.yaml: cannot be read: No such file"):
        read_penalty_defaults(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_bytes(b"high: \xff\n")

    with pytest.raises(PenaltyDefaultsFault, match="is not UTF-8 at byte 6"):
        read_penalty_defaults(path)


def test_a_file_that_is_far_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenaltyDefaultsFault, match="has more than"):
        read(tmp_path, "#" * (FILE_BYTES_MAX + 1))


def test_an_alias_that_contains_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenaltyDefaultsFault):
        read(tmp_path, "high: &x\n  interruptionPenalty: *x\n")


def annotated_pod(penalty: str) -> PodObject:
    metadata = {"name": "p", "namespace": "ns", "uid": "u", "annotations": {INTERRUPTION_PENALTY_ANNOTATION: penalty}}
    spec = {"containers": [{"name": "c"}], "priorityClassName": "high"}
    return msgspec.convert({"metadata": metadata, "spec": spec}, PodObject)


@pytest.mark.parametrize(
    ("maximum", "stated", "penalty", "is_cut"),
    [(None, "9e6", "9e6", False), ("10", "9e6", "10", True), ("10", "10", "10", False), ("0", "1m", "0", True)],
)
def test_an_annotation_states_no_more_than_the_maximum(
    maximum: str | None, stated: str, penalty: str, is_cut: bool
) -> None:
    """Any creator of pods can set it, and machines with a high penalty are preempted after others."""
    defaults = PenaltyDefaults({"high": ClassPenalties(reclamation_penalty="5000")}, annotated_max=maximum)
    mapping = map_pod(annotated_pod(stated), defaults=defaults)

    assert mapping.spec is not None
    assert mapping.spec["interruptionPenalty"] == penalty
    assert mapping.spec["reclamationPenalty"] == "5000"
    assert [finding.reason for finding in mapping.findings] == [InexpressibleReason.INVALID_PENALTY] * is_cut
