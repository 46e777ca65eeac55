"""What all plots share: matplotlib where it is needed, and lines that are told apart without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plain_axes", "require_matplotlib", "show_legend", "style", "the_axes"]

MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")
DASHES: Final[tuple[Any, ...]] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#0891b2", "#65a30d", "#7c3aed")


def require_matplotlib() -> Any:
    """Return `matplotlib.figure.Figure`.

    Raises:
        UsageError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a plot needs matplotlib: pip install 'lmcache-stream[bench]'") from error
    return Figure


def the_axes(ax: Axes | None, width: float = 6.4, height: float = 3.6) -> Axes:
    """`ax`, or the Axes of a new figure of pyplot's, sized in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    if ax is not None:
        return ax
    from matplotlib import pyplot

    made: Axes = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    return made


def plain_axes(ax: Axes, x_label: str, y_label: str) -> None:
    """Label the axes; a light grid, and no frame at the top and at the right."""
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.grid(color="0.5", alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def show_legend(ax: Axes) -> None:
    """Name the lines, where there are several."""
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, handlelength=4, fontsize="small")


def style(index: int) -> dict[str, Any]:
    """A look that no other of the first 84 lines has in greyscale: marker and dashes differ."""
    colour = COLOURS[index % len(COLOURS)]
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "color": colour,
        "markerfacecolor": "none" if index % 2 else colour,
    }
