"""TOVA: what the last token looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import Layer, QueryScoring, aggregate

__all__ = ["TOVA"]


@dataclass(frozen=True, kw_only=True)
class TOVA(QueryScoring):
    """Keeps the tokens that the last one attends to, over all heads of a layer together.

    Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
    """

    name: ClassVar[str] = "tova"

    window: int = 1

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Attention of the last query, the same for every head of the layer."""
        heads, total, _ = layer.keys.shape
        attention = self.attention(layer, total - 1, total)
        return aggregate(attention, (0, 1, 2), self.aggregate).expand(heads, total)
