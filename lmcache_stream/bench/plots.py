"""Quality over the share of tokens kept, readable in print without colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_stream.plots.look import require_matplotlib, style

__all__ = ["Line", "Panel", "Point", "plot_quality"]


@dataclass(frozen=True)
class Point:
    """A measured value with its interval over the share of tokens kept."""

    kept: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """The points of one method in one scope."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """One of the plots side by side.

    Args:
        title: What it shows.
        ylabel: The value and its unit.
        lines: Lines; equal names look alike in all panels.
        reference: Value with all KV.
        logarithmic: Whether large values are squeezed.
    """

    title: str
    ylabel: str
    lines: Sequence[Line]
    reference: float
    logarithmic: bool = False


def plot_quality(panels: Sequence[Panel], path: Path, caption: str) -> None:
    """Draw the panels into a file whose ending names the format: `.png`, `.svg` or `.pdf`."""
    figure = require_matplotlib()(figsize=(6.4 * len(panels), 5.2), layout="constrained")
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    styles = {name: style(index) for index, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in panel.lines:
            handles.setdefault(line.name, draw(axes, line, styles[line.name]))
        axes.axhline(panel.reference, color="0.7", linewidth=0.8, zorder=0)
        axes.set_title(panel.title)
        axes.set_xlabel("share of tokens kept")
        axes.set_ylabel(panel.ylabel)
        axes.set_xlim(1.02, 0)
        if panel.logarithmic:
            axes.set_yscale("symlog", linthresh=0.1)
            axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, handlelength=4)
    figure.suptitle(caption, fontsize="medium")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(axes: Any, line: Line, look: Mapping[str, Any]) -> Any:
    points = sorted(line.points, key=lambda point: point.kept)
    below = [max(point.value - point.low, 0) for point in points]
    above = [max(point.high - point.value, 0) for point in points]
    return axes.errorbar(
        [point.kept for point in points],
        [point.value for point in points],
        yerr=[below, above],
        capsize=2,
        linewidth=1.2,
        elinewidth=0.7,
        markersize=5,
        **look,
    )
