"""Defines what an exchange is: the settings, what is asked of a search, and what a proposal says.

docs/spec/exchange.md. Money is US dollars in float64 here, and nano-dollars in the planner's problem. Every value can
be sent to another process.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from bigfleet.engine.targets import ClassKey
from bigfleet.planner.problem import Problem

SECONDS_PER_HOUR: Final = 3600.0
#: Proposals of one cluster; what comes after them is looked for when they are done.
PROPOSALS_MAX: Final = 8


def total_usd(amounts: Iterable[float]) -> float:
    """Return the sum of finite amounts, rounded once; infinite where it is beyond the largest float."""
    try:
        return math.fsum(amounts)
    except OverflowError:
        return math.inf


class ExchangeMode(Enum):
    """What is done about machines that cheaper ones could replace."""

    #: No exchange is looked for.
    OFF = "off"
    #: Exchanges are shown, audited and counted; none is carried out.
    PROPOSE = "propose"
    #: Those that are ready are carried out, too.
    ON = "on"


class ExchangeKind(Enum):
    """How many machines go and come, or that they go to another cluster."""

    ONE_FOR_ONE = "one-for-one"
    MANY_FOR_FEWER = "many-for-fewer"
    ONE_FOR_MANY = "one-for-many"
    #: Machines that are paid for anyway go to another cluster, which lets rented ones go.
    BETWEEN_CLUSTERS = "between-clusters"

    @classmethod
    def of(cls, goes: int, comes: int) -> "ExchangeKind":
        """Return the kind of an exchange of so many machines within a cluster."""
        if goes == comes:
            return cls.ONE_FOR_ONE
        return cls.MANY_FOR_FEWER if goes > comes else cls.ONE_FOR_MANY


class WaitReason(Enum):
    """Why a proposal is not ready."""

    SAVES_TOO_LITTLE = "saves-too-little"
    DOES_NOT_PAY = "does-not-pay"
    #: Proposals before it take the cluster's budget.
    BUDGET = "budget"
    #: The planner finds no place for all pods of the cluster afterwards.
    DOES_NOT_PACK = "does-not-pack"
    #: Exchanges under way, of other clusters too, take what is on offer.
    NO_STOCK = "no-stock"
    #: The operator is asked whether the pods of what goes would find a place.
    FORECAST = "forecast"
    #: The operator said that they would not.
    WOULD_NOT_FIT = "would-not-fit"


class BlockReason(Enum):
    """Why nothing of a cluster is exchanged for now."""

    NOT_REPORTED = "not-reported"
    QUARANTINED = "quarantined"
    OPERATOR_AWAY = "operator-away"
    SHORTFALL = "shortfall"
    WAITING_PODS = "waiting-pods"
    MACHINES_CHANGING = "machines-changing"
    DEMAND_WITHOUT_PODS = "demand-without-pods"
    TOO_LARGE = "too-large"
    SEARCH_FAILED = "search-failed"
    #: One is under way, or was abandoned a moment ago.
    EXCHANGE_UNDER_WAY = "exchange-under-way"


class ExclusionReason(Enum):
    """Why one machine takes no part."""

    PINNED = "pinned"
    COOLING = "cooling"
    #: It is held after its operator refused a drain.
    WOULD_NOT_FIT = "would-not-fit"
    #: Its operator said that its pods would not fit on other nodes if it were drained.
    FORECAST = "forecast"
    PRICE = "price"
    #: A gang or a strict spread moves as a whole, and another machine of it is excluded, or shares pods with others.
    GANG = "gang"
    SPREAD = "spread"
    #: The shard excludes it: it has not joined, or an action is under way.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """When an exchange pays, and how much may be exchanged at a time (docs/spec/exchange.md §3)."""

    #: How long the machines that come are expected to stay the cheaper ones, at most.
    hold_seconds: float = 4 * SECONDS_PER_HOUR
    margin: float = 1.25
    #: Least saving, as a share of what the exchanged machines cost.
    saving_fraction_min: float = 0.10
    #: Share of a cluster's machines that may go at a time; at least one may.
    budget_fraction: float = 0.05
    #: How long a machine serves before it may go.
    cooling_seconds: float = 6 * SECONDS_PER_HOUR
    #: From the call that creates a machine until it is Configured.
    boot_seconds: float = 300.0
    #: How long machines are excess before they drain: the shard's reclaim delay.
    excess_seconds: float = 600.0
    #: How long one machine drains.
    drain_seconds: float = 600.0

    def budget(self, machines: int) -> int:
        """Return how many of so many machines may go at a time."""
        return max(1, math.floor(machines * self.budget_fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """Facts of equal machines in a proposal."""

    instance_type: str
    zone: str
    #: Such as `Spot`.
    capacity_type: str
    price_usd_per_hour: float
    key: ClassKey
    #: Idle: it is there; else it would be created.
    is_idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMachine:
    """A machine that may go."""

    id: str
    #: Sum of the reclamation penalties of the rows with pods on it.
    reclamation_usd: float = 0.0
    #: Pods that the decision places there.
    pods: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePart:
    """Machines that may go, with the pods on them and what is on offer.

    `kinds` and `held` have one entry for each class of the problem. Machines go in the order of `held`.
    """

    problem: Problem
    kinds: tuple[MachineKind, ...]
    held: tuple[tuple[HeldMachine, ...], ...]
    #: Whether all machines go, or none.
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class WholeCluster:
    """A cluster as the planner sees it: `keys` has one entry for each class of the problem."""

    problem: Problem
    keys: tuple[ClassKey, ...]

    def offers(self, wanted: Counter[ClassKey]) -> bool:
        """Return whether so many machines of each class are on offer."""
        left = Counter(wanted)
        for key, of in zip(self.keys, self.problem.classes, strict=True):
            left[key] -= left[key] if of.stock is None else of.stock
        return not +left

    def after(self, goes: Counter[ClassKey], comes: Counter[ClassKey]) -> Problem | None:
        """Return the problem with nothing on offer, once so many machines of each class have gone and come.

        None if fewer are held, or fewer are on offer.
        """
        left, missing = Counter(goes), Counter(comes)
        classes = []
        for key, of in zip(self.keys, self.problem.classes, strict=True):
            fewer = min(left[key], of.held)
            more = missing[key] if of.stock is None else min(missing[key], of.stock)
            left[key] -= fewer
            missing[key] -= more
            classes.append(replace(of, held=of.held - fewer + more, stock=0))
        return None if +left or +missing else replace(self.problem, classes=tuple(classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeQuestion:
    """What a search needs to know of one cluster; equal questions have equal answers."""

    cluster: str
    #: Machines that the cluster holds, and what they cost, dollars an hour.
    machines: int
    cost_usd_per_hour: float
    parts: tuple[ExchangePart, ...] = ()
    #: Everything that the cluster holds, with all its pods and what is on offer; None while it is blocked.
    whole: WholeCluster | None = None
    #: Number of machines that are excluded, by reason, reasons ascending.
    excluded: tuple[tuple[ExclusionReason, int], ...] = ()
    blocked: BlockReason | None = None
    settings: ExchangeSettings = field(default_factory=ExchangeSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTerms:
    """The arithmetic of one exchange, term by term (docs/spec/exchange.md §3)."""

    #: Prices of what goes and what comes, dollars an hour.
    goes_usd_per_hour: float
    comes_usd_per_hour: float
    #: Expected interruptions of the pods concerned, dollars an hour.
    interruptions_before_usd_per_hour: float
    interruptions_after_usd_per_hour: float
    #: Price of what comes until it is Configured.
    boot_usd: float
    #: Price of what goes from then on until it has drained.
    double_running_usd: float
    #: Reclamation penalties of the pods that are evicted.
    reclamation_usd: float
    settings: ExchangeSettings
    #: Share of the expected hold for which what comes stayed the cheaper choice before (docs/spec/exchange.md §5.1).
    lasting_share: float = 1.0

    @property
    def hold_seconds(self) -> float:
        """Return how long what comes is expected to stay the cheaper choice."""
        return self.settings.hold_seconds * self.lasting_share

    @property
    def saving_usd_per_hour(self) -> float:
        """Return what the cluster costs less by the hour."""
        before = self.goes_usd_per_hour + self.interruptions_before_usd_per_hour
        return before - self.comes_usd_per_hour - self.interruptions_after_usd_per_hour

    @property
    def interruptions_saved_usd_per_hour(self) -> float:
        """Return the part of the saving that is no price."""
        return self.interruptions_before_usd_per_hour - self.interruptions_after_usd_per_hour

    @property
    def saving_fraction(self) -> float:
        """Return the saving as a share of what goes; 0 where that costs nothing."""
        return self.saving_usd_per_hour / self.goes_usd_per_hour if self.goes_usd_per_hour > 0 else 0.0

    @property
    def gain_usd(self) -> float:
        """Return the saving over the expected hold."""
        return self.saving_usd_per_hour * self.hold_seconds / SECONDS_PER_HOUR

    @property
    def cost_usd(self) -> float:
        """Return what the exchange itself costs."""
        return self.boot_usd + self.double_running_usd + self.reclamation_usd

    @property
    def required_usd(self) -> float:
        """Return the least gain that pays."""
        return self.settings.margin * self.cost_usd

    @property
    def break_even_seconds(self) -> float:
        """Return after how long the saving has paid for the exchange; infinite if it never does."""
        if self.saving_usd_per_hour <= 0:
            return math.inf
        return self.cost_usd / self.saving_usd_per_hour * SECONDS_PER_HOUR

    @property
    def wait_reason(self) -> WaitReason | None:
        """Return which condition does not hold; None if both do."""
        if not self.saving_usd_per_hour > 0 or self.saving_fraction < self.settings.saving_fraction_min:
            return WaitReason.SAVES_TOO_LITTLE
        return None if self.gain_usd >= self.required_usd else WaitReason.DOES_NOT_PAY


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeProposal:
    """One exchange that would make a cluster cheaper."""

    kind: ExchangeKind
    #: Whether all machines of a gang go.
    is_gang: bool
    #: (kind, machines), the dearest first.
    goes: tuple[tuple[MachineKind, int], ...]
    comes: tuple[tuple[MachineKind, int], ...]
    #: Ids of the machines that go, ascending.
    machine_ids: tuple[str, ...]
    #: How many times machines drain one after the other, so that no more than the budget go at a time.
    waves: int
    #: Of an exchange between clusters the sum of both parts.
    gate: GateTerms
    #: None: it is ready.
    waits_for: WaitReason | None = None
    #: Of an exchange between clusters: the cluster that the machines go to, and the exchange that they make there.
    taker: str = ""
    taker_part: "ExchangeProposal | None" = None

    @property
    def own_saving_usd_per_hour(self) -> float:
        """Return what its own cluster costs less by the hour; below 0 where the saving is another cluster's."""
        taken = 0.0 if self.taker_part is None else self.taker_part.gate.saving_usd_per_hour
        return self.gate.saving_usd_per_hour - taken

    @property
    def own_interruptions_usd_per_hour(self) -> float:
        """Return the part of that saving that is expected interruptions, and no price."""
        found = self.gate.interruptions_saved_usd_per_hour
        return found if self.taker_part is None else found - self.taker_part.gate.interruptions_saved_usd_per_hour

    @property
    def comes_by_class(self) -> Counter[ClassKey]:
        """Return how many machines of each class come."""
        found: Counter[ClassKey] = Counter()
        for kind, count in self.comes:
            found[kind.key] += count
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterExchanges:
    """What can be exchanged in one cluster."""

    cluster: str
    machines: int
    cost_usd_per_hour: float
    #: Each assumes that those before it are carried out.
    proposals: tuple[ExchangeProposal, ...] = ()
    excluded: tuple[tuple[ExclusionReason, int], ...] = ()
    blocked: BlockReason | None = None

    @property
    def promised_usd_per_hour(self) -> float:
        """Return the saving of the proposals that are ready."""
        return total_usd(each.gate.saving_usd_per_hour for each in self.proposals if each.waits_for is None)
