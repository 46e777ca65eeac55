"""What every editor of KV shares: score -> select -> gather -> re-rotate."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from lmcache_stream.editors.tensors import gather, heads_at_once, of_heads, product_dtype
from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.rotary import Rotary
from lmcache_stream.rotary.turning import Rerotation

__all__ = [
    "Aggregate",
    "Edit",
    "EditInput",
    "Editor",
    "Layer",
    "LayerScoring",
    "QueryScoring",
    "Scope",
    "TokenDropping",
]

Scope = Literal["shared", "layer", "head"]
Aggregate = Literal["mean", "max", "sum"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EditInput:
    """What an editor sees. It leaves all of it as it is, unless the KV is `spent`.

    Args:
        kv: `[P, L, T, D]`, floating point; plane 0 holds keys with their rotary positions `0 .. T-1`, plane 1 values;
            one plane for MLA. `D` is KV heads times head size, head by head.
        tokens: The `T` token ids.
        geometry: Shape of the KV and its rotary positions, as far as known.
        chunk_size: Tokens a cache chunk; kept counts are multiples of it.
        queries: `[1, L, Tq, Dq]`: queries of the first `Tq` of the `T` tokens, rotated as the engine's attention sees
            them; `Dq` is query heads times head size; None if there are none.
        generator: Source of randomness for editors that need one; None: they use their seed.
        spent: Whether nobody looks at `kv` afterwards, so that an editor may write its result into that memory. What it
            returns then is a view of `kv`, not `kv` itself.

    Raises:
        UsageError: Shapes contradict each other.
    """

    kv: torch.Tensor
    tokens: tuple[int, ...]
    geometry: KVGeometry | None
    chunk_size: int
    queries: torch.Tensor | None = None
    generator: torch.Generator | None = None
    spent: bool = False

    def __post_init__(self) -> None:
        shape = list(self.kv.shape)
        if self.kv.dim() != 4 or self.kv.shape[0] not in (1, 2) or not self.kv.is_floating_point():
            raise UsageError(f"kv must be floating point [2, L, T, D] ([1, ...] for MLA), not {self.kv.dtype} {shape}")
        if len(self.tokens) != self.kv.shape[2]:
            raise UsageError(f"kv {shape} holds {self.kv.shape[2]} tokens, but {len(self.tokens)} token ids were given")
        if self.chunk_size < 1:
            raise UsageError(f"chunk_size must be at least 1, not {self.chunk_size}")
        geometry = self.geometry
        if geometry is not None:
            expected = (geometry.planes, geometry.num_layers, geometry.hidden_dim)
            if (self.kv.shape[0], self.kv.shape[1], self.kv.shape[3]) != expected:
                raise UsageError(
                    f"kv {shape} does not fit the geometry: {expected[0]} planes, {expected[1]} layers and "
                    f"{geometry.num_kv_heads} heads of {geometry.head_dim}"
                )
        queries = self.queries
        if queries is not None and (queries.dim() != 4 or queries.shape[:2] != (1, self.kv.shape[1])):
            raise UsageError(f"queries must be [1, {self.kv.shape[1]}, Tq, Dq], not {list(queries.shape)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """What an editor made of its input.

    Args:
        kv: `[P, L, T', D]`, contiguous, of the input's dtype; the input itself when nothing changed.
        tokens: `T'` token ids under which to store it. Where layers or heads keep different tokens: those that most
            of them keep, in order.
        kept_positions: Positions in the input of the tokens kept, ascending, int64: `[T']`, `[L, T']` by layer or
            `[L, H, T']` by head; None where positions mean nothing.
        asked: The budget asked for, a ratio or a token count; None for editors without one.
    """

    kv: torch.Tensor
    tokens: tuple[int, ...]
    kept_positions: torch.Tensor | None
    asked: float | int | None = None


@dataclass(frozen=True, kw_only=True)
class Editor(abc.ABC):
    """Edits KV between prefill and decode.

    Attributes:
        name: Its name in the registry.
        needs: What it cannot do without: "queries", "heads" (known KV heads), "rotary" (known rotary positions).
        keeps_all: Whether every token keeps its place, so that the prompt's queries still fit.

    Args:
        geometry: Shape of the KV for the call `editor(kv, tokens)`; it also fills in rotary positions that an
            `EditInput` lacks.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    keeps_all: ClassVar[bool] = False

    geometry: KVGeometry | None = None

    @abc.abstractmethod
    def edit(self, x: EditInput) -> Edit:
        """Edit `x.kv`, leaving `x` as it is unless it is `spent`.

        Raises:
            UsageError: The input lacks what this editor needs; the message says how to give it.
        """

    def __call__(self, kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Edit `kv` `[P, L, T, D]` of `T` `tokens`: the form that `modify_kv` documents for plain functions.

        Chunks are as long as `geometry.chunk_size` says, one token where it does not.
        """
        chunk_size = (self.geometry.chunk_size if self.geometry is not None else None) or 1
        edit = self.edit(EditInput(kv=kv, tokens=tuple(tokens), geometry=self.geometry, chunk_size=chunk_size))
        return edit.kv, list(edit.tokens)

    def _prepared(self, x: EditInput) -> EditInput:
        """Complete `x` with the editor's own geometry, and check `needs`."""
        own = self.geometry
        if own is not None and x.geometry is None:
            x = replace(x, geometry=own)
        elif own is not None and x.geometry is not None and x.geometry.rotary is None:
            known = replace(x.geometry, rotary=own.rotary, rotary_unknown=own.rotary_unknown)
            if x.geometry.layer_types is None:
                known = replace(known, layer_types=own.layer_types, alibi=own.alibi)
            x = replace(x, geometry=known)
        if "heads" in self.needs:
            self._require_heads(x)
        if "rotary" in self.needs:
            self._rotary(x)
        if "queries" in self.needs and x.queries is None:
            raise self.without_queries()
        return x

    def without_queries(self) -> UsageError:
        """What to raise where the cache has no queries and this editor needs them."""
        return UsageError(
            f"{self.label} scores tokens by the queries of the prompt, and the cache holds none: serve with queries "
            "offloaded (EmbeddedEngine(queries=True)), or take an editor that needs none, such as streaming-llm or "
            "keydiff"
        )

    def _require_heads(self, x: EditInput) -> KVGeometry:
        if x.geometry is None:
            raise UsageError(f"{self.label} must know the KV heads: pass geometry=KVGeometry.from_config(...)")
        if x.geometry.planes == 1:
            raise UsageError(
                f"{self.label} works on the keys of each head, and MLA keeps one latent for all heads: take "
                "streaming-llm, middle-out, random or quantize"
            )
        return x.geometry

    def _rotary(self, x: EditInput) -> tuple[Rotary | None, ...]:
        rotary = x.geometry.rotary if x.geometry is not None else None
        if rotary is None:
            why = x.geometry.rotary_unknown if x.geometry is not None else None
            remedy = ", or rerotate=False to leave the old positions in the keys" if "rotary" not in self.needs else ""
            raise UsageError(
                f"{self.label} moves keys or queries to other positions and the rotary positions are not known"
                f"{f' ({why})' if why else ''}: pass geometry=KVGeometry.from_config(...) to the editor or to connect"
                f"{remedy}"
            )
        return rotary

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.name or type(self).__name__


@dataclass(frozen=True, kw_only=True)
class TokenDropping(Editor):
    """Keeps the tokens that `score` rates highest and drops the others.

    The kept count is `keep` rounded to the nearest whole chunks (half a chunk is kept), at least one chunk and at
    least the chunks that hold all protected tokens (`sinks`, `window`, `protect`). An input no longer than that stays
    whole. Equal scores go to the earlier token.

    Args:
        keep: Tokens to keep: a ratio of the input in (0, 1] if a float, a token count if an int.
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
        if not self.comparable and reduced and scores.shape[-1] > 1:
            scores = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp_min(1e-12)
        if reduced:
            scores = aggregate(scores, reduced, self.aggregate)
        if self.scope == "layer":
            scores = scores.expand(x.kv.shape[1], -1)
        elif self.scope == "head":
            scores = scores.expand(x.kv.shape[1], self._require_heads(x).num_kv_heads, -1)
        scores = scores.masked_fill(protected, math.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
        return best.sort(dim=-1).values

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
                scores[index, some] = self.score_layer(self._layer(x, index, some, heads), budget)
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
        keys = layer.keys[:, :stop]
        if keys.is_contiguous():
            products = rows @ keys.transpose(-1, -2)
        else:  # torch takes a slow path for batches of bfloat16 matrices with gaps between them
            products = torch.stack([row @ key.T for row, key in zip(rows, keys, strict=True)])
        logits = products.float().view(heads, groups, count, stop)
        logits.mul_(self.scale or head_dim**-0.5)
        future = torch.ones(count, count, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., start:].masked_fill_(future, -math.inf)
        return logits.softmax(dim=-1)


def checked_keep(keep: object) -> float | int:
    """Refuse a budget that is neither a ratio in (0, 1] nor a positive token count."""
    if isinstance(keep, bool):
        raise UsageError(f"keep must be a ratio (float) or a token count (int), not {keep}")
    if isinstance(keep, numbers.Integral):
        if int(keep) < 1:
            raise UsageError(f"keep={keep} tokens: keep at least one")
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
