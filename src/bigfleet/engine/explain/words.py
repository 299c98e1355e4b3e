"""Words the figures of an explanation and the reasons of rejections (docs/spec/aggregates.md §8).

`bigfleet.engine.explain.sentences` makes whole explanations of them. This module does not decide, and no figure stands
without its unit.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final

from bigfleet.engine.explain.explanation import PassedOver, RejectionCount
from bigfleet.engine.explain.records import Rejection, RowRef, Stage
from bigfleet.model.profile import Operator
from bigfleet.model.vector import Vector, format_vector

#: Above this, parts of a cent are not shown.
_FINE_DOLLARS_MAX: Final = 10
#: Says which row is meant.
RowName = Callable[[RowRef], str]

#: What the machines of a scan are, one of them and all.
_MACHINES_OF: Final[Mapping[Stage, tuple[str, str]]] = {
    Stage.CREDIT: ("a machine that is bound or being made", "the machines that are bound or being made"),
    Stage.DOMAIN: ("a part of a domain", "the machines that might make up a domain"),
    Stage.IDLE: ("an idle machine", "the idle machines"),
    Stage.SPECULATIVE: ("a machine to be made", "the machines that could be made"),
    Stage.COMING: ("a draining machine", "the draining machines"),
    Stage.VICTIM: ("a machine to preempt", "the machines in service"),
}
#: What is wrong with them, one and several.
_WRONG: Final[Mapping[Rejection, tuple[str, str]]] = {
    Rejection.UNJOINED: ("never joined its cluster", "never joined their cluster"),
    Rejection.RESERVED: (
        "is reserved for another shard or held for its former cluster",
        "are reserved for another shard or held for their former cluster",
    ),
    Rejection.SOLD_OUT: ("is out of stock at the provider", "are out of stock at the provider"),
    Rejection.SET_ASIDE: (
        "failed to bootstrap a short time ago, or has a rejected record",
        "failed to bootstrap a short time ago, or have rejected records",
    ),
    Rejection.NOT_OWN: ("is meant for another row", "are meant for other rows"),
    Rejection.CLAIMED: ("is held by another row", "are held by other rows"),
    Rejection.EARMARKED: ("is counted on by an earlier gang", "are counted on by earlier gangs"),
    Rejection.TAKEN: ("is already being drained for another row", "are already being drained for other rows"),
    Rejection.ASSIGNED_PRIORITY: (
        "serves a priority that is not below the row's",
        "serve a priority that is not below the row's",
    ),
    Rejection.CLAIMED_BY_PEER: (
        "is held by a row of equal or higher precedence",
        "are held by rows of equal or higher precedence",
    ),
    Rejection.PROFILE: ("does not match", "do not match"),
    Rejection.MIN_UNIT: ("is too small", "are too small"),
    Rejection.NOT_USEFUL: ("has nothing of what was still wanted", "have nothing of what was still wanted"),
    Rejection.NO_TOPOLOGY_VALUE: (
        "does not carry the label that the row is spread over",
        "do not carry the label that the row is spread over",
    ),
    Rejection.OTHER_DOMAIN: ("lies in another domain", "lie in another domain"),
    Rejection.SKEW: ("would make the spread uneven", "would make the spread uneven"),
    Rejection.COVERED: ("came after everything was covered", "came after everything was covered"),
}


# ---- figures -----------------------------------------------------------------------------------------------------


def dollars_text(dollars: float) -> str:
    """Return dollars with cents; small amounts that are finer than that with up to four decimals."""
    if math.isinf(dollars):
        return "unbounded dollars"
    is_fine = abs(dollars) < _FINE_DOLLARS_MAX and round(dollars, 2) != round(dollars, 6)
    text = f"{abs(dollars):,.4f}" if is_fine else f"{abs(dollars):,.2f}"
    # Beyond the cents zeros at the end say nothing.
    text = re.sub(r"(\.\d\d\d*?)0+$", r"\1", text)
    if float(text.replace(",", "")) == 0 and dollars != 0:
        text = f"{abs(dollars):.3g}"
    return f"-${text}" if dollars < 0 else f"${text}"


def amounts_text(amounts: Vector) -> str:
    """Return a vector as `cpu 8, memory 16Gi`, or `nothing`."""
    return ", ".join(f"{name} {text}" for name, text in format_vector(amounts).items()) or "nothing"


def hourly_text(dollars: float) -> str:
    """Return a price or a cost, such as `$0.50/h`."""
    return f"{dollars_text(dollars)}/h"


def figure_text(number: float) -> str:
    """Return a number without unit: whole ones with thousands set apart, others to four digits."""
    return f"{number:,.0f}" if number == int(number) else f"{number:.4g}"


def share_text(probability: float) -> str:
    """Return a probability in percent."""
    return f"{100 * probability:.4g}%"


def percent_text(coverage: str) -> str:
    """Return a coverage, a fraction such as `3/2`, in percent to a tenth."""
    share = Fraction(coverage)
    return f"{float(100 * share):.1f}".removesuffix(".0") + "%"


def counted(count: int, one: str, several: str) -> str:
    """Return a count and what is counted."""
    return f"{count:,} {one if count == 1 else several}"


def listed(names: Sequence[str], total: int) -> str:
    """Return the names and how many of the total are not among them."""
    rest = total - len(names)
    return ", ".join(names) + (f" and {rest:,} more" if rest > 0 else "")


def joined(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def seconds_text(seconds: float) -> str:
    """Return seconds with their unit."""
    return f"{figure_text(seconds)} s"


# ---- rejections --------------------------------------------------------------------------------------------------


def rejection_sentence(count: RejectionCount, row_name: RowName) -> str:
    """Return why machines were passed over for a row: how many, the first with its figures, and which."""
    wrong = _WRONG[count.reason][0 if count.count == 1 else 1]
    machines = listed([over.machine for over in count.sample], count.count)
    compared = _compared(count.reason, count.sample[0], row_name)
    because = f" ({count.sample[0].machine}: {compared})" if compared else ""
    return f"Among {_MACHINES_OF[count.stage][1]}, {count.count:,} {wrong}{because}: {machines}."


def not_taken_sentence(count: RejectionCount, row_name: RowName) -> str:
    """Return why rows passed over a machine: what it was looked at for, which rows, and the figures."""
    names = [row_name(over.row) for over in count.sample]
    compared = [_compared(count.reason, over, row_name) for over in count.sample]
    # One row's figures must not be read as those of all.
    whose = "" if len(set(compared)) == 1 and len(compared) == count.count else f"for {names[0]}: "
    because = f" ({whose}{compared[0]})" if compared[0] else ""
    stage, wrong = _MACHINES_OF[count.stage][0], _WRONG[count.reason][0]
    return f"Not taken as {stage} for {listed(names, count.count)}: it {wrong}{because}."


def _compared(reason: Rejection, over: PassedOver, row_name: RowName) -> str:
    """Return what a reason compared, for one machine; empty when the reason says everything."""
    detail = over.detail
    match reason:
        case Rejection.NOT_OWN:
            differs = _texts(detail["differs"])
            return f"its {joined(differs)} {'differs' if len(differs) == 1 else 'differ'}"
        case Rejection.CLAIMED | Rejection.EARMARKED | Rejection.TAKEN | Rejection.CLAIMED_BY_PEER:
            row = detail["row"]
            return f"by {row_name(row)}" if isinstance(row, RowRef) else ""
        case Rejection.ASSIGNED_PRIORITY:
            return f"{detail['assigned']}, the row has {detail['row']}"
        case Rejection.PROFILE:
            value = "absent" if detail["value"] is None else _value(detail["value"])
            operator = detail["operator"]
            label = operator.label if isinstance(operator, Operator) else operator
            wanted = f"{label} {', '.join(_texts(detail['values']))}".strip()
            return f"{detail['key']} is {value}, wanted is {wanted}"
        case Rejection.MIN_UNIT:
            name, have, want = str(detail["dimension"]), detail["have"], detail["want"]
            assert isinstance(have, int), "a dimension is an integer"
            assert isinstance(want, int), "a dimension is an integer"
            has = amounts_text({name: have}) if have else f"no {name}"
            return f"it has {has}, one machine must have {amounts_text({name: want})}"
        case Rejection.OTHER_DOMAIN:
            value = "no domain" if detail["value"] is None else _value(detail["value"])
            return f"{value}, chosen was {_value(detail['chosen'])}"
        case Rejection.SKEW:
            return (
                f"{detail['domain']} has {detail['count']}, the fewest are {detail['minimum']}, "
                f"the skew may be {detail['skew']}"
            )
        case Rejection.NO_TOPOLOGY_VALUE:
            return str(detail["key"])
        case _:
            return ""


def _value(value: object) -> str:
    """Return a label's value, an empty one so that it can be seen."""
    return str(value) or '""'


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, tuple) else [str(values)]
