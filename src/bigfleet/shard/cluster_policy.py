"""Reads the cluster policy file: settings for clusters and for patterns of clusters.

docs/spec/shard.md §1.1. `ClusterPolicies` is an immutable value that a cycle takes once; `PolicyFile` keeps the last
one that could be read. The file is read completely or not at all.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import yaml

from bigfleet.files.nesting import NestingError, check_nesting
from bigfleet.model.ids import identifier_fault
from bigfleet.planner.problem import PlanSettings, SchedulerOrder

FILE_BYTES_MAX = 4 * 1024 * 1024
CLUSTERS_MAX = 50_000
#: Each cluster that is not named is compared with all of them.
PATTERNS_MAX = 100

_ORDERS = {order.value: order for order in SchedulerOrder}
_SCHEDULER = "scheduler"
_SETTINGS = (_SCHEDULER, "spot_pool_max")
_SETTING_REMEDY = "write " + " or ".join(f"`{name}:`" for name in _SETTINGS)
_PERCENT = re.compile("([0-9]|[1-9][0-9]|100)%")
PERCENT_REMEDY = "write a share from 0% to 100%, as 50%"
_DEFAULT = PlanSettings()
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_log = structlog.get_logger("bigfleet.shard.cluster_policy")


class PolicyFault(ValueError):
    """The file cannot be used; the message names the file, the line and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """What the file says of a cluster or a pattern; None leaves a setting to the next entry that applies."""

    scheduler: SchedulerOrder | None = None
    #: Percent; 0 is no limit.
    spot_pool_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterPolicies:
    """The settings of all clusters. A cluster's own entry goes first, then patterns in the order of the file."""

    by_cluster: Mapping[str, ClusterPolicy] = field(default_factory=dict)
    #: A `*` stands for any characters, none included.
    by_pattern: Mapping[str, ClusterPolicy] = field(default_factory=dict)

    def plan_settings(self, cluster: str) -> PlanSettings:
        """Return how the cluster is planned; a setting that no entry has is the default."""
        known = self._settings.get(cluster)
        if known is None:
            applying = list(self._applying(cluster))
            orders = (policy.scheduler for policy in applying if policy.scheduler is not None)
            limits = (policy.spot_pool_max for policy in applying if policy.spot_pool_max is not None)
            known = PlanSettings(
                order=next(orders, _DEFAULT.order),
                spot_pool_percent_max=next(limits, _DEFAULT.spot_pool_percent_max),
            )
            if len(self._settings) >= CLUSTERS_MAX:
                self._settings.clear()
            self._settings[cluster] = known
        return known

    @cached_property
    def _settings(self) -> dict[str, PlanSettings]:
        """Return what was found before: a cycle asks for every cluster, and each is compared with all patterns."""
        return {}

    def _applying(self, cluster: str) -> Iterator[ClusterPolicy]:
        own = self.by_cluster.get(cluster)
        if own is not None:
            yield own
        yield from (policy for expression, policy in self._expressions if expression.fullmatch(cluster))

    @cached_property
    def _expressions(self) -> list[tuple[re.Pattern[str], ClusterPolicy]]:
        return [
            (re.compile(".*".join(map(re.escape, re.split(r"\*+", pattern)))), policy)
            for pattern, policy in self.by_pattern.items()
        ]


class PolicyFile:
    """A file of policies and what was last read of it."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises PolicyFault."""
        self._path = path
        self.policies = read_policies(path)

    def read_again(self) -> bool:
        """Read the file again and say whether it could be used; if not, the policies stay as they are."""
        try:
            self.policies = read_policies(self._path)
        except PolicyFault as fault:
            advice = "the policies of the last good file stay in force; correct the file"
            _log.error("policy.rejected", error=str(fault), advice=advice)
            return False
        clusters, patterns = len(self.policies.by_cluster), len(self.policies.by_pattern)
        _log.info("policy.loaded", path=str(self._path), clusters=clusters, patterns=patterns)
        return True


