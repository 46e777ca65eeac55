"""Line charts as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Series", "line_chart"]

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 42
TICKS = 5


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Args:
        name: What the legend calls it.
        points: `(x, y)` pairs; those that are not finite are left out.
        dots: Whether each point is a dot on the line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """A chart as an `<svg>` element; its colours are the classes `s0`, `s1`, ... Empty text without a point to draw.

    Args:
        title: For readers that do not see it.
        x_label: Below the x axis.
        y_label: Beside the y axis.
        series: What to draw.
    """
    finite = [
        Series(one.name, [(x, y) for x, y in one.points if math.isfinite(x) and math.isfinite(y)], one.dots)
        for one in series
    ]
    points = [point for one in finite for point in one.points]
    if not points:
        return ""
    xs, ys = _ticks([x for x, _ in points]), _ticks([0.0, *(y for _, y in points)])
    x_of = _Scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    y_of = _Scale(ys[0], ys[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{html.escape(title)}</title>']
    for y in ys:
        at = y_of(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{_number(y)}</text>')
    for x in xs:
        at = x_of(x)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_number(x)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">')
    parts.append(f"{html.escape(x_label)}</text>")
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">')
    parts.append(f"{html.escape(y_label)}</text>")
    for number, one in enumerate(finite):
        places = [(x_of(x), y_of(y)) for x, y in one.points]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline class="line s{number}" points="{path}"/>')
        if one.dots:
            parts += [f'<circle class="dot s{number}" cx="{x}" cy="{y}" r="4"/>' for x, y in places]
    parts.append("</svg>")
    return "".join(parts)


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = low
        self._factor = (end - start) / (high - low)
        self._start = start

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self._low) * self._factor, 2)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers that span the values."""
    low, high = min(values), max(values)
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
