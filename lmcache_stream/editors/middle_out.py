"""Middle-out: the beginning and the end of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import EditInput, TokenDropping

__all__ = ["MiddleOut"]


@dataclass(frozen=True, kw_only=True)
class MiddleOut(TokenDropping):
    """Drops the chunks in the middle: keeps one half of the budget from the start and one from the end."""

    name: ClassVar[str] = "middle-out"

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """The farther from the middle, the higher; from the end, when both are as far."""
        positions = torch.arange(len(x.tokens), dtype=torch.float32, device=x.kv.device)
        return (positions - (len(x.tokens) - 1.25) / 2).abs().view(1, 1, -1)