def percent_of(text: str) -> int | None:
    """Return the number of a share such as 50%, None for any other text."""
    return int(text.removesuffix("%")) if _PERCENT.fullmatch(text) else None


def read_policies(path: Path) -> ClusterPolicies:
    """Return what the file says. Raises PolicyFault for its first fault."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise PolicyFault(
            f"{path}: cannot be read: {error.strerror or error}; check the path and its permissions"
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise PolicyFault(f"{path}: has more than {FILE_BYTES_MAX} bytes; name clusters by patterns such as prod-*")
    try:
        text = content.decode("utf-8")
        check_nesting(text)
        root = yaml.compose(text, _LOADER)
    except UnicodeDecodeError as error:
        raise PolicyFault(f"{path}: is no UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise PolicyFault(f"{path}:{line}: is no YAML: {error.problem or error.context}; correct this line") from error
    except (yaml.YAMLError, NestingError, RecursionError) as error:
        raise PolicyFault(f"{path}: is no YAML: {' '.join(str(error).split())}; write a mapping `clusters:`") from error
    return ClusterPolicies() if root is None else _Reader(path).policies(root)


class _Reader:
    """Turns the nodes of one file into policies; the nodes know their lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def policies(self, root: yaml.Node) -> ClusterPolicies:
        """Return what the file says. Raises PolicyFault for its first fault."""
        by_cluster: dict[str, ClusterPolicy] = {}
        by_pattern: dict[str, ClusterPolicy] = {}
        for _clusters, value in self._entries(root, "the file", _is_clusters, "write `clusters:`"):
            for cluster, settings in self._entries(value, "clusters", _is_name, "write a cluster id, or as prod-*"):
                (by_pattern if "*" in cluster else by_cluster)[cluster] = self._policy(settings, f"clusters.{cluster}")
            for found, most, what in ((by_cluster, CLUSTERS_MAX, "clusters"), (by_pattern, PATTERNS_MAX, "patterns")):
                if len(found) > most:
                    raise self._fault(value, "clusters", f"has {len(found)} {what}; write at most {most}")
        return ClusterPolicies(by_cluster=by_cluster, by_pattern=by_pattern)

    def _policy(self, node: yaml.Node, place: str) -> ClusterPolicy:
        order: SchedulerOrder | None = None
        limit: int | None = None
        for key, value in self._entries(node, place, _is_setting, _SETTING_REMEDY):
            text = value.value if isinstance(value, yaml.ScalarNode) else None
            fault = "is no text" if text is None else f"{text!r} is unknown"
            if key == _SCHEDULER:
                order = _ORDERS.get(text or "")
                if order is None:
                    raise self._fault(value, f"{place}.{key}", f"{fault}; write {' or '.join(_ORDERS)}")
            else:
                limit = percent_of(text or "")
                if limit is None:
                    raise self._fault(value, f"{place}.{key}", f"{fault}; {PERCENT_REMEDY}")
        return ClusterPolicy(scheduler=order, spot_pool_max=limit)

    def _entries(
        self, node: yaml.Node, place: str, is_known: Callable[[str], bool], remedy: str
    ) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the keys and values of a mapping; each key must be known, and be there once."""
        if not isinstance(node, yaml.MappingNode):
            raise self._fault(node, place, f"is no mapping; {remedy}")
        lines: dict[str, int] = {}
        for key, value in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not is_known(text):
                raise self._fault(key, place, f"{text!r} cannot be a key here; {remedy}")
            if text in lines:
                raise self._fault(key, place, f"{text!r} is already in line {lines[text]}; remove one of the two")
            lines[text] = key.start_mark.line + 1
            yield text, value

    def _fault(self, node: yaml.Node, place: str, text: str) -> PolicyFault:
        return PolicyFault(f"{self._path}:{node.start_mark.line + 1}: {place}: {text}")


def _is_clusters(key: str) -> bool:
    return key == "clusters"


def _is_name(key: str) -> bool:
    return identifier_fault(key) is None


def _is_setting(key: str) -> bool:
    return key in _SETTINGS
