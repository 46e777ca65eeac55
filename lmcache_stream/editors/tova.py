"""TOVA: what the last token looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import EditInput, Layer, QueryScoring
from lmcache_stream.editors.base.dropping import aggregate

__all__ = ["TOVA"]


@dataclass(frozen=True, kw_only=True)
class TOVA(QueryScoring):
    """Keeps the tokens that the last one attends to, over all heads of a layer together.

    Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
    """

    name: ClassVar[str] = "tova"

    window: int = 1

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """Attention of the last query, the same for every head of a layer."""
        return aggregate(super().score(x, budget), (1,), self.aggregate).unsqueeze(1)

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Attention of the last query, the query heads of each group together."""
        total = layer.keys.shape[1]
        return aggregate(self.attention(layer, total - 1, total), (1, 2), self.aggregate)
