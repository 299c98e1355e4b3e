"""Evaluates label selectors and writes them canonically.

A pod's own selector decides whether a rule of the pod applies to the pod itself. Equal selectors give equal text and
equal JSON, whatever the order of their maps and lists.
"""

from collections.abc import Mapping

from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.objects import LabelSelectorObject, LabelSelectorRequirement
from bigfleet.operator.requests import LabelSelector, SelectorExpression


def with_label_keys(
    selector: LabelSelectorObject | None,
    labels: Mapping[str, str],
    match_keys: list[str] | None,
    mismatch_keys: list[str] | None = None,
) -> LabelSelectorObject | None:
    """Return the selector with the values that the pod has for `matchLabelKeys` and `mismatchLabelKeys`.

    Keys that the pod lacks are ignored. API servers write the values into the selector of pod affinity, so an
    expression that is there already is not repeated. No selector stays none.
    """
    if selector is None:
        return None
    expressions = list(selector.match_expressions or ())
    for keys, operator in ((match_keys, "In"), (mismatch_keys, "NotIn")):
        for key in keys or ():
            if key in labels:
                merged = LabelSelectorRequirement(key=key, operator=operator, values=[labels[key]])
                if merged not in expressions:
                    expressions.append(merged)
    return LabelSelectorObject(match_labels=selector.match_labels, match_expressions=expressions)


def selects(selector: LabelSelectorObject | None, labels: Mapping[str, str]) -> bool:
    """Say whether a selector matches labels: none matches nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.match_labels or {}).items()):
        return False
    return all(_holds(expression, labels.get(expression.key)) for expression in selector.match_expressions or ())


def _holds(expression: LabelSelectorRequirement, value: str | None) -> bool:
    match expression.operator:
        case "In":
            return value is not None and value in (expression.values or ())
        case "NotIn":
            return value is None or value not in (expression.values or ())
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False


def canonical_selector(selector: LabelSelectorObject) -> LabelSelector:
    """Return the selector with sorted values and expressions, and without repetitions."""
    expressions = {
        SelectorExpression(e.key, e.operator, tuple(sorted(set(e.values or ()))))
        for e in selector.match_expressions or ()
    }
    return LabelSelector(
        match_labels=dict(sorted((selector.match_labels or {}).items())),
        match_expressions=tuple(sorted(expressions, key=lambda e: (e.key, e.operator, e.values))),
    )


def selector_json(selector: LabelSelectorObject) -> dict[str, Json]:
    """Return the canonical JSON of a selector; an empty one is an empty object."""
    canonical = canonical_selector(selector)
    body: dict[str, Json] = {}
    if canonical.match_labels:
        body["matchLabels"] = dict(canonical.match_labels)
    if canonical.match_expressions:
        body["matchExpressions"] = [
            {"key": e.key, "operator": e.operator} | ({"values": list(e.values)} if e.values else {})
            for e in canonical.match_expressions
        ]
    return body
