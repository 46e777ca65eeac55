"""What an editor is, what it sees and what it gives back."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.rotary import Rotary

__all__ = ["Edit", "EditInput", "Editor"]


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
        kv: `[P, L, T', D]`, contiguous, of the input's dtype; the input itself, untouched, when nothing changed.
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
