"""Scores of one layer and KV head at a time, from its KV or from the prompt's queries."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch

from lmcache_stream.editors.base.dropping import TokenDropping
from lmcache_stream.editors.base.editor import EditInput
from lmcache_stream.editors.tensors import heads_at_once, of_heads, product_dtype
from lmcache_stream.errors import UsageError

__all__ = ["Layer", "LayerScoring", "QueryScoring"]


_KEYS_STEP: Final = 256
"""Queries meet a multiple of so many keys: torch keeps code and memory for every shape that it has multiplied."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Some KV heads of one layer of an `EditInput`.

    Args:
        index: Which layer.
        heads: Which of its KV heads, `H` of them.
        keys: `[H, T, head_dim]` with their rotary positions, float32 or of the input's dtype.
        values: `[H, T, head_dim]`, a view of the input in its dtype.
        queries: `[H, G, T, head_dim]` of the `G` query heads that share a KV head, a view of the input in its dtype;
            None for methods that need none.
    """

    index: int
    heads: slice
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerScoring(TokenDropping):
    """Scores the tokens of each layer and KV head from that head's KV alone."""

    needs: ClassVar[frozenset[str]] = frozenset({"heads"})

    @abc.abstractmethod
    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Rate the tokens of some KV heads of one layer: float32 `[H, T]`; the higher, the sooner kept."""

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """Rate each layer; see `TokenDropping.score`."""
        heads = self._require_heads(x).num_kv_heads
        scores = torch.empty(x.kv.shape[1], heads, len(x.tokens), device=x.kv.device)
        for index in range(x.kv.shape[1]):
            for some in heads_at_once(x.kv, heads):
                layer = self._layer(x, index, some, heads)
                rated = self.score_layer(layer, budget)
                if rated.shape != layer.keys.shape[:2]:
                    raise UsageError(
                        f"{type(self).__name__}.score_layer must give [KV heads, tokens] = "
                        f"{list(layer.keys.shape[:2])}, not {list(rated.shape)}"
                    )
                scores[index, some] = rated
        return scores

    def _layer(self, x: EditInput, index: int, some: slice, heads: int) -> Layer:
        keys, values = (of_heads(plane, heads)[some] for plane in x.kv[:, index])
        return Layer(index, some, keys, values)


@dataclass(frozen=True, kw_only=True)
class QueryScoring(LayerScoring):
    """Scores tokens by the attention that the prompt's own queries pay to them.

    Args:
        scale: Factor of the attention logits; None: `1 / sqrt(head_dim)`, as most models have it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"heads", "queries"})

    scale: float | None = None

    def _layer(self, x: EditInput, index: int, some: slice, heads: int) -> Layer:
        layer = super()._layer(x, index, some, heads)
        total, head_dim = layer.keys.shape[1:]
        queries = x.queries
        assert queries is not None
        if queries.shape[2] < total:
            raise UsageError(
                f"{self.label} needs the queries of all {total} tokens and the cache holds those of the first "
                f"{queries.shape[2]} only: prefill the prompt without a cached prefix, under a cache_salt of its own"
            )
        if queries.shape[3] % (heads * head_dim):
            raise UsageError(
                f"queries {list(queries.shape)} do not divide into groups of {heads} heads of {head_dim}: give the "
                "geometry of this model"
            )
        grouped = queries[0, index, :total].view(total, heads, -1, head_dim).permute(1, 2, 0, 3)
        dtype = product_dtype(layer.keys, queries)
        return replace(layer, keys=layer.keys.to(dtype).contiguous(), queries=grouped[some])

    def attention(self, layer: Layer, start: int, stop: int) -> torch.Tensor:
        """Causal attention of the queries `start .. stop - 1`: float32 `[H, G, stop - start, stop]`, rows sum to 1.

        Of bfloat16 keys and queries the products are rounded to bfloat16, as in a model's own attention, where the
        hardware multiplies it faster.
        """
        assert layer.queries is not None
        queries = layer.queries[:, :, start:stop].to(layer.keys.dtype)
        heads, groups, count, head_dim = queries.shape
        rows = queries.reshape(heads, groups * count, head_dim)
        keys = layer.keys[:, : -(-stop // _KEYS_STEP) * _KEYS_STEP]
        if keys.is_contiguous():
            products = rows @ keys.transpose(-1, -2)
        else:  # torch takes a slow path for batches of bfloat16 matrices with gaps between them
            products = torch.stack([row @ key.T for row, key in zip(rows, keys, strict=True)])
        logits = products[..., :stop].float().view(heads, groups, count, stop)
        logits.mul_(self.scale or head_dim**-0.5)
        future = torch.ones(count, count, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., start:].masked_fill_(future, -math.inf)
        return logits.softmax(dim=-1)
