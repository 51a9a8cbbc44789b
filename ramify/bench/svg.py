"""Line charts as inline SVG: linear or logarithmic axes with round numbers, in the page's colours."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 430, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order of x, in one of the page's series colours."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    marks: bool = False
    """Draw each point."""


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    zero: bool = False
    """Begin at 0."""


def chart(lines: Sequence[Line], x: Axis, y: Axis, title: str) -> str:
    """An ``svg`` element; empty text where there is no point."""
    lines = [line for line in lines if line.points]
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_at, x_ticks = _scale([px for px, _ in points], x, LEFT, WIDTH - RIGHT)
    y_at, y_ticks = _scale([py for _, py in points], y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        *(_rule(LEFT, WIDTH - RIGHT, y_at(tick), y_at(tick)) for tick in y_ticks),
        *(_tick(LEFT - 7, y_at(tick) + 3.5, "end", tick) for tick in y_ticks),
        *(_rule(x_at(tick), x_at(tick), TOP, HEIGHT - BOTTOM) for tick in x_ticks),
        *(_tick(x_at(tick), HEIGHT - BOTTOM + 15, "middle", tick) for tick in x_ticks),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x.label)}</text>",
        f'<text class="axis" transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(y.label)}</text>',
    ]
    for line in lines:
        places = [(x_at(px), y_at(py)) for px, py in line.points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline class="s{line.colour}" points="{path}"{dash}/>')
        for (px, py), (vx, vy) in zip(places, line.points, strict=True):
            if line.marks:
                words = f"{line.name}: {_number(vx)}, {_number(vy)}"
                parts.append(
                    f'<circle class="s{line.colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
                    f"<title>{html.escape(words)}</title></circle>"
                )
    return "".join([*parts, "</svg>"])


def _rule(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _tick(x: float, y: float, anchor: str, value: float) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_number(value)}</text>'


def shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """The cumulative distribution of `values` in at most a hundred steps: (value, share up to it)."""
    ordered = sorted(values)
    count = len(ordered)
    steps = sorted({math.ceil(count * step / 100) for step in range(1, 101)})
    return [(ordered[rank - 1], rank / count) for rank in steps]


def _scale(
    values: Sequence[float], axis: Axis, start: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """Where on the page a value is, and the values to mark."""
    low, high = min(values), max(values)
    if axis.log and low > 0:
        low, high = low / 1.05, high * 1.05
        first, last = math.log10(low), math.log10(high)
        ticks = _log_ticks(low, high)
        return lambda value: start + (end - start) * (math.log10(value) - first) / (last - first), ticks
    low = min(low, 0.0) if axis.zero or low == high else low
    high = high if high > low else low + 1.0
    ticks = _round_ticks(low, high)
    high = max(high, ticks[-1])
    return lambda value: start + (end - start) * (value - low) / (high - low), ticks


def _round_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [index * step for index in range(math.ceil(low / step), math.ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(found) >= 3:
            return found
    return _round_ticks(low, high)[:-1]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
