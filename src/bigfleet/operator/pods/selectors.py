"""Writes label selectors canonically.

Equal selectors give equal text and
equal JSON, in any order of their maps and lists.
"""

from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.objects import LabelSelectorObject
from bigfleet.operator.requests import LabelSelector, SelectorExpression


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
