"""Merging: dropped tokens leave something behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from lmcache_stream.editors.base import Edit, EditInput, Editor, TokenDropping
from lmcache_stream.editors.keydiff import KeyDiff
from lmcache_stream.errors import UsageError

__all__ = ["Merge"]

BLOCK = 1 << 22
"""Similarities computed at once."""


@dataclass(frozen=True, kw_only=True)
class Merge(Editor):
    """Drops tokens and merges the value of each dropped one into the kept one with the most similar key.

    With cosine `u` of both keys, a kept value counts `e` and a dropped one `exp(u)` in the weighted mean: Wan et al.
    2024, "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models",
    arXiv:2406.13035. Keys stay as they are: merged keys would mix positions.

    Args:
        editor: Which tokens are kept.
        threshold: Dropped tokens with no kept key at least this similar (cosine) are dropped without a trace.
    """

    name: ClassVar[str] = "merge"
    needs: ClassVar[frozenset[str]] = frozenset({"heads"})

    editor: TokenDropping = field(default_factory=KeyDiff)
    threshold: float = 0.6

    def __post_init__(self) -> None:
        if not isinstance(self.editor, TokenDropping):
            raise UsageError(f"merge needs an editor that drops tokens, not {self.editor!r}")
        object.__setattr__(self, "needs", type(self).needs | self.editor.needs)

    def edit(self, x: EditInput) -> Edit:
        """Drop and merge: see the class and `Editor.edit`."""
        x = self._prepared(x)
        heads = self._require_heads(x).num_kv_heads
        edit = self.editor.edit(x)
        kept = edit.kept_positions
        if kept is None or len(edit.tokens) == len(x.tokens):
            return edit
        while kept.dim() < 3:
            kept = kept.unsqueeze(-2)
        kept = kept.expand(x.kv.shape[1], heads, -1)
        for index in range(x.kv.shape[1]):
            keys, values = (plane.view(len(x.tokens), heads, -1).transpose(0, 1) for plane in x.kv[:, index])
            merged = self._merged(keys.float(), values, kept[index])
            edit.kv[1, index] = merged.transpose(0, 1).flatten(1)
        return edit

    def _merged(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Keys and values `[H, T, head_dim]`, kept `[H, n]` -> values `[H, n, head_dim]`, float32."""
        keys = normalize(keys, dim=-1)
        dropped = _others(kept, keys.shape[1])
        kept_keys = _take(keys, kept).transpose(-1, -2)
        total = _take(values, kept).float() * math.e
        weight = torch.full(kept.shape, math.e, device=keys.device)
        step = max(BLOCK // kept.numel(), 1)
        for start in range(0, dropped.shape[1], step):
            some = dropped[:, start : start + step]
            cosine, nearest = (_take(keys, some) @ kept_keys).max(dim=-1)
            share = torch.where(cosine >= self.threshold, cosine.exp(), 0.0)
            weight.scatter_add_(1, nearest, share)
            rows = nearest.unsqueeze(-1).expand(-1, -1, values.shape[-1])
            total.scatter_add_(1, rows, _take(values, some).float() * share.unsqueeze(-1))
        return total / weight.unsqueeze(-1)


def _take(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`[H, T, head_dim]` at `[H, n]` -> `[H, n, head_dim]`."""
    return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def _others(kept: torch.Tensor, total: int) -> torch.Tensor:
    """Positions that are not in `kept` `[H, n]`: `[H, T - n]`, ascending."""
    mask = torch.ones(kept.shape[0], total, dtype=torch.bool, device=kept.device).scatter_(1, kept, False)
    return mask.nonzero()[:, 1].view(kept.shape[0], -1)
