"""Converts one capacity request to a profile, a gang and a vector (docs/spec/operator.md §3).

A request stands for one pod for the pod's whole life. One that cannot be mapped is refused with its reason, so that the
caller can leave it out and say so; the others are unaffected. `bigfleet.operator.rollup` adds the mapped ones up. This
module must never guess at a value that it cannot read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

from bigfleet.model.metadata import fingerprint_fault
from bigfleet.model.penalty import UNSPECIFIED, bucket_for_dollars
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import MILLI, QuantityError, parse_quantity
from bigfleet.model.shapes import LIMIT_MAX
from bigfleet.model.vector import Vector, parse_vector, vector_faults

#: Bound of docs/spec/wire.md §2 for any string.
GROUP_BYTES_MAX = 1_024
#: Exclusions of groups that begin so are for host ports, which pods of all namespaces share. No selector begins so.
HOST_PORT_GROUP = "hostPort "

_EMPTY: Mapping[str, str] = MappingProxyType({})
_OPERATORS_WITH_VALUES = frozenset({Operator.IN, Operator.NOT_IN})
_OPERATORS_OF_USERS = frozenset({Operator.IN, Operator.NOT_IN, Operator.EXISTS, Operator.DOES_NOT_EXIST})


class UnmappableReason(Enum):
    """Why a request cannot be mapped; the values are condition reasons (docs/spec/operator.md §5)."""

    INVALID_REQUIREMENT = "InvalidRequirement"
    INVALID_QUANTITY = "InvalidQuantity"


class UnmappableRequest(ValueError):
    """A request that is left out of the roll-up; the message names the field and the fault."""

    def __init__(self, reason: UnmappableReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SelectorExpression:
    """One match expression of a label selector, its operator in Kubernetes spelling."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSelector:
    """A Kubernetes label selector."""

    match_labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    match_expressions: tuple[SelectorExpression, ...] = ()

    @property
    def text(self) -> str:
        """The canonical form: equal for equal selectors, and never empty."""
        labels = "".join(f"{key}={value}," for key, value in sorted(self.match_labels.items()))
        texts = sorted((e.key, e.operator, ",".join(sorted(e.values))) for e in self.match_expressions)
        return f"{labels};" + "".join(f"{key} {operator} {values};" for key, operator, values in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoLocation:
    """Pods of one namespace that a selector finds must share one value of a topology key."""

    topology_key: str
    namespace: str
    selector: LabelSelector | None = None

    @property
    def group(self) -> str:
        """The gang's identity: equal exactly for equal (topology key, namespace, selector).

        The namespace is part of it: equal affinity terms in two namespaces are two gangs. A selector whose text would
        make the identity longer than the wire allows is replaced by its SHA-256.
        """
        selector = "" if self.selector is None else self.selector.text
        group = f"{self.topology_key}\0{self.namespace}\0{selector}"
        if len(group) <= GROUP_BYTES_MAX and len(group.encode()) <= GROUP_BYTES_MAX:
            return group
        return f"{self.topology_key}\0{self.namespace}\0sha256:{sha256(selector.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Pods of one group of which a machine may host only so many: required anti-affinity or a spread over hostnames."""

    #: Equal for the pods that exclude each other; unique in the cluster, not "".
    group: str
    max_per_machine: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What one pod asks for."""

    #: Unique in the cluster for the request's life.
    id: str
    #: Kubernetes quantities by resource name.
    resources: Mapping[str, str]
    requirements: tuple[Requirement, ...] = ()
    spreads: tuple[TopologySpread, ...] = ()
    priority: int = 0
    interruption_bucket: int = UNSPECIFIED
    reclamation_bucket: int = UNSPECIFIED
    co_location: CoLocation | None = None
    exclusion: Exclusion | None = None


class MappedRequest(NamedTuple):
    """A request as the roll-up adds it up."""

    profile: Profile
    group: str
    #: Exact milli-units; zero dimensions are absent.
    vector: Vector
    #: The group of pods that exclude each other on one machine, "" for none, and how many of it one may host.
    exclusion: str = ""
    max_per_machine: int = 0


def penalty_bucket(quantity: str | None) -> int:
    """Return the bucket of a penalty in dollars: the smallest that is not below it, UNSPECIFIED for None.

    Raises UnmappableRequest for what is no quantity.
    """
    if quantity is None:
        return UNSPECIFIED
    try:
        # A quantity has at most three decimals, so that the division rounds no amount across a bucket's border.
        return bucket_for_dollars(parse_quantity(quantity) / MILLI)
    except QuantityError as error:
        raise UnmappableRequest(UnmappableReason.INVALID_QUANTITY, f"penalty: {error}") from error


def map_request(request: CapacityRequest) -> MappedRequest:
    """Return the request's profile, group and vector. Raises UnmappableRequest naming the first fault.

    ScheduleAnyway spreads are dropped; a co-location adds a Same requirement on its key unless there is one.
    """
    for requirement in request.requirements:
        _check_requirement(requirement)
    faults = vector_faults(request.resources)
    if faults:
        raise UnmappableRequest(UnmappableReason.INVALID_QUANTITY, f"resources: {faults[0]}")
    requirements = request.requirements
    group = ""
    if request.co_location is not None:
        key = request.co_location.topology_key
        if not key:
            raise UnmappableRequest(UnmappableReason.INVALID_REQUIREMENT, "coLocation.topologyKey is empty")
        group = request.co_location.group
        if not any(r.key == key and r.operator is Operator.SAME for r in requirements):
            requirements = (*requirements, Requirement(key, Operator.SAME))
    profile = Profile(
        requirements=requirements,
        spreads=tuple(spread for spread in request.spreads if spread.mode is SpreadMode.DO_NOT_SCHEDULE),
        priority=request.priority,
        interruption_bucket=request.interruption_bucket,
        reclamation_bucket=request.reclamation_bucket,
    )
    fault = fingerprint_fault(profile.fingerprint)
    if fault:
        raise UnmappableRequest(UnmappableReason.INVALID_REQUIREMENT, f"spec: {fault}")
    vector = parse_vector(request.resources)
    exclusion = request.exclusion
    if exclusion is None:
        return MappedRequest(profile, group, vector)
    if not exclusion.group or not 1 <= exclusion.max_per_machine <= LIMIT_MAX:
        fault = f"exclusion: a group and 1 to {LIMIT_MAX} pods a machine are expected, not {exclusion.max_per_machine}"
        raise UnmappableRequest(UnmappableReason.INVALID_REQUIREMENT, fault)
    return MappedRequest(profile, group, vector, exclusion.group, exclusion.max_per_machine)


def _check_requirement(requirement: Requirement) -> None:
    fault = None
    if not requirement.key:
        fault = "a requirement has an empty key"
    elif requirement.operator not in _OPERATORS_OF_USERS:
        fault = f"{requirement.key}: operator {requirement.operator.label} is not for requests; use coLocation for Same"
    elif requirement.operator in _OPERATORS_WITH_VALUES and not requirement.values:
        fault = f"{requirement.key}: operator {requirement.operator.label} needs values"
    elif requirement.operator not in _OPERATORS_WITH_VALUES and requirement.values:
        fault = f"{requirement.key}: operator {requirement.operator.label} takes no values"
    if fault is not None:
        raise UnmappableRequest(UnmappableReason.INVALID_REQUIREMENT, f"requirements: {fault}")
