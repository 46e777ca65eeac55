"""Random tokens: the baseline that every method must beat."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import ClassVar

import torch

from lmcache_stream.editors.base import EditInput, TokenDropping

__all__ = ["Random"]


@dataclass(frozen=True, kw_only=True)
class Random(TokenDropping):
    """Keeps tokens drawn at random, all with the same chance.

    Args:
        seed: Equal seeds and equal tokens keep equal positions; an `EditInput.generator` takes its place.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """Draw one number for each token, and each layer and head where they keep their own."""
        layers = x.kv.shape[1] if self.scope != "shared" else 1
        heads = self._require_heads(x).num_kv_heads if self.scope == "head" else 1
        generator = x.generator or torch.Generator().manual_seed(self._seed_of(x.tokens))
        drawn = torch.rand(layers, heads, len(x.tokens), generator=generator, device=generator.device)
        return drawn.to(x.kv.device)

    def _seed_of(self, tokens: tuple[int, ...]) -> int:
        digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8, key=str(self.seed).encode()[:64])
        return int.from_bytes(digest.digest()) >> 1
