"""Dropping tokens: a budget, the best by their scores, what is left at its new positions."""

from __future__ import annotations

import abc
import math
import numbers
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from lmcache_stream.editors.base.editor import Edit, EditInput, Editor
from lmcache_stream.editors.tensors import gather
from lmcache_stream.errors import UsageError
from lmcache_stream.rotary.turning import Rerotation

__all__ = ["Aggregate", "Scope", "TokenDropping", "aggregate"]

Scope = Literal["shared", "layer", "head"]
Aggregate = Literal["mean", "max", "sum"]


@dataclass(frozen=True, kw_only=True)
class TokenDropping(Editor):
    """Keeps the tokens that `score` rates highest and drops the others.

    The kept count is `keep` rounded to the nearest whole chunks (half a chunk is kept), at least one chunk and at
    least the chunks that hold all protected tokens (`sinks`, `window`, `protect`). An input no longer than that stays
    whole. Equal scores go to the earlier token.

    Args:
        keep: Tokens to keep: a ratio of the input in (0, 1] if a float, a token count of at least 2 if an int.
        sinks: First tokens that are always kept.
        window: Last tokens that are always kept.
        protect: Spans `(start, stop)` of positions that are always kept, such as an instruction in the middle.
        scope: Whether all layers and heads keep the same tokens ("shared"), or each layer or KV head its own, in
            equal counts. What was measured is in benchmarks/README.md: for text, "layer" is better where a quarter or
            less is kept, and at half nothing is decided.
        aggregate: How the scores of several query heads, KV heads and layers become one.
        rerotate: Whether kept keys get the positions `0 .. T'-1` under which an engine will see them.

    Raises:
        UsageError: A parameter that cannot be right; when editing: KV heads or rotary positions that must be known
            and are not, a scope that the model's attention does not allow.
    """

    comparable: ClassVar[bool] = True
    """Whether scores of different layers and heads have one scale; if not, they are standardised before aggregation."""

    keep: float | int = 0.5
    sinks: int = 0
    window: int = 0
    protect: tuple[tuple[int, int], ...] = ()
    scope: Scope = "shared"
    aggregate: Aggregate = "mean"
    rerotate: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", checked_keep(self.keep))
        for name in ("sinks", "window"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative: {getattr(self, name)}")
        for name, choices in (("scope", get_args(Scope)), ("aggregate", get_args(Aggregate))):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        object.__setattr__(self, "protect", tuple((int(a), int(b)) for a, b in self.protect))
        if any(a < 0 or b < a for a, b in self.protect):
            raise UsageError(f"protect must hold spans (start, stop) with 0 <= start <= stop, not {self.protect}")

    @abc.abstractmethod
    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """Rate the tokens of `x`, of which `budget` will be kept.

        Returns:
            float32 `[L, H, T]`, with 1 in place of `L` or `H` where the score does not depend on it; the higher, the
            sooner kept.
        """

    def edit(self, x: EditInput) -> Edit:
        """Drop tokens: see the class and `Editor.edit`."""
        x = self._prepared(x)
        total = len(x.tokens)
        protected = self._protected(total)
        budget = self.budget(total, x.chunk_size, int(protected.sum()))
        if budget >= total:
            return Edit(
                kv=x.kv.contiguous(),
                tokens=x.tokens,
                kept_positions=torch.arange(total, device=x.kv.device),
                asked=self.keep,
            )
        rotary = self._rotary(x) if self.rerotate else None
        self._check_scope(x)
        kept = self.select(self.score(x, budget), protected.to(x.kv.device), budget, x)
        move = Rerotation(kept, torch.arange(budget, device=kept.device), rotary) if rotary is not None else None
        turn = (lambda layer, keys: move.turn_(keys[None], layer)) if move is not None else None
        kv = gather(x.kv, kept, spent=x.spent, then=turn)
        return Edit(kv=kv, tokens=_ids(x.tokens, kept), kept_positions=kept, asked=self.keep)

    def budget(self, total: int, chunk_size: int, protected: int) -> int:
        """Tokens to keep of `total`, of which `protected` must be: whole chunks, or all of `total`."""
        asked = self.keep * total if isinstance(self.keep, float) else self.keep
        chunks = max(math.floor(asked / chunk_size + 0.5), math.ceil(protected / chunk_size), 1)
        return total if asked >= total else min(chunks * chunk_size, total)

    def select(self, scores: torch.Tensor, protected: torch.Tensor, budget: int, x: EditInput) -> torch.Tensor:
        """Positions of the `budget` best tokens in this scope, ascending, int64: `[n]`, `[L, n]` or `[L, H, n]`."""
        scores = scores.float()
        reduced = {"shared": (0, 1), "layer": (1,), "head": ()}[self.scope]
        if reduced:
            scores = aggregate(self._comparable(scores), reduced, self.aggregate)
        if self.scope == "layer":
            scores = scores.expand(x.kv.shape[1], -1)
        elif self.scope == "head":
            scores = scores.expand(x.kv.shape[1], self._require_heads(x).num_kv_heads, -1)
        scores = scores.masked_fill(protected, math.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
        return best.sort(dim=-1).values

    def _comparable(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of `score`, those of all layers and heads on one scale."""
        if self.comparable or scores.shape[-1] == 1:
            return scores
        return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp_min(1e-12)

    def _protected(self, total: int) -> torch.Tensor:
        """Which positions are kept in any case, bool `[T]`."""
        mask = torch.zeros(total, dtype=torch.bool)
        mask[: self.sinks] = True
        mask[max(total - self.window, 0) :] = True
        for start, stop in self.protect:
            mask[start:stop] = True
        return mask

    def _check_scope(self, x: EditInput) -> None:
        geometry = x.geometry
        if self.scope == "head":
            geometry = self._require_heads(x)
        if self.scope == "shared" or geometry is None:
            return
        if geometry.alibi:
            raise UsageError(
                f'{self.label}: ALiBi looks at the order of slots, so heads cannot keep their own: scope="shared"'
            )
        other = sorted(set(geometry.layer_types or ()) - {"full_attention"})
        if other:
            raise UsageError(
                f"{self.label}: layers of type {', '.join(other)} look at the order of slots, so layers and heads "
                'cannot keep tokens of their own: scope="shared"'
            )


def checked_keep(keep: object) -> float | int:
    """Refuse a budget that is neither a ratio in (0, 1] nor a token count of at least 2."""
    if isinstance(keep, bool):
        raise UsageError(f"keep must be a ratio (float) or a token count (int), not {keep}")
    if isinstance(keep, numbers.Integral):
        if int(keep) < 2:  # nobody wants one token: 1 was meant as a ratio
            raise UsageError(f"keep={keep} is a count of tokens: give 2 or more; a ratio is a float, 1.0 keeps all")
        return int(keep)
    if isinstance(keep, numbers.Real):
        if not 0 < float(keep) <= 1:
            raise UsageError(f"keep={keep}: a ratio lies in (0, 1]; a token count is an int")
        return float(keep)
    raise UsageError(f"keep must be a ratio (float) or a token count (int), not {keep!r}")


def aggregate(scores: torch.Tensor, dim: tuple[int, ...], how: Aggregate) -> torch.Tensor:
    """Make one score of several."""
    if how == "max":
        return scores.amax(dim)
    return scores.mean(dim) if how == "mean" else scores.sum(dim)


def _ids(tokens: tuple[int, ...], kept: torch.Tensor) -> tuple[int, ...]:
    """Ids of the kept tokens; where layers or heads differ, the positions that most of them keep, in order."""
    if kept.dim() > 1:
        votes = torch.bincount(kept.flatten(), minlength=len(tokens))
        kept = votes.sort(descending=True, stable=True).indices[: kept.shape[-1]].sort().values
    return tuple(tokens[i] for i in kept.tolist())
