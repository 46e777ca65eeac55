"""Plots of edits and of runs, for notebooks, scripts and reports; legible without colour.

Every function draws into the `ax` that it is given, or into a new figure of `matplotlib.pyplot`, and returns the Axes:
`plot_kept(receipt).figure.savefig("kept.png")`. `matplotlib` is imported with the first plot.
"""

from __future__ import annotations

from lmcache_stream.plots.attention import attention_mass, mass_kept, plot_attention_mass
from lmcache_stream.plots.kept import plot_kept
from lmcache_stream.plots.runs import output_throughput, plot_latencies, plot_throughput

__all__ = [
    "attention_mass",
    "mass_kept",
    "output_throughput",
    "plot_attention_mass",
    "plot_kept",
    "plot_latencies",
    "plot_throughput",
]
