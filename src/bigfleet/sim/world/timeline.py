"""Draws one run as an HTML page: machines by state over time, short rows, actions, faults, violations.

Plain SVG in HTML without scripts and without anything from elsewhere, so that it can be attached to a report. It draws
what the result holds and must never compute anything that a run should have recorded.
"""

from collections.abc import Iterator, Sequence
from html import escape

from bigfleet.sim.world.run import WorldResult
from bigfleet.sim.world.world import Sample

_WIDTH, _LEFT, _HEIGHT = 1200, 60, 260
_STATES = {
    "Speculative": "#e5e7eb",
    "Creating": "#c4b5fd",
    "Idle": "#93c5fd",
    "Configuring": "#fde68a",
    "Configured": "#86efac",
    "Draining": "#fdba74",
    "Deleting": "#d6d3d1",
    "Failed": "#f87171",
}
_FAULT_LANES_MAX = 14
_LANE = 16


def timeline(result: WorldResult) -> str:
    """Return the HTML page of a run."""
    body = "\n".join(
        [
            f"<h1>Seed {result.plan.seed}</h1>",
            f"<p>{_summary(result)}</p>",
            _legend(),
            f'<svg viewBox="0 0 {_WIDTH + _LEFT + 20} 640" width="100%" font-family="sans-serif" font-size="11">',
            *_machines(result.samples, _scale(result)),
            *_line(result.samples, _scale(result), top=290, name="rows short", values=_shorts(result.samples)),
            *_line(result.samples, _scale(result), top=350, name="actions", values=_rates(result.samples)),
            *_faults(result, _scale(result), top=420),
            "</svg>",
        ]
    )
    style = "body{font-family:sans-serif;margin:2em}span{padding:2px 8px;margin-right:4px}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>bigfleet sim, seed {result.plan.seed}</title>'
        f"<style>{style}</style><body>{body}</body></html>\n"
    )


def _summary(result: WorldResult) -> str:
    found = ", ".join(f"{each.invariant}: {each.text}" for each in result.violations[:3]) or "no violation"
    return escape(f"{result.simulated_seconds:.0f} simulated seconds, trace hash {result.trace_hash}; {found}")


def _legend() -> str:
    return "".join(f'<span style="background:{colour}">{state}</span>' for state, colour in _STATES.items())


def _scale(result: WorldResult) -> float:
    return _WIDTH / max(1.0, result.simulated_seconds)


def _machines(samples: Sequence[Sample], scale: float) -> Iterator[str]:
    total = max((sum(sample.machines.values()) for sample in samples), default=1) or 1
    yield f'<text x="0" y="20">machines</text><text x="0" y="34">{total}</text>'
    for sample, following in zip(samples, [*samples[1:], None], strict=False):
        until = following.at_seconds if following is not None else sample.at_seconds + 10.0
        left, width = _LEFT + sample.at_seconds * scale, (until - sample.at_seconds) * scale
        top = 10.0
        for state, colour in _STATES.items():
            height = _HEIGHT * sample.machines.get(state, 0) / total
            if height:
                yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"/>'
            top += height


def _shorts(samples: Sequence[Sample]) -> list[int]:
    return [sample.short_rows for sample in samples]


def _rates(samples: Sequence[Sample]) -> list[int]:
    totals = [sample.actions for sample in samples]
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


def _line(samples: Sequence[Sample], scale: float, *, top: int, name: str, values: Sequence[int]) -> Iterator[str]:
    most = max([*values, 1])
    yield f'<text x="0" y="{top + 10}">{name}</text><text x="0" y="{top + 24}">{most} at most</text>'
    points = " ".join(
        f"{_LEFT + sample.at_seconds * scale:.1f},{top + 40 - 40 * value / most:.1f}"
        for sample, value in zip(samples, values, strict=True)
    )
    yield f'<polyline points="{points}" fill="none" stroke="#1f2937"/>'


def _faults(result: WorldResult, scale: float, *, top: int) -> Iterator[str]:
    yield f'<text x="0" y="{top - 6}">faults</text>'
    open_since: dict[str, float] = {}
    lanes: dict[str, int] = {}
    for entry in result.journal.entries:
        at = entry.at_nanos / 1e9
        if entry.kind == "heal":
            x = _LEFT + at * scale
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="630" stroke="#16a34a" stroke-dasharray="4"/>'
            yield from (_fault(name, since, at, lanes[name], scale, top) for name, since in open_since.items())
            open_since.clear()
        elif entry.kind == "VIOLATION":
            x = _LEFT + at * scale
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="630" stroke="#dc2626"/>'
        elif entry.kind == "fault" and entry.text == "over":
            since = open_since.pop(entry.subject, at)
            yield _fault(entry.subject, since, at, lanes.get(entry.subject, 0), scale, top)
        elif entry.kind == "fault":
            lanes.setdefault(entry.subject, len(lanes) % _FAULT_LANES_MAX)
            open_since.setdefault(entry.subject, at)


def _fault(name: str, since: float, until: float, lane: int, scale: float, top: int) -> str:
    left, width = _LEFT + since * scale, max(2.0, (until - since) * scale)
    y = top + lane * _LANE
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 4}" fill="#fca5a5"/>'
        f'<text x="{left:.1f}" y="{y + 9}">{escape(name)}</text>'
    )
