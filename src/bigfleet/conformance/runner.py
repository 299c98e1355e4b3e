"""Runs the selected behaviours one after the other, and computes the verdict (docs/spec/provider.md §23).

CERTIFIED if and only if every behaviour of every requested profile passed; a skip never counts as a pass. This module
must not know how a provider is reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from bigfleet.conformance.behaviour import Behaviour
from bigfleet.conformance.calls import CallLog
from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.expecting import Broken, Skipped, how
from bigfleet.conformance.lab import Lab, Patience
from bigfleet.conformance.ports import List, ProviderUnderTest, SiteFault, SiteMissing
from bigfleet.conformance.profiles import ConformanceProfile, Lane
from bigfleet.conformance.slots import NoSlots, Slots, check_enough, slots_min
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, Rng


class BehaviourOutcome(Enum):
    """How one behaviour ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    #: It was left out by --only, or its provider could not be set up.
    NOT_RUN = "not run"


class Verdict(Enum):
    """What a run proves, in all or about one profile."""

    CERTIFIED = "CERTIFIED"
    FAILED = "FAILED"
    INCOMPLETE = "INCOMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one behaviour."""

    behaviour: Behaviour
    outcome: BehaviourOutcome
    seconds: float = 0.0
    #: Why it did not pass; empty when it did.
    reason: str = ""
    #: Its last calls with their answers; none for one that did not run.
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of a run."""

    profiles: frozenset[ConformanceProfile]
    seed: int = 1
    #: Ids to run; None runs all. What is left out has no result.
    only: frozenset[str] | None = None
    scale_count: int = 8000
    soak_seconds: float = 10.0
    patience: Patience = field(default_factory=Patience)
    #: Bootstrap data. A provider that runs it needs data that ends well on its machines.
    blob: bytes = b"blob"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """Everything about a run."""

    plan: Plan
    #: Where the providers were, by lane.
    targets: dict[Lane, str]
    results: tuple[Result, ...]
    #: Why the provider of a lane could not be set up, by lane; behaviours of such a lane did not run.
    faults: dict[Lane, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """What the results prove."""
        return verdict_of(self.plan.profiles, self.results)

    @property
    def verdicts(self) -> dict[ConformanceProfile, Verdict]:
        """What the results prove about each profile of the plan, in the order of the profiles."""
        return {
            profile: verdict_of(
                frozenset({profile}), [result for result in self.results if result.behaviour.profile is profile]
            )
            for profile in ConformanceProfile
            if profile in self.plan.profiles
        }

    def count(self, outcome: BehaviourOutcome) -> int:
        """Return how many behaviours ended so."""
        return sum(result.outcome is outcome for result in self.results)


def verdict_of(profiles: frozenset[ConformanceProfile], results: Sequence[Result]) -> Verdict:
    """Return the verdict of results about profiles; a profile without a result is not proven."""
    if any(result.outcome is BehaviourOutcome.FAILED for result in results):
        return Verdict.FAILED
    proven = {result.behaviour.profile for result in results}
    if (
        any(result.outcome is not BehaviourOutcome.PASSED for result in results)
        or not profiles
        or not profiles <= proven
    ):
        return Verdict.INCOMPLETE
    return Verdict.CERTIFIED


class Sites(Protocol):
    """Where the providers are."""

    async def open(self, lane: Lane) -> ProviderUnderTest:
        """Return the provider of a lane, serving. Raises SiteMissing or SiteFault."""
        ...


class Listener(Protocol):
    """Hears how a run goes."""

    def begins(self, behaviour: Behaviour) -> None:
        """A behaviour is about to run."""
        ...

    def ended(self, result: Result) -> None:
        """A behaviour has a result."""
        ...


class Silent:
    """A listener that ignores everything."""

    def begins(self, behaviour: Behaviour) -> None:
        """Do nothing."""

    def ended(self, result: Result) -> None:
        """Do nothing."""


class Runner:
    """One run. `make_rng` gives the stream of a text, such as `7/LIFE-1`."""

    def __init__(
        self,
        plan: Plan,
        sites: Sites,
        *,
        clock: Clock,
        ids: IdSource,
        make_rng: Callable[[str], Rng],
        listener: Listener | None = None,
    ) -> None:
        self._plan = plan
        self._sites = sites
        self._clock = clock
        self._ids = ids
        self._make_rng = make_rng
        self._listener = listener or Silent()
        self._targets: dict[Lane, str] = {}
        self._faults: dict[Lane, str] = {}
        #: A behaviour was run, so that there is something to report.
        self._has_run = False

    async def run(self) -> ConformanceReport:
        """Run the selected behaviours and return the report.

        A lane whose provider cannot be set up is named in the report, and the others are run. Raises SiteFault when the
        first one cannot: then nothing would be lost. An open site is closed whatever happens.
        """
        behaviours = behaviours_of(self._plan.profiles)
        results: dict[str, Result] = {}
        for lane in Lane:
            of_lane = [behaviour for behaviour in behaviours if behaviour.lane is lane]
            wanted = [behaviour for behaviour in of_lane if self._is_wanted(behaviour)]
            for behaviour in of_lane:
                results[behaviour.id] = Result(
                    behaviour=behaviour, outcome=BehaviourOutcome.NOT_RUN, reason="left out by --only"
                )
            if wanted:
                for result in await self._tried_lane(lane, wanted):
                    results[result.behaviour.id] = result
        ordered = tuple(results[behaviour.id] for behaviour in behaviours)
        return ConformanceReport(plan=self._plan, targets=self._targets, results=ordered, faults=self._faults)

    async def _tried_lane(self, lane: Lane, behaviours: Sequence[Behaviour]) -> list[Result]:
        try:
            return await self._run_lane(lane, behaviours)
        except SiteFault as fault:
            if not self._has_run:
                raise
            self._faults[lane] = str(fault)
            return [
                self._report(Result(behaviour=b, outcome=BehaviourOutcome.NOT_RUN, reason=str(fault)))
                for b in behaviours
            ]

    def _is_wanted(self, behaviour: Behaviour) -> bool:
        return self._plan.only is None or behaviour.id in self._plan.only

    async def _run_lane(self, lane: Lane, behaviours: Sequence[Behaviour]) -> list[Result]:
        try:
            site = await self._sites.open(lane)
        except SiteMissing as missing:
            return [
                self._report(Result(behaviour=b, outcome=BehaviourOutcome.SKIPPED, reason=str(missing)))
                for b in behaviours
            ]
        try:
            self._targets[lane] = site.address
            slots = await self._found_slots(site, behaviours)
            return [self._report(await self._run_one(behaviour, site, slots)) for behaviour in behaviours]
        finally:
            await site.close()

    async def _found_slots(self, site: ProviderUnderTest, behaviours: Sequence[Behaviour]) -> Slots:
        """Look at the whole fleet before anything is touched. Raises SiteFault."""
        log = CallLog(site.connections, self._clock)
        answer = await log.call(List())
        if not answer.is_ok:
            raise SiteFault(
                f"{site.address}: List was not answered ({how(answer)});"
                " is a provider running there, and may you call it?"
            )
        slots = Slots.found_in(answer.listing.machines if answer.listing is not None else ())
        profiles = {behaviour.profile for behaviour in behaviours}
        check_enough(slots, slots_min(profiles, self._plan.scale_count), site.address)
        return slots

    def _report(self, result: Result) -> Result:
        self._listener.ended(result)
        return result

    async def _run_one(self, behaviour: Behaviour, site: ProviderUnderTest, slots: Slots) -> Result:
        self._listener.begins(behaviour)
        self._has_run = True
        started_seconds = self._clock.monotonic_seconds()
        lab = self._lab(behaviour, site, slots)
        outcome, reason = await _judge(behaviour, lab)
        calls = lab.calls.lines
        # What a failed behaviour holds is handed back too: the next one must find the fleet as it was.
        faults = await lab.hand_back()
        if faults and outcome is BehaviourOutcome.PASSED:
            outcome, reason, calls = BehaviourOutcome.FAILED, "; ".join(faults), lab.calls.lines
        return Result(
            behaviour=behaviour,
            outcome=outcome,
            seconds=self._clock.monotonic_seconds() - started_seconds,
            reason=reason,
            calls=calls,
        )

    def _lab(self, behaviour: Behaviour, site: ProviderUnderTest, slots: Slots) -> Lab:
        return Lab(
            site=site,
            calls=CallLog(site.connections, self._clock),
            clock=self._clock,
            draws=BehaviourDraws(self._make_rng(f"{self._plan.seed}/{behaviour.id}")),
            ids=self._ids,
            slots=slots,
            patience=self._plan.patience,
            scale_count=self._plan.scale_count,
            soak_seconds=self._plan.soak_seconds,
            blob=self._plan.blob,
        )


async def _judge(behaviour: Behaviour, lab: Lab) -> tuple[BehaviourOutcome, str]:
    try:
        await behaviour.check(lab)
    except Skipped as skipped:
        return BehaviourOutcome.SKIPPED, str(skipped)
    except (Broken, NoSlots, SiteFault) as error:
        return BehaviourOutcome.FAILED, str(error)
    except Exception as error:  # a client that breaks on an answer is a finding about the provider, not the run's end
        return BehaviourOutcome.FAILED, f"{type(error).__name__}: {error}"
    return BehaviourOutcome.PASSED, ""
