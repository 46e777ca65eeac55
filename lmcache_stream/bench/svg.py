"""Plots as inline SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.plots.look import require_matplotlib, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["chart", "line_sample"]

INK: Final = "#010203"
"""Becomes the page's own `var(--ink)`, so that a chart fits a light page and a dark one."""

LOOK: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
}


def chart(title: str, draw: Callable[[Axes], object]) -> str:
    """A plot as an `<svg>` element; empty text if nothing was drawn. The page has one title and one legend for it.

    Args:
        title: For readers that do not see it; unique in the page.
        draw: Draws the plot.
    """

    def fill(figure: Figure) -> bool:
        ax = figure.add_subplot()
        draw(ax)
        ax.set_title("", loc="left")
        if legend := ax.get_legend():
            legend.remove()
        return bool(ax.lines)

    return _svg(title, (6.4, 3.2), fill)


def line_sample(index: int) -> str:
    """What the line `style(index)` looks like, as a small `<svg>` element."""

    def fill(figure: Figure) -> bool:
        from matplotlib.lines import Line2D

        figure.add_artist(Line2D([0.02, 0.5, 0.98], [0.5] * 3, markevery=[1], **style(index)))
        return True

    return _svg(f"line {index + 1}", (0.6, 0.16), fill)


def _svg(title: str, size: tuple[float, float], fill: Callable[[Figure], bool]) -> str:
    figure_type = require_matplotlib()
    import matplotlib

    out = io.StringIO()
    look: dict[Any, Any] = {**LOOK, "svg.hashsalt": title}
    with matplotlib.rc_context(look):
        figure = figure_type(figsize=size, layout="constrained")
        if not fill(figure):
            return ""
        figure.savefig(out, format="svg", transparent=True)
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.DOTALL)
    drawn = drawn[drawn.index("<svg") :].replace(INK, "var(--ink)")
    drawn = re.sub(r" font-family: [^;\"]*;?", "", drawn)
    used = set(re.findall(r"#(\w+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", drawn)
    box = re.search(r'viewBox="[^"]*"', drawn)
    assert box is not None
    return f'<svg {box[0]} role="img"><title>{html.escape(title)}</title>{drawn[drawn.index(">") + 1 :].rstrip()}'
