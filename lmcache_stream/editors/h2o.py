"""H2O: heavy hitters and a recent window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import Layer, QueryScoring
from lmcache_stream.editors.base.dropping import aggregate
from lmcache_stream.editors.tensors import block
from lmcache_stream.errors import UsageError

__all__ = ["H2O"]

BLOCK = 1 << 21
"""Attention weights computed at once on a CPU."""


@dataclass(frozen=True, kw_only=True)
class H2O(QueryScoring):
    """Keeps the most recent tokens and those that gathered most attention from all queries.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    arXiv:2306.14048. Takes time quadratic in the tokens; memory stays linear.

    Args:
        recent: Share of the budget that goes to the most recent tokens, in [0, 1].
    """

    name: ClassVar[str] = "h2o"

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise UsageError(f"recent={self.recent} is no share of the budget: it lies in [0, 1]")

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """The sum of the attention that all queries pay; infinite for recent tokens."""
        assert layer.queries is not None
        heads, groups, total, _ = layer.queries.shape
        gathered = torch.zeros(heads, groups, total, device=layer.keys.device)
        step = max(block(BLOCK, layer.keys.device) // (heads * groups * total), 1)
        for start in range(0, total, step):
            stop = min(start + step, total)
            gathered[..., :stop] += self.attention(layer, start, stop).sum(dim=-2)
        scores = aggregate(gathered, (1,), self.aggregate)
        scores[:, total - int(self.recent * budget) :] = math.inf
        return scores
