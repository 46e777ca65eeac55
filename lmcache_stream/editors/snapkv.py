"""SnapKV: what the end of the prompt looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import avg_pool1d, pad

from lmcache_stream.editors.base import Layer, QueryScoring
from lmcache_stream.editors.base.dropping import aggregate
from lmcache_stream.errors import UsageError

__all__ = ["SnapKV"]


@dataclass(frozen=True, kw_only=True)
class SnapKV(QueryScoring):
    """Keeps an observation window at the end and the tokens that its queries attend to, smoothed over neighbours.

    Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.

    Args:
        window: Tokens of the observation window, at least one.
        kernel_size: Width of the average pooling over neighbours, odd.
    """

    name: ClassVar[str] = "snapkv"

    window: int = 32
    kernel_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self.window)
        check_kernel(self.kernel_size)

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Mean attention of the window, pooled, over the query heads of each group; 0 for the window itself."""
        past = layer.keys.shape[1] - self.window
        attention = self.attention(layer, past, past + self.window)[..., :past].mean(dim=-2)
        if self.aggregate != "max":  # averages commute, and one row is pooled faster than a group's
            attention = aggregate(attention, (1,), self.aggregate)
        pooled = avg_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        if self.aggregate == "max":
            pooled = aggregate(pooled, (1,), self.aggregate)
        return pad(pooled, (0, self.window))


def check_window(window: int) -> None:
    """Refuse an empty observation window."""
    if window < 1:
        raise UsageError(f"window={window}: the observation window needs at least one token")


def check_kernel(kernel_size: int) -> None:
    """Refuse a pooling width that has no middle."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise UsageError(f"kernel_size={kernel_size}: take an odd width")
