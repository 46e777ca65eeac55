"""R-KV: important and not redundant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d, normalize, pad

from lmcache_stream.editors.base import Layer, QueryScoring, aggregate
from lmcache_stream.editors.snapkv import check_kernel, check_window
from lmcache_stream.errors import UsageError

__all__ = ["RKV"]

BLOCK = 1 << 22
"""Similarities computed at once."""


@dataclass(frozen=True, kw_only=True)
class RKV(QueryScoring):
    """Keeps tokens that the end of the prompt attends to and whose keys are unlike the others.

    Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv:2505.24133. The
    redundancy is exact and takes time quadratic in the tokens; memory stays linear.

    Args:
        window: Tokens of the observation window (the paper's alpha), at least one.
        kernel_size: Width of the max pooling of the importance, odd.
        mix: Weight of the importance against the redundancy (lambda), in [0, 1].
        threshold: Cosine from which on two keys count as similar (T).
        retain: The most recent similar keys that do not count against a token (beta).
    """

    name: ClassVar[str] = "rkv"

    window: int = 8
    kernel_size: int = 7
    mix: float = 0.1
    threshold: float = 0.5
    retain: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self.window)
        check_kernel(self.kernel_size)
        if not 0 <= self.mix <= 1:
            raise UsageError(f"mix={self.mix}: the weight of the importance lies in [0, 1]")
        if self.retain < 0:
            raise UsageError(f"retain={self.retain} must not be negative")

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """`mix * importance - (1 - mix) * redundancy`."""
        return self.mix * self._importance(layer) - (1 - self.mix) * self._redundancy(layer.keys)

    def _importance(self, layer: Layer) -> torch.Tensor:
        total = layer.keys.shape[1]
        attention = self.attention(layer, total - self.window, total)[..., : total - self.window].mean(dim=-2)
        pooled = max_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return pad(aggregate(pooled, (1,), self.aggregate), (0, self.window))

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        """Softmax over the tokens of their mean similarity to all others: `[H, T, head_dim]` -> `[H, T]`."""
        keys = normalize(keys, dim=-1)
        heads, total, _ = keys.shape
        similar = torch.zeros(heads, total, device=keys.device)
        positions = torch.arange(total, dtype=torch.int32, device=keys.device)
        step = max(BLOCK // (heads * total), 1)
        for start in range(0, total, step):
            rows = keys[:, start : start + step] @ keys.transpose(-1, -2)
            own = positions[start : start + step, None]
            rows.masked_fill_(positions == own, 0)
            if self.retain:
                self._forget_recent(rows, positions, own)
            similar += rows.sum(dim=1)
        return (similar / total).softmax(dim=-1)

    def _forget_recent(self, rows: torch.Tensor, positions: torch.Tensor, own: torch.Tensor) -> None:
        """Zero, in each row of similarities, the last `retain` entries above the threshold."""
        above = torch.where(rows > self.threshold, positions, -1)
        count = min(self.retain, above.shape[-1])
        last = above.amax(-1, keepdim=True) if count == 1 else above.topk(count, dim=-1).values
        rows.scatter_(-1, torch.where(last < 0, own, last).long(), 0)  # a token's own entry is 0 already
