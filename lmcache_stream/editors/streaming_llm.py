"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import EditInput, TokenDropping

__all__ = ["StreamingLLM"]


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(TokenDropping):
    """Keeps the first `sinks` tokens and the most recent ones, as many as the budget holds.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453. Positions are those
    in the cache, as the paper has it (`rerotate=True`).
    """

    name: ClassVar[str] = "streaming-llm"

    sinks: int = 4

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """The more recent, the higher."""
        return torch.arange(len(x.tokens), dtype=torch.float32, device=x.kv.device).view(1, 1, -1)
