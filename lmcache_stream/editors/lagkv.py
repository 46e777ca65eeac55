"""LagKV: tokens that stand out against what follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import Layer, LayerScoring
from lmcache_stream.errors import UsageError

__all__ = ["LagKV"]


@dataclass(frozen=True, kw_only=True)
class LagKV(LayerScoring):
    """Keeps, in each partition of `lag` tokens, those whose channels vary most once scaled by the next partition.

    Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
    arXiv:2504.04704. The last whole partition and what follows it have nothing to be compared with and are kept first.
    An input of less than two partitions keeps its most recent tokens.

    Args:
        lag: Tokens a partition.
    """

    name: ClassVar[str] = "lagkv"

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag < 2:
            raise UsageError(f"lag={self.lag}: a partition needs at least two tokens")

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Each token's rank within its partition, by `lag`: in [0, 1); 1 for sinks and the tail."""
        heads, total, _ = layer.keys.shape
        scores = torch.ones(heads, total, device=layer.keys.device)
        partitions = max(total - self.sinks, 0) // self.lag
        if partitions < 2:
            scores[:, self.sinks :] = torch.arange(max(total - self.sinks, 0), device=scores.device) / total
            return scores
        rated = self._spread(layer.keys.float(), partitions) + self._spread(layer.values.float(), partitions)
        ranks = rated.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores[:, self.sinks : self.sinks + (partitions - 1) * self.lag] = ranks.flatten(1)
        return scores

    def _spread(self, states: torch.Tensor, partitions: int) -> torch.Tensor:
        """`[H, T, head_dim]` -> `[H, partitions - 1, lag]`."""
        parts = states[:, self.sinks : self.sinks + partitions * self.lag]
        parts = parts.reshape(states.shape[0], partitions, self.lag, -1)
        low, high = parts[:, 1:].amin(dim=2, keepdim=True), parts[:, 1:].amax(dim=2, keepdim=True)
        scaled = (parts[:, :-1] - low).div_((high - low).clamp_min(1e-12))
        scaled -= scaled.mean(dim=-1, keepdim=True)
        spread: torch.Tensor = torch.linalg.vector_norm(scaled, dim=-1)  # the standard deviation, but vectorised
        return (spread / math.sqrt(scaled.shape[-1] - 1)).softmax(dim=-1)
