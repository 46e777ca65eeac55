"""Merging: dropped tokens leave something behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from lmcache_stream.editors.base import Edit, EditInput, Editor, TokenDropping
from lmcache_stream.editors.keydiff import KeyDiff
from lmcache_stream.editors.tensors import block, of_heads
from lmcache_stream.errors import UsageError

__all__ = ["Merge"]

BLOCK = 1 << 20
"""Similarities computed at once on a CPU."""

GROUP = 64
"""Columns of a group in which a place is looked for."""


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
        edit = self.editor.edit(replace(x, spent=False))  # dropped tokens are looked at afterwards
        kept = edit.kept_positions
        if kept is None or len(edit.tokens) == len(x.tokens):
            return edit
        while kept.dim() < 3:
            kept = kept.unsqueeze(-2)
        kept = kept.expand(x.kv.shape[1], heads, -1)
        for index in range(x.kv.shape[1]):
            keys, values, merged = (of_heads(plane, heads) for plane in (*x.kv[:, index], edit.kv[1, index]))
            for head in range(heads):
                merged[head] = self._merged(keys[head].float(), values[head].float(), kept[index, head])
        return edit

    def _merged(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Keys and values `[T, head_dim]`, kept `[n]` -> values `[n, head_dim]`, float32."""
        keys = normalize(keys, dim=-1)
        kept_keys = keys[kept].T
        weight = torch.full(kept.shape, math.e, device=keys.device)
        total = values[kept] * math.e
        dropped = _others(kept, len(keys))
        step = max(block(BLOCK, keys.device) // len(kept), 1)
        for some in torch.split(dropped, step):
            cosine, nearest = _nearest(keys[some] @ kept_keys)
            share = torch.where(cosine >= self.threshold, cosine.exp(), 0.0)
            weight.index_add_(0, nearest, share)
            total.index_add_(0, nearest, values[some] * share.unsqueeze(-1))
        return total / weight.unsqueeze(-1)


def _nearest(cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of `[m, n]` and its first place.

    A reduction without places is many times faster on a CPU, so places are looked for in one group of columns only.
    """
    if cosine.shape[1] % GROUP:
        largest, place = cosine.max(dim=-1)
        return largest, place
    groups = cosine.view(len(cosine), -1, GROUP)
    largest, group = groups.amax(dim=-1).max(dim=-1)
    row = torch.arange(len(cosine), device=cosine.device)
    return largest, group * GROUP + groups[row, group].argmax(dim=-1)


def _others(kept: torch.Tensor, total: int) -> torch.Tensor:
    """Positions that are not in `kept` `[n]`: `[T - n]`, ascending."""
    mask = torch.ones(total, dtype=torch.int8, device=kept.device)
    mask[kept] = 0
    return mask.sort(descending=True, stable=True).indices[: total - len(kept)]
