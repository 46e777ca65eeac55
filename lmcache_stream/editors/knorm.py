"""Knorm: keys of small norm draw attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import Layer, LayerScoring

__all__ = ["Knorm"]


@dataclass(frozen=True, kw_only=True)
class Knorm(LayerScoring):
    """Keeps the tokens whose keys have the smallest L2 norm.

    Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430.
    """

    name: ClassVar[str] = "knorm"
    comparable: ClassVar[bool] = False

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """The negative norm of each key."""
        norms: torch.Tensor = torch.linalg.vector_norm(layer.keys, dim=-1, dtype=torch.float32)
        return -norms
