"""Draw curves over steps as SVG: reports must work without a plotting package."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDE, TALL, LEFT, TOP, BOTTOM, RIGHT = 720, 300, 48, 34, 28, 14
_COLOURS = ("#2f6fce", "#23935a", "#c98a1b", "#8a5cd1")


class Curve(NamedTuple):
    """Values at steps, optionally with an interval."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def draw_curves(curves: Sequence[Curve], ceiling: float | None = None) -> str:
    """Draw the curves in one frame whose vertical axis starts at zero."""
    shown = [curve for curve in curves if curve.values]
    values = [value for curve in shown for value in (*curve.values, *curve.high)] or [1.0]
    steps = [step for curve in shown for step in curve.steps] or [0, 1]
    top = ceiling or max(values) or 1.0
    first, last = min(steps), max(*steps, min(steps) + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDE - LEFT - RIGHT)

    def y(value: float) -> float:
        return TALL - BOTTOM - min(value, top) / top * (TALL - BOTTOM - TOP)

    def to_points(places: Sequence[int], heights: Sequence[float]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(places, heights, strict=True))

    frame = f'viewBox="0 0 {WIDE} {TALL}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>']
    parts.append(f'<rect width="{WIDE}" height="{TALL}" fill="#ffffff"/>')
    for quarter in range(5):
        value = top * quarter / 4
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDE - RIGHT}" stroke="#e3e0da"/>')
        place = f'x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end"'
        parts.append(f'<text {place} fill="#5a616d">{value:.3g}</text>')
    parts.append(f'<text x="{LEFT}" y="{TALL - 8}" fill="#5a616d">{first}</text>')
    parts.append(
        f'<text x="{WIDE - RIGHT}" y="{TALL - 8}" text-anchor="end" fill="#5a616d">step {last}</text>'
    )
    for number, curve in enumerate(shown):
        colour = _COLOURS[number % len(_COLOURS)]
        if curve.low:
            around = to_points([*curve.steps, *reversed(curve.steps)], [*curve.high, *reversed(curve.low)])
            parts.append(f'<polygon points="{around}" fill="{colour}" opacity="0.15"/>')
        line = to_points(curve.steps, curve.values)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curve.values) < 30:
            parts += [
                f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'
                for step, value in zip(curve.steps, curve.values, strict=True)
            ]
        place = LEFT + number * 220
        parts.append(f'<rect x="{place}" y="10" width="10" height="10" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{place + 16}" y="19" fill="#1c2028">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
