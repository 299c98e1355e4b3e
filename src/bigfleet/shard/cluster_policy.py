"""Reads the cluster policy file: settings for clusters and for patterns of clusters.

docs/spec/shard.md §1.1. `ClusterPolicies` is an immutable value that a cycle takes once; `PolicyFile` keeps the last
one that could be read. The file is read completely or not at all.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import yaml

from bigfleet.exchange.values import ExchangeMode
from bigfleet.files.yaml_loading import NestingError, compose_yaml
from bigfleet.model.ids import identifier_fault
from bigfleet.model.penalty import ORDINALS, UNSPECIFIED, bucket_label
from bigfleet.planner.problem import PlanSettings, SchedulerOrder

FILE_BYTES_MAX = 4 * 1024 * 1024
CLUSTERS_MAX = 50_000
#: Each cluster that is not named is compared with all of them.
PATTERNS_MAX = 100

_ORDERS = {order.value: order for order in SchedulerOrder}
_SCHEDULER = "scheduler"
_SPOT_POOL = "spot_pool_max"
_MODES = {mode.value: mode for mode in ExchangeMode}
_EXCHANGE = "exchange"
_PENALTY = "penalty_max"
_DOLLARS = "dollars_per_hour_max"
_LIMITS = ("priority_max", _PENALTY, "machines_max", "rows_max", _DOLLARS)
_SETTINGS = (_SCHEDULER, _SPOT_POOL, _EXCHANGE, *_LIMITS)
_SETTING_REMEDY = "write " + " or ".join(f"`{name}:`" for name in _SETTINGS)
_PERCENT = re.compile("([0-9]|[1-9][0-9]|100)%")
PERCENT_REMEDY = "write a share from 0% to 100%, as 50%"
_UNLIMITED = "unlimited"
_NUMBER_MAX = 2**31 - 1
_WHOLE = re.compile("-?[0-9]{1,10}")
_AMOUNT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")
#: Penalty buckets by the dollars that they stand for; the unspecified one is no limit that anyone could mean.
_BUCKETS = {bucket_label(ordinal): ordinal for ordinal in ORDINALS if ordinal != UNSPECIFIED}
_DEFAULT = PlanSettings()

_log = structlog.get_logger("bigfleet.shard.cluster_policy")


class PolicyFault(ValueError):
    """The file cannot be used; the message names the file, the line and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """The settings of a cluster or a pattern; None leaves a setting to the next entry that applies."""

    scheduler: SchedulerOrder | None = None
    #: Percent; 0 is no limit.
    spot_pool_max: int | None = None
    exchange: ExchangeMode | None = None
    #: Of the limits infinity is "unlimited", which goes before the limit of a later entry.
    priority_max: float | None = None
    #: Ordinal of a penalty bucket (docs/spec/model.md §6), of both penalties.
    penalty_max: float | None = None
    machines_max: float | None = None
    rows_max: float | None = None
    dollars_per_hour_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """What a cluster may ask for and have at most; infinity is no limit."""

    priority_max: float = math.inf
    penalty_max: float = math.inf
    machines_max: float = math.inf
    rows_max: float = math.inf
    dollars_per_hour_max: float = math.inf

    @property
    def bounds_rows(self) -> bool:
        """Return whether the rows of a roll-up are limited, apart from what they are given."""
        return min(self.priority_max, self.penalty_max, self.rows_max) < math.inf

    @property
    def bounds_supply(self) -> bool:
        """Return whether the machines of the cluster are limited."""
        return min(self.machines_max, self.dollars_per_hour_max) < math.inf


UNLIMITED = ClusterLimits()


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

    def exchange_mode(self, cluster: str, default: ExchangeMode) -> ExchangeMode:
        """Return what is done about cheaper machines for the cluster."""
        modes = (policy.exchange for policy in self._applying(cluster) if policy.exchange is not None)
        return next(modes, default)

    def limits(self, cluster: str) -> ClusterLimits:
        """Return what the cluster may ask for and have at most."""
        if not self.has_limits:
            return UNLIMITED
        known = self._limits.get(cluster)
        if known is None:
            applying = list(self._applying(cluster))
            found = {
                name: next((value for value in (getattr(each, name) for each in applying) if value is not None), None)
                for name in _LIMITS
            }
            known = ClusterLimits(**{name: value for name, value in found.items() if value is not None})
            if len(self._limits) >= CLUSTERS_MAX:
                self._limits.clear()
            self._limits[cluster] = known
        return known

    @cached_property
    def _limits(self) -> dict[str, ClusterLimits]:
        """Return what was found before, as `_settings` does."""
        return {}

    @cached_property
    def has_limits(self) -> bool:
        """Return whether any entry limits a cluster."""
        policies = (*self.by_cluster.values(), *self.by_pattern.values())
        return any(getattr(policy, name) is not None for policy in policies for name in _LIMITS)

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
        root = compose_yaml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PolicyFault(f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise PolicyFault(f"{path}:{line}: is not YAML: {error.problem or error.context}; correct this line") from error
    except (yaml.YAMLError, NestingError, RecursionError) as error:
        raise PolicyFault(
            f"{path}: is not YAML: {' '.join(str(error).split())}; write a mapping `clusters:`"
        ) from error
    # A truncated file, or one whose template was rendered without its values, must not lift every limit.
    if root is None or not root.value:
        raise PolicyFault(f"{path}: has no `clusters:`; write `clusters: {{}}` for no policy")
    return _Reader(path).policies(root)


def _value_of(key: str, text: str) -> tuple[SchedulerOrder | ExchangeMode | float | None, str]:
    """Return what a setting's text says, None when it says nothing, and what to write instead."""
    if key == _SCHEDULER:
        return _ORDERS.get(text), f"write {' or '.join(_ORDERS)}"
    if key == _SPOT_POOL:
        return percent_of(text), PERCENT_REMEDY
    if key == _EXCHANGE:
        return _MODES.get(text), f"write {' or '.join(_MODES)}"
    if text == _UNLIMITED:
        return math.inf, ""
    if key == _PENALTY:
        return _BUCKETS.get(text), f"write the dollars of a penalty bucket, {', '.join(_BUCKETS)}, or {_UNLIMITED}"
    if key == _DOLLARS:
        amount = float(text) if _AMOUNT.fullmatch(text) else None
        return amount, f"write dollars per hour such as 250 or 12.5, or {_UNLIMITED}"
    number = int(text) if _WHOLE.fullmatch(text) else None
    lowest = -_NUMBER_MAX - 1 if key == "priority_max" else 0
    if number is not None and not lowest <= number <= _NUMBER_MAX:
        number = None
    return number, f"write a whole number from {lowest} to {_NUMBER_MAX}, or {_UNLIMITED}"


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
        found: dict[str, Any] = {}
        for key, value in self._entries(node, place, _is_setting, _SETTING_REMEDY):
            text = value.value if isinstance(value, yaml.ScalarNode) else None
            read, remedy = _value_of(key, text or "")
            if read is None:
                fault = "is no text" if text is None else f"{text!r} is unknown"
                raise self._fault(value, f"{place}.{key}", f"{fault}; {remedy}")
            found[key] = read
        return ClusterPolicy(**found)

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
