"""Plain `transformers` computations to compare with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from lmcache_stream.bench.scoring import cache_argument


@torch.no_grad()
def forward_kv(model: Any, ids: list[int]) -> torch.Tensor:
    """KV `[2, L, T, D]` of one forward pass over `ids`."""
    cache = DynamicCache()
    model(torch.tensor([ids]), **{cache_argument(model): cache}, use_cache=True)
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    planes = [torch.stack([layer[plane].transpose(0, 1).flatten(1) for layer in layers]) for plane in (0, 1)]
    return torch.stack(planes)


@torch.no_grad()
def greedy(model: Any, kv: torch.Tensor | None, ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens after cache `kv` `[2, L, T, D]` (None: empty) and then `ids`."""
    cache = DynamicCache()
    past = 0
    if kv is not None:
        past = kv.shape[2]
        head_dim = model.config.head_dim
        for layer in range(kv.shape[1]):
            keys, values = (kv[plane, layer].view(past, -1, head_dim).transpose(0, 1)[None].clone() for plane in (0, 1))
            cache.update(keys, values, layer)
    tokens: list[int] = []
    feed = ids
    for _ in range(count):
        positions = torch.arange(past, past + len(feed))[None]
        given = {cache_argument(model): cache}
        logits = model(torch.tensor([feed]), **given, position_ids=positions, use_cache=True).logits
        past += len(feed)
        tokens.append(int(logits[0, -1].argmax()))
        feed = tokens[-1:]
    return tokens
