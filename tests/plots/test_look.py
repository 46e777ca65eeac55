from __future__ import annotations

import importlib
import sys

import pytest
import torch

import lmcache_stream
from lmcache_stream import UsageError
from lmcache_stream.plots import plot_kept, plot_latencies


def test_matplotlib_is_imported_with_the_first_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_stream, "plots", lmcache_stream.plots)
    for name in [name for name in sys.modules if name.startswith("lmcache_stream.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fresh = importlib.import_module("lmcache_stream.plots")
    assert fresh.plot_kept is not plot_kept


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'lmcache-stream\[bench\]'"):
        plot_latencies({"run": [0.1]})
    with pytest.raises(UsageError, match="needs matplotlib"):
        plot_kept(torch.tensor([0]), 1)
