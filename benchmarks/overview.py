"""Draws `overview.png`, README's picture, from `quality.json` and `headline.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
QUALITY, HEADLINE, PICTURE = HERE / "quality.json", HERE / "headline.json", HERE / "overview.png"
ALL_KV, HALF = "all of the KV", "half of it"
COLOURS = {ALL_KV: "#9ca3af", HALF: "#2563eb"}


@dataclass(frozen=True)
class Panel:
    """Two bars: with all of the KV, and with half of it."""

    title: str
    unit: str
    all_kv: float
    half: float
    digits: int = 0

    def label(self, value: float) -> str:
        """What stands over a bar."""
        return f"{value:.{self.digits}f} {self.unit}"


def panels(quality: Mapping[str, Any], headline: Mapping[str, Any]) -> list[Panel]:
    """What is kept, what it takes, and what it gains; `headline`'s editor and share of the tokens in all three.

    Raises:
        KeyError: The quality of that editor was not measured.
    """
    workload = headline["workload"]
    variant = f"{workload['editor']}/shared/{workload['keep']:g}"
    cells = {cell["variant"]: cell for cell in quality["results"]}
    probe = quality["plan"]["continuations"][0]
    same = cells[variant]["agreement"][probe]["mean"]
    baseline, edited = headline["baseline"], headline["edited"]
    return [
        Panel("the same next token", "%", 100.0, 100 * same),
        Panel("KV of a request", "MB", baseline["kv_bytes_per_request"] / 1e6, edited["kv_bytes_per_request"] / 1e6),
        Panel(
            "decode of all requests, edits included",
            "tokens/s",
            baseline["output_tput"],
            edited["output_tput_with_edit"],
        ),
    ]


def draw(content: Sequence[Panel], path: Path) -> None:
    """Write the picture; the two bars differ by hatching, too."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes = figure.subplots(1, len(content))
    for ax, panel in zip(axes, content, strict=True):
        _draw_panel(ax, panel)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize="small"
    )
    figure.savefig(path, dpi=150)


def _draw_panel(ax: Axes, panel: Panel) -> None:
    for at, (name, value) in enumerate({ALL_KV: panel.all_kv, HALF: panel.half}.items()):
        hatch = "//" if name == HALF else None
        ax.bar(at, value, 0.7, color=COLOURS[name], edgecolor="white", hatch=hatch, label=name)
        ax.text(at, value, panel.label(value), ha="center", va="bottom", fontsize="small")
    ax.set_title(panel.title, fontsize="small")
    ax.set_ylim(0, 1.2 * max(panel.all_kv, panel.half))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    draw(panels(json.loads(QUALITY.read_text()), json.loads(HEADLINE.read_text())), PICTURE)


if __name__ == "__main__":
    main()
