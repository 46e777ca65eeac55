"""R-KV: important and not redundant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d, normalize, pad

from lmcache_stream.editors.base import Layer, QueryScoring
from lmcache_stream.editors.base.dropping import aggregate
from lmcache_stream.editors.snapkv import check_kernel, check_window
from lmcache_stream.editors.tensors import block
from lmcache_stream.errors import UsageError

__all__ = ["RKV"]

BLOCK = 1 << 20
"""Similarities computed at once on a CPU."""

FIRST = 32
"""Columns in which every row first looks for a similar key."""


@dataclass(frozen=True, kw_only=True)
class RKV(QueryScoring):
    """Keeps tokens that the end of the prompt attends to and whose keys are unlike the others.

    Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv:2505.24133. The
    redundancy is exact. It takes time linear in the tokens as long as most keys have a similar one among the last, and
    quadratic where none has; memory stays linear.

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
        return self.mix * self._importance(layer) - (1 - self.mix) * self._redundancy(layer.keys.float())

    def _importance(self, layer: Layer) -> torch.Tensor:
        total = layer.keys.shape[1]
        attention = self.attention(layer, total - self.window, total)[..., : total - self.window].mean(dim=-2)
        pooled = max_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return pad(aggregate(pooled, (1,), self.aggregate), (0, self.window))

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        """Softmax over the tokens of their mean similarity to all others: `[H, T, head_dim]` -> `[H, T]`.

        The similarities to all others add up to one product with the sum of all keys; only those that do not count
        are looked for pair by pair.
        """
        keys = normalize(keys, dim=-1)
        own: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1).square()
        similar = (keys @ keys.sum(dim=1).unsqueeze(-1)).squeeze(-1) - own
        if self.retain:
            similar -= torch.stack([self._retained(head) for head in keys])
        return (similar / keys.shape[1]).softmax(dim=-1)

    def _retained(self, keys: torch.Tensor) -> torch.Tensor:
        """Sum, for each of the unit keys `[T, head_dim]`, the similarities that do not count against it.

        They are those in whose row it is among the last `retain` similar ones. Columns are looked at from the end in
        ever larger blocks, by the rows that have not found theirs yet.
        """
        # A GPU waits after each block to learn how many rows are left: a few short waits save most of the work.
        total = keys.shape[0]
        retained = torch.zeros(total, device=keys.device)
        rows = torch.arange(total, device=keys.device)
        missing = torch.full((total,), self.retain, device=keys.device)
        stop, width = total, FIRST
        while stop and len(rows):
            start = max(stop - min(width, max(block(BLOCK, keys.device) // len(rows), FIRST)), 0)
            columns = torch.arange(start, stop, device=keys.device)
            cosine = keys[rows] @ keys[start:stop].T
            above = torch.where((cosine > self.threshold) & (columns != rows[:, None]), columns, -1)
            last = above.topk(min(self.retain, len(columns))).values if self.retain > 1 else above.amax(-1, True)
            found = (last >= 0) & (torch.arange(last.shape[1], device=keys.device) < missing[:, None])
            at = last.clamp_min(start)
            retained.index_add_(0, at.flatten(), (cosine.gather(1, at - start) * found).flatten())
            missing = missing - found.sum(dim=-1)
            left = missing.nonzero().squeeze(-1)
            rows, missing = rows[left], missing[left]
            stop, width = start, 4 * width
        return retained
