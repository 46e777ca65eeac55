"""Made-up KV whose keys carry real rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lmcache_stream.editors import (
    Compose,
    Edit,
    EditInput,
    Editor,
    Quantize,
    QueryStatistics,
    TokenDropping,
    get,
    names,
)
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.rotary import Rotary, rerotate

LAYERS, HEADS, GROUPS, HEAD_DIM, CHUNK = 3, 2, 2, 8, 16

ROTARY = Rotary(tuple(100.0 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)), HEAD_DIM)
OTHER = Rotary(tuple(10000.0 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)), HEAD_DIM)
GEOMETRY = KVGeometry(
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    chunk_size=CHUNK,
    num_heads=HEADS * GROUPS,
    rotary=(ROTARY, None, OTHER),
    layer_types=("full_attention",) * LAYERS,
)
LATENT = KVGeometry(
    num_layers=LAYERS,
    num_kv_heads=1,
    head_dim=12,
    planes=1,
    chunk_size=CHUNK,
    rotary=(Rotary(ROTARY.inv_freq[:2], 12, offset=8, interleaved=True),) * LAYERS,
)


def given(
    tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, geometry: KVGeometry = GEOMETRY
) -> EditInput:
    """KV of `tokens` tokens with keys at positions `0 .. tokens - 1`, distinct ids, and queries of every token."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(geometry.planes, LAYERS, tokens, geometry.hidden_dim, generator=generator)
    raw[0] += torch.randn(LAYERS, 1, geometry.hidden_dim, generator=generator)
    positions = torch.arange(tokens)
    raw[0] = rerotate(raw[0], torch.zeros_like(positions), positions, geometry.rotary)
    queries = torch.randn(1, LAYERS, tokens, HEADS * GROUPS * HEAD_DIM, generator=generator)
    return EditInput(
        kv=raw.to(dtype),
        tokens=tuple(range(1000, 1000 + tokens)),
        geometry=geometry,
        chunk_size=CHUNK,
        queries=queries.to(dtype),
    )


def statistics(seed: int = 0) -> QueryStatistics:
    """Of made-up queries, not rotated."""
    generator = torch.Generator().manual_seed(seed)
    heads = (LAYERS, HEADS * GROUPS, HEAD_DIM)
    spread = torch.randn(*heads, HEAD_DIM, generator=generator)
    return QueryStatistics(mean=torch.randn(*heads, generator=generator), covariance=spread @ spread.transpose(-1, -2))


STATISTICS = statistics()


def all_editors(**params: object) -> list[Editor]:
    """One editor of every registered name, with `params` where it has them."""
    made: list[Editor] = []
    for name in names():
        if name == "compose":
            made.append(Compose(editors=(Quantize(), get("streaming-llm", **params))))
        elif name == "expected-attention":
            made.append(get(name, statistics=STATISTICS, **params))
        elif name == "merge":
            made.append(get(name, editor=get("keydiff", **params)))
        elif name == "quantize":
            made.append(get(name))
        else:
            scoped = {"scope": "layer"} if name == "per-layer" and params.get("scope", "shared") == "shared" else {}
            made.append(get(name, **{**params, **scoped}))
    return made


def by_head(x: EditInput, plane: int) -> list[list[torch.Tensor]]:
    """`[T, head_dim]` in float64 of each layer and KV head."""
    return [[layer.view(len(x.tokens), HEADS, -1)[:, head].double() for head in range(HEADS)] for layer in x.kv[plane]]


def attention_of(x: EditInput, layer: int, head: int, group: int, query: int) -> torch.Tensor:
    """Softmax weights in float64 `[T]` of one query of one query head over the keys up to its own."""
    assert x.queries is not None
    heads = x.queries[0, layer].view(len(x.tokens), HEADS, GROUPS, HEAD_DIM).double()
    keys = by_head(x, 0)[layer][head][: query + 1]
    logits = keys @ heads[query, head, group] / HEAD_DIM**0.5
    weights = torch.zeros(len(x.tokens), dtype=torch.float64)
    weights[: query + 1] = logits.exp() / logits.exp().sum()
    return weights


def each_head(score: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """`score(layer, head)` `[T]` as `[L, H, T]`."""
    return torch.stack([torch.stack([score(layer, head) for head in range(HEADS)]) for layer in range(LAYERS)])


def assert_scores(editor: TokenDropping, x: EditInput, expected: torch.Tensor, budget: int = 48) -> None:
    """The editor's scores equal `[L, H, T]` in float64, but for what is protected anyway."""
    scores = editor.score(x, budget).double().expand(expected.shape)
    free = slice(editor.sinks, len(x.tokens) - editor.window)
    assert expected[..., free].std() > 0
    torch.testing.assert_close(scores[..., free], expected[..., free], atol=1e-6, rtol=1e-5)


def unrotated(kv: torch.Tensor, positions: torch.Tensor, geometry: KVGeometry = GEOMETRY) -> torch.Tensor:
    """Keys `[L, T, D]` of `kv` with their positions taken back."""
    return rerotate(kv[0], positions, torch.zeros(kv.shape[2], dtype=torch.int64), geometry.rotary)


def kept_by_head(edit: Edit, geometry: KVGeometry = GEOMETRY) -> torch.Tensor:
    """Kept positions as `[L, H, T']`, whatever the scope."""
    kept = edit.kept_positions
    assert kept is not None
    if kept.dim() == 1:
        kept = kept.view(1, 1, -1)
    elif kept.dim() == 2:
        kept = kept.unsqueeze(1)
    return kept.expand(geometry.num_layers, geometry.num_kv_heads, -1)


def picked(states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`[L, T, D]` at `[L, H, n]` -> `[L, n, D]`, one head and token at a time."""
    layers, heads, count = kept.shape
    by_head = states.view(layers, states.shape[1], heads, -1)
    rows = [
        torch.stack([by_head[layer, kept[layer, head], head] for head in range(heads)], dim=1)
        for layer in range(layers)
    ]
    return torch.stack(rows).view(layers, count, -1)


def without(x: EditInput, **fields: object) -> EditInput:
    """`x` with other fields of its geometry."""
    assert x.geometry is not None
    return replace(x, geometry=replace(x.geometry, **fields))  # type: ignore[arg-type]  # fields are the caller's
