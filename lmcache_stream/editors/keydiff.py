"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from lmcache_stream.editors.base import Layer, LayerScoring

__all__ = ["KeyDiff"]


@dataclass(frozen=True, kw_only=True)
class KeyDiff(LayerScoring):
    """Keeps the tokens whose keys are least similar to the mean direction of all keys.

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", arXiv:2504.15364.
    """

    name: ClassVar[str] = "keydiff"

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """The negative cosine between each key and the mean of all normalised keys."""
        keys = layer.keys.float()
        norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min(1e-12)
        anchor = normalize(norms.reciprocal().transpose(-1, -2) @ keys, dim=-1)
        return -(keys @ anchor.transpose(-1, -2) / norms).squeeze(-1)
